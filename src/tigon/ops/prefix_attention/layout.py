"""Row layout for prefixes and suffixes: offsets, positions and tile tables, built once per batch."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

SEQUENCES = ("prefix queries", "suffix queries", "prefix keys", "suffix keys", "suffix keys across")
zeros = torch.zeros_like


class PrefixLayout:
    """R requests, each a prefix and its suffixes, as packed rows: [all prefixes | all suffixes].

    A request's suffixes are contiguous, in request order, so that both halves are slices of every tensor with a row per
    token. There is no padding.

    Args:
        prefix_lengths: R ints, the token count of each prefix. With 0 the suffixes are independent sequences.
        suffix_lengths: R lists of ints, the token count of each suffix per request.
        device: for the tensors. Default: torch's default device.
    Raises: ValueError if the request counts differ, for a request without suffixes, for negative prefix lengths or
        empty suffixes, and for tensors as lengths: building a layout never synchronizes with the device.

    Attributes:
        requests, suffixes: R, and the total suffix count C.
        rows, prefix_rows, suffix_rows: the total row count, and the row count of each half.
        prefix_lengths, suffix_lengths: the arguments, as tuples.
        cu_prefix, cu_suffix: (R + 1,) and (C + 1,) int32, the start of each prefix and each suffix in its half.
        request: (C,) int64, the request of each suffix.
        positions: (rows,) int64. A suffix continues the prefix's positions.
        predictor: (suffix_rows,) int64, the row whose output predicts each suffix token. The prefix's last row
            predicts a suffix's first token.
    """

    def __init__(
        self,
        prefix_lengths: Sequence[int],
        suffix_lengths: Sequence[Sequence[int]],
        *,
        device: torch.device | str | int | None = None,
    ) -> None:
        self.prefix_lengths = _lengths("prefix_lengths", prefix_lengths, 0)
        if isinstance(suffix_lengths, Tensor):
            raise ValueError(
                f"PrefixLayout: suffix_lengths must be a list of lists of ints, got {_kind(suffix_lengths)}."
            )
        self.suffix_lengths = tuple(_lengths(f"suffix_lengths[{r}]", s, 1) for r, s in enumerate(suffix_lengths))
        self.requests, count = len(self.prefix_lengths), len(self.suffix_lengths)
        if self.requests != count:
            raise ValueError(
                f"PrefixLayout: suffix_lengths must hold a list for each of the {self.requests} prefixes, got {count}."
            )
        prefix = _tensor(self.prefix_lengths)
        many = _tensor([len(s) for s in self.suffix_lengths])
        suffix = _tensor([n for s in self.suffix_lengths for n in s])
        requests = torch.arange(self.requests, device="cpu")
        self.suffixes = len(suffix)
        self.prefix_rows, self.suffix_rows = sum(self.prefix_lengths), int(suffix.sum())
        self.rows = self.prefix_rows + self.suffix_rows
        # 0: no suffix has a single token, 1: some do, 2: all do.
        ones = int((suffix == 1).sum())
        self.singles = 0 if ones == 0 else 1 if ones < self.suffixes else 2
        by_request = _offsets(many)
        of_suffix = _owners(by_request[:-1], self.suffixes)
        cu_prefix, cu_suffix = _offsets(prefix), _offsets(suffix)
        cu_request = cu_suffix.index_select(0, by_request)
        lengths = torch.cat((prefix, suffix))
        starts = torch.cat((cu_prefix[:-1], cu_suffix[:-1] + self.prefix_rows))
        sequence = _owners(starts, self.rows)
        first = starts.index_select(0, sequence)
        before = torch.cat((torch.zeros_like(prefix), prefix.index_select(0, of_suffix)))
        position = torch.arange(self.rows, device="cpu") - first + before.index_select(0, sequence)
        of_row = torch.cat((requests, of_suffix)).index_select(0, sequence)
        stop = first + lengths.index_select(0, sequence)
        # Sequences to cut into tiles: start, stop, and the range of other rows that each tile reads in full. Query
        # tiles read the prefix; prefix-key tiles read the request's suffixes. For queries a request's suffixes form a
        # single sequence, so that short suffixes share full tiles; for keys each suffix is a sequence.
        prefixes = torch.stack((cu_prefix[:-1], cu_prefix[1:]), 1)
        runs = torch.stack((cu_request[:-1], cu_request[1:]), 1) + self.prefix_rows
        own = torch.stack((cu_suffix[:-1], cu_suffix[1:]), 1) + self.prefix_rows
        cut = (prefixes, zeros(prefixes)), (runs, prefixes), (prefixes, runs), (own, zeros(own)), (runs, zeros(runs))
        self._host = dict(zip(SEQUENCES, (torch.cat(pair, 1).int() for pair in cut), strict=True))
        device = torch.get_default_device() if device is None else torch.device(device)
        parts = [t.int() for t in (cu_prefix, cu_suffix, of_suffix, first, stop, position, of_row)]
        parts += [t.flatten() for t in self._host.values()]
        ends = [-(-t.numel() // 4) * 4 for t in parts]
        padded = [torch.nn.functional.pad(t, (0, n - t.numel())) for t, n in zip(parts, ends, strict=True)]
        copied = _copy(torch.cat(padded), device).split(ends)
        moved: list[Tensor] = [t[: part.numel()] for t, part in zip(copied, parts, strict=True)]
        self.device = moved[0].device
        self.cu_prefix, self.cu_suffix, self._of_suffix = moved[:3]
        self._first, self._stop, self._position, self._of_row = moved[3:7]
        self._on_device = {name: t.view(-1, 4) for name, t in zip(SEQUENCES, moved[7:], strict=True)}
        self._tiles: dict[tuple[str, int], Tensor] = {}
        self._short: dict[int, bool] = {}

    def tiles(self, kind: str, size: int) -> Tensor:
        """Return (n, 6) int32, tiles with at most `size` tokens: start, stop, and the sequence they are cut from.

        kind: an entry of `SEQUENCES`. The tiles with the most work come first, so that late programs are short.
        """
        if torch.compiler.is_compiling():
            sequences = self._on_device[kind]
            rows = self.prefix_rows if kind.startswith("prefix") else self.suffix_rows
            return _cut(sequences, size, rows // size + sequences.shape[0], kind == "suffix keys")
        found = self._tiles.get((kind, size))
        if found is None:
            found = _copy(_cut(self._host[kind], size, None, kind == "suffix keys"), self.device)
            self._tiles[kind, size] = found
        return found

    def short(self, heads: int) -> bool:
        """Return whether tiles with 64 rows (`heads` rows per token) fit the suffixes better than tiles with 128."""
        if torch.compiler.is_compiling():
            return False  # a graph must hold for every layout
        found = self._short.get(heads)
        if found is None:
            tokens = [sum(own) for own in self.suffix_lengths]
            small, large = (sum(-(-n * heads // rows) * rows for n in tokens) for rows in (64, 128))
            # Full tiles with 128 rows halve the reads per key, hence the factor 1.3.
            found = self._short[heads] = large > 1.3 * small
        return found

    @functools.cached_property
    def request(self) -> Tensor:
        return self._of_suffix.long()

    @functools.cached_property
    def positions(self) -> Tensor:
        return self._position.long()

    @functools.cached_property
    def predictor(self) -> Tensor:
        if 0 in self.prefix_lengths:
            raise ValueError(
                f"PrefixLayout: every prefix must have a token for predictor, got an empty one for request "
                f"{self.prefix_lengths.index(0)}: nothing predicts the first token of its suffixes."
            )
        first, rows = self._first[self.prefix_rows :], torch.arange(self.suffix_rows, device=self.device)
        rows = rows + self.prefix_rows
        last = self.cu_prefix[1:][self._of_row[self.prefix_rows :].long()].long() - 1
        return torch.where(rows == first, last, rows - 1)

    def to(self, device: torch.device | str | int) -> PrefixLayout:
        """Return this layout on the given device; self if already there."""
        device = torch.device(device)
        if device == self.device or (device.index is None and device.type == self.device.type != "cuda"):
            return self
        return PrefixLayout(self.prefix_lengths, self.suffix_lengths, device=device)

    def __repr__(self) -> str:
        return (
            f"PrefixLayout({self.requests} prefixes of {self.prefix_rows} tokens, {self.suffixes} suffixes of "
            f"{self.suffix_rows}, device={str(self.device)!r})"
        )


def _cut(sequences: Tensor, size: int, count: int | None, longer: bool) -> Tensor:
    """Cut sequences into tiles.

    longer: only sequences with more than one token. count: pad with empty tiles to this count; None: exact count, for
    tensors on the host.
    """
    start, stop = sequences[:, 0].long(), sequences[:, 1].long()
    lengths = stop - start
    if longer:
        lengths = torch.where(lengths > 1, lengths, 0)
    counts = (lengths + size - 1) // size
    ends = counts.cumsum(0)
    tile = torch.arange(int(ends[-1]) if count is None else count, device=sequences.device)
    of = torch.searchsorted(ends, tile, right=True).clamp(max=len(sequences) - 1)
    begin = start[of] + (tile - (ends - counts)[of]) * size
    end = torch.minimum(begin + size, (start + lengths)[of])
    cut = torch.cat((begin[:, None], end[:, None], sequences[of]), 1)
    work = end - cut[:, 2] + cut[:, 5] - cut[:, 4]
    return cut[work.argsort(descending=True, stable=True)].int()


def _lengths(name: str, given: Any, least: int) -> tuple[int, ...]:
    if isinstance(given, (Tensor, str, int)) or not isinstance(given, Sequence):
        raise ValueError(f"PrefixLayout: {name} must be a list of ints on the host, got {_kind(given)}.")
    lengths = tuple(given)
    if not lengths:
        raise ValueError(f"PrefixLayout: {name} must have at least one length, got an empty list.")
    # Thousands of candidates may have a single token each: check all lengths in C first, and loop in Python only to
    # report an invalid length.
    if set(map(type, lengths)) == {int} and min(lengths) >= least:
        return lengths
    for i, n in enumerate(lengths):
        if type(n) is not int:
            raise ValueError(f"PrefixLayout: {name}[{i}] must be an int on the host, got {_kind(n)}.")
        if n < least:
            raise ValueError(f"PrefixLayout: {name}[{i}] must be at least {least}, got {n}.")
    return lengths


def _kind(given: Any) -> str:
    return f"a tensor on {given.device}" if isinstance(given, Tensor) else type(given).__name__


def _tensor(lengths: Sequence[int]) -> Tensor:
    """Convert through array('q'): a fifth of torch's time for a Python list."""
    return torch.frombuffer(array("q", lengths), dtype=torch.int64)


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))


def _owners(starts: Tensor, rows: int) -> Tensor:
    """Return (rows,) int64, the sequence of each row. starts: ascending; among equal starts all but the last are empty.

    repeat_interleave would start threads at any size, which stall each other on a busy host.
    """
    return torch.bincount(starts, minlength=rows + 1)[:rows].cumsum(0) - 1


def _copy(host: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without a synchronization: a copy from pageable memory would wait for the stream."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
