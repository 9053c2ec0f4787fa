"""Links in a search: item values as tags in the attribute words, and each hit's edges."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.retrieve.filters.attributes import Attributes
from tigon.retrieve.filters.columns import Category, Tags
from tigon.retrieve.filters.schema import Schema
from tigon.retrieve.links.encoder import Attribute
from tigon.retrieve.links.links import LinkWeights
from tigon.retrieve.scan import RowTags
from tigon.retrieve.transfer import to_device

# Value sets whose tags an index caches.
REMEMBERED = 64


class ResolvedLinks(NamedTuple):
    """Links that fit an index.

    Attributes:
        tags, weights: (B, T), as the operator takes them. values: T, each tag's value.
        given: the links as passed by the caller.
    """

    tags: RowTags
    weights: Tensor
    values: tuple[Attribute, ...]
    given: LinkWeights


def resolve_links(links: Any, alpha: Any, B: int, attributes: Attributes, device: torch.device) -> ResolvedLinks | None:
    """Resolve the links for B queries; None without links.

    Raises: ValueError for links with another query count, or for columns that the index lacks.
    """
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise ValueError(f"Index.search: alpha must be a finite number, got {alpha!r}.")
    if links is None:
        if alpha != 1:
            raise ValueError(
                f"Index.search: alpha must be 1 without links, since alpha weighs vectors against links, got {alpha!r}."
            )
        return None
    if not isinstance(links, LinkWeights):
        raise ValueError(f"Index.search: links must come from Links.weigh(queries), got {type(links).__name__}.")
    if len(links.weights) != B:
        raise ValueError(f"Index.search: links must be for {B} queries, like query, got {len(links.weights)}.")
    tags, columns = _find_tags(links, attributes, device)
    if not columns:
        return ResolvedLinks(tags, torch.zeros(B, 0, device=device), (), links)
    weights = links.weights.float()
    if len(columns) < len(links.values):
        weights = weights[:, columns]
    values = tuple(links.values[n] for n in columns)
    return ResolvedLinks(tags, to_device(weights.contiguous(), device), values, links)


def _find_tags(links: LinkWeights, attributes: Attributes, device: torch.device) -> tuple[RowTags, list[int]]:
    """The tags for the values that items have, and their columns in the weights."""
    schema, cache = attributes.schema, attributes.link_tags
    key = links.values, schema.version, device
    with attributes.lock:
        entry = cache.get(key)
        if entry is None:
            tests = [_make_test(schema, *value) for value in links.values]
            columns = [n for n, test in enumerate(tests) if test is not None]
            entry = cache[key] = RowTags([test for test in tests if test is not None], device=device), columns
            while len(cache) > REMEMBERED:
                del cache[next(iter(cache))]
        return entry


def _make_test(schema: Schema, name: str, value: Any) -> tuple[int, int, int] | None:
    """The word, mask and value by which rows have an attribute; None if no item ever had the attribute."""
    if name not in schema.columns:
        raise ValueError(f"Index.search: links lead to an item column {name!r}{schema.nearest(name)}.")
    column = schema.columns[name]
    if not isinstance(column, (Category, Tags)):
        raise ValueError(f"Index.search: links lead to values of {name!r}, a {column.kind} in the index.")
    number = column.numbers.get(value)
    if number is None:
        return None
    if isinstance(column, Category):
        place = schema.places[name][0]
        return place.word, place.mask, (number + 1) << place.shift
    place = next(p for p in schema.places[name] if p.start <= number < p.start + p.bits)
    bit = 1 << (number - place.start + place.shift)
    return place.word, bit, bit


class HitLinks(NamedTuple):
    """A search's links, with the attribute words (W, B, k) that its hits had at search time."""

    links: ResolvedLinks
    words: Tensor

    def test(self) -> Tensor:
        """(B, k, T) bool, on the CPU: the values that each hit has."""
        words = self.words.cpu()
        tested: Tensor = self.links.tags.has(words.flatten(1)).t().unflatten(0, words.shape[1:])
        return tested


def describe_links(links: ResolvedLinks, codes: str | None) -> str:
    """Describe a search with links, for `Index.explain`."""
    words = len({tag.word for tag in links.tags.tags})
    text = f"links to {len(links.tags)} item values, in {words} word{'s' * (words != 1)}, are added in the scan"
    return text + (f"; codes {codes!r} are not used, every matching item is scored" if codes else "")
