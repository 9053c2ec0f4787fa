"""Time the FP8 operators beside what eager PyTorch takes for the same, and beside their floors, in one run.

    python benchmarks/fp8_operators.py                       all rows, at the sizes of Llama-3-8B
    python benchmarks/fp8_operators.py rows linear --output fp8.json

A floor is the time of the fewest bytes at the bandwidth of a large copy in the run, each input read and each output
written once; for layers, the time of the FP8 products alone, in the same run. "tigon in bf16" is the operator
that bf16 training has in the same place. tests/ops compare the numbers.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import report
from harness.runner import QUICK, SETTINGS, Settings, free, measure_ceilings, time_ms
from torch import Tensor

import tigon
from tigon.ops.fp8.columns import fold_scales, to_columns, transpose_rows
from tigon.ops.fp8.gated_gradient import gated_gradient
from tigon.ops.fp8.gated_rows import gated_rows
from tigon.ops.fp8.norm_rows import norm_rows
from tigon.ops.fp8.products import multiply_columns, multiply_rows
from tigon.ops.fp8.recipe import E4M3, LARGEST, Norm, Rows, Weight
from tigon.ops.fp8.rows import quantize_rows
from tigon.ops.fp8.weight import measure_weights, quantize_transposed, quantize_weight

Call = Callable[[], Any]


@dataclass
class Case:
    """One operator. nbytes: the fewest bytes moved. products: timed for the floor in place of bytes."""

    name: str
    what: str
    calls: dict[str, Call]
    nbytes: int = 0
    products: tuple[Call, ...] = ()


@dataclass
class Timing:
    name: str
    what: str
    floor_ms: float
    ms: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def round_eagerly(x: Tensor, dim: int | None = 1) -> tuple[Tensor, Tensor]:
    """e4m3 and scales as eager code makes them: a maximum, a scale, a cast."""
    amax = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = (amax.float() / LARGEST).clamp(min=2.0**-126)
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale


def differentiate_unit_eagerly(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(gate)
    value = gate * s
    gradient = torch.cat([dy * up * (s + value * (1 - s)), dy * value], 1)
    return round_eagerly(gradient)[0], round_eagerly(value * up)[0]


def list_kernels(M: int, H: int, N: int, draw: Callable[..., Tensor]) -> Iterator[Case]:
    """The kernels for M tokens of width H, and an MLP N wide."""
    x, residual, weight = draw(M, H), draw(M, H), draw(H)
    yield Case(
        "rows", f"{M}×{H}", {"tigon": lambda: quantize_rows(x), "eager": lambda: round_eagerly(x)}, 3 * x.numel()
    )
    options = 1e-5, 0.0, "llama"

    def norm_eagerly() -> Any:
        total = x + residual
        return total, round_eagerly(F.rms_norm(total, weight.shape, weight, 1e-5))

    yield Case(
        "norm_rows", f"{M}×{H}",
        {"tigon": lambda: norm_rows(x, residual, weight, *options), "eager": norm_eagerly,
         "tigon in bf16": lambda: tigon.add_rms_norm(x, residual, weight)},
        7 * x.numel(),
    )  # fmt: skip
    gate_up, dy = draw(M, 2 * N), draw(M, N)
    gate, up = gate_up[:, :N], gate_up[:, N:]
    unit = {
        "eager": lambda: round_eagerly(F.silu(gate) * up),
        "tigon in bf16": lambda: tigon.swiglu(gate, up),
    }
    for keep in (False, True):
        kept = "fp8" if keep else "bf16"
        ours = {"tigon": functools.partial(gated_rows, gate_up, "silu", keep)}
        yield Case("gated_rows", f"{M}×{N}, keep={kept}", ours | unit, (7 if keep else 5) * dy.numel())
    product, kept_rows = gated_rows(gate_up, "silu", True)
    eager = {"eager": lambda: differentiate_unit_eagerly(dy, gate, up)}
    for source, scale, nbytes in ((gate_up, None, 9), (*(kept_rows or ()), 7)):
        what = f"{M}×{N}, keep={'bf16' if scale is None else 'fp8'}"
        ours = {"tigon": functools.partial(gated_gradient, dy, source, scale, "silu", product.scale)}
        yield Case("gated_gradient", what, ours | eager, nbytes * dy.numel())
    for rows in (gate_up.to(E4M3), x.to(E4M3)):
        calls = {
            "tigon": functools.partial(transpose_rows, rows),
            "eager": lambda data=rows: data.view(torch.uint8).t().contiguous(),
        }
        yield Case("transpose", "×".join(map(str, rows.shape)), calls, 2 * rows.numel())
    factor = draw(M, 1).abs().float() / 8
    calls = {
        "tigon": lambda: to_columns(x, factor),
        "eager": lambda: (x.float() * factor).clamp(-LARGEST, LARGEST).to(E4M3).view(torch.uint8).t().contiguous(),
    }
    yield Case("columns", f"{M}×{H}", calls, 3 * x.numel())
    rstd = draw(M).abs().float()
    ours = {"tigon of a norm": lambda: to_columns(x, factor, Norm(rstd, weight, 0.0, "llama"))}
    yield Case("columns", f"{M}×{H}, of a norm", ours, 3 * x.numel())
    yield Case("fold", f"{M}", {"tigon": lambda: fold_scales(factor, factor)}, 12 * M)
    w = draw(N, H)
    amax = measure_weights([w])
    calls = {"tigon": lambda: quantize_weight([w], amax), "eager": lambda: round_eagerly(w, None)}
    yield Case("weight", f"{N}×{H}", calls, 3 * w.numel())
    calls = {
        "tigon": lambda: quantize_transposed([w], amax),
        "eager": lambda: round_eagerly(w, None)[0].view(torch.uint8).t().contiguous(),
    }
    yield Case("weight", f"{N}×{H}, transposed", calls, 3 * w.numel())
    yield Case("weight", f"{N}×{H}, its maximum", {"tigon": lambda: measure_weights([w])}, 2 * w.numel())


def run_layer(forward: Callable[[Tensor], Any], x: Tensor, parameters: list[Tensor], dys: list[Tensor]) -> Any:
    results = forward(x)
    return torch.autograd.grad(results if isinstance(results, tuple) else (results,), [x, *parameters], dys)


def list_products(M: int, K: int, N: int, draw: Callable[..., Tensor]) -> tuple[Call, ...]:
    """The three products of a layer in FP8, of factors that lie ready."""
    one = draw(M, 1).float() * 0 + 1
    x, w, dy = draw(M, K).to(E4M3), draw(N, K).to(E4M3), draw(M, N).to(E4M3)
    c = one[0, 0].clone()
    wide, narrow, wt = dy.t().contiguous(), x.t().contiguous(), w.t().contiguous()
    scales = one[:1, 0].expand(N).contiguous(), one[:1, 0].expand(K).contiguous()
    return (
        lambda: multiply_rows(Rows(x, one), Weight(w, scales[0])),
        lambda: multiply_rows(Rows(dy, one), Weight(wt, scales[1])),
        lambda: multiply_columns(wide, narrow, c, torch.bfloat16),
    )


def load_torchao(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """torchao's tensorwise float8 layer with a weight, not compiled."""
    from torchao.float8 import convert_to_float8_training

    layer = torch.nn.Sequential(torch.nn.Linear(*weight.shape[::-1], bias=False, device="meta"))
    layer[0].weight = torch.nn.Parameter(weight.detach())
    converted: Callable[[Tensor], Tensor] = convert_to_float8_training(layer)
    return converted


