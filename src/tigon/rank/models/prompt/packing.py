"""Tokenise requests into a prefix and a suffix per candidate and task, and batch them by token budget.

    prefix    [chat template | BOS] instruction ⏎ profile ⏎ event ⏎ event ⏎ …
    suffix    candidate ⏎ question [chat template | ⏎]

Every line is tokenised separately, including its line break. Therefore dropping the oldest events leaves the other
lines' tokens unchanged, a suffix does not depend on its prefix, and training, scoring and a server that receives token
ids use identical ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tigon.fusion.shared_prefix.batch import SharedPrefixBatch
from tigon.losses.choices import IGNORED
from tigon.rank.models.prompt.task import NAME
from tigon.rank.models.prompt.templates import Prompt

T = TypeVar("T")
# Placeholder for the user's turn in a chat template.
MARK = "\u2402content\u2403"
# Number of lines with cached tokens: events and candidates repeat often.
REMEMBERED = 1 << 18


@dataclass(frozen=True)
class Request:
    """A request's candidates, profile and history.

    Args:
        candidates: a row of columns per candidate.
        profile: the request's columns.
        events: rows of columns, oldest first; `ago` is the time before the request.
        labels: task → the right answer's index per candidate, −1 if unknown. None: read from the candidates' columns,
            as the tasks define.
        teacher: task → a teacher's answer probabilities per candidate, or None.
    """

    candidates: Sequence[Mapping[str, Any]]
    profile: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[Mapping[str, Any]] = ()
    labels: Mapping[str, Sequence[int]] | None = None
    teacher: Mapping[str, Sequence[Sequence[float] | None]] = field(default_factory=dict)


class Encoded(NamedTuple):
    """A request as token ids.

    Attributes:
        prefix: ids. suffixes: [candidate][task], ids.
        labels: [candidate][task], the right answer's index, −100 if unknown.
        teacher: [candidate][task], probabilities or None.
        dropped: number of events that did not fit.
    """

    prefix: list[int]
    suffixes: list[list[list[int]]]
    labels: list[list[int]]
    teacher: list[list[Sequence[float] | None]]
    dropped: int

    @property
    def tokens(self) -> int:
        return len(self.prefix) + sum(len(suffix) for own in self.suffixes for suffix in own)

    def take(self, start: int, stop: int) -> Encoded:
        """Select a range of candidates."""
        part = slice(start, stop)
        return self._replace(suffixes=self.suffixes[part], labels=self.labels[part], teacher=self.teacher[part])


class PromptBatch(NamedTuple):
    """Requests packed for a single forward pass. C suffixes in total; a candidate's tasks are adjacent.

    Attributes:
        shared: the prefixes and suffixes.
        task: (C,) int64, each suffix's task.
        labels: (C,) int64, the right answer's index, −100 if unknown.
        teacher: (C, K) float32, a teacher's answer probabilities, padded with zeros; None without a teacher.
        has_teacher: (C,) bool mask.
    """

    shared: SharedPrefixBatch
    task: Tensor
    labels: Tensor
    teacher: Tensor | None
    has_teacher: Tensor | None


class Encoder:
    """Tokenises requests, identically for training, scoring and export.

    Args:
        prompt: the `Prompt`.
        tokenizer: the model's. Its chat template, if any, wraps prefix and suffix as a user turn.
        prefix_len: maximum prefix tokens; the oldest events are dropped first.
        positions: the model's number of positions; None for unlimited.

    Attributes:
        answers: task → each answer's first token.

    Raises: ValueError for answers with the same first token.
    """

    def __init__(self, prompt: Prompt, tokenizer: Any, prefix_len: int, positions: int | None = None) -> None:
        if prefix_len < 1:
            raise ValueError(f"{NAME}: prefix_len must be 1 or more, got {prefix_len}.")
        if positions is not None and prefix_len >= positions:
            raise ValueError(
                f"{NAME}: prefix_len must leave room for suffixes in the model's {positions} positions, got "
                f"{prefix_len}."
            )
        self.prompt, self.tokenizer, self.prefix_len, self.positions = prompt, tokenizer, prefix_len, positions
        self._lines: dict[str, list[int]] = {}
        before, self.tail = self._around()
        self.head = before + self.line(prompt.render("instruction", {}))
        self.answers = {task.name: self._answers(task.name, list(task.answers)) for task in prompt.tasks.values()}

    def line(self, text: str) -> list[int]:
        """Token ids for a line and its line break.

        Special tokens in the text are encoded as plain text: data cannot end the user's turn.
        """
        return self._encode_cached(text + "\n")

    def encode(self, request: Request, *, labelled: bool = True) -> Encoded:
        """Tokenise a request.

        Args:
            request: with at least one candidate.
            labelled: whether labels are read; otherwise all are unknown.
        Raises: ValueError for a request without candidates, columns used in templates but missing from rows, an
            instruction and profile longer than `prefix_len`, and a suffix too long for the model.
        """
        if not request.candidates:
            raise ValueError(f"{NAME}: a request must have candidates, got none.")
        prompt = self.prompt
        prefix = list(self.head)
        if prompt.profile is not None:
            prefix += self.line(prompt.render("profile", request.profile))
        if len(prefix) > self.prefix_len:
            raise ValueError(
                f"{NAME}: instruction and profile take {len(prefix)} tokens, but prefix_len is {self.prefix_len}; only "
                "events can be dropped."
            )
        kept: list[list[int]] = []
        room = self.prefix_len - len(prefix)
        for row in reversed(request.events if prompt.event is not None else ()):
            event = self.line(prompt.render("event", row))
            room -= len(event)
            if room < 0:  # drop older events too, so that histories have no gaps
                break
            kept.append(event)
        prefix += [token for event in reversed(kept) for token in event]
        suffixes = [[self._suffix(row, name) for name in prompt.tasks] for row in request.candidates]
        longest = max(len(suffix) for own in suffixes for suffix in own)
        if self.positions is not None and len(prefix) + longest > self.positions:
            room = self.positions - longest
            todo = f"prefix_len must be at most {room}, got {self.prefix_len}"
            if room < 1:
                todo = "shorten the candidate and question templates"
            raise ValueError(
                f"{NAME}: a prefix of {len(prefix)} tokens and a suffix of {longest} exceed the model's "
                f"{self.positions} positions; {todo}."
            )
        labels, teacher = self._targets(request, labelled)
        return Encoded(prefix, suffixes, labels, teacher, len(request.events) - len(kept))

    def _suffix(self, row: Mapping[str, Any], task: str) -> list[int]:
        # The question's line break belongs to the tail: a chat template ends the turn instead.
        question = self._encode_cached(self.prompt.render(task, row))
        return self.line(self.prompt.render("candidate", row)) + question + self.tail

    def _targets(self, request: Request, labelled: bool) -> tuple[list[list[int]], list[list[Sequence[float] | None]]]:
        labels, teacher = [], []
        tasks = self.prompt.tasks.values()
        for given in (*(request.labels or {}).items(), *request.teacher.items()):
            if given[0] in self.prompt.tasks and len(given[1]) != len(request.candidates):
                raise ValueError(
                    f"{NAME}: labels and teacher must have one entry for each of the {len(request.candidates)} "
                    f"candidates, got {len(given[1])} for {given[0]}."
                )
        for c, row in enumerate(request.candidates):
            own = []
            for task in tasks:
                if not labelled:
                    at = None
                elif request.labels is None:
                    at = task.find_answer(row)
                else:
                    at = int(request.labels[task.name][c]) if task.name in request.labels else None
                if at is not None and at >= len(task.answers):
                    raise ValueError(f"{NAME}: task {task.name} has {len(task.answers)} answers, got the label {at}.")
                own.append(IGNORED if at is None or at < 0 else at)
            labels.append(own)
            teacher.append([request.teacher[task.name][c] if task.name in request.teacher else None for task in tasks])
        return labels, teacher

    def _around(self) -> tuple[list[int], list[int]]:
        """Ids before the instruction, and after the question."""
        tokenizer = self.tokenizer
        if not getattr(tokenizer, "chat_template", None):
            first = list(tokenizer("").input_ids)
            bos = tokenizer.bos_token_id
            return ([bos] if bos is not None and first[:1] == [bos] else []), self._ids("\n")
        message = [{"role": "user", "content": MARK}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True, **self.prompt.chat)
        if text.count(MARK) != 1:
            raise ValueError(f"{NAME}: the tokenizer's chat template must write the user's turn once, got {text!r}.")
        before, _, after = text.partition(MARK)
        return self._ids(before, special=True), self._ids(after, special=True)

    def _encode_cached(self, text: str) -> list[int]:
        result = self._lines.get(text)
        if result is None:
            result = self._ids(text)
            if len(self._lines) < REMEMBERED:
                self._lines[text] = result
        return result

    def _ids(self, text: str, special: bool = False) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, split_special_tokens=not special).input_ids)

    def _answers(self, task: str, answers: list[str]) -> list[int]:
        result = []
        for answer in answers:
            ids = self._ids(answer)
            if not ids:
                raise ValueError(f"{NAME}: answer {answer!r} of task {task} has no tokens.")
            result.append(ids[0])
        if len(set(result)) < len(result):
            name = self.tokenizer.convert_ids_to_tokens
            shown = ", ".join(f"{a!r} with {name(i)!r} ({i})" for a, i in zip(answers, result, strict=True))
            raise ValueError(f"{NAME}: the answers of task {task} must begin with different tokens, but begin {shown}.")
        return result


def group_by_budget(items: Iterable[T], size: Callable[[T], int], budget: int) -> Iterator[list[T]]:
    """Group consecutive items into groups with total size at most `budget`; larger items form their own group."""
    group: list[T] = []
    room = budget
    for item in items:
        if group and size(item) > room:
            yield group
            group, room = [], budget
        group.append(item)
        room -= size(item)
    if group:
        yield group


def split_request(encoded: Encoded, budget: int) -> Iterable[Encoded]:
    """Split a request between candidates into pieces with at most `budget` tokens, each with the whole prefix.

    Suffixes do not attend to each other, so splitting does not change the results.
    """
    if encoded.tokens <= budget:
        yield encoded
        return
    sizes = [sum(map(len, own)) for own in encoded.suffixes]
    for group in group_by_budget(range(len(sizes)), sizes.__getitem__, max(budget - len(encoded.prefix), 1)):
        yield encoded.take(group[0], group[-1] + 1)


def collate(requests: Sequence[Encoded]) -> PromptBatch:
    """Collate requests into a batch, on the CPU."""
    suffixes = [[suffix for own in request.suffixes for suffix in own] for request in requests]
    shared = SharedPrefixBatch([request.prefix for request in requests], suffixes)
    labels = [label for request in requests for own in request.labels for label in own]
    task = [t for request in requests for own in request.labels for t in range(len(own))]
    given = [one for request in requests for own in request.teacher for one in own]
    teacher = has_teacher = None
    if any(one is not None for one in given):
        width = max(len(one) for one in given if one is not None)
        teacher = torch.tensor([[*(one or ())] + [0.0] * (width - len(one or ())) for one in given])
        has_teacher = torch.tensor([one is not None for one in given])
    return PromptBatch(shared, torch.tensor(task), torch.tensor(labels), teacher, has_teacher)
