"""How far FP8 moves the gradients of a model with random weights: eight layers of width 4,096, against fp32.

    PYTHONPATH=benchmarks python benchmarks/studies/fp8_error.py --output results       under a minute on an H200

Every side computes the gradients of one loss from the same bf16 weights, which fp32 holds exactly. The error of a side
is ‖g − exact‖ / ‖exact‖ over all parameters, and over those of each decoder layer. The fp32 gradients come without
TF32, and with attention in plain products.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from harness import report
from harness.training import build, convert_to_torchao, synchronize, why_missing
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import tigon
from studies.rows import Row
from tigon.fusion.fp8.layers import ignore_sizes

PRESET, SIZES = "llama-3-8b", {"num_hidden_layers": 8, "vocab_size": 32768}
TOY = {
    "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 160, "vocab_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
BATCH, SEQ, TOY_SEQ = 8, 1024, 16


def _fuse(model: Any, **options: Any) -> tigon.Fusion:
    return tigon.fuse(model, fp8=tigon.FP8(**options) if options else False)


# What each side does to the model; a fused model's report must then have calls in FP8.
SIDES: dict[str, Callable[[Any], Any]] = {
    "hf": lambda model: None,
    "tigon": _fuse,
    "tigon-fp8 first=0": functools.partial(_fuse, first=0),
    "tigon-fp8 first=1": functools.partial(_fuse, first=1),
    "tigon-fp8 first=2": functools.partial(_fuse, first=2),
    "tigon-fp8 first=0 keep=fp8": functools.partial(_fuse, first=0, keep="fp8"),
    "tigon-fp8 first=0 dw=bf16": functools.partial(_fuse, first=0, dw="bf16"),
    "torchao-rowwise first=0": functools.partial(convert_to_torchao, recipe="rowwise", first=0),
    "torchao-rowwise first=1": functools.partial(convert_to_torchao, recipe="rowwise", first=1),
    "torchao-tensorwise first=0": functools.partial(convert_to_torchao, recipe="tensorwise", first=0),
}
# Two sides, and the most that the first one's error may be, as a multiple of the second one's.
BARS = (
    ("tigon-fp8 first=0", "torchao-rowwise first=0", 1.02),
    ("tigon-fp8 first=1", "torchao-rowwise first=0", 0.55),
)


def compute_gradients(model: Any, ids: Tensor) -> dict[str, Tensor]:
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def measure_errors(gradients: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """The relative errors of all gradients together, and of those in each decoder layer."""
    groups: dict[str, list[str]] = {"all": [*exact]}
    for name in exact:
        words = name.split(".")
        if "layers" in words:
            groups.setdefault(f"layer {words[words.index('layers') + 1]}", []).append(name)
    errors = {name: torch.sum((gradients[name].float() - g).square(), dtype=torch.float64) for name, g in exact.items()}
    sizes = {name: torch.sum(g.square(), dtype=torch.float64) for name, g in exact.items()}
    return {
        group: float((sum(errors[n] for n in names) / sum(sizes[n] for n in names)).sqrt())
        for group, names in groups.items()
    }


def measure_sides(seed: int, is_toy: bool, device: torch.device) -> Iterator[Row]:
    """A row for each side, with the weights and the tokens of this seed."""
    sizes, seq = (TOY, TOY_SEQ) if is_toy else (SIZES, SEQ)
    model: Any = build(PRESET, device, torch.bfloat16, seed, **sizes)
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (BATCH, seq), generator=draw).to(device)
    torch.set_float32_matmul_precision("highest")
    with sdpa_kernel(SDPBackend.MATH):
        exact = compute_gradients(copy.deepcopy(model).float(), ids)
    data = f"{model.config.num_hidden_layers} layers of width {model.config.hidden_size}, {BATCH}x{seq} tokens"
    for side, change in SIDES.items():
        if why := why_missing(side):
            print(f"left out, {why}: {side}", flush=True)
            continue
        begun = time.perf_counter()
        with ignore_sizes():
            trained: nn.Module = copy.deepcopy(model)
            fusion = change(trained)
            gradients = compute_gradients(trained, ids)
        calls = dict(fusion.report().calls) if isinstance(fusion, tigon.Fusion) else {}
        if ("tigon-fp8" in side) != ("fp8" in calls):
            raise RuntimeError(f"fp8_error: {side} ran {calls.get('fp8', 0)} calls in FP8 on {device}.")
        errors = measure_errors(gradients, exact)
        synchronize(device)
        seconds = round(time.perf_counter() - begun, 2)
        yield Row("gradients", data, seed, side, {"calls": calls}, errors, seconds=seconds)
        del trained, fusion, gradients
        gc.collect()


def describe_bars(rows: list[Row]) -> list[str]:
    """A sentence for each bar and seed whose two sides were measured."""
    errors = {(row.seed, row.method): row.measures["all"] for row in rows}
    lines = []
    for side, other, most in BARS:
        for seed in sorted({row.seed for row in rows}):
            if (seed, side) in errors and (seed, other) in errors:
                ratio = errors[seed, side] / errors[seed, other]
                verdict = "within" if ratio <= most else "ABOVE"
                lines.append(f"seed {seed}: {side} / {other}: {ratio:.3f}, {verdict} {most}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, help="folder for the result file")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--toy", action="store_true", help="three layers of width 64, for a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    options = parser.parse_args(arguments)
    device = options.device
    rows: list[Row] = []
    for seed in range(options.seeds):
        for row in measure_sides(seed, options.toy, device):
            rows.append(row)
            if options.output:
                content = report.result("fp8-error", rows, device=device)
                report.save(options.output / report.file_name(content), content)
            worst = max(row.measures, key=lambda name: row.measures[name])
            print(
                f"seed {seed}  {row.method:28} all {row.measures['all']:.4f}  {worst} {row.measures[worst]:.4f}"
                f"  {row.seconds:.1f} s", flush=True,
            )  # fmt: skip
    lines = describe_bars(rows)
    print("\n".join(lines))
    return int(any("ABOVE" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
