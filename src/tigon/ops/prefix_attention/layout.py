"""Where the rows of prefixes and suffixes lie: offsets, positions and tables of tiles, made once a batch."""

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

    The suffixes of a request lie one behind the other, in the order of the requests, so that both halves are slices of
    every tensor with a row for each token. Nothing is padded.

    Args:
        prefix_lengths: R ints, the tokens of each prefix. 0 is allowed: the suffixes are then sequences of their own.
        suffix_lengths: R lists of ints, the tokens of each suffix of each request.
        device: of the tensors. Default: torch's default device.
    Raises: ValueError for other counts of requests, for a request without suffixes, for negative lengths and suffixes
        without tokens, and for tensors: a layout is made without asking the device.

    Attributes:
        requests, suffixes: R, and how many suffixes there are in all, C.
        rows, prefix_rows, suffix_rows: of both halves, and of each.
        prefix_lengths, suffix_lengths: as given, as tuples.
        cu_prefix, cu_suffix: (R + 1,) and (C + 1,) int32, where each prefix and each suffix starts in its half.
        request: (C,) int64, the request of each suffix.
        positions: (rows,) int64. A suffix continues the positions of its prefix.
        predictor: (suffix_rows,) int64, the row whose output predicts each token of the suffixes. That of a suffix's
            first token is the last row of its prefix.
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
        # Everything is computed on the host, whatever torch's default device is, and reaches the device in one copy.
        prefix = _tensor(self.prefix_lengths)
        many = _tensor([len(s) for s in self.suffix_lengths])
        suffix = _tensor([n for s in self.suffix_lengths for n in s])
        requests = torch.arange(self.requests, device="cpu")
        self.suffixes = len(suffix)
        self.prefix_rows, self.suffix_rows = sum(self.prefix_lengths), int(suffix.sum())
        self.rows = self.prefix_rows + self.suffix_rows
        # How many of the suffixes have one token: 0 none, 1 some, 2 all.
        ones = int((suffix == 1).sum())
        self.singles = 0 if ones == 0 else 1 if ones < self.suffixes else 2
        by_request = _offsets(many)
        of_suffix = _owners(by_request[:-1], self.suffixes)
        cu_prefix, cu_suffix = _offsets(prefix), _offsets(suffix)
        # Where the suffixes of each request begin, in rows of the suffixes' half.
        cu_request = cu_suffix.index_select(0, by_request)
        lengths = torch.cat((prefix, suffix))
        starts = torch.cat((cu_prefix[:-1], cu_suffix[:-1] + self.prefix_rows))
        sequence = _owners(starts, self.rows)
        first = starts.index_select(0, sequence)
        before = torch.cat((torch.zeros_like(prefix), prefix.index_select(0, of_suffix)))
        position = torch.arange(self.rows, device="cpu") - first + before.index_select(0, sequence)
        of_row = torch.cat((requests, of_suffix)).index_select(0, sequence)
        stop = first + lengths.index_select(0, sequence)
        # Sequences that are cut into tiles: start, stop, and the rows that each meets as a whole. Tiles of queries meet
        # the prefix, those of a prefix's keys the suffixes of its request. The suffixes of a request are one sequence
        # of queries, so that tiles of short ones are full, and by themselves sequences of keys.
        prefixes = torch.stack((cu_prefix[:-1], cu_prefix[1:]), 1)
        runs = torch.stack((cu_request[:-1], cu_request[1:]), 1) + self.prefix_rows
        own = torch.stack((cu_suffix[:-1], cu_suffix[1:]), 1) + self.prefix_rows
        cut = (prefixes, zeros(prefixes)), (runs, prefixes), (prefixes, runs), (own, zeros(own)), (runs, zeros(runs))
        self._host = dict(zip(SEQUENCES, (torch.cat(pair, 1).int() for pair in cut), strict=True))
        device = torch.get_default_device() if device is None else torch.device(device)
        parts = [t.int() for t in (cu_prefix, cu_suffix, of_suffix, first, stop, position, of_row)]
        parts += [t.flatten() for t in self._host.values()]
        # Each part starts at a multiple of 16 bytes, as the kernels' launches expect.
        ends = [-(-t.numel() // 4) * 4 for t in parts]
        padded = [torch.nn.functional.pad(t, (0, n - t.numel())) for t, n in zip(parts, ends, strict=True)]
        copied = _copied(torch.cat(padded), device).split(ends)
        moved: list[Tensor] = [t[: part.numel()] for t, part in zip(copied, parts, strict=True)]
        self.device = moved[0].device
        self.cu_prefix, self.cu_suffix, self._of_suffix = moved[:3]
        self._first, self._stop, self._position, self._of_row = moved[3:7]
        self._on_device = {name: t.view(-1, 4) for name, t in zip(SEQUENCES, moved[7:], strict=True)}
        self._tiles: dict[tuple[str, int], Tensor] = {}
        self._short: dict[int, bool] = {}

    def tiles(self, kind: str, size: int) -> Tensor:
        """(n, 6) int32, the tiles of at most `size` tokens: start, stop, and the sequence that each is cut from.

        kind: one of `SEQUENCES`. Those with most to do come first: what is started last should end soon.
        """
        if torch.compiler.is_compiling():
            # On the device, as a part of the graph, which holds for every layout: as many as there could be.
            sequences = self._on_device[kind]
            rows = self.prefix_rows if kind.startswith("prefix") else self.suffix_rows
            return _cut(sequences, size, rows // size + sequences.shape[0], kind == "suffix keys")
        found = self._tiles.get((kind, size))
        if found is None:
            found = _copied(_cut(self._host[kind], size, None, kind == "suffix keys"), self.device)
            self._tiles[kind, size] = found
        return found

    def short(self, heads: int) -> bool:
        """Whether tiles of 64 rows, heads for each token, hold the suffixes better than tiles of 128."""
        if torch.compiler.is_compiling():
            return False  # the graph holds for every layout
        found = self._short.get(heads)
        if found is None:
            tokens = [sum(own) for own in self.suffix_lengths]
            small, large = (sum(-(-n * heads // rows) * rows for n in tokens) for rows in (64, 128))
            # Full tiles of 128 rows read each key half as often.
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
        """This layout with its tensors on a device; itself if they lie there."""
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
    """Tiles of sequences. longer: only of those with more than one token. Beyond the tiles `count` is filled by empty
    ones; None for as many as there are, which takes a tensor on the host."""
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
    # What a tile reads at most: a causal part of its own sequence, and the whole of the other rows.
    work = end - cut[:, 2] + cut[:, 5] - cut[:, 4]
    return cut[work.argsort(descending=True, stable=True)].int()


def _lengths(name: str, given: Any, least: int) -> tuple[int, ...]:
    if isinstance(given, (Tensor, str, int)) or not isinstance(given, Sequence):
        raise ValueError(f"PrefixLayout: {name} must be a list of ints on the host, got {_kind(given)}.")
    lengths = tuple(given)
    if not lengths:
        raise ValueError(f"PrefixLayout: {name} must have at least one length, got an empty list.")
    # Most are right, and thousands of candidates have one token each: C looks through them, Python at the wrong one.
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
    """On the host, by way of C's numbers: a fifth of the time that torch takes to look at each of Python's."""
    return torch.frombuffer(array("q", lengths), dtype=torch.int64)


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))


def _owners(starts: Tensor, rows: int) -> Tensor:
    """(rows,) int64, the sequence that each row lies in. starts: ascending; equal ones are empty but for the last.

    repeat_interleave starts threads at any size, and on a host whose cores are busy they wait for each other.
    """
    return torch.bincount(starts, minlength=rows + 1)[:rows].cumsum(0) - 1


def _copied(host: Tensor, device: torch.device) -> Tensor:
    """On the device, without a wait: a copy from pageable memory would wait for all that the stream has to do."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
