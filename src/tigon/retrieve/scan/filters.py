"""Row filters: clauses of literals over attribute words, as integers that the kernels read."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

# Bounds on the kernels' loops.
MOST_CLAUSES, MOST_LITERALS = 16, 16
LARGEST = 2**63 - 1
# A bitmap of codes is at most 256 MiB.
MOST_CODES = 2**31
TESTS = ("any", "all", "range", "codes")

# A table row. Every test is `0 <= (word & MASK) - LOW <= SPAN` on unsigned numbers, or a bitmap lookup.
WORD, MASK, LOW, SPAN, FLAGS, SHIFT, START, BITS = range(8)
COLUMNS = 8
# Bits in FLAGS. For codes, SPAN is the bitmap's bit count; for LAST_OF_FILTER, BITS is the word count of all the
# filter's bitmaps, the offset to the next filter's bitmaps.
NEGATED, LAST_OF_CLAUSE, LAST_OF_FILTER, CODES = 1, 2, 4, 8


class Literal(NamedTuple):
    """A test on an attribute word of a row.

    Args:
        word: index of the word in `attributes`.
        mask: the tested bits, below 2**63.
        test: "any": at least one bit is set. "all": all bits are set. "range": low <= word & mask <= high. "codes": the
            masked number, (word & mask) >> (lowest bit of mask), is in `codes`.
        low, high: inclusive bounds for a range, shifted to the mask's position.
        negated: invert the test.
        codes: the passing numbers, non-negative ints.
    """

    word: int
    mask: int
    test: str = "any"
    low: int = 0
    high: int = 0
    negated: bool = False
    codes: Sequence[int] | None = None


Clauses = Sequence[Sequence[Literal]]
M = TypeVar("M", bound="DeviceTables")


class DeviceTables:
    """An object with tables that the kernels read, which are copied to each device once.

    tables: the tables' names.
    """

    tables: ClassVar[tuple[str, ...]]

    def _place(self, device: torch.device | str | int | None) -> None:
        """Move the new tables from the CPU to a device."""
        self.device = torch.device("cpu")
        # Excludes this object: a cycle would keep megabytes of tables until garbage collection.
        self._moved: dict[torch.device, Any] = {}
        if device is not None:
            self.__dict__.update(self.to(device).__dict__)

    def to(self: M, device: torch.device | str | int) -> M:
        """Return this object with its tables on a device; the same object for the same device."""
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device == self.device:
            return self
        moved: M | None = self._moved.get(device)
        if moved is None:
            moved = copy.copy(self)
            for name in self.tables:
                setattr(moved, name, _copy_to(getattr(self, name), device))
            moved.device, moved._moved = device, {}
            self._moved[device] = moved
        return moved


class RowFilter(DeviceTables):
    """A row filter in conjunctive form: a row passes if every clause has at least one literal that holds.

    Without clauses every row passes; an empty clause lets no row pass. Filters are immutable, and a new filter needs no
    new kernel: the kernels read its table.

    Args:
        clauses: at most 16 sequences of at most 16 `RowFilter.Literal`s.
        device: the table's device. Default: the CPU; `tigon.filtered_topk` copies the table to the items' device, once.

    Raises: ValueError for too many clauses or literals, and for literals with invalid numbers.

    Attributes:
        clauses: as given, as tuples.
        words: the required number of attribute words.
        table: (literals, 8) int64, read by the kernels.
        bitmaps: (n,) int32, a bit per code for the literals with codes, bitmaps concatenated.
        device: the device of both.
    """

    Literal: ClassVar[type[Literal]] = Literal
    tables = ("table", "bitmaps")

    def __init__(self, clauses: Clauses, *, device: torch.device | str | int | None = None) -> None:
        self.clauses = _check_clauses(clauses)
        self.words = max((literal.word + 1 for clause in self.clauses for literal in clause), default=0)
        rows, bitmaps = _rows(self.clauses)
        self.table = torch.tensor(rows, dtype=torch.int64, device="cpu")
        # At least one number: an empty tensor has no address to pass to a kernel.
        self.bitmaps = torch.cat(bitmaps) if bitmaps else torch.zeros(1, dtype=torch.int32, device="cpu")
        self._hash = hash(self.clauses)
        self._place(device)

    def mask(self, attributes: Tensor) -> Tensor:
        """(N,) bool, whether each row passes; the kernels' specification.

        attributes: (W, N) int64.
        """
        passing = torch.ones(attributes.shape[1], dtype=torch.bool, device=attributes.device)
        for clause in self.clauses:
            some = torch.zeros_like(passing)
            for literal in clause:
                some = some | _holds(literal, attributes[literal.word])
            passing = passing & some
        return passing

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RowFilter):
            return NotImplemented
        return self is other or (self._hash == other._hash and self.clauses == other.clauses)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        literals = sum(len(clause) for clause in self.clauses)
        return f"RowFilter({len(self.clauses)} clauses of {literals} literals, device={str(self.device)!r})"


def _holds(literal: Literal, word: Tensor) -> Tensor:
    bits = word & literal.mask
    if literal.test == "any":
        holds = bits != 0
    elif literal.test == "all":
        holds = bits == literal.mask
    elif literal.test == "range":
        holds = (bits >= max(literal.low, 0)) & (bits <= min(literal.high, LARGEST))
    else:
        codes = torch.tensor(literal.codes, dtype=torch.int64, device=word.device)
        holds = torch.isin(bits >> _lowest_bit(literal.mask), codes)
    return ~holds if literal.negated else holds


def _lowest_bit(mask: int) -> int:
    return (mask & -mask).bit_length() - 1 if mask else 0


def _check_clauses(clauses: Any) -> tuple[tuple[Literal, ...], ...]:
    if isinstance(clauses, (str, Tensor, Literal)) or not isinstance(clauses, Sequence):
        raise ValueError(
            f"RowFilter: clauses must be a sequence of sequences of RowFilter.Literal, got {type(clauses).__name__}."
        )
    if len(clauses) > MOST_CLAUSES:
        raise ValueError(f"RowFilter: clauses must be at most {MOST_CLAUSES}, got {len(clauses)}.")
    found = []
    for i, clause in enumerate(clauses):
        name = f"clauses[{i}]"
        if isinstance(clause, (str, Tensor, Literal)) or not isinstance(clause, Sequence):
            raise ValueError(f"RowFilter: {name} must be a sequence of RowFilter.Literal, got {type(clause).__name__}.")
        if len(clause) > MOST_LITERALS:
            raise ValueError(f"RowFilter: {name} must have at most {MOST_LITERALS} literals, got {len(clause)}.")
        found.append(tuple(_check_literal(f"{name}[{j}]", literal) for j, literal in enumerate(clause)))
    return tuple(found)


def _check_literal(name: str, literal: Any) -> Literal:
    if not isinstance(literal, Literal):
        raise ValueError(f"RowFilter: {name} must be a RowFilter.Literal, got {type(literal).__name__}.")
    for field in ("word", "mask", "low", "high"):
        number = getattr(literal, field)
        if type(number) is not int:
            raise ValueError(f"RowFilter: {name}.{field} must be an int, got {type(number).__name__}.")
    if literal.word < 0:
        raise ValueError(f"RowFilter: {name}.word must be a row of attributes, 0 or more, got {literal.word}.")
    if not 0 <= literal.mask <= LARGEST:
        raise ValueError(f"RowFilter: {name}.mask must be bits below 2**63, got {literal.mask}.")
    if literal.test not in TESTS:
        raise ValueError(f"RowFilter: {name}.test must be one of {', '.join(TESTS)}, got {literal.test!r}.")
    if literal.test != "codes":
        return literal._replace(negated=bool(literal.negated), codes=None)
    codes = literal.codes
    if isinstance(codes, (str, Tensor)) or not isinstance(codes, Sequence):
        raise ValueError(f"RowFilter: {name}.codes must be a sequence of ints, got {type(codes).__name__}.")
    kept = tuple(sorted(set(codes)))
    wrong = next((c for c in kept if type(c) is not int or not 0 <= c < MOST_CODES), None)
    if wrong is not None:
        raise ValueError(f"RowFilter: {name}.codes must be ints from 0 to 2**31 - 1, got {wrong!r}.")
    return literal._replace(negated=bool(literal.negated), codes=kept)


def _rows(clauses: tuple[tuple[Literal, ...], ...]) -> tuple[list[list[int]], list[Tensor]]:
    """The table's rows, and the codes' bitmaps."""
    rows: list[list[int]] = []
    bitmaps: list[Tensor] = []
    start = 0
    for clause in clauses:
        # A clause without literals never holds: mask 0, minimum 1.
        for literal in clause or (Literal(0, 0),):
            mask = literal.mask
            row = [literal.word, mask, 0, 0, NEGATED if literal.negated else 0, _lowest_bit(mask), 0, 0]
            if literal.test == "codes":
                bitmap = _bitmap(literal.codes or ())
                row[SPAN], row[START] = 32 * len(bitmap), start
                row[FLAGS] |= CODES
                bitmaps.append(bitmap)
                start += len(bitmap)
            else:
                bounds = {"any": (1, mask), "all": (mask, mask), "range": (literal.low, literal.high)}
                low, high = bounds[literal.test]
                low, high = max(low, 0), min(high, LARGEST)
                if low > high:
                    row[MASK], low, high = 0, 1, 1
                row[LOW], row[SPAN] = low, high - low
            rows.append(row)
        rows[-1][FLAGS] |= LAST_OF_CLAUSE
    if not rows:  # mask 0, minimum and maximum 0: every row passes
        rows.append([0, 0, 0, 0, LAST_OF_CLAUSE, 0, 0, 0])
    rows[-1][FLAGS] |= LAST_OF_FILTER
    rows[-1][BITS] = max(start, 1)
    return rows, bitmaps


def _bitmap(codes: Sequence[int]) -> Tensor:
    """(n,) int32: bit c % 32 in number c // 32 is set for each code c."""
    bits = torch.zeros(max(codes, default=0) // 32 + 1, 32, dtype=torch.int64, device="cpu")
    bits.view(-1)[torch.tensor(codes, dtype=torch.int64, device="cpu")] = 1
    # The sum fits 32 bits; as int32 the highest bit is the sign.
    return (bits << torch.arange(32, device="cpu")).sum(1).to(torch.int32)


def _copy_to(t: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without synchronizing: a copy from pageable memory would wait for the stream's work."""
    if device.type != "cuda" or t.device.type != "cpu" or torch.compiler.is_compiling():
        return t.to(device)
    return t.pin_memory().to(device, non_blocking=True)


# Concatenated tables for a batch's filters, keyed by identity. The cache holds the filters, so that no other object can
# reuse an identity.
_stacked: dict[tuple[Any, ...], tuple[Any, ...]] = {}
_STACKED_KEPT, _STACKED_BYTES = 64, 64 << 20
EVERY = RowFilter([])


def stack_tables(
    where: RowFilter | Sequence[RowFilter | None] | None, kind: str, device: torch.device, B: int
) -> tuple[int, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """Return the number of distinct filters; their table, their bitmaps, and (B,) int32, each query's filter."""
    if where is None:
        return 0, (None, None, None)
    if isinstance(where, RowFilter):
        of_query = torch.zeros(B, dtype=torch.int32, device=device) if kind == "bitmaps" else None
        return 1, (*_tensors(where, device), of_query)
    if torch.compiler.is_compiling():
        return _stack(where, device)[:2]
    key = (device, *map(id, where))
    found = _stacked.get(key)
    if found is None:
        size = sum(table.nbytes + bitmaps.nbytes for _, (table, bitmaps, _), _ in _stacked.values())
        if len(_stacked) >= _STACKED_KEPT or size > _STACKED_BYTES:
            _stacked.clear()
        found = _stacked[key] = _stack(where, device)
    return found[:2]


def _tensors(row_filter: RowFilter, device: torch.device) -> tuple[Tensor, Tensor]:
    """The filter's table and bitmaps on a device. A compiled graph caches no moved filter: create filters there."""
    if torch.compiler.is_compiling():
        return row_filter.table.to(device), row_filter.bitmaps.to(device)
    moved = row_filter.to(device)
    return moved.table, moved.bitmaps


def _stack(where: Sequence[RowFilter | None], device: torch.device) -> tuple[Any, ...]:
    """Stack distinct filters in query order, so that neighbouring queries' filters are adjacent."""
    distinct: list[RowFilter] = []
    which = []
    for f in where:
        f = EVERY if f is None else f
        at = next((n for n, other in enumerate(distinct) if other is f), len(distinct))
        if at == len(distinct):
            distinct.append(f)
        which.append(at)
    tables, bits = zip(*(_tensors(f, device) for f in distinct), strict=True)
    table, bitmaps = torch.cat(tables), torch.cat(bits)
    of_query = _copy_to(torch.tensor(which, dtype=torch.int32, device="cpu"), device)
    return len(distinct), (table, bitmaps, of_query), tuple(where)
