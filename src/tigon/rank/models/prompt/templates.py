"""prompt.yaml: templates that turn request columns into text.

    instruction: "You are given a member's profile and the films they rated."
    profile: "Age {{ age }}, {{ occupation }}."
    event: "{{ title }} ({{ year }}): {{ rating }} of 5, {{ ago }} before"
    candidate: "Film: {{ title }} ({{ year }})."
    tasks:
      like: {question: "Will the member rate it 4 or more?", answers: {"yes": 1, "no": 0}, label: "rating >= 4"}

Templates are sandboxed Jinja2: columns, conditions, and a short list of filters. Templates cannot call, loop, or access
attributes, so that an untrusted file can only produce text.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tigon.data.arrow import nearest
from tigon.files import read_yaml
from tigon.rank.models.prompt.task import NAME, Task, is_missing

FILE = "prompt.yaml"
PARTS = ("instruction", "profile", "event", "candidate")
# Extra event variable besides its columns: the time before the request.
AGO = "ago"
FILTERS = (
    "abs", "capitalize", "default", "first", "float", "int", "join", "last", "length", "lower", "replace", "round",
    "string", "title", "trim", "truncate", "upper",
)  # fmt: skip


@dataclass(frozen=True)
class Prompt:
    """Converts requests to text: templates and tasks.

    Args:
        instruction: first lines in every prefix, without columns.
        candidate: first lines in every suffix, over the candidate's columns.
        tasks: name → `Task`, or a dict with its arguments. Their questions end the suffixes, one suffix per task.
        profile: over the request's columns, such as user columns; None for none.
        event: a history line, over the event's columns and `ago`; None for no history.
        columns: columns by role, as in `rank.Roles`: request, item, user, time.
        chat: keyword arguments for the tokenizer's chat template, such as {"enable_thinking": False}.

    Raises: ValueError for missing or unknown keys, a template with syntax errors, loops, calls or attribute access, a
        candidate or event without columns, and a candidate that reveals its label.
    """

    instruction: str
    candidate: str
    tasks: Mapping[str, Task]
    profile: str | None = None
    event: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    chat: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.tasks, Mapping) or not self.tasks:
            raise ValueError(f"{NAME}: tasks must name at least one task, got {self.tasks!r}.")
        for name in ("columns", "chat"):
            if not isinstance(getattr(self, name), Mapping):
                raise ValueError(f"{NAME}: {name} must be a mapping, got {getattr(self, name)!r}.")
        tasks = {name: one if isinstance(one, Task) else _task(name, one) for name, one in self.tasks.items()}
        object.__setattr__(self, "tasks", tasks)
        for part in ("instruction", "candidate"):
            if not isinstance(getattr(self, part), str) or not getattr(self, part).strip():
                raise ValueError(f"{NAME}: {part} must be a text, got {getattr(self, part)!r}.")
        for part in ("candidate", "event"):
            found = self.templates.get(part)
            if found is not None and not found.columns - {AGO}:
                raise ValueError(
                    f"{NAME}: {part} must name a column, or all texts would be identical, got {found.text!r}."
                )
        if named := self.templates["instruction"].columns:
            raise ValueError(
                f"{NAME}: instruction must name no column, as all requests share the instruction, got {sorted(named)}; "
                "request columns belong in the profile."
            )
        for task in tasks.values():
            for part in ("profile", "candidate", task.name):
                if part in self.templates and task.read.column in self.templates[part].columns:
                    what = f"the question of task {part}" if part == task.name else f"the {part}"
                    raise ValueError(
                        f"{NAME}: {what} names {task.read.column!r}, the label column for task {task.name}: "
                        "the prompt would reveal the answer."
                    )

    @cached_property
    def templates(self) -> dict[str, Template]:
        """Templates by part, and questions by task."""
        result = {part: Template(part, text) for part in PARTS if (text := getattr(self, part)) is not None}
        for task in self.tasks.values():
            if task.name in PARTS:
                raise ValueError(f"{NAME}: a task cannot be named {task.name!r}, a prompt part's name.")
            result[task.name] = Template(f"the question of task {task.name}", task.question)
        return result

    def columns_in(self, *parts: str) -> set[str]:
        """Columns named in some parts or task questions."""
        return {column for part in parts if part in self.templates for column in self.templates[part].columns}

    def check_columns(self, part: str, known: Iterable[str]) -> None:
        """Raise a ValueError if a template names an unknown column, with the nearest name."""
        known = set(known) | ({AGO} if part == "event" else set())
        for column in sorted(self.columns_in(part) - known):
            raise ValueError(
                f"{NAME}: {part} names {column!r}, but there is no such column; {nearest(column, sorted(known))}"
            )

    def render(self, part: str, row: Mapping[str, Any]) -> str:
        """Render a part or a task's question for a row."""
        return self.templates[part](row)

    def to_dict(self) -> dict[str, Any]:
        """The contents of prompt.yaml."""
        told: dict[str, Any] = {part: getattr(self, part) for part in PARTS if getattr(self, part) is not None}
        told["tasks"] = {name: task.to_dict() for name, task in self.tasks.items()}
        return told | {name: dict(getattr(self, name)) for name in ("columns", "chat") if getattr(self, name)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write prompt.yaml.

        Args:
            path: the file.
        """
        import yaml

        text = yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=120)
        Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Prompt:
        """Load a prompt from a file.

        Args:
            path: the prompt.yaml.

        Raises: ValueError for an unreadable file or invalid YAML, and as `Prompt`.
        """
        return cls.from_dict(read_yaml(Path(path)))

    @classmethod
    def from_dict(cls, told: Any) -> Prompt:
        """Build a prompt from a dict, as in prompt.yaml.

        Args:
            told: {"instruction": …, "candidate": …, "tasks": {…}, …}.

        Raises: ValueError as `Prompt`.
        """
        if not isinstance(told, Mapping):
            raise ValueError(f"{NAME}: a prompt must be a mapping of {', '.join(PARTS)} and tasks, got {told!r}.")
        known = (*PARTS, "tasks", "columns", "chat")
        _check_keys("a prompt", told, known)
        for key in ("instruction", "candidate", "tasks"):
            if key not in told:
                raise ValueError(f"{NAME}: a prompt must have {key!r}.")
        return cls(**told)


def _task(name: str, told: Any) -> Task:
    if not isinstance(told, Mapping) or not {"question", "answers"} <= set(told):
        raise ValueError(f"{NAME}: task {name} must have a question and answers, got {told!r}.")
    _check_keys(f"task {name}", told, ("question", "answers", "label", "weight"))
    return Task(name, **told)


def _check_keys(what: str, told: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in told:
        if key not in known:
            raise ValueError(f"{NAME}: {what} has no {key!r}; {nearest(str(key), known)}")


# ------------------------------------------------------------------------------------------------------- templates


class Template:
    """A Jinja2 template restricted to producing text."""

    def __init__(self, part: str, text: str) -> None:
        if not isinstance(text, str):
            raise ValueError(f"{NAME}: {part} must be a text, got {text!r}.")
        self.part, self.text = part, text
        try:
            self._compile()
        except RecursionError:
            raise ValueError(f"{NAME}: {part} nests too deeply.") from None

    def _compile(self) -> None:
        import jinja2
        from jinja2 import meta, nodes

        part, text, environment = self.part, self.text, _environment()
        try:
            tree = environment.parse(text)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{NAME}: {part} is not a valid template ({error.message}): {text!r}.") from None
        allowed = (
            nodes.Template, nodes.Output, nodes.TemplateData, nodes.Name, nodes.Const, nodes.Filter, nodes.Keyword,
            nodes.If, nodes.CondExpr, nodes.Test, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not,
            nodes.Concat, nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Neg, nodes.Pos,
        )  # fmt: skip
        for node in tree.find_all(nodes.Node):
            if isinstance(node, nodes.For):
                raise ValueError(
                    f"{NAME}: {part} must not loop; events and candidates are rendered separately: {text!r}."
                )
            if isinstance(node, nodes.Filter):
                _check_filter(part, node)
            if not isinstance(node, allowed):
                kind = type(node).__name__
                said = {"Getattr": "reach attributes", "Getitem": "reach into values", "Call": "call functions"}
                raise ValueError(f"{NAME}: {part} must not {said.get(kind, f'use {kind.lower()}')}: {text!r}.")
        self.columns = set(meta.find_undeclared_variables(tree))
        self.template = environment.from_string(text)

    def __call__(self, row: Mapping[str, Any]) -> str:
        import jinja2

        try:
            text = self.template.render({name: row[name] for name in self.columns if name in row})
        except jinja2.UndefinedError:
            missing = sorted(self.columns - set(row))
            raise ValueError(
                f"{NAME}: {self.part} names {missing[0] if missing else '?'!r}, but there is no such column; "
                f"{nearest(missing[0], sorted(row)) if missing else ''}"
            ) from None
        except Exception as error:  # a filter may reject the value
            raise ValueError(f"{NAME}: {self.part} cannot be rendered ({error}): {self.text!r}.") from None
        return str(text).strip()


def _check_filter(part: str, node: Any) -> None:
    if node.name not in FILTERS:
        raise ValueError(f"{NAME}: {part} has no filter {node.name!r}; {nearest(node.name, FILTERS)}")
    # `join`'s attribute= accesses attributes, as do filters given by name. Only join accepts this as its second
    # positional argument.
    reaches = node.name == "join" and (len(node.args) > 1 or any(one.key == "attribute" for one in node.kwargs))
    if reaches or node.dyn_args is not None or node.dyn_kwargs is not None:
        raise ValueError(f"{NAME}: {part} must not reach attributes, as {node.name} does here.")


def _environment() -> Any:
    import jinja2
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "%"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            # A text times a number, or a format string, can have any length.
            if not all(isinstance(side, (int, float)) for side in (left, right)):
                raise SecurityError(f"{operator} needs numbers, got {left!r} and {right!r}")
            return super().call_binop(context, operator, left, right)

    return Environment(undefined=jinja2.StrictUndefined, finalize=to_text, autoescape=False)


def to_text(value: Any) -> Any:
    """Format a value: on one line, integers without a decimal point, "unknown" for a missing value."""
    if is_missing(value) or value == "":
        return "unknown"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else f"{value:.6g}"
    if isinstance(value, str):
        return " ".join(value.split())  # a line break in a title would start a new event
    if isinstance(value, (list, tuple)):
        return " ".join(str(to_text(one)) for one in value) or "none"  # words, as in titles that RecBole's files split
    if isinstance(value, datetime.datetime):
        return value.strftime("%Y-%m-%d")
    return value


def format_age(seconds: float) -> str:
    """Format an event's age before the request in words.

    Args:
        seconds: from the event to the request.
    """
    for unit, length in (("year", 31_557_600), ("month", 2_629_800), ("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return "moments"
