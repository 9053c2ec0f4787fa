"""Merge the results from several devices that each hold a shard of the items into the global k best rows.

Row r on device p is global row r · devices + p, so that the row order is the same per device and globally. A result is
sent as int64 columns with (B, k) numbers:

    key     the upper half is the score, as an order-preserving integer; the lower half is 2³¹ − 1 minus the row
    id      the row's item
    words   the requested attribute words of the row

Keys descend, so a key's global position is its own position plus, for each other device, the number of keys ahead.
Every device merges the same numbers, so the results are bitwise equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.kernels import Plan, cdiv, do_not_specialize, jit, launch, tl, use_triton
from tigon.retrieve.scan.select import order_key

BLOCK = 256
LAST = 0x7FFFFFFF

# Scores, rows, ids and words.
Merged = tuple[Tensor, Tensor, Tensor, Tensor]


def pack_answer(scores: Tensor, rows: Tensor, ids: Tensor, words: Tensor | None, device: int, devices: int) -> Tensor:
    """Pack a device's result for sending: (2 + W, B, k) int64.

    Args:
        scores: (B, k) fp32, descending.
        rows: (B, k) int64, on this device, -1 if missing.
        ids: (n,) int64, the device's row ids.
        words: (W, n) int64, or None.
    """
    W = 0 if words is None else words.shape[0]
    packed = rows.new_empty((2 + W, *rows.shape))
    if not use_triton(scores):
        bits = scores.view(torch.int32)
        ordered = (bits ^ ((bits >> 31) & LAST)).long()
        whole = torch.where(rows >= 0, rows * devices + device, -1)
        at = rows.clamp(min=0)
        packed[0] = (ordered << 32) | (LAST - whole)
        packed[1] = torch.where(rows >= 0, ids[at], -1)
        if words is not None:
            packed[2:] = words[:, at]
        return packed
    count, stride = rows.numel(), 0 if words is None else words.stride(0)

    def plan() -> Plan:
        return cdiv(count, BLOCK), (count, device, devices, stride, W, BLOCK), {"num_warps": 4}

    if count:
        tensors = scores, rows, ids, words, packed
        launch(_pack_kernel, (count, device, devices, stride, W, words is None), tensors, plan)
    return packed


def merge_answers(packed: Tensor) -> Merged:
    """(devices, 2 + W, B, k), packed per device → scores (B, k), global rows, ids, and words (W, B, k)."""
    devices, columns, B, k = packed.shape
    scores = packed.new_empty((B, k), dtype=torch.float32)
    rest = packed.new_empty((columns, B, k))  # rows, ids, words
    if not use_triton(scores):
        keys = packed[:, 0].permute(1, 0, 2).reshape(B, devices * k)
        # Rows differ, and so do keys, except those without a row, which are all equal.
        best, at = keys.topk(k, dim=1)
        ordered = (best >> 32).int()
        scores.copy_((ordered ^ ((ordered >> 31) & LAST)).view(torch.float32))
        rest[0] = LAST - (best & 0xFFFFFFFF)
        others = packed[:, 1:].permute(1, 2, 0, 3).reshape(columns - 1, B, devices * k)
        rest[1:] = others.gather(2, at.expand(columns - 1, B, k))
        return scores, rest[0], rest[1], rest[2:]

    def plan() -> Plan:
        blocks = cdiv(devices * k, BLOCK)
        return B * blocks, (B, k, devices, columns, blocks, k.bit_length(), BLOCK), {"num_warps": 4}

    if B:
        launch(_merge_kernel, (devices, columns, B, k), (packed, scores, rest), plan)
    return scores, rest[0], rest[1], rest[2:]


@jit
@do_not_specialize("count", "device", "devices", "stride", "W")
def _pack_kernel(
    score_ptr, row_ptr, id_ptr, word_ptr, out_ptr, count, device, devices, stride, W, BLOCK: tl.constexpr
):  # fmt: skip
    """BLOCK numbers per column of a result."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    row = tl.load(row_ptr + at, mask=there, other=-1)
    found = there & (row >= 0)
    key = order_key(tl.load(score_ptr + at, mask=there, other=float("-inf")))
    signed = (key ^ 0x80000000).to(tl.int32, bitcast=True).to(tl.int64)
    whole = tl.where(found, row * devices + device, -1)
    tl.store(out_ptr + at, (signed << 32) | (0x7FFFFFFF - whole), mask=there)
    tl.store(out_ptr + count + at, tl.load(id_ptr + row, mask=found, other=-1), mask=there)
    if word_ptr is not None:
        for w in range(W):
            word = tl.load(word_ptr + w * tl.cast(stride, tl.int64) + row, mask=found, other=0)
            tl.store(out_ptr + (2 + w) * tl.cast(count, tl.int64) + at, word, mask=there)


@jit
@do_not_specialize("B", "k", "devices", "columns", "blocks", "steps")
def _merge_kernel(packed_ptr, score_ptr, rest_ptr, B, k, devices, columns, blocks, steps, BLOCK: tl.constexpr):
    """BLOCK rows from a query's results: find each row's global position, and write those among the first k."""
    b = tl.program_id(0) // blocks
    m = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    device, own = m // k, m % k
    there = device < devices
    size = tl.cast(B, tl.int64) * k  # a column's size
    packed_ptr += tl.cast(b, tl.int64) * k
    key_ptr = packed_ptr + device * columns * size + own
    key = tl.load(key_ptr, mask=there, other=0)
    place = own
    for other in range(devices):
        # Binary search for the number of keys ahead on another device. Equal keys belong to no row: lower devices
        # first.
        low, high = tl.zeros([BLOCK], tl.int32), tl.full([BLOCK], k, tl.int32)
        for _ in range(steps):
            middle = (low + high) // 2
            more = low < high
            x = tl.load(packed_ptr + other * columns * size + middle, mask=there & more, other=0)
            ahead = (x > key) | ((x == key) & (other < device))
            low = tl.where(more & ahead, middle + 1, low)
            high = tl.where(more & (ahead == 0), middle, high)
        place += tl.where(device == other, 0, low)
    kept = there & (place < k)
    out = tl.cast(b, tl.int64) * k + place
    bits = (key >> 32).to(tl.int32).to(tl.uint32, bitcast=True) ^ 0x80000000
    score = tl.where(bits >= 0x80000000, bits ^ 0x80000000, bits ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)
    tl.store(score_ptr + out, score, mask=kept)
    tl.store(rest_ptr + out, 0x7FFFFFFF - (key & 0xFFFFFFFF), mask=kept)
    for column in range(1, columns):
        value = tl.load(key_ptr + column * size, mask=kept, other=0)
        tl.store(rest_ptr + column * size + out, value, mask=kept)
