"""Parse large JSON texts in pieces.

Python's parsers hold the interpreter for a whole text, 100 ms per MiB at worst, and the event loop waits meanwhile,
even for a parser in another thread. Here each parser call gets at most 64 KiB, so that the loop runs in between.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
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
    return _Parser(text).parse_document(take)


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.position, self.values = text, 0, 0
        self.decoder: Any = json.JSONDecoder(parse_constant=_refuse_constant)

    def parse_document(self, take: Mapping[str, Take]) -> dict[str, Any]:
        if self._peek() != "{":
            raise ValueError("an object is expected")

        def parse_member(name: str) -> Any:
            if name not in take or self._peek() != "[":
                return self._parse_value(1)
            before = self.values

            def take_piece(piece: list[Any]) -> None:
                take[name](piece)
                self.values = before

            self._parse_elements(take_piece, 1)
            return []

        document = self._parse_object(parse_member)
        if self._peek():
            raise self._error("nothing more is expected")
        return document

    def _peek(self) -> str:
        """The first character after white space; empty at the end."""
        match = _SPACE.match(self.text, self.position)
        assert match is not None
        self.position = match.end()
        return self.text[self.position : self.position + 1]

    def _parse_value(self, depth: int) -> Any:
        first = self._peek()
        if first not in ("[", "{"):
            return self._parse_scalar()
        self._count(CONTAINER_VALUES)
        if depth > MAX_DEPTH:
            raise self._error(f"lists and objects nest {MAX_DEPTH} deep at most")
        if first == "{":
            return self._parse_object(lambda _: self._parse_value(depth + 1))
        elements: list[Any] = []

        def take(piece: list[Any]) -> None:
            elements.extend(piece)
            self._count(len(piece))

        self._parse_elements(take, depth)
        return elements

    def _parse_scalar(self) -> Any:
        try:
            value, self.position = self.decoder.scan_once(self.text, self.position)
        except StopIteration:
            raise self._error("a value is expected") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{error.msg} at character {error.pos:,}") from None
        if isinstance(value, str):
            value.encode()  # raises for a lone surrogate
        return value

    def _parse_object(self, parse_member: Callable[[str], Any]) -> dict[str, Any]:
        members: dict[str, Any] = {}
        self.position += 1
        if self._peek() == "}":
            self.position += 1
            return members
        for _ in range(MAX_MEMBERS):
            if self._peek() != '"':
                raise self._error("a name in quotes is expected")
            name = self._parse_scalar()
            if self._peek() != ":":
                raise self._error("a colon is expected")
            self.position += 1
            members[name] = parse_member(name)
            self._count(1)
            if not self._has_more("}"):
                return members
        raise self._error(f"an object has at most {MAX_MEMBERS:,} members")

    def _parse_elements(self, take: Take, depth: int) -> None:
        text = self.text
        self.position += 1
        if self._peek() == "]":
            self.position += 1
            return
        while True:
            stop = self.position + PIECE
            end = text.find("]", self.position, stop)
            if end >= 0 and not _NESTED.search(text, self.position, end):
                take(self._parse_piece(end))
                self.position = end + 1
                return
            if run := _RUN.match(text, self.position, stop):
                take(self._parse_piece(run.end() - 1))
                self.position = run.end()
            take([self._parse_value(depth + 1)])
            if not self._has_more("]"):
                return

    def _parse_piece(self, end: int) -> list[Any]:
        try:
            piece: list[Any] = self.decoder.decode(f"[{self.text[self.position : end]}]")
        except json.JSONDecodeError as error:
            raise ValueError(f"{error.msg} at character {self.position + error.pos - 1:,}") from None
        return piece

    def _has_more(self, end: str) -> bool:
        character = self._peek()
        if character not in (",", end) or not character:
            raise self._error(f"a comma or {end} is expected")
        self.position += 1
        return character == ","

    def _count(self, count: int) -> None:
        self.values += count
        if self.values > MAX_VALUES:
            raise TooManyValues(f"a request has at most {MAX_VALUES:,} values beside ids and vectors")

    def _error(self, sentence: str) -> ValueError:
        return ValueError(f"{sentence} at character {self.position:,}")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