def list_layers(M: int, H: int, N: int, draw: Callable[..., Tensor]) -> Iterator[Case]:
    """Forward and backward passes of layers."""
    x = draw(M, H).requires_grad_()

    def make_weights(*heights: int) -> list[Tensor]:
        return [(draw(n, H) * 0.02).requires_grad_() for n in heights]

    def make_call(forward: Callable[[Tensor], Any], parameters: list[Tensor], dys: list[Tensor]) -> Call:
        return functools.partial(run_layer, forward, x, parameters, dys)

    (w,) = make_weights(N)
    calls = {
        "tigon": make_call(lambda x: tigon.fp8.linear(x, w), [w], [draw(M, N)]),
        "tigon compiled": make_call(torch.compile(lambda x: tigon.fp8.linear(x, w)), [w], [draw(M, N)]),
        "bf16": make_call(lambda x: F.linear(x, w), [w], [draw(M, N)]),
    }
    try:
        theirs = load_torchao(w)
        calls["torchao"] = make_call(theirs, [*theirs.parameters()], [draw(M, N)])  # type: ignore[attr-defined]
    except (ImportError, AttributeError) as error:
        calls["torchao"] = functools.partial(_fail, error)
    yield Case("linear", f"{M}×{H}→{N}", calls, products=list_products(M, H, N, draw))
    heights = H, H // 4, H // 4
    ws, dys = make_weights(*heights), [draw(M, n) for n in heights]
    calls = {
        "tigon": make_call(lambda x: tigon.fp8.projections(x, ws), ws, dys),
        "bf16": make_call(lambda x: tuple(F.linear(x, w) for w in ws), ws, dys),
    }
    yield Case("projections", f"{M}×{H}→{heights}", calls, products=list_products(M, H, sum(heights), draw))
    gate, up = make_weights(N, N)
    down = (draw(H, N) * 0.02).requires_grad_()
    dy = [draw(M, H)]
    calls = {
        f"tigon, keep={keep}": make_call(
            lambda x, keep=keep: tigon.fp8.gated_mlp(x, gate, up, down, keep=keep), [gate, up, down], dy
        )
        for keep in ("bf16", "fp8")
    }
    calls["bf16"] = make_call(
        lambda x: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down), [gate, up, down], dy
    )
    products = (*list_products(M, H, 2 * N, draw), *list_products(M, N, H, draw))
    yield Case("gated_mlp", f"{M}×{H}, {N} wide", calls, products=products)


