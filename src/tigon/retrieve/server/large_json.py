"""Parse large JSON texts in pieces.

Python's parsers hold the interpreter for a whole text, 100 ms per MiB at worst, and the event loop waits meanwhile,
even for a parser in another thread. Here each parser call gets at most 64 KiB, so that the loop runs in between.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

PIECE = 1 << 16  # characters
# The most Python objects per text, besides elements passed to functions: freeing a million takes 25 ms.
MAX_VALUES = 1 << 20
CONTAINER_VALUES = 4  # weight of a list or an object as values: the garbage collector traverses each again
MAX_DEPTH, MAX_MEMBERS = 8, 10_000
_SPACE = re.compile(r"[ \t\r\n]*")
_NESTED = re.compile(r'[\[{"]')
# Elements other than lists, objects and strings with escapes, each with the comma behind it.
_RUN = re.compile(r'(?:[ \t\r\n]*(?:"[^"\\\x00-\x1f]*"|[^\[\]{}",: \t\r\n]+)[ \t\r\n]*,)+')

Take = Callable[[list[Any]], None]


class TooManyValues(ValueError):
    """A text has more than `MAX_VALUES` values."""


def parse_large_object(text: str, take: Mapping[str, Take]) -> dict[str, Any]:
    """Parse an object as `json.loads` does, except that NaN, infinities and lone surrogates are errors.

    Args:
        text: JSON.
        take: functions that receive the elements of these members' lists in chunks; the members themselves stay empty.

    Raises: ValueError if the text is not JSON, is not an object, or nests too deeply; TooManyValues.
    """
    parser = _Parser(text, take)
    if parser.peek() != "{":
        raise ValueError("an object is expected")
    document: dict[str, Any] = parser.parse_value(0)
    if parser.peek():
        raise parser.error("nothing more is expected")
    return document


class _Parser:
    def __init__(self, text: str, take: Mapping[str, Take]) -> None:
        self.text, self.take, self.position, self.values = text, take, 0, 0
        self.decoder: Any = json.JSONDecoder(parse_constant=_refuse_constant)

    def peek(self) -> str:
        """The first character after white space; empty at the end."""
        match = _SPACE.match(self.text, self.position)
        assert match is not None
        self.position = match.end()
        return self.text[self.position : self.position + 1]

    def parse_value(self, depth: int, name: str | None = None) -> Any:
        """Parse the value at the position; name: the member's that has the value, if any."""
        first = self.peek()
        if first not in ("[", "{"):
            return self._parse_scalar()
        self._count(CONTAINER_VALUES)
        if depth > MAX_DEPTH:
            raise self.error(f"lists and objects nest {MAX_DEPTH} deep at most")
        self.position += 1
        if first == "{":
            return dict(self._parse_members(depth))
        take = self.take.get(name) if depth == 1 and name is not None else None
        elements: list[Any] = []
        before = self.values
        for piece in self._parse_elements(depth):
            if take is None:
                elements += piece
                self._count(len(piece))
            else:
                take(piece)
                self.values = before
        return elements

    def _parse_scalar(self) -> Any:
        try:
            value, self.position = self.decoder.scan_once(self.text, self.position)
        except StopIteration:
            raise self.error("a value is expected") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{error.msg} at character {error.pos:,}") from None
        if isinstance(value, str):
            value.encode()  # raises for a lone surrogate
        return value

    def _parse_members(self, depth: int) -> Iterator[tuple[str, Any]]:
        if self.peek() == "}":
            self.position += 1
            return
        for _ in range(MAX_MEMBERS):
            if self.peek() != '"':
                raise self.error("a name in quotes is expected")
            name = self._parse_scalar()
            if self.peek() != ":":
                raise self.error("a colon is expected")
            self.position += 1
            yield name, self.parse_value(depth + 1, name)
            self._count(1)
            if not self._has_more("}"):
                return
        raise self.error(f"an object has at most {MAX_MEMBERS:,} members")

    def _parse_elements(self, depth: int) -> Iterator[list[Any]]:
        """The elements of a list, in pieces."""
        text = self.text
        if self.peek() == "]":
            self.position += 1
            return
        while True:
            stop = self.position + PIECE
            end = text.find("]", self.position, stop)
            if end >= 0 and not _NESTED.search(text, self.position, end):
                yield self._parse_piece(end)
                self.position = end + 1
                return
            if run := _RUN.match(text, self.position, stop):
                yield self._parse_piece(run.end() - 1)
                self.position = run.end()
            yield [self.parse_value(depth + 1)]
            if not self._has_more("]"):
                return

    def _parse_piece(self, end: int) -> list[Any]:
        try:
            piece: list[Any] = self.decoder.decode(f"[{self.text[self.position : end]}]")
        except json.JSONDecodeError as error:
            raise ValueError(f"{error.msg} at character {self.position + error.pos - 1:,}") from None
        return piece

    def _has_more(self, end: str) -> bool:
        character = self.peek()
        if character not in (",", end) or not character:
            raise self.error(f"a comma or {end} is expected")
        self.position += 1
        return character == ","

    def _count(self, count: int) -> None:
        self.values += count
        if self.values > MAX_VALUES:
            raise TooManyValues(f"a request has at most {MAX_VALUES:,} values beside ids and vectors")

    def error(self, sentence: str) -> ValueError:
        return ValueError(f"{sentence} at character {self.position:,}")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
