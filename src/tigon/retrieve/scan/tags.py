"""Score contributions from attribute values: tests on attribute words, with a weight per query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels import jit, next_power_of_2, tl
from tigon.retrieve.scan.filters import LARGEST, DeviceTables

# Tests that a scan step multiplies at once, all on the same word, and the maximum tag count.
LEAST, WIDEST, MOST_TAGS = 16, 64, 4096


class Tag(NamedTuple):
    """Holds for rows with `attributes[word] & mask == value`: a tag bit, or a category code."""

    word: int
    mask: int
    value: int


class RowTags(DeviceTables):
    """Attribute values that `tigon.filtered_topk` weighs by `tag_weights`.

    Args:
        tags: at most 4096 (word, mask, value): a row has the tag if `attributes[word] & mask == value`. mask and value
            are below 2**63.
        device: the table's device. Default: the CPU; `tigon.filtered_topk` copies the table to the items' device, once.

    Raises: ValueError for invalid numbers, and for duplicate tags.

    Attributes:
        tags: as given, as `RowTags.Tag`s.
        words: the required number of attribute words.
        table: (3, C) int64, word, mask and value for each column of the product. A word's columns are adjacent,
            `width` columns or a multiple.
        places: (T,) int64, each tag's column. Columns are ordered by word and value, independent of the tags' order.
    """

    Tag = Tag
    tables = ("table", "places")

    def __init__(self, tags: Sequence[Any], *, device: torch.device | str | int | None = None) -> None:
        self.tags = _check_tags(tags)
        self.words = max((tag.word + 1 for tag in self.tags), default=0)
        by_word: dict[int, list[int]] = {}
        for at in sorted(range(len(self.tags)), key=lambda at: self.tags[at][::2] + self.tags[at][1:2]):
            by_word.setdefault(self.tags[at].word, []).append(at)
        self.width = min(WIDEST, next_power_of_2(max(LEAST, *map(len, by_word.values()), 0)))
        rows: list[Tag] = []
        places = [0] * len(self.tags)
        for word, listed in by_word.items():
            for at in listed:
                places[at] = len(rows)
                rows.append(self.tags[at])
            rows += [Tag(word, 0, 1)] * (-len(rows) % self.width)  # a tag that no row has
        self.table = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 3).t().contiguous()
        self.places = torch.tensor(places, dtype=torch.int64, device="cpu")
        self._place(device)

    def __len__(self) -> int:
        return len(self.tags)

    def __repr__(self) -> str:
        return f"RowTags({len(self)} tags of {self.words} words, device={str(self.device)!r})"

    def has(self, attributes: Tensor) -> Tensor:
        """(T, N) bool, whether each row has each tag; the kernels' specification.

        attributes: (W, N) int64.
        """
        found = [(attributes[tag.word] & tag.mask) == tag.value for tag in self.tags]
        return torch.stack(found) if found else attributes.new_zeros(0, attributes.shape[1], dtype=torch.bool)


def _check_tags(tags: Any) -> tuple[Tag, ...]:
    if isinstance(tags, (str, Tensor)) or not isinstance(tags, Sequence):
        raise ValueError(f"RowTags: tags must be a sequence of (word, mask, value), got {type(tags).__name__}.")
    if len(tags) > MOST_TAGS:
        raise ValueError(f"RowTags: tags must be at most {MOST_TAGS:,}, got {len(tags):,}.")
    found = []
    for i, tag in enumerate(tags):
        if not isinstance(tag, tuple) or len(tag) != 3 or any(type(number) is not int for number in tag):
            raise ValueError(f"RowTags: tags[{i}] must be three ints, (word, mask, value), got {tag!r}.")
        word, mask, value = tag
        if word < 0 or not 0 <= mask <= LARGEST or not 0 <= value <= LARGEST:
            raise ValueError(
                f"RowTags: tags[{i}] must be a row of attributes, and a mask and a value from 0 to 2**63 - 1, got "
                f"{tuple(tag)}."
            )
        found.append(Tag(*tag))
    if len(set(found)) < len(found):
        raise ValueError("RowTags: tags must be distinct, got a duplicate.")
    return tuple(found)


class Tagged(NamedTuple):
    """Tags and weights as the kernels read them. words: attributes. table: from `RowTags`. weights: (B, C) fp32, in
    column order; high, low and scale (B,): the same as scale · (high + low) in fp16. width: columns per step."""

    words: Tensor
    table: Tensor
    weights: Tensor
    high: Tensor
    low: Tensor
    scale: Tensor
    width: int

    def part(self, at: slice) -> Tagged:
        """Select some queries."""
        return self._replace(
            weights=self.weights[at], high=self.high[at], low=self.low[at], scale=self.scale[at]
        )  # fmt: skip


@jit
def has_tags(words_ptr, stride, i, word, mask, value):
    """(rows, tags): 1 if row i has the tag, else 0. word: shared by all the tags; mask and value: per tag."""
    w = tl.load(words_ptr + word * stride + i)
    return tl.where((w[:, None] & mask[None, :]) == value[None, :], 1.0, 0.0).to(tl.float16)


@jit
def add_tags(words_ptr, table_ptr, weights_ptr, stride, columns, i, there, G: tl.constexpr):
    """(G,): the summed weights of the tags that rows i have, added sequentially.

    In table order: a tag with weight 0 changes no bit, so that removing it does not change the result.
    """
    v = tl.zeros([G], tl.float32)
    word_before = tl.full([], -1, tl.int64)
    w = tl.zeros([G], tl.int64)
    for t in range(columns):
        weight = tl.load(weights_ptr + t)
        if weight != 0:
            word = tl.load(table_ptr + t)
            if word != word_before:
                w = tl.load(words_ptr + word * stride + i, mask=there, other=0)
                word_before = word
            has = (w & tl.load(table_ptr + columns + t)) == tl.load(table_ptr + 2 * columns + t)
            v += tl.where(has, weight, 0.0)
    return v
