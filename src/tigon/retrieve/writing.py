"""What is asked of items before any of them is written, and the writing itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tigon.data.values import Ints, Value
from tigon.retrieve import coded
from tigon.retrieve.ids import KINDS, last_of_each, read_ids
from tigon.retrieve.memory import spoken_bytes
from tigon.retrieve.schema import named_rows
from tigon.retrieve.updates import spare_rows, words_of

if TYPE_CHECKING:
    from tigon.retrieve.index import Index


# Bytes of vectors that are pinned at once.
PIECE = 1 << 26
# Ids that are looked up in one step, of strings.
STRINGS = 64


class Prepared(NamedTuple):
    """Items that fit an index: ids of which each stands there once, vectors as they are stored, attribute words.

    found: keys and rows of the ids, where they were looked up already.
    """

    ids: Ints | list[str]
    vectors: Tensor | None
    words: Ints
    growth: dict[str, list[Value]]
    found: tuple[Ints, Ints] | None = None


def prepared(index: Index, ids: Any, embeddings: Any, table: Any) -> Prepared:
    """Items as they will be written.

    Raises: ValueError, with the first id that it is about, for all that does not fit the index.
    """
    name = "Index.upsert"
    read = checked_ids(index, name, ids)
    row_name = named_rows(read)
    encoded = index.schema.encode(table if index.schema.words else None, row_name, len(read))
    if table is not None and not index.schema.words:
        index.schema.encode(table, row_name, len(read))  # raises for the first of its columns
    kept = last_of_each(read)
    vectors = None
    index.turns.give_way()
    if index.fixed:
        if embeddings is not None:
            raise ValueError(
                f"{name}: embeddings must be None for an index over a parameter, which holds them: write to that."
            )
    else:
        vectors = _vectors(index, embeddings, read)
        index.turns.give_way()
    words = encoded.words
    if len(kept) < len(read):
        words = np.ascontiguousarray(words[:, kept])
        vectors = None if vectors is None else vectors[torch.from_numpy(kept).to(vectors.device)]
        read = [read[i] for i in kept] if isinstance(read, list) else read[kept]
    found = None if index.ids is None else _found(index, read)
    check_room(index, read, np.full(len(read), -1) if found is None else found[1])
    index.turns.give_way()
    return Prepared(read, vectors, words, encoded.growth, found)


def _found(index: Index, ids: Ints | list[str]) -> tuple[Ints, Ints]:
    """Keys and rows of ids; strings, which are compared one by one, a few in a step."""
    assert index.ids is not None
    if not isinstance(ids, list) or len(ids) <= STRINGS:
        return index.ids.find(ids)
    parts = []
    for start in range(0, len(ids), STRINGS):
        parts.append(index.ids.find(ids[start : start + STRINGS]))
        index.turns.give_way()
    return np.concatenate([keys for keys, _ in parts]), np.concatenate([rows for _, rows in parts])


def checked_ids(index: Index, name: str, ids: Any) -> Ints | list[str]:
    """Ids of the kind that the index has; of any kind while it has none."""
    read = read_ids(name, ids)
    kind = "str" if isinstance(read, list) else "int64"
    if len(read) and index.ids is not None and index.ids.kind != kind:
        raise ValueError(f"{name}: ids must be {index.ids.kind}, as those in the index are, got {kind}.")
    return read


def known(index: Index, name: str, ids: Any) -> tuple[Ints | list[str], Ints, Ints]:
    """Ids without those that stand there twice, and keys and rows of those that are in the index.

    Raises: ValueError if they are of another kind than the index's.
    """
    read = checked_ids(index, name, ids)
    if index.ids is None or not len(read):
        return read, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    read = list(dict.fromkeys(read)) if isinstance(read, list) else np.unique(read)
    keys, rows = index.ids.find(read)
    there = rows >= 0
    there[there] = index.rows.there()[rows[there]] if index.fixed else True
    return read, keys[there], rows[there]


def _vectors(index: Index, embeddings: Any, ids: Ints | list[str]) -> Tensor:
    name = "Index.upsert"
    if not isinstance(embeddings, Tensor):
        try:
            embeddings = torch.as_tensor(np.require(embeddings, requirements="W"))  # torch warns of others
        except (TypeError, ValueError):
            raise ValueError(
                f"{name}: embeddings must be a tensor or an array of numbers, got {type(embeddings).__name__}."
            ) from None
    given: Tensor = embeddings.detach()
    if given.dim() != 2 or given.shape[1] != index.dim:
        of = f", id {_id(ids, 0)} first" if len(ids) else ""
        raise ValueError(
            f"{name}: embeddings must be (items, {index.dim}), the index's dim, got {tuple(given.shape)}{of}."
        )
    if given.shape[0] != len(ids):
        raise ValueError(
            f"{name}: embeddings must have a row for each of the {len(ids):,} ids, got {given.shape[0]:,}."
        )
    if given.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64, index.dtype):
        raise ValueError(f"{name}: embeddings must be floats, got {given.dtype}.")
    if index.metric == "cosine":
        wide = given.float()
        lengths = wide.norm(dim=1, keepdim=True)
        _first_wrong(lengths[:, 0] == 0, ids, f"{name}: embeddings must have a length above 0 for cosine, got 0 for id")
        given = torch.where(lengths.isfinite(), wide / lengths, wide)
    stored = given.to(index.dtype)
    narrow = stored.element_size() == 1  # torch may write infinity, and what is too large, as the largest number
    if narrow or not _all_finite(stored):
        _first_wrong(~_finite(given), ids, f"{name}: embeddings must be finite, got NaN or infinity for id")
        large = (given.float().abs() >= BEYOND_FLOAT8).any(1) if narrow else ~_finite(stored)
        _first_wrong(large, ids, f"{name}: embeddings must fit {_spoken(index.dtype)}, got larger numbers for id")
    return stored.clone() if stored.data_ptr() == embeddings.data_ptr() else stored


# Half a step above the largest float8_e4m3fn, 448.
BEYOND_FLOAT8 = 464.0
# Bits of a number that are all set in infinity and NaN alone, and the integers that have as many.
EXPONENTS = {
    torch.float16: (np.uint16, 0x7C00), torch.bfloat16: (np.uint16, 0x7F80), torch.float32: (np.uint32, 0x7F800000),
}  # fmt: skip


def _all_finite(vectors: Tensor) -> bool:
    if vectors.device.type != "cpu" or vectors.dtype not in EXPONENTS or not vectors.is_contiguous():
        return bool(_finite(vectors).all())
    kind, exponent = EXPONENTS[vectors.dtype]  # on a CPU six times as fast as `isfinite`
    bits = vectors.view(torch.int16 if kind is np.uint16 else torch.int32).numpy().view(kind)
    return not ((bits & kind(exponent)) == exponent).any()


def _finite(vectors: Tensor) -> Tensor:
    wide = vectors.float() if vectors.element_size() == 1 else vectors
    return wide.isfinite().all(1)


def distance_bias(vectors: Tensor) -> Tensor:
    """−|x|² of each vector, what "l2" adds to 2 q · x; by pieces, so that no copy of all in fp32 is made."""
    return torch.cat([-piece.float().square().sum(1) for piece in vectors.split(1 << 20)])


def _first_wrong(wrong: Tensor, ids: Ints | list[str], said: str) -> None:
    if bool(wrong.any()):
        raise ValueError(f"{said} {_id(ids, int(wrong.nonzero()[0, 0]))}.")


def _id(ids: Ints | list[str], at: int) -> str:
    return repr(ids[at]) if isinstance(ids, list) else str(ids[at])


def _spoken(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_room(index: Index, ids: Ints | list[str], rows: Ints) -> None:
    new = int((rows < 0).sum())
    if index.fixed and new:
        at = _id(ids, int(np.argmax(rows < 0)))
        raise ValueError(f"Index.upsert: ids must be rows of the parameter that the index is over, got {at}.")
    if index.rows.count + new > index.capacity and not index.fixed:
        needed = index.rows.count + new
        size = spoken_bytes(index.plan(needed).device_bytes)
        raise ValueError(
            f"Index.upsert: {new:,} new items do not fit: the index holds {index.rows.count:,} of {index.capacity:,}. "
            f"index.grow({needed}) makes room, and takes {size} on the device."
        )


# ------------------------------------------------------------------------------------------------------------ writing


# Where items go: rows, keys, vectors, attribute words, and the rows that they replace.
Place = Callable[[Ints, Ints, Tensor, Ints, Ints], None]


def write(index: Index, items: Prepared, place_items: Place | None = None) -> None:
    """Write items that were prepared: rows that no search looks at, then the live bits between two searches.

    place_items: writes rows that were chosen; None: `place`.
    """
    if not len(items.ids):
        return
    index.schema.take(items.growth)
    if index.ids is None:
        index.ids = KINDS["str" if isinstance(items.ids, list) else "int64"]()
    index.counts.settle()
    keys, old = items.found if items.found is not None else index.ids.find(items.ids)
    if isinstance(items.ids, list):
        new = np.flatnonzero(keys < 0)
        keys[new] = index.ids.keys([items.ids[i] for i in new])
    if not index.fixed and len(keys) <= index.rows.available():
        assert items.vectors is not None
        _write(index, keys, old, items.vectors, items.words, place_items)
        return
    start = 0
    # All become visible at once, as far as there are rows that no search looks at.
    while start < len(keys):
        part = slice(start, start + (len(keys) if index.fixed else max(1, index.rows.available())))
        start = part.stop
        if index.fixed:
            _rewrite(index, old[part], items.words[:, part])
        else:
            assert items.vectors is not None
            _write(index, keys[part], old[part], items.vectors[part], items.words[:, part], place_items)


def reserve(index: Index, items: Prepared) -> None:
    """Take the memory that writing needs on a GPU, and give it back: if there is none, nothing is written yet.

    Raises: torch.OutOfMemoryError, with a sentence.
    """
    if index.device.type != "cuda":
        return
    # Copies in fp32: for biases, and for codes with their ratios, rounded numbers and errors.
    copies = (8 if index.bias is not None else 0) + (24 if index.codes is not None else 0)
    vector = index.dim * (index.embeddings.element_size() + copies)
    rows = min(len(items.ids), max(1, PIECE // max(1, vector)))
    needed = rows * (vector + 8 * (2 * index.schema.words + 3))
    try:
        with index.turns.write(index.device, given=False):
            torch.empty(needed, dtype=torch.uint8, device=index.device)
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(
            f"Index.upsert: the device's memory does not suffice for {spoken_bytes(needed)} of new items on their way; "
            "nothing is written."
        ) from error


def _write(index: Index, keys: Ints, old: Ints, vectors: Tensor, words: Ints, place_items: Place | None) -> None:
    rows = index.rows.allocate(len(keys))
    replaced = old[old >= 0]
    if place_items is None:
        place(index, rows, keys, vectors, words, replaced)
    else:
        place_items(rows, keys, vectors, words, replaced)
    assert index.ids is not None
    index.ids.place(keys, rows)


def place(index: Index, rows: Ints, keys: Ints, vectors: Tensor, words: Ints, replaced: Ints) -> None:
    """Write items to rows that no search looks at; then searches see these, and those that they replace no more."""
    most = max(1, PIECE // max(1, index.dim * index.embeddings.element_size()))
    if len(keys) <= most:
        _put_rows(index, rows, keys, vectors, words, replaced)
    else:
        for start in range(0, len(keys), most):
            part = slice(start, start + most)
            forgotten = replaced if start == 0 else replaced[:0]
            _put_rows(index, rows[part], keys[part], vectors[part], words[:, part], forgotten)
    index.counts.add(words)
    index.turns.give_way()
    show(index, rows, replaced)


def _put_rows(index: Index, rows: Ints, keys: Ints, vectors: Tensor, words: Ints, forgotten: Ints) -> None:
    """All of some items, in rows that no search looks at; and rows that hold items are taken out of the counts."""
    device = index.device
    with index.turns.write(device):
        if vectors.device.type == "cuda" == device.type:
            vectors.record_stream(torch.cuda.current_stream(device))
        alone = is_run(rows)
        to_rows, item_ids, attributes, renewed, from_rows, vectors = sent_together(
            [rows[:0] if alone else rows, keys, words, words_of(rows), forgotten], device, vectors
        )
        at: Any = slice(int(rows[0]), int(rows[-1]) + 1) if alone else to_rows
        index.turns.give_way()
        put(index.embeddings, at, vectors)
        put(index.item_ids, at, item_ids)
        if index.bias is not None:
            index.bias[at] = distance_bias(vectors)
        coded.write(index, at, vectors)
        index.turns.give_way()
        with index.kept.writing:
            if index.schema.words:
                index.attributes[:, at] = attributes
            index.kept.renew(index, renewed)
        index.turns.give_way()
        _forget(index, from_rows)
    index.turns.give_way()


def _rewrite(index: Index, rows: Ints, words: Ints) -> None:
    """Attributes of rows that stay where they are, between two searches."""
    there = index.rows.there()[rows]
    with index.turns.write(index.device):
        _forget(index, sent(rows[there], index.device))
    index.counts.add(words)
    with index.kept.writing, index.turns.switch(index.device):
        index.attributes[:, at_rows(rows, index.device)] = sent(words, index.device)
        index.kept.renew(index, sent(words_of(rows), index.device))
    show(index, rows[~there], rows[:0])


def show(index: Index, shown: Ints, hidden: Ints) -> None:
    """Let searches see rows, and see others no more."""
    places, bits = index.rows.mark(shown, hidden)
    if len(bits) % 2:
        bits = np.append(bits, np.int32(0))
    with index.turns.write(index.device, given=False):
        alone = is_run(places)
        to_places, marks = sent_together([places[:0] if alone else places, bits.view(np.int64)], index.device)
        at: Any = slice(int(places[0]), int(places[-1]) + 1) if alone else to_places
        marks = marks.view(torch.int32)[: len(places)]
    with index.turns.switch(index.device):
        index.rows.show(shown, hidden)
        index.live[at] = marks


def remove(index: Index, rows: Ints) -> None:
    """Hide rows from searches."""
    with index.turns.write(index.device):
        _forget(index, sent(rows, index.device))
    show(index, rows[:0], rows)


def _forget(index: Index, rows: Tensor) -> None:
    """Take rows that hold items out of the counts; on a GPU when the copy of their attributes has arrived."""
    if not index.schema.words or not len(rows):
        index.counts.items -= len(rows)
        return
    words = index.attributes.index_select(1, rows)
    if words.device.type != "cuda":
        index.counts.add(words.numpy(), sign=-1)
        return
    here = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
    here.copy_(words, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    index.counts.later(here, event)


def is_run(rows: Ints) -> bool:
    """Whether rows lie one behind the other."""
    return bool(len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (rows[1:] - rows[:-1] == 1).all())


def at_rows(rows: Ints, device: torch.device) -> Any:
    """Rows as an index: a slice where they lie one behind the other."""
    return slice(int(rows[0]), int(rows[-1]) + 1) if is_run(rows) else sent(rows, device)


def sent_together(numbers: Sequence[Ints], device: torch.device, vectors: Tensor | None = None) -> list[Tensor]:
    """Arrays of int64, and vectors, on the device. To a GPU all go in one copy, from memory that is pinned once."""
    if device.type != "cuda":
        parts = [torch.from_numpy(np.ascontiguousarray(array)) for array in numbers]
        return parts if vectors is None else [*parts, vectors.to(device)]
    # Each begins at a multiple of 16 bytes, as kernels are compiled for.
    sizes = [array.size + array.size % 2 for array in numbers]
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    count = starts[-1]
    beside = vectors is not None and vectors.device.type == "cpu"
    length = vectors.numel() * vectors.element_size() if beside and vectors is not None else 0
    here = torch.empty(8 * count + length, dtype=torch.uint8, pin_memory=True)
    ints = here[: 8 * count].view(torch.int64).numpy()
    for array, start in zip(numbers, starts, strict=False):
        ints[start : start + array.size] = array.reshape(-1)
    if beside and vectors is not None:
        here[8 * count :].view(vectors.dtype).view(vectors.shape).copy_(vectors)
    there = here.to(device, non_blocking=True)
    sent_ints = there[: 8 * count].view(torch.int64)
    pairs = zip(numbers, starts, strict=False)
    parts = [sent_ints[start : start + array.size].view(array.shape) for array, start in pairs]
    if vectors is None:
        return parts
    return [*parts, there[8 * count :].view(vectors.dtype).view(vectors.shape) if beside else vectors.to(device)]


def sent(values: Any, device: torch.device) -> Tensor:
    """A numpy array on the device."""
    return moved(torch.from_numpy(np.ascontiguousarray(values)), device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device. A copy from memory that is not pinned would wait for all that the stream has to do."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def put(buffer: Tensor, at: Any, vectors: Tensor) -> None:
    """buffer[at] = vectors, of any dtype."""
    if buffer.element_size() == 1:  # torch indexes no float8
        buffer, vectors = buffer.view(torch.uint8), vectors.contiguous().view(torch.uint8)
    buffer[at] = vectors


# --------------------------------------------------------------------------------------------------------------- grow


def grow(index: Index, capacity: int, rows: int | None = None) -> None:
    """Copy the buffers to larger ones, all of which are there before an old one is given up.

    rows: that there will be; None: capacity, and some to spare.
    """
    rows = capacity + spare_rows(capacity) if rows is None else rows
    total = max(rows, index.rows.total)  # more are left of one that the journal refused
    if index.device.type == "cuda":
        torch.cuda.synchronize(index.device)  # searches that have begun read the old buffers
    with index.turns.lock:
        try:
            grown = {name: new for name in BUFFERS if (new := _grown(index, name, total)) is not None}
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"Index.grow: {capacity:,} items take {spoken_bytes(index.plan(capacity).device_bytes)} on the device, "
                "beside the buffers that there are, which is more than is free; the index is as it was: save it and "
                "load it where there is room."
            ) from error
        if index.device.type == "cuda":
            torch.cuda.synchronize(index.device)  # and those to come may run on any stream
        for name, new in grown.items():
            setattr(index, name, new)
        index.kept.clear()
        index.rows.extend(total)
        index.capacity = capacity


BUFFERS = ("embeddings", "attributes", "live", "item_ids", "bias", *coded.BUFFERS)


def _grown(index: Index, name: str, total: int) -> Tensor | None:
    old: Tensor | None = getattr(index, name)
    if old is None:
        return None
    size = (total + 31) // 32 if name == "live" else total
    columns = name == "attributes"
    new = old.new_zeros((old.shape[0], size) if columns else (size, *old.shape[1:]))
    (new[:, : old.shape[1]] if columns else new[: old.shape[0]]).copy_(old)
    return new
