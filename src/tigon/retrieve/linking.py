"""Links in a search of an index: their values as tags of its attribute words, and which edges a hit has."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tigon.retrieve.columns import Category, Tags
from tigon.retrieve.links import LinkWeights
from tigon.retrieve.scan import RowTags
from tigon.retrieve.sides import Attribute
from tigon.retrieve.writing import moved

if TYPE_CHECKING:
    from tigon.retrieve.index import Index

# Sets of values whose tags an index remembers.
KEPT = 64


class Linked(NamedTuple):
    """Links that fit an index. tags, weights (B, T): as the operator takes them. values: T, of the tags."""

    tags: RowTags
    weights: Tensor
    values: tuple[Attribute, ...]
    given: LinkWeights


def linked(index: Index, links: Any, alpha: Any, B: int) -> Linked | None:
    """The links of a search, checked; None where there are none.

    Raises: ValueError if they are of another number of queries, or of columns that the index lacks.
    """
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise ValueError(f"Index.search: alpha must be a finite number, got {alpha!r}.")
    if links is None:
        if alpha != 1:
            raise ValueError(
                f"Index.search: alpha must be 1 without links, beside which it weighs vectors, got {alpha!r}."
            )
        return None
    if not isinstance(links, LinkWeights):
        raise ValueError(f"Index.search: links must be what Links.of(queries) returns, got {type(links).__name__}.")
    if len(links.weights) != B:
        raise ValueError(f"Index.search: links must be of {B} queries, as query is, got {len(links.weights)}.")
    tags, columns = _tags(index, links)
    if not columns:
        return Linked(tags, torch.zeros(B, 0, device=index.device), (), links)
    weights = links.weights.float()
    if len(columns) < len(links.values):
        weights = weights[:, columns]
    return Linked(tags, moved(weights.contiguous(), index.device), tuple(links.values[n] for n in columns), links)


def _tags(index: Index, links: LinkWeights) -> tuple[RowTags, list[int]]:
    """Of the values that items of the index have: their tags, and the columns of the weights."""
    key = links.values, index.schema.version, index.device
    with index.turns.compiling:
        found = index.tagged.get(key)
        if found is None:
            tests = [_test(index, *value) for value in links.values]
            columns = [n for n, test in enumerate(tests) if test is not None]
            made = RowTags([test for test in tests if test is not None], device=index.device)
            found = index.tagged[key] = made, columns
            while len(index.tagged) > KEPT:
                del index.tagged[next(iter(index.tagged))]
        return found


def _test(index: Index, name: str, value: Any) -> tuple[int, int, int] | None:
    """The word, the mask and the value of rows that have it; None if no item ever had it."""
    if name not in index.schema.columns:
        raise ValueError(f"Index.search: links lead to a column {name!r} of items{index.schema.nearest(name)}.")
    column = index.schema.columns[name]
    if not isinstance(column, (Category, Tags)):
        raise ValueError(f"Index.search: links lead to values of {name!r}, which is a {column.kind} of the index.")
    number = column.numbers.get(value)
    if number is None:
        return None
    if isinstance(column, Category):
        place = index.schema.places[name][0]
        return place.word, place.mask, (number + 1) << place.shift
    place = next(p for p in index.schema.places[name] if p.start <= number < p.start + p.bits)
    bit = 1 << (number - place.start + place.shift)
    return place.word, bit, bit


class HitLinks(NamedTuple):
    """What hits keep of a search with links: the attribute words (W, B, k) of their items at that moment."""

    linked: Linked
    words: Tensor

    def has(self) -> Tensor:
        """(B, k, T) bool, on the CPU: which values each hit has."""
        words = self.words.cpu()
        found: Tensor = self.linked.tags.has(words.flatten(1)).t().unflatten(0, words.shape[1:])
        return found


def kept(index: Index, found: Linked | None, rows: Tensor) -> HitLinks | None:
    """For `Hits.explain`; between two updates, as the search itself."""
    if found is None:
        return None
    words = index.attributes[: found.tags.words]
    return HitLinks(found, words[:, rows.clamp(min=0)])


def weighed(query: Tensor, norms: Tensor | None, alpha: float) -> tuple[Tensor, Tensor | None]:
    """A query whose scores are alpha times as large."""
    if alpha == 1:
        return query, norms
    return query.float() * alpha, None if norms is None else norms * alpha


def spoken(index: Index, links: LinkWeights) -> str:
    """What a search with links does, for `Index.explain`."""
    tags, columns = _tags(index, links)
    words = len({tag.word for tag in tags.tags})
    text = f"links to {len(columns)} values of items, in {words} word{'s' * (words != 1)}, are added in the scan"
    return text + (f"; codes {index.coding!r} are not read, all that pass are scored" if index.coding else "")
