"""Requests as token ids: one prefix, and for each candidate a suffix a task; and batches of them by a budget of tokens.

    prefix    [chat template | BOS] instruction ⏎ profile ⏎ event ⏎ event ⏎ …
    suffix    candidate ⏎ question [chat template | ⏎]

Every line is tokenised by itself, with the line break that ends it. So a prefix without its oldest events is exactly
the lines that are left, a suffix is the same whatever it follows, and training, scoring and a server that gets token
ids read the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.fusion.shared_prefix.batch import SharedPrefixBatch
from tigon.losses.choices import IGNORED
from tigon.rank.models.prompt.task import NAME
from tigon.rank.models.prompt.templates import Prompt

# Stands for the user's turn in a chat template.
MARK = "\u2402content\u2403"
# Lines whose tokens are remembered: events and candidates come again and again.
REMEMBERED = 1 << 18


@dataclass(frozen=True)
class Request:
    """The candidates of one request, its profile and its history.

    Args:
        candidates: a row of columns for each candidate.
        profile: the columns of the request.
        events: rows of columns, oldest first; `ago` says how long before the request an event was.
        labels: task → for each candidate the place of the right answer, −1 where it is not known. None: read from the
            candidates' columns, as the tasks say.
        teacher: task → for each candidate a teacher's probability of each answer, or None.
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
        labels: [candidate][task], the place of the right answer, −100 where it is not known.
        teacher: [candidate][task], probabilities or None.
        dropped: how many events did not fit.
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
        """Some of the candidates."""
        part = slice(start, stop)
        return self._replace(suffixes=self.suffixes[part], labels=self.labels[part], teacher=self.teacher[part])


class PromptBatch(NamedTuple):
    """Requests packed for one pass of the model. C suffixes in all, a candidate's tasks side by side.

    Attributes:
        shared: the prefixes and suffixes.
        task: (C,) int64, which task each suffix asks.
        labels: (C,) int64, the place of the right answer, −100 where it is not known.
        teacher: (C, K) float32, a teacher's probabilities of the answers, zeros beyond a task's own; None without one.
        has_teacher: (C,) bool, where there are any.
    """

    shared: SharedPrefixBatch
    task: Tensor
    labels: Tensor
    teacher: Tensor | None
    has_teacher: Tensor | None


class Encoder:
    """Turns requests into token ids, the same way for training, scoring and export.

    Args:
        prompt: the `Prompt`.
        tokenizer: of the model. Its chat template, if it has one, puts prefix and suffix into a turn of the user.
        prefix_len: most tokens of a prefix; the oldest events are left out first.
        positions: how many positions the model has; None for any number.

    Attributes:
        answers: task → the token that each answer begins with.

    Raises: ValueError for answers that begin with the same token.
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
        """The ids of a line, with its line break. Special tokens in it are text: data cannot end the user's turn."""
        result = self._lines.get(text)
        if result is None:
            result = self._ids(text + "\n")
            if len(self._lines) < REMEMBERED:
                self._lines[text] = result
        return result

    def encode(self, request: Request, *, labelled: bool = True) -> Encoded:
        """A request as token ids.

        Args:
            request: with at least one candidate.
            labelled: whether labels are read; without them all are unknown.
        Raises: ValueError for a request without candidates, columns that templates name and rows lack, an instruction
            and profile that do not fit `prefix_len`, and a suffix that does not fit the model.
        """
        if not request.candidates:
            raise ValueError(f"{NAME}: a request must have candidates, got none.")
        prompt = self.prompt
        prefix = list(self.head)
        if prompt.profile is not None:
            prefix += self.line(prompt.render("profile", request.profile))
        if len(prefix) > self.prefix_len:
            raise ValueError(
                f"{NAME}: instruction and profile take {len(prefix)} tokens, and prefix_len is {self.prefix_len}; only "
                "events can be left out."
            )
        kept: list[list[int]] = []
        room = self.prefix_len - len(prefix)
        for row in reversed(request.events if prompt.event is not None else ()):
            event = self.line(prompt.render("event", row))
            if len(event) > room:  # older ones go too, so that no history has a hole
                break
            kept.append(event)
            room -= len(event)
        for event in reversed(kept):
            prefix += event
        suffixes = [[self._suffix(row, name) for name in prompt.tasks] for row in request.candidates]
        longest = max(len(suffix) for own in suffixes for suffix in own)
        if self.positions is not None and len(prefix) + longest > self.positions:
            room = self.positions - longest
            todo = f"prefix_len must be at most {room}, got {self.prefix_len}"
            if room < 1:
                todo = "shorten what candidate and question say"
            raise ValueError(
                f"{NAME}: a prefix of {len(prefix)} tokens and a suffix of {longest} are more than the model's "
                f"{self.positions} positions; {todo}."
            )
        labels, teacher = self._targets(request, labelled)
        return Encoded(prefix, suffixes, labels, teacher, len(request.events) - len(kept))

    def _suffix(self, row: Mapping[str, Any], task: str) -> list[int]:
        prompt = self.prompt
        ids = self.line(prompt.render("candidate", row))
        # The question's line break belongs to the tail: a chat template ends the turn in its place.
        return ids + self._encode_cached(prompt.render(task, row)) + self.tail

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
        """The ids before the instruction, and those after the question."""
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
        key = "\0" + text  # apart from lines, which end in a line break
        result = self._lines.get(key)
        if result is None:
            result = self._ids(text)
            if len(self._lines) < REMEMBERED:
                self._lines[key] = result
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
            raise ValueError(f"{NAME}: the answers of task {task} must begin with different tokens, and begin {shown}.")
        return result


def group_by_budget(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Places of consecutive sizes in groups of at most `budget`, or of one where that is larger by itself."""
    groups: list[list[int]] = []
    room = 0
    for place, size in enumerate(sizes):
        if not groups or size > room:
            groups.append([])
            room = budget
        groups[-1].append(place)
        room -= size
    return groups


def split_request(encoded: Encoded, budget: int) -> Iterable[Encoded]:
    """A request cut between candidates into pieces of at most `budget` tokens, each with the whole prefix.

    A suffix reads nothing of the other suffixes, so that the pieces say what the request does.
    """
    if encoded.tokens <= budget:
        yield encoded
        return
    sizes = [sum(map(len, own)) for own in encoded.suffixes]
    for group in group_by_budget(sizes, max(budget - len(encoded.prefix), 1)):
        yield encoded.take(group[0], group[-1] + 1)


def collate(requests: Sequence[Encoded]) -> PromptBatch:
    """One batch of some requests, on the CPU."""
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
