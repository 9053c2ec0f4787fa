"""Launches for the gated delta rule: the table of chunks, tiles, library ops and autograd."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels import (
    Plan,
    SymInt,
    cdiv,
    differentiable,
    launch,
    launcher,
    next_power_of_2,
    shared_memory,
)
from tigon.kernels import device as facts
from tigon.ops.gated_delta_rule.chunks import _chunks_kernel, _matrices_kernel
from tigon.ops.gated_delta_rule.gradients import _keys_kernel, _queries_kernel
from tigon.ops.gated_delta_rule.states import _reverse_kernel, _states_kernel
from tigon.ops.offsets import share_table

# ------------------------------------------------------------------------------------------------------------ tiles


class Tile(NamedTuple):
    """values: columns of the state that a program owns, or takes at a time. stages: loop rounds in flight."""

    values: int
    warps: int
    stages: int


# By the wider of K and V, for 16-bit dtypes; those for 128 are an H200's fastest. A walk has a program per `values`
# columns, and a step's latency counts, not its arithmetic. Never fewer than two stages in a walk with fewer than 64
# values: there Triton 3.6 reads outside of shared memory on sm_90. At 256 the gradients spill some registers.
TILES = {
    "matrices": {64: Tile(0, 4, 1), 128: Tile(0, 4, 1), 256: Tile(0, 8, 1)},
    "states": {64: Tile(32, 4, 2), 128: Tile(32, 4, 2), 256: Tile(16, 4, 2)},
    "reverse": {64: Tile(32, 4, 2), 128: Tile(32, 4, 2), 256: Tile(16, 4, 2)},
    "queries": {64: Tile(32, 8, 2), 128: Tile(64, 8, 3), 256: Tile(32, 8, 2)},
    "keys": {64: Tile(32, 8, 2), 128: Tile(64, 8, 3), 256: Tile(32, 8, 2)},
}
WALKS = "states", "reverse"
WIDE = 132  # processors of an H200
# For fp32: three tensor-core products per product and twice the registers; from 128 on some spill.
TILES_FP32 = {
    "matrices": {64: Tile(0, 4, 1), 128: Tile(0, 4, 1), 256: Tile(0, 8, 1)},
    "states": {64: Tile(16, 4, 1), 128: Tile(16, 4, 1), 256: Tile(16, 8, 1)},
    "reverse": {64: Tile(16, 4, 1), 128: Tile(16, 4, 1), 256: Tile(16, 8, 1)},
    "queries": {64: Tile(16, 4, 1), 128: Tile(16, 8, 1), 256: Tile(16, 8, 1)},
    "keys": {64: Tile(16, 4, 1), 128: Tile(16, 4, 1), 256: Tile(16, 8, 1)},
}


def choose_chunk(q: Tensor, v: Tensor) -> int:
    """Return the tokens in a chunk, as many as a program's registers hold."""
    if q.dtype == torch.float32:
        return 16
    return 64 if max(q.shape[-1], v.shape[-1]) <= 128 else 32


def choose_tile(kind: str, q: Tensor, v: Tensor) -> tuple[dict[str, int], dict[str, int]]:
    """Return a kernel's blocks, and Triton's options."""
    widest = max(q.shape[-1], v.shape[-1])
    width = 64 if widest <= 64 else 128 if widest <= 128 else 256
    values, warps, stages = (TILES_FP32 if q.dtype == torch.float32 else TILES)[kind][width]
    chunk, block = choose_chunk(q, v), max(16, next_power_of_2(q.shape[-1]))
    if kind in WALKS and width == 128 and stages > 1 and v.shape[-2] * cdiv(v.shape[-1], values) <= WIDE:
        stages += 1  # a sequence's walks have a processor each. By the heads alone: no bit depends on other documents
    # What a round of a walk loads must fit in shared memory once per stage, beside the state's operand.
    loaded = (2 * chunk * (block + chunk) + chunk * values) * q.element_size()
    while stages > 1 and (stages + 0.5) * loaded > shared_memory(q.device):
        stages -= 1
    blocks = {"CHUNK": chunk, "BLOCK_K": block}
    if values:
        # The gradients take V in two steps at least: in a single one, all loads at once, registers spill.
        whole = next_power_of_2(v.shape[-1]) // (2 if kind in ("queries", "keys") else 1)
        blocks["BLOCK_V"] = min(values, max(16, whole))
    return blocks, {"num_warps": warps, "num_stages": stages}


