"""Griffe extension: docstrings of this house in Google's style, so that the reference has a row for each parameter.

In the source, parameters that belong together share a line, and short sections stand on one:

    Args:
        cos, sin: (B, T, D). scale: of the result.
    Returns: x's shape and dtype.
    Raises: ValueError for a dtype that is not a float; TypeError for what is no tensor.

    Replaces::

        y = F.relu(x).square()

Here each name gets an entry of its own, with the type and default of the signature; sections become sections, and code
gets a fence. Parameters that the text leaves to another place ("as of `rms_norm`") get that sentence.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Any

import griffe

SECTION = re.compile(r"^(Args|Returns|Yields|Raises):(?: (.*))?$")
# What is the same in every module, and not said in each.
EVERYWHERE = {"device": "where the parameters are made.", "dtype": "dtype of the parameters."}


class Docstrings(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        # Keywords that a function refuses, with a sentence that says how they are passed, are no parameters of it.
        func.parameters = griffe.Parameters(*(p for p in func.parameters if str(p.annotation) != "NoReturn"))
        self.rewrite(func, [p.name for p in func.parameters if p.name not in ("self", "cls")])

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        # The fields of a dataclass become parameters after this; those of a NamedTuple never do, and are attributes.
        fields = [name for name, field in cls.attributes.items() if field.annotation is not None]
        made = [p.name for p in cls.parameters if p.name not in ("self", "cls")]
        self.rewrite(cls, made or fields)
        if cls.docstring is not None:
            if any(str(base).endswith("NamedTuple") for base in cls.bases):
                cls.docstring.value = re.sub(r"^Args:$", "Attributes:", cls.docstring.value, flags=re.MULTILINE)
            cls.docstring.value = attributed(cls.docstring.value, fields)

    def rewrite(self, thing: griffe.Function | griffe.Class, parameters: Sequence[str]) -> None:
        if thing.docstring is None:
            return
        text = thing.docstring.value
        # A module of tigon.nn is an operator with options fixed: what it does not explain, the operator does.
        operator = re.search(r"`(tigon\.[\w.]+)`", text.partition("\n\n")[0]) if thing.is_class else None
        thing.docstring.value = google(text, parameters, f"as in `{operator[1]}`." if operator else "")


def google(text: str, parameters: Sequence[str] = (), otherwise: str = "") -> str:
    """A docstring in Google's style, with an entry for every parameter that it speaks of; of others that sentence."""
    parts: list[str] = []
    found = sections(text.splitlines())
    if otherwise and parameters and all(kind != "Args" for kind, _ in found):
        found.insert(1, ("Args", []))
    for kind, lines in found:
        if kind == "Args":
            if rows := entries(lines, parameters, otherwise):
                parts.append("Args:\n" + "\n".join(entry(*row) for row in rows))
        elif kind == "Raises":
            parts.append("Raises:\n" + "\n".join(entry(*error) for error in errors(joined(lines))))
        elif kind:
            parts.append(f"{kind}:\n" + textwrap.indent(": " + listed(lines), "    ").rstrip())
        else:
            parts.append(fenced(lines))
    return "\n\n".join(part for part in parts if part.strip())


def attributed(text: str, fields: Sequence[str]) -> str:
    """Paragraphs that begin "field: what it is" become one section of attributes."""
    kept, found = [], []
    for paragraph in text.split("\n\n"):
        own = re.match(r"(\w+): ", paragraph)
        if own and own[1] in fields:
            said = apart(paragraph.split("\n"), fields)
            found += [(name, what) for names, what in said for name in names.split(", ")]
        else:
            kept.append(paragraph)
    return "\n\n".join(kept + (["Attributes:\n" + "\n".join(entry(*item) for item in found)] if found else []))


def sections(lines: list[str]) -> list[tuple[str, list[str]]]:
    """(kind or "", lines without their indentation), in their order; a section ends where its indentation does."""
    found: list[tuple[str, list[str]]] = [("", [])]
    after_blank = False
    for line in lines:
        start = SECTION.match(line)
        if start:
            # "Args: as of `f`. Returns: a mapping." on one line are two.
            rest = start[2] or ""
            first, returns, second = rest.partition(" Returns: ")
            found.append((start[1], [first] if first else []))
            if returns:
                found.append(("Returns", [second]))
        elif found[-1][0] and line and (not line.startswith(" ") or after_blank):
            found.append(("", [line]))
        else:
            found[-1][1].append(line)
        after_blank = not line.strip()
    return [(kind, block if not kind else dedented(block)) for kind, block in found]


def dedented(lines: list[str]) -> list[str]:
    """Without the indentation of a section, whose first line may stand beside its heading."""
    indents = [len(line) - len(line.lstrip()) for line in lines if line.strip() and line.startswith(" ")]
    least = min(indents, default=0)
    return [line[least:] if line.startswith(" ") else line for line in lines]


