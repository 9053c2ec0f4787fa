"""A training step on many rows: its floor of products and bytes, LiRank, and FuxiCTR's DCN-V2, in one run.

The floor is what the step's products take alone, measured one by one in bf16 by torch, and what the other parts have to
move at the bandwidth of a copy, measured too; `moved` counts those bytes. Nothing overlaps in it. A product is measured
with its widths as they are and with the next multiples of 8, and the shorter time counts.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from studies.clicks.data import LABEL, TRAIN, Clicks, Rows
from studies.clicks.methods import columns, fuxictr_model
from tigon import rank
from tigon.kernels import cdiv
from tigon.rank.training.optimizers import parameter_groups
from tigon.training import RowAdagrad


class Sizes(NamedTuple):
    """Of a step. codes: of each field. rank: None for full matrices. attention: of the cross layers, which have a rank
    then. gated: whether hidden layers have gates and batch norm."""

    rows: int = 65_536
    fields: int = 40
    width: int = 16
    codes: int = 25_000
    rank: int | None = 64
    layers: int = 3
    mlp: tuple[int, ...] = (3500, 3500)
    attention: bool = True
    gated: bool = False

    @property
    def wide(self) -> int:
        return self.fields * self.width


BATCHES = 8
TINY = Sizes(16, 3, 4, 10, 4, 3, (8, 8))


def products(sizes: Sizes) -> list[tuple[int, int]]:
    """(inputs, outputs) of each linear layer."""
    r, wide = sizes.rank, sizes.wide
    cross = [(wide, wide)] if r is None else [(wide, (3 if sizes.attention else 1) * r), (r, wide)]
    gates = [(width, width) for width in sizes.mlp] if sizes.gated else []
    mlp = itertools.pairwise((wide, *sizes.mlp))
    return [*cross * sizes.layers, *mlp, *gates, (wide + sizes.mlp[-1], 1)]


def flops(sizes: Sizes) -> int:
    """Forward, and two products in the backward pass."""
    return 6 * sizes.rows * sum(a * b for a, b in products(sizes))


def move_to_device(sizes: Sizes) -> dict[str, int]:
    """Bytes beside the products: each part reads its operands once, and writes its results once. bf16 activations,
    fp32 weights, int64 codes; row-wise Adagrad reads and writes the rows that occur, AdamW all other weights."""
    B, d, r, layers = sizes.rows, sizes.wide, sizes.rank if sizes.attention else 0, sizes.layers
    assert r is not None
    weights = sum(a * b + b for a, b in products(sizes))
    codes = 2 * 8 * B * sizes.fields
    # Drawn evenly: of each field's codes so many occur.
    touched = sizes.fields * sizes.codes * (1 - (1 - 1 / sizes.codes) ** B)
    return {
        "codes": codes,
        # Rows in fp32 to x₀ in bf16; the gradient of x₀; weights and accumulators, read and written.
        "embeddings": B * d * (4 + 2) + B * d * 2 + round(touched * (sizes.width + 1) * 4 * 2),
        # q, k, v → h; and q, k, v, h, dh → dq, dk, dv.
        "attention": layers * 2 * B * ((3 + 1) * r + (3 + 1 + 1 + 3) * r),
        # x₀, u, x → x; and dx, x₀, u → du, with dx₀ read and added to.
        "cross": layers * 2 * B * (4 * d + (3 + 1 + 2) * d),
        # relu, and its backward from the output; behind a batch norm, whose statistics need its input first, and before
        # a gate.
        "relu": 2 * B * sum(sizes.mlp) * ((3 + 5) + (3 + 5) if sizes.gated else 2 + 3),
        # To bf16; and weight, gradient and two moments read, three written.
        "weights": weights * (4 + 2) + weights * 4 * 7,
    }


def time_call(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median milliseconds, behind warm-ups."""
    for _ in range(min(3, repeats)):
        run()
    found = []
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def floor(sizes: Sizes, device: torch.device, repeats: int, taken: dict[Any, float]) -> dict[str, float]:
    """Milliseconds of the products and of the bytes, and the rates they come from.

    taken: what was measured for floors of other sizes, of as many rows; more is put into it.
    as_they_are_ms: of the products with the widths as they are.
    """
    shapes = products(sizes)
    eights = {(a, b): (8 * cdiv(a, 8), 8 * cdiv(b, 8) if b > 1 else 1) for a, b in shapes}
    for shape in {*shapes, *eights.values()} - set(taken):
        taken[shape] = _product(sizes.rows, *shape, device, repeats)
    if "rate" not in taken:
        source = torch.empty((1 << 30) if device.type == "cuda" else 1 << 20, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        taken["rate"] = 2 * source.numel() / _back_to_back(lambda: target.copy_(source), device, repeats)
    rate, total = taken["rate"], sum(move_to_device(sizes).values())
    found = {
        "products_ms": sum(min(taken[one], taken[eights[one]]) for one in shapes), "bytes_ms": total / rate,
    }  # fmt: skip
    return {
        "ms": sum(found.values()), **found, "as_they_are_ms": sum(taken[one] for one in shapes),
        "tflop": flops(sizes) / 1e12, "tflops": flops(sizes) / found["products_ms"] / 1e9,
        "gb": total / 1e9, "copy_gb_s": rate / 1e6,
    }  # fmt: skip


def _product(rows: int, a: int, b: int, device: torch.device, repeats: int) -> float:
    """Milliseconds of a linear layer's three products, forward and backward."""
    x, w, y = (torch.randn(shape, device=device).bfloat16() for shape in ((rows, a), (a, b), (rows, b)))
    runs: list[Callable[[], Tensor]] = [lambda: x @ w, lambda: y @ w.t(), lambda: x.t() @ y]
    return sum(_back_to_back(run, device, repeats) for run in runs)


def _back_to_back(run: Callable[[], Any], device: torch.device, repeats: int, many: int = 10) -> float:
    """Milliseconds of one of several that wait for nothing between them: without the host's share."""

    def several() -> None:
        for _ in range(many):
            run()

    return time_call(several, device, repeats) / many


# ------------------------------------------------------------------------------------------------------------ the steps


def table(sizes: Sizes, batches: int) -> Clicks:
    """Made rows: batches · sizes.rows of them."""
    draw = torch.Generator().manual_seed(0)
    n = batches * sizes.rows
    codes = torch.randint(1, sizes.codes, (n, sizes.fields), generator=draw)
    fields = {f"f{f}": sizes.codes for f in range(sizes.fields)}
    labels = torch.randint(0, 2, (n,), generator=draw).float()
    return Clicks("made", codes, fields, torch.zeros(n, 0), (), labels, torch.full((n,), TRAIN))


def build(sizes: Sizes, rows: Rows, device: torch.device) -> rank.LiRank:
    torch.manual_seed(0)
    return rank.LiRank(
        rows.schema,
        rank.LiRankConfig(sizes.width, "residual" if sizes.attention else "dcn", sizes.layers, sizes.rank, sizes.mlp,
        sizes.gated, norm="batch" if sizes.gated else "none"),
    ).to(device)  # fmt: skip


def lirank_step(
    ranker: rank.LiRank, batch: rank.Batch, device: torch.device, share: float = 1.0
) -> Callable[[], Tensor]:
    """What `rank.fit` does in a step, with a batch that is there: bf16 products, row-wise Adagrad of the tables.

    share: of the peaks of both rates.
    """
    tables = ranker.table_gradients("rows")
    own = {id(p) for p in tables}
    others = [p for p in ranker.parameters() if id(p) not in own]
    cuda = device.type == "cuda"
    grouped = parameter_groups(ranker, 0.01, own)
    optimizers = torch.optim.AdamW(grouped, lr=share * 1e-3, fused=cuda), RowAdagrad(tables, lr=share * 0.02)

    def step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            logits = ranker(batch)
        loss = rank.losses.bce(logits[LABEL].float(), batch.labels[LABEL])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def fitted_ms(sizes: Sizes, rows: Rows, device: torch.device, repeats: int) -> float:
    """Mean milliseconds of a step of `rank.fit` itself, with what draws its batches."""
    first, marks = min(5, repeats), list[float]()

    def after(progress: rank.Progress) -> bool:
        if progress.step in (first, first + repeats):
            _wait(device)
            marks.append(time.perf_counter())
        return len(marks) == 2

    epochs = cdiv(first + repeats, len(rows) // sizes.rows)
    options = rank.FitOptions(batch_size=sizes.rows, epochs=epochs, table_optimizer="row-adagrad")
    rank.fit(build(sizes, rows, device), rows, None, options, after=after)
    return 1e3 * (marks[1] - marks[0]) / repeats


def fuxictr_step(sizes: Sizes, data: Clicks, rows: Rows, zoo: Path, device: torch.device) -> Callable[[], Tensor]:
    """Its own train_step, with a batch that is there. Its cross layers have full matrices, as its default."""
    options = {
        "embedding_dim": sizes.width, "parallel_dnn_hidden_units": list(sizes.mlp), "num_cross_layers": sizes.layers
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model = fuxictr_model("DCNv2", data.fields, (), options, zoo, folder, device)
    model._max_gradient_norm = 10.0
    model.train()
    batch = columns(rows)[: sizes.rows]
    return lambda: model.train_step(batch)


def sides(
    sizes: Sizes, zoo: Path | None, device: torch.device, repeats: int
) -> Iterator[tuple[str, Sizes, dict[str, float], str]]:
    """(method, its sizes, measures, note) of each side; the floor first. A peer in fp32 is beside no floor of ours."""
    # An epoch of several batches, as those of a large table: between two the host draws an order.
    data = table(sizes, BATCHES)
    rows = Rows(data, TRAIN, device)
    batch = rows.batch(torch.arange(sizes.rows, device=device), device)
    taken: dict[Any, float] = {}
    least = floor(sizes, device, repeats, taken)
    yield "floor", sizes, least, ""

    def beside(ms: float, lowest: float) -> dict[str, float]:
        return {"ms": ms, "rows_s": 1e3 * sizes.rows / ms, "floors": ms / lowest, "floor_ms": lowest}

    def of(run: Callable[[], Any]) -> tuple[float, dict[str, float]]:
        gc.collect()  # the model of the side before, which would be in this one's peak
        if device.type != "cuda":
            return time_call(run, device, repeats), {}
        torch.cuda.reset_peak_memory_stats()
        ms = time_call(run, device, repeats)
        return ms, {"peak_gib": torch.cuda.max_memory_allocated() / 2**30}

    full = sizes._replace(attention=False, rank=None)
    kinds = {
        "lirank-residual": sizes, "lirank-dcn": sizes._replace(attention=False), "lirank-dcn-full": full,
        "lirank-residual, gates and batch norm": sizes._replace(gated=True),
    }  # fmt: skip
    for name, kind in kinds.items():
        lowest = floor(kind, device, repeats, taken)["ms"]
        ms, peak = of(lirank_step(build(kind, rows, device).train(), batch, device))
        yield name, kind, beside(ms, lowest) | peak, ""
    yield "lirank-residual, rank.fit", sizes, beside(fitted_ms(sizes, rows, device, repeats), least["ms"]), ""
    if zoo is None:
        return
    for tf32 in (False, True) if device.type == "cuda" else (False,):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        try:
            ms, peak = of(fuxictr_step(sizes, data, rows, zoo, device))
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False
        name, note = ("fuxictr-dcnv2, TF32", "an option of torch") if tf32 else ("fuxictr-dcnv2", "")
        yield name, full, {"ms": ms, "rows_s": 1e3 * sizes.rows / ms} | peak, note