def _fail(error: Exception) -> None:
    raise error


def run(case: Case, device: torch.device, copy_gbps: float, settings: Settings) -> Timing:
    floor = sum(time_ms(product, device, settings) for product in case.products) or case.nbytes / copy_gbps / 1e6
    timing = Timing(case.name, case.what, floor)
    for name, call in case.calls.items():
        try:
            timing.ms[name] = time_ms(call, device, settings)
        except Exception as error:  # a peer that is missing, or has no such product, is a line in the table
            timing.failures[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return timing


def write_table(timings: list[Timing]) -> str:
    lines = ["| operator | of | floor ms | ms (× floor) |", "| :-- | :-- | --: | :-- |"]
    for t in timings:
        times = [f"{name} {ms:.3f} ({ms / t.floor_ms:.2f})" for name, ms in t.ms.items()]
        times += [f"{name}: {why}" for name, why in t.failures.items()]
        lines.append(f"| {t.name} | {t.what} | {t.floor_ms:.3f} | {'; '.join(times)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="rows to time, all by default")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--quick", action="store_true", help="small sizes, one short round")
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_small = options.quick or device.type == "cpu"
    M, H, N = (32, 64, 128) if is_small else (options.tokens, 4096, 14336)
    settings = QUICK if is_small else SETTINGS
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    ceilings = measure_ceilings(device, settings)
    timings = []
    for list_cases in (list_kernels, list_layers):
        for case in list_cases(M, H, N, draw):
            if not options.names or case.name in options.names:
                timings.append(run(case, device, ceilings.copy_gbps, settings))
                free(device)
    print(write_table(timings))
    if options.output:
        content = report.result("fp8_operators", timings, device=device, ceilings=asdict(ceilings))
        options.output.write_text(json.dumps(content, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
