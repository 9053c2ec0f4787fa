"""Experts in FP8 beside Tigon's in bf16, forward and backward, for one layer of three models at 8,192 tokens.

    python benchmarks/studies/fp8_experts.py --output results           half a minute on a GPU
    python benchmarks/studies/fp8_experts.py --output results --toy     small layers, for a try on a CPU

bf16 is `tigon.moe_mlp` as models call it: its time, and that of its six grouped products alone. FP8's six products are
timed alone, and compared with the dequantised factors' for the first and the last expert.

Each pass that FP8 needs beside its products is timed alone on tensors of the same size and layout: tokens and their
gradients in e4m3, the activation and its gradient in e4m3 rows, both factors of two weight gradients, weights and their
transpositions. The gathering of rows, the sums of results and the routing, which bf16 has, too, count with their bytes
at the rate of a large copy. The same rate gives the reckoned time of all passes. predicted_ms is the products' and the
passes' time.

fp8_ms is the operator behind `tigon.FP8(experts=True)`, which takes plain gated units alone; fp8_error compares its
result and gradients with bf16's. times_faster compares bf16's time with fp8_ms, or without one with predicted_ms.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from cases.experts import OPS
from cases.inputs import Inputs
from harness import report
from harness.runner import QUICK, Ceilings, Settings, free, measure_ceilings, one_line, peak_mib, time_ms
from torch import Tensor

from tigon import use_backend
from tigon.kernels import use_triton
from tigon.ops.experts.launches import _rows_by_weight, _weight_bwd
from tigon.ops.experts.routing import route, rows_of_a_tile
from tigon.ops.fp8.columns import fold_scales, to_columns, transpose_rows
from tigon.ops.fp8.experts import multiply_by_experts
from tigon.ops.fp8.gated_gradient import gated_gradient
from tigon.ops.fp8.gated_rows import gated_rows
from tigon.ops.fp8.grouped import multiply_grouped_columns, multiply_grouped_rows
from tigon.ops.fp8.mlp import Unit
from tigon.ops.fp8.recipe import Rows, round_up
from tigon.ops.fp8.rows import quantize_rows
from tigon.ops.fp8.weight import measure_stack, quantize_stack, transpose_stack

KIND = "fp8-experts"
# tokens, width, inner width, experts, choices; the operator of benchmarks/cases that draws the layer
LAYERS = {
    "Mixtral-8x7B": ("moe_mlp", (8192, 4096, 14336, 8, 2)),
    "Qwen3-30B-A3B": ("moe_mlp", (8192, 2048, 768, 128, 8)),
    "gpt-oss-20b": ("moe_mlp-gpt-oss", (8192, 2880, 2880, 32, 4)),
}
TOY = {name: (op, (64, 32, 48, 4, 2)) for name, (op, _) in LAYERS.items()}
LARGEST_ERROR = 0.01  # of a product against the dequantised factors'
LARGEST_DIFFERENCE = 0.15  # of results and gradients in FP8 to bf16's


@dataclass
class Layer:
    """One layer's times.

    error: the largest ‖found − exact‖ / ‖exact‖ of the six FP8 products. fp8_error: of the result and the gradients,
    where exact is bf16's. peak_mib: of forward and backward, beyond inputs.
    """

    model: str
    shape: tuple[int, ...]
    status: str = "ok"  # ok | wrong | failed
    reason: str = ""
    bf16_ms: float | None = None
    bf16_products_ms: float | None = None
    fp8_products_ms: float | None = None
    passes_ms: float | None = None
    passes_reckoned_ms: float | None = None
    predicted_ms: float | None = None
    times_faster: float | None = None
    error: float | None = None
    fp8_ms: float | None = None
    fp8_error: float | None = None
    bf16_peak_mib: float | None = None
    fp8_peak_mib: float | None = None
    parts: dict[str, float] | None = None
    reckoned: dict[str, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def count_passes(shape: tuple[int, ...]) -> dict[str, float]:
    """Bytes of each pass beside the products: bf16 and e4m3 numbers, without scales."""
    T, D, inner, E, K = shape
    S, weights = T * K, 3 * E * inner * D
    return {
        "tokens": 2 * 3 * T * D,
        "gathers": 2 * (2 * S * D),
        "unit": S * inner * (4 + 1),
        "unit's gradient": S * inner * (6 + 3),
        "narrow factors": 2 * S * D * 3,
        "wide factors": 2 * S * 3 * inner,
        "weights": weights * (2 + 3),
        "weights, transposed": weights * 3,
        "sums": 2 * (2 * S * D + 2 * T * D),
        "routing": 5 * 4 * S,
    }


class Factors:
    """A layer's tensors in e4m3: random rows by expert, groups as the routing says, and the weights."""

    def __init__(self, inputs: Inputs, shape: tuple[int, ...]) -> None:
        T, D, inner, E, K = shape
        a = inputs.arguments
        self.E, S = E, T * K
        index = a["top_k_index"]
        counts = torch.bincount(index.flatten(), minlength=E)
        self.ends = counts.cumsum(0).int()
        self.padded_ends = ((counts + 15) // 16 * 16).clamp(min=16).cumsum(0).int()
        columns = round_up(S) + 16 * E
        self.x, self.dy = a["x"].detach(), inputs.grads[0]
        self.dh = torch.randn(S, inner, device=index.device, dtype=self.x.dtype)
        self.z = torch.randn(S, 2 * inner, device=index.device, dtype=self.x.dtype)
        self.wide_rows = self.dh.new_zeros(columns, D)
        self.gate_up, self.down = (a[n].detach().contiguous() for n in ("gate_up", "down"))
        self.of_x, self.of_dy, self.of_h, self.of_dz = (
            quantize_rows(torch.randn(S, n, device=index.device, dtype=self.x.dtype)) for n in (D, D, inner, 2 * inner)
        )
        amax = [measure_stack(t) for t in (self.gate_up, self.down)]
        self.weights = [quantize_stack(t, m) for t, m in zip((self.gate_up, self.down), amax, strict=True)]
        self.transposed = [transpose_stack(t, m) for t, m in zip((self.gate_up, self.down), amax, strict=True)]
        self.amax = amax
        # Zero columns behind each group, and rounded numbers elsewhere: the speed is that of any numbers.
        self.columns = {
            n: transpose_rows(quantize_rows(torch.randn(columns, n, device=index.device)).data)
            for n in (D, inner, 2 * inner)
        }
        self.c = torch.rand(E, device=index.device) + 0.5

    def list_products(self) -> dict[str, Callable[[], Tensor]]:
        up, down = self.weights
        up_t, down_t = self.transposed
        D, inner = self.x.shape[1], self.dh.shape[1]
        columns = self.columns

        def sum_columns(a: int, b: int) -> Tensor:
            return multiply_grouped_columns(columns[a], columns[b], self.c, self.padded_ends)

        return {
            "gate, up": lambda: multiply_grouped_rows(self.of_x, up, self.ends),
            "down": lambda: multiply_grouped_rows(self.of_h, down, self.ends),
            "dh": lambda: multiply_grouped_rows(self.of_dy, down_t, self.ends),
            "dx": lambda: multiply_grouped_rows(self.of_dz, up_t, self.ends),
            "d gate, up": lambda: sum_columns(2 * inner, D),
            "d down": lambda: sum_columns(D, inner),
        }

    def compute_error(self) -> float:
        """The largest error of the products of the first and the last expert."""
        D, inner = self.x.shape[1], self.dh.shape[1]
        factors = {
            "gate, up": (self.of_x, self.weights[0]), "down": (self.of_h, self.weights[1]),
            "dh": (self.of_dy, self.transposed[1]), "dx": (self.of_dz, self.transposed[0]),
            "d gate, up": (self.columns[2 * inner], self.columns[D]), "d down": (self.columns[D], self.columns[inner]),
        }  # fmt: skip
        worst = 0.0
        for name, multiply in self.list_products().items():
            found = multiply()
            a, b = factors[name]
            for e in sorted({0, self.E - 1}):
                ends = self.ends if isinstance(a, Rows) else self.padded_ends
                part = slice(int(ends[e - 1]) if e else 0, int(ends[e]))
                if isinstance(a, Rows):
                    exact = (a.data[part].float() * a.scale[part]) @ (b.data[e].float() * b.scale[e][:, None]).t()
                    got = found[part]
                else:
                    exact = self.c[e] * (a[:, part].float() @ b[:, part].float().t())
                    got = found[e]
                if exact.numel():
                    worst = max(worst, float((got.float() - exact).norm() / exact.norm().clamp(min=1e-30)))
            del found
        return worst

    def list_passes(self) -> dict[str, Callable[[], Any]]:
        product, dz = self.of_h, self.of_dz
        ones = self.wide_rows.new_ones(len(self.wide_rows), 1, dtype=torch.float32)
        stacks = self.gate_up, self.down
        return {
            "tokens": lambda: (quantize_rows(self.x), quantize_rows(self.dy)),
            "unit": lambda: gated_rows(self.z, "silu"),
            "unit's gradient": lambda: gated_gradient(self.dh, self.z, None, "silu", product.scale),
            "narrow factors": lambda: [to_columns(self.wide_rows, fold_scales(ones, ones)[0]) for _ in range(2)],
            "wide factors": lambda: (transpose_rows(product.data), transpose_rows(dz.data)),
            "weights": lambda: [quantize_stack(t, measure_stack(t)) for t in stacks],
            "weights, transposed": lambda: [transpose_stack(t, m) for t, m in zip(stacks, self.amax, strict=True)],
        }


def list_bf16_products(inputs: Inputs, shape: tuple[int, ...]) -> list[Callable[[], Any]]:
    """The six grouped products of `moe_mlp`."""
    T, D, inner, E, K = shape
    a = inputs.arguments
    x, S = a["x"].detach(), T * K
    if not use_triton(x):
        return []
    rows = rows_of_a_tile(S, E, x.dtype)
    routing = route(a["top_k_index"], E, rows)
    room, z, h = (x.new_empty(S, n).normal_() for n in (D, 2 * inner, inner))
    gate_up, down = a["gate_up"].detach(), a["down"].detach()
    d_gate_up, d_down = torch.empty_like(gate_up), torch.empty_like(down)
    return [
        lambda: _rows_by_weight(room, gate_up, None, routing, z, rows),
        lambda: _rows_by_weight(h, down, None, routing, room, rows),
        lambda: _rows_by_weight(room, down, None, routing, h, rows, transposed=True),
        lambda: _rows_by_weight(z, gate_up, None, routing, room, rows, transposed=True),
        lambda: _weight_bwd(z, room, routing, d_gate_up),
        lambda: _weight_bwd(room, h, routing, d_down),
    ]


def run_layer(
    model: str, op_name: str, shape: tuple[int, ...], device: torch.device, ceilings: Ceilings, settings: Settings
) -> Layer:
    row = Layer(model, shape)
    op = next(op for op in OPS if op.name == op_name)
    try:
        inputs = op.make(shape, torch.bfloat16, device, 0.0)
        moe = op.implementations["tigon"].load()
        wrt = [inputs.arguments[n] for n in inputs.wrt]

        def step(function: Callable[..., Tensor] = moe) -> list[Tensor]:
            y = function(**inputs.arguments)
            return [y.detach(), *torch.autograd.grad(y, wrt, inputs.grads)]

        def run_fp8(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
            return multiply_by_experts(x, top_k_index, top_k_weights, gate_up, down, Unit())

        row.bf16_ms = time_ms(step, device, settings)
        row.bf16_peak_mib, _ = peak_mib(step, device)
        if op_name == "moe_mlp":
            pairs = zip(step(run_fp8), step(), strict=True)
            row.fp8_error = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
            if not row.fp8_error <= LARGEST_DIFFERENCE:
                row.status, row.reason = "wrong", f"differs from bf16 by more than {LARGEST_DIFFERENCE:g}"
            row.fp8_ms = time_ms(lambda: step(run_fp8), device, settings)
            row.fp8_peak_mib, _ = peak_mib(lambda: step(run_fp8), device)
            free(device)
        products = list_bf16_products(inputs, shape)
        row.bf16_products_ms = sum(time_ms(f, device, settings) for f in products) if products else None
        del products
        factors = Factors(inputs, shape)
        row.error = factors.compute_error()
        if not row.error <= LARGEST_ERROR:
            row.status, row.reason = "wrong", f"relative error above {LARGEST_ERROR:g}"
        row.parts = {name: time_ms(f, device, settings) for name, f in factors.list_products().items()}
        row.fp8_products_ms = sum(row.parts.values())
        row.reckoned = {name: n / ceilings.copy_gbps / 1e6 for name, n in count_passes(shape).items()}
        passes = {name: time_ms(f, device, settings) for name, f in factors.list_passes().items()}
        row.parts |= passes
        row.passes_ms = sum((row.reckoned | passes).values())
        row.passes_reckoned_ms = sum(row.reckoned.values())
        row.predicted_ms = row.fp8_products_ms + row.passes_ms
        row.times_faster = row.bf16_ms / (row.fp8_ms or row.predicted_ms)
    except Exception as error:  # as of a torch without these products: the row says so
        row.status, row.reason = "failed", one_line(error)
    free(device)
    return row


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", required=True, type=Path, help="folder for the result file")
    parser.add_argument("--name", help="name of the result file; default: the device and what was measured")
    parser.add_argument("--toy", action="store_true", help="small layers, measured briefly, with the reference")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = QUICK if options.toy else Settings(warmup_ms=10.0, repeat_ms=50.0)
    ceilings = measure_ceilings(device, settings)
    rows: list[Layer] = []
    with use_backend("torch" if options.toy else "auto"):
        for model, (op, shape) in (TOY if options.toy else LAYERS).items():
            rows.append(run_layer(model, op, shape, device, ceilings, settings))
            content = report.result(KIND, rows, device=device, ceilings=asdict(ceilings))
            report.save(options.output / (options.name or report.file_name(content)), content)
    print(report.to_text(content))
    for row in rows:
        print(row.model, {k: round(v, 3) for k, v in (row.parts or {}).items()})


if __name__ == "__main__":
    main()