def entries(lines: list[str], parameters: Sequence[str], otherwise: str = "") -> list[tuple[str, str]]:
    """(parameter, what is said of it), in the order of the signature."""
    said: dict[str, str] = {}
    rest = ""
    for block in blocks(lines):
        for names, what in apart(block, parameters):
            mine, others = named(names, parameters)
            for name in mine:
                said.setdefault(name, what)
            rest = what if others == "rest" else rest
            for name in parameters[parameters.index(others) + 1 :] if others in parameters else ():
                said.setdefault(name, what)
    rest = rest or (listed(lines) if not said else "")
    for name in parameters:
        if words := rest or EVERYWHERE.get(name) or otherwise:
            said.setdefault(name, words)
    order = {name: i for i, name in enumerate(parameters)}
    return sorted(said.items(), key=lambda item: order.get(item[0], len(order)))


def blocks(lines: list[str]) -> list[list[str]]:
    """An entry and the lines that go on with it, which are further in."""
    found: list[list[str]] = []
    for line in lines:
        if line and not line.startswith(" "):
            found.append([line])
        elif found:
            found[-1].append(line)
    return found


def apart(block: list[str], parameters: Sequence[str]) -> list[tuple[str, str]]:
    """(names, text) of an entry; of "weight: (N,). bias: (N,)." two."""
    names, colon, first = block[0].partition(": ")
    if not colon:
        return []
    text = listed([first, *block[1:]])
    found = []
    for part in re.split(r"(?<=[.;)]) (?=(?:\w+(?:, | and ))*\w+: )", text):
        head, colon, what = part.partition(": ")
        mine = named(head, parameters)[0] if colon and re.fullmatch(r"\w+(?:(?:, | and )\w+)*", head) else []
        if found and mine and set(re.split(r", | and ", head)) <= set(parameters):
            found.append((head, what))
        elif found:
            found[-1] = (found[-1][0], f"{found[-1][1]} {part}")
        else:
            found.append((names, part))
    return found


def named(names: str, parameters: Sequence[str]) -> tuple[list[str], str]:
    """The parameters of a heading, and after which one "what follows" begins, or "rest"."""
    after = re.search(r"what follows (\w+)", names)
    words = re.findall(r"[\w]+", names.partition(" and what follows")[0])
    others = after[1] if after else "rest" if re.search(r"\b(the others|the rest|all others)\b", names) else ""
    known = [word for word in words if word in parameters]
    return known or ([] if parameters else words[:1]), others


def entry(name: str, text: str) -> str:
    first, *more = text.split("\n")
    return "\n".join([f"    {name}: {first}", *(f"        {line}" if line else "" for line in more)])


def joined(lines: list[str]) -> str:
    return " ".join(line.strip() for line in lines if line.strip())


def listed(lines: list[str]) -> str:
    """Lines as one paragraph; of lines that name a value and explain it, a list."""
    text, items = [], []
    for line in lines:
        item = re.match(r'("[^"]+"(?:, "[^"]+")*|\w[\w.]*) {2,}(\S.*)$', line.strip())
        if item:
            items.append(f"- `{item[1]}`: {item[2]}")
        elif items and line.strip():
            items[-1] += f" {line.strip()}"
        elif line.strip():
            text.append(line.strip())
    return "\n".join([" ".join(text), *(["", *items] if items else [])])


def errors(text: str) -> list[tuple[str, str]]:
    """ "ValueError for a, or b; TypeError for c" as (error, reason) each."""
    found = []
    for part in re.split(r"[;.,] (?:and )?(?=[A-Z]\w*(?:Error|Exception|Problem)\b)", text):
        name, _, reason = part.partition(" ")
        found.append((name.rstrip(":,."), reason.strip()))
    return found


def fenced(lines: list[str]) -> str:
    """Text whose indented blocks have fences: Python where it is, else as it stands."""
    parts: list[tuple[bool, list[str]]] = []
    for line in lines:
        code = line.startswith("    ") if line.strip() else bool(parts) and parts[-1][0]
        if not parts or parts[-1][0] != code:
            parts.append((code, []))
        parts[-1][1].append(line)
    shown = []
    for code, block in parts:
        text = textwrap.dedent("\n".join(block)).strip("\n")
        if code:
            shown.append(f"\n```{language(text)}\n{text.rstrip()}\n```\n")
        else:
            text = re.sub(r"^(Replaces.*?)::$", r"**\1:**", text, flags=re.MULTILINE)
            shown.append(re.sub(r"::$", ":", text, flags=re.MULTILINE))
    return "\n".join(shown).strip("\n")


def language(code: str) -> str:
    try:
        compile(code, "", "exec")
    except SyntaxError:
        return "text"
    return "python"