def _precision(q: Tensor) -> tuple[str, str]:
    """Return the input precision of products, and of the inverse, whose operands are fp32.

    For fp32 three TF32 products (relative error 2⁻²² each), or AMD's native fp32. The inverse has them for 16-bit
    dtypes, too: where keys are alike, it is the small difference of large numbers.
    """
    if not facts.limits_registers(q.device):
        return "ieee", "ieee"
    return "tf32x3" if q.dtype == torch.float32 else "ieee", "tf32x3"


# --------------------------------------------------------------------------------------------------------- launches

ENTRIES = 64


def _delta_chunks_fake(offsets: Tensor, tokens: SymInt, chunk: int) -> Tensor:
    # A row for each document; a slot for each full chunk, and for each document's last.
    documents = offsets.shape[0] - 1
    return offsets.new_empty((2 * documents + tokens // chunk, 4), dtype=torch.int32)


@launcher(_delta_chunks_fake)
def _delta_chunks(offsets: Tensor, tokens: SymInt, chunk: int) -> Tensor:
    offsets = offsets.contiguous()
    table, documents = _delta_chunks_fake(offsets, tokens, chunk), offsets.shape[0] - 1

    def plan() -> Plan:
        return documents, (documents, tokens, chunk, ENTRIES), {"num_warps": 2}

    launch(_chunks_kernel, (documents, tokens, chunk, offsets.dtype), (offsets, table), plan)
    return table


def make_table(offsets: Tensor | None, q: Tensor, v: Tensor) -> tuple[Tensor | None, int]:
    """Return the table of chunks, None for sequences, and the number of documents or sequences."""
    if offsets is None:
        return None, q.shape[0]
    tokens, chunk = q.shape[1], choose_chunk(q, v)
    table = share_table(offsets, ("delta", tokens, chunk), lambda: _delta_chunks(offsets, tokens, chunk))
    return table, offsets.shape[0] - 1


def gated_delta_rule_launch(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None, offsets: Tensor | None,
    scale: float, normalize: bool, return_state: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the kernels. The state is empty unless return_state."""
    table, documents = make_table(offsets, q, v)
    o, state = _gated_delta_rule(q, k, v, g, beta, initial, table, documents, scale, normalize, return_state)
    return o, state


def _key(*tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(None if t is None else (t.dtype, t.shape, t.stride()) for t in tensors)


def flatten_tokens(*tensors: Tensor | None) -> list[Any]:
    """View (B, T, heads, D) as (B · T, heads, D) with unit stride in D, and copy where strides do not allow a view."""
    flat = [None if t is None else t.flatten(0, 1) for t in tensors]
    return [t if t is None or t.dim() < 3 or t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in flat]


class Call(NamedTuple):
    """A call's tensors as rows of tokens, and what all its launches share.

    corrects: whether values are corrected; a scan's are not. skip (H,): how much of v its outputs also have. split:
    programs of the gradients for each key head, whose sums are separate.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    table: Tensor | None
    documents: int
    length: int  # tokens per sequence, without a table
    scale: float
    normalize: bool
    corrects: bool = True
    skip: Tensor | None = None
    split: int = 1

    @property
    def heads(self) -> tuple[int, int]:
        return self.v.shape[1], self.v.shape[1] // self.q.shape[1]

    @property
    def slots(self) -> int:
        chunk = choose_chunk(self.q, self.v)
        if self.table is None:
            return self.documents * cdiv(self.length, chunk)
        return self.table.shape[0] - self.documents

    def new_square(self) -> Tensor:
        chunk = choose_chunk(self.q, self.v)
        return self.q.new_empty((self.slots, self.v.shape[1], chunk, chunk))

    def new_states(self) -> Tensor:
        return self.q.new_empty((self.slots, self.v.shape[1], self.q.shape[2], self.v.shape[2]))


def launch_matrices(call: Call, solve: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return P and the rows' factors, and write W to solve where given: see chunks.py."""
    q, k, v, g, beta = call[:5]
    (H, N), tokens = call.heads, q.shape[0]
    attend = call.new_square()
    factors = q.new_empty((6 if call.normalize else 4, H, tokens), dtype=torch.float32)

    def plan() -> Plan:
        blocks, options = choose_tile("matrices", q, v)
        arguments = (
            call.documents, call.length, tokens, *q.stride()[:2], *k.stride()[:2], *g.stride(), *beta.stride(),
            call.scale, H, N, q.shape[2], call.normalize, *blocks.values(), *_precision(q),
        )  # fmt: skip
        return call.slots * H, arguments, options

    if call.slots and tokens:
        shared = (call.scale, call.normalize, solve is None, call.documents, call.length)
        key = (*shared, _key(q, k, v, g, beta, call.table))
        launch(_matrices_kernel, key, (q, k, g, beta, call.table, solve, attend, factors), plan)
    return attend, factors


def launch_walk(kind: str, call: Call, tensors: tuple[Any, ...], rows: Tensor | None) -> None:
    """Launch a walk through all documents, a kind of tile. rows: v or do, the kernel's third tensor."""
    q, k, v = call[:3]
    (H, N), (K, V) = call.heads, (q.shape[2], v.shape[2])

    def plan() -> Plan:
        blocks, options = choose_tile(kind, q, v)
        arguments = (
            call.documents, call.length, q.shape[0], *q.stride()[:2], *k.stride()[:2],
            *((0, 0) if rows is None else rows.stride()[:2]), H, N, K, V, *blocks.values(), _precision(q)[0],
        )  # fmt: skip
        return call.documents * H * cdiv(V, blocks["BLOCK_V"]), arguments, options

    if call.documents:
        key = (call.documents, call.length, _key(q, k, v, rows), tuple(None if t is None else t.dtype for t in tensors))
        launch(_states_kernel if kind == "states" else _reverse_kernel, key, tensors, plan)


_OPTIONS = "SymInt documents, float scale, bool normalize"


def _gated_delta_rule_fwd_fake(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    table, documents, return_state = others[3], others[4], others[-1]
    (B, T, H, V), K, chunk = v.shape, q.shape[3], choose_chunk(q, v)
    slots = B * cdiv(T, chunk) if table is None else table.shape[0] - documents
    state = v.new_empty((documents, H, K, V) if return_state else (0,), dtype=torch.float32)
    return v.new_empty(v.shape), state, q.new_empty((slots, H, chunk, chunk))


@launcher(_gated_delta_rule_fwd_fake, rest="Tensor? initial, Tensor? table, " + _OPTIONS + ", bool return_state")
def _gated_delta_rule_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The third result is W, kept for the backward pass: the inverses take as long as all else that is made again."""
    initial, table, documents, scale, normalize, return_state = others
    o, final, solve = _gated_delta_rule_fwd_fake(q, k, v, g, beta, *others)
    length = q.shape[1]
    q, k, v, g, beta = flatten_tokens(q, k, v, g, beta)
    call = Call(q, k, v, g, beta, table, documents, length, scale, normalize)
    matrices = launch_matrices(call, solve)
    initial = None if initial is None else initial.contiguous()
    results = o, None, None, final if return_state else None
    launch_walk("states", call, (q, k, v, solve, *matrices, None, table, initial, *results), v)
    return o, final, solve


def _gated_delta_rule_bwd_fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None, table: Tensor | None,
    solve: Tensor, do: Tensor | None, dfinal: Tensor | None, wants: list[bool], *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    given = (q, k, v, g, beta, q if initial is None else initial)
    return tuple(t.new_empty(t.shape if wanted else (0,)) for t, wanted in zip(given, wants, strict=True))


@launcher(_gated_delta_rule_bwd_fake, rest=_OPTIONS, results=6)
def _gated_delta_rule_bwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None, table: Tensor | None,
    solve: Tensor, do: Tensor | None, dfinal: Tensor | None, wants: list[bool], *others: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """wants: for dq, dk, dv, dg, dbeta and dinitial; unwanted gradients are empty."""
    results = _gated_delta_rule_bwd_fake(q, k, v, g, beta, initial, table, solve, do, dfinal, wants)
    dq, dk, dv, dg, dbeta, dinitial = (t if wanted else None for t, wanted in zip(results, wants, strict=True))
    length = q.shape[1]
    q, k, v, g, beta, do = flatten_tokens(q, k, v, g, beta, do)
    documents, scale, normalize = others
    call = Call(q, k, v, g, beta, table, documents, length, scale, normalize)
    attend, factors = launch_matrices(call)
    matrices = solve, attend, factors
    initial, dfinal = (None if t is None else t.contiguous() for t in (initial, dfinal))
    # The gradients of q, k, g and beta need x, dx and the states at all chunks, which are not kept from the forward
    # pass: in 16 bits 2 · V · (2 · K / CHUNK + 1) bytes a token and head, at K = V = 128 five times v's.
    deep = dq is not None or dk is not None or dg is not None or dbeta is not None
    x = states = dstates = None
    if deep:
        x, states, dstates = v.new_empty(v.shape), call.new_states(), call.new_states()
        own = None, x, states, None
        launch_walk("states", call, (q, k, v, *matrices, None, table, initial, *own), v)
    dx = v.new_empty(v.shape) if dv is None else dv
    launch_walk(
        "reverse", call, (q, k, do, *matrices, None, table, dfinal, dx, dstates, dinitial), do
    )  # fmt: skip
    if deep:
        scratch = [attend, call.new_square()]  # the walks are over: P becomes scratch
        launch_gradients(call, (do, x, dx, factors, states, dstates), scratch, (None, dq, dk, dg, dbeta))
    return results


def launch_gradients(call: Call, given: tuple[Any, ...], scratch: list[Any], results: tuple[Any, ...]) -> None:
    """given: do, x, dv, factors, states, dstates. scratch: two matrices. results: do · x by rows, dq, dk, dg, dbeta."""
    q, k, v, _, beta, table = call[:6]
    do, x, dx, factors, states, dstates = given
    dskip, dq, *others = results
    H, G = v.shape[1], q.shape[1] * call.split
    sums = factors.new_empty((2 if call.corrects else 3, H, q.shape[0]))
    tensors = (q, k, beta, do, x, dx, factors, table, states, *scratch, sums)

    def plan(kind: str) -> Plan:
        blocks, options = choose_tile(kind, q, v)
        upstream = (0, 0) if do is None else do.stride()[:2]
        arguments = (
            call.documents, call.length, q.shape[0], *q.stride()[:2], *k.stride()[:2], *beta.stride(),
            *((*upstream, call.scale) if kind == "queries" else ()), G, H // G, q.shape[2], v.shape[2],
            call.split, call.normalize, *blocks.values(), _precision(q)[0],
        )  # fmt: skip
        return call.slots * G, arguments, options

    if call.slots and q.shape[0]:
        dtypes = tuple(None if t is None else t.dtype for t in results)
        shared = (call.scale, call.corrects, call.normalize, call.split)
        key = (shared, call.documents, call.length, _key(q, k, v, beta, do, table), dtypes)
        launch(_queries_kernel, key, (*tensors, dskip, dq), lambda: plan("queries"))
        if any(t is not None for t in others):
            launch(_keys_kernel, key, (*tensors, dstates, *others), lambda: plan("keys"))


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, documents, scale, normalize, ctx.return_state = inputs
    ctx.options = documents, scale, normalize
    ctx.save_for_backward(*tensors, output[2])


def _backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None, *_: Any) -> tuple[Any, ...]:
    wants = list(ctx.needs_input_grad[:6])
    dfinal = dfinal if ctx.return_state else None
    gradients = _gated_delta_rule_bwd(*ctx.saved_tensors, do, dfinal, wants, *ctx.options)
    return tuple(t if wanted else None for t, wanted in zip(gradients, wants, strict=True))


_gated_delta_rule = differentiable(_gated_delta_rule_fwd, _setup_context, _backward, outputs=2)
