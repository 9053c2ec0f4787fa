"""How often each value occurs in an index, and an estimate of the share of items that pass a filter.

The share selects the search plan, and `explain` prints the share; results never depend on it. Columns are treated as
independent.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tigon.data.values import Ints
from tigon.retrieve.filters.clauses import Clauses, TagTest
from tigon.retrieve.filters.columns import Category, Ranges, Tags
from tigon.retrieve.filters.schema import Schema

# Numbers and times are counted by the highest bits in their codes: for float32 sign, exponent and three more bits.
BITS = 12


class ValueCounts:
    """Counts of each column's codes, and of tag bits, over the live items."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.items = 0
        self._later: list[tuple[Tensor, torch.cuda.Event]] = []
        self.missing = dict.fromkeys(schema, 0)
        self.bins: dict[str, npt.NDArray[np.int64]] = {name: np.zeros(0, dtype=np.int64) for name in schema}
        self.changes = 0  # how often rows were added or subtracted

    def subtract_when_copied(self, words: Tensor, event: torch.cuda.Event) -> None:
        """Subtract rows once the event has happened, when their words have been copied to the host."""
        self._later.append((words, event))

    def __getstate__(self) -> dict[str, Any]:
        self.settle(wait=True)  # events are not copied
        return {**self.__dict__}

    def settle(self, wait: bool = False) -> None:
        """Subtract the rows whose copies have arrived; with wait, all rows."""
        while self._later and (wait or self._later[0][1].query()):
            words, event = self._later.pop(0)
            event.synchronize()
            self.add(words.numpy(), sign=-1)

    def add(self, words: Ints, sign: int = 1) -> None:
        """Add rows of attribute words to the counts, or subtract them with sign -1.

        words: (W, rows).
        """
        self.items += sign * words.shape[1]
        for name, column in self.schema.columns.items():
            if isinstance(column, Tags):
                counts = np.concatenate([_bits(words[p.word], p.shift, p.bits) for p in self.schema.places[name]])
                any_tag = np.zeros(words.shape[1], dtype=bool)
                for place in self.schema.places[name]:
                    any_tag |= (words[place.word] & place.mask) != 0
                self.missing[name] += sign * int((~any_tag).sum())
            else:
                codes = self.schema.decode(name, words)
                codes = codes[codes > 0]
                self.missing[name] += sign * (words.shape[1] - len(codes))
                counts = np.bincount(codes >> self._dropped_bits(name))
            if len(counts) > len(self.bins[name]):
                grown = np.zeros(max(len(counts), 2 * len(self.bins[name])), dtype=np.int64)
                grown[: len(self.bins[name])] = self.bins[name]
                self.bins[name] = grown
            self.bins[name][: len(counts)] += sign * counts
        self.changes += 1

    def _dropped_bits(self, name: str) -> int:
        """How many low code bits a bin drops."""
        column = self.schema[name]
        return 0 if isinstance(column, Category) else max(0, column.bits - BITS)

    def estimate_share(self, clauses: Clauses) -> float:
        """Estimate the share of items for which all clauses hold; 1 if there are no items."""
        passing = 1.0
        for clause in clauses:
            failing = 1.0
            for name, ranges in clause.codes:
                failing *= 1 - self._estimate_codes(name, ranges)
            for tag in clause.tags:
                failing *= 1 - self._estimate_tag(tag)
            passing *= 1 - failing
        return min(max(passing, 0.0), 1.0)

    def _estimate_codes(self, name: str, ranges: Ranges) -> float:
        dropped, bins = self._dropped_bits(name), self.bins[name]
        total = 0.0
        for low, high in ranges:
            total += self.missing[name] if low == 0 else 0
            low = max(low, 1)
            first, last = low >> dropped, high >> dropped
            total += float(bins[first : last + 1].sum())
            # A bin that the range cuts counts in proportion.
            for edge, inside in ((first, low - (first << dropped)), (last, ((last + 1) << dropped) - 1 - high)):
                if edge < len(bins):
                    total -= float(bins[edge]) * inside / (1 << dropped)
        return min(total / self.items, 1.0) if self.items > 0 else 1.0

    def _estimate_tag(self, tag: TagTest) -> float:
        if self.items <= 0:
            return 1.0
        place = self.schema.places[tag.column][tag.place]
        bins = self.bins[tag.column]
        numbers = [place.start + i for i in range(place.bits) if tag.bits >> i & 1]
        if len(numbers) == self.schema[tag.column].bits and tag.test == "any":
            holds = 1 - self.missing[tag.column] / self.items
        else:
            shares = [float(bins[n]) / self.items if n < len(bins) else 0.0 for n in numbers]
            holds = float(np.prod(shares)) if tag.test == "all" else 1 - float(np.prod([1 - s for s in shares]))
        return 1 - holds if tag.negated else holds


def _bits(word: Ints, shift: int, bits: int) -> Ints:
    """The number of rows with each bit set."""
    return np.array([int(((word >> (shift + i)) & 1).sum()) for i in range(bits)], dtype=np.int64)
