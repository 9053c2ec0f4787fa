"""Cross-entropy rows: on given logits and on a linear head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from flat import cross_entropy, linear_cross_entropy
from torch import Tensor

from ops_table.row import Bad, Case, Inputs, Op, Replaced, randn, sample
from tigon.ops.cross_entropy import cross_entropy_reference


def _targets(rows: tuple[int, ...], classes: int, generator: torch.Generator, ignore_index: int = -100) -> Tensor:
    """Every fourth row is ignored, from the second on."""
    target = torch.randint(0, classes, rows, generator=generator)
    ignored = (torch.arange(target.numel()) % 4 == 1).view(rows)
    return torch.where(ignored, torch.full_like(target, ignore_index), target)


def _valid(rows: int) -> int:
    return sum(i % 4 != 1 for i in range(rows))


def _make_cross_entropy(shape, dtype, generator, ignore_index=-100, weighted=False):
    logits = (3 * torch.randn(shape, generator=generator)).to(dtype)
    target = _targets(shape[:-1], shape[-1], generator, ignore_index)
    return logits, target, 0.1 + torch.rand(shape[-1], generator=generator) if weighted else None


def _cross_entropy(logits, target, weight=None, **options):
    """The loss alone: the only result of details=True with a gradient."""
    result = cross_entropy(logits, target, weight, **options)
    return result[0] if isinstance(result, tuple) else result


def _reduced(rows: Tensor, target: Tensor, weight: Tensor | None, reduction: str, divisor: Any, ignore: int) -> Tensor:
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    valid = target != ignore
    if divisor is None:
        divisor = valid.sum() if weight is None else weight[target[valid]].sum()
        divisor = torch.where(valid.any(), divisor, 1.0)  # the mean over no row is 0
    return rows.sum() / divisor


def reference_cross_entropy(
    logits, target, weight=None, *, ignore_index=-100, reduction="mean", label_smoothing=0.0, z_loss=0.0,
    softcap=None, scale=1.0, divisor=None, details=False,
):  # fmt: skip
    options = ignore_index, label_smoothing, 0.0, softcap or 0.0, scale
    rows = cross_entropy_reference(logits, target, *options, weight)
    loss = _reduced(rows, target, weight, reduction, divisor, ignore_index)
    if z_loss:
        with_z = cross_entropy_reference(logits, target, ignore_index, 0.0, z_loss, softcap or 0.0, scale)
        z_rows = with_z - cross_entropy_reference(logits, target, ignore_index, 0.0, 0.0, softcap or 0.0, scale)
        loss = loss + _reduced(z_rows, target, None, reduction, divisor, ignore_index)
    return loss


def eager_cross_entropy(
    logits, target, weight=None, *, ignore_index=-100, reduction="mean", label_smoothing=0.0, z_loss=0.0,
    softcap=None, scale=1.0, divisor=None, details=False,
):  # fmt: skip
    """F.cross_entropy on upcast logits, as in transformers. z-loss is not weighted: its mean is over rows."""
    z = (logits.float() if logits.dtype != torch.float64 else logits) * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z, flat = z.reshape(-1, z.shape[-1]), target.reshape(-1)
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    if weight is not None and reduction == "mean" and divisor is None:
        loss = F.cross_entropy(z, flat, weight, reduction="mean", **options)
    else:
        rows = F.cross_entropy(z, flat, weight, reduction="none", **options).view(target.shape)
        loss = _reduced(rows, target, weight, reduction, divisor, ignore_index)
    if z_loss:
        rows = torch.where(flat == ignore_index, 0.0, z_loss * torch.logsumexp(z, -1).square()).view(target.shape)
        loss = loss + _reduced(rows, target, None, reduction, divisor, ignore_index)
    return loss


def _three(target: Tensor | None) -> Tensor:
    return torch.zeros(3, dtype=torch.long) if target is None else target


def _bad_cross_entropy(name: str, inputs: Callable[..., Inputs]) -> tuple[Bad, ...]:
    """Calls that every cross entropy refuses. inputs(target=…) makes a good call with three rows and seven classes."""
    four, floats, outside = torch.zeros(4, dtype=torch.long), torch.zeros(3), torch.tensor([0, 9, 1])
    return (
        Bad(inputs, r"CrossEntropy: reduction must be one of .*got 'avg'", {"reduction": "avg"}),
        Bad(inputs, r"CrossEntropy: label_smoothing must lie in \[0, 1\], got 1.5", {"label_smoothing": 1.5}),
        Bad(inputs, rf"(CrossEntropy|{name}): softcap must be positive.*got -1", {"softcap": -1.0}),
        Bad(inputs, r"CrossEntropy: divisor goes with reduction='mean'", {"reduction": "sum", "divisor": 3}),
        Bad(inputs, r"CrossEntropy: divisor must be a number or a 0-d tensor", {"divisor": torch.ones(2)}),
        Bad(lambda: inputs(target=four), rf"{name}: target must have shape \(3,\).*got \(4,\)"),
        Bad(lambda: inputs(target=floats), rf"{name}: target must hold integer class indices, got torch.float32"),
        Bad(
            lambda: inputs(target=outside),
            rf"{name}: target must lie in \[0, 7\) or be ignore_index=-100, got 9",
            {},
            True,
        ),
    )


_EVERY_OPTION = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0, "scale": 0.7}
_THREE = torch.tensor([0, 4, -100])
CROSS_ENTROPY = Op(
    name="cross_entropy",
    public=_cross_entropy,
    reference=reference_cross_entropy,
    eager=eager_cross_entropy,
    make=_make_cross_entropy,
    cases=(
        Case("masked", (7, 700)),
        Case("least", (1, 2), draws=64),
        Case("rows share tiles", (2, 50, 100)),
        Case("beyond one block, summed", (2, 2, 5000), {"reduction": "sum"}),
        Case("beyond one tile, softcap", (2, 40000), {"softcap": 5.0, "details": True}),
        Case("one loss a row, smoothing", (3, 5, 700), {"reduction": "none", "label_smoothing": 0.1, "details": True}),
        Case("z-loss and scale", (7, 300), {"z_loss": 1e-2, "scale": 0.25, "details": True}),
        Case("weights", (7, 300), {"z_loss": 1e-2, "label_smoothing": 0.1}, {"weighted": True}),
        Case("weights, every option", (7, 5000), {**_EVERY_OPTION, "divisor": 11.0}, {"weighted": True}),
        Case("divisor on the device", (7, 100), {"divisor": torch.tensor(11)}),
        Case("another ignore_index", (7, 100), {"ignore_index": 3}, {"ignore_index": 3}),
    ),
    empty=((0, 8),),
    bad=(
        *_bad_cross_entropy("cross_entropy", lambda target=None: (torch.ones(3, 7), _three(target))),
        Bad(lambda: (torch.ones(3, 7).long(), torch.zeros(3).long()), r"cross_entropy: logits must be .*torch.int64"),
        Bad(
            lambda: (torch.ones(3, 7), torch.zeros(3).long(), torch.ones(6)),
            r"cross_entropy: weight must have shape \(7,\).*got \(6,\) torch.float32",
        ),
        Bad(
            lambda: (torch.ones(3, 7), torch.zeros(3).long(), torch.ones(7, requires_grad=True)),
            r"cross_entropy: weight must not require a gradient",
        ),
    ),
    launches=("cross_entropy_fwd", "cross_entropy_details_fwd", "cross_entropy_bwd"),
    models=(
        Case("Llama-3-8B", (8192, 128256)),
        Case("Llama-2-7B", (32768, 32000)),
        Case("Gemma-2-2B", (4096, 256000), {"softcap": 30.0}),
        Case("every option", (8192, 151936), _EVERY_OPTION),
        Case("weights", (8192, 32000), {"z_loss": 1e-4}, {"weighted": True}),
        Case("weights, every option", (8192, 32000), {**_EVERY_OPTION, "details": True}, {"weighted": True}),
        Case("details", (8192, 128256), {"details": True}),
        Case("odd width", (8192, 50257)),
        Case("odd width, every option", (8192, 50257), {**_EVERY_OPTION, "details": True}),
        Case("few rows", (8, 151936)),
        Case("odd width, few rows, every option", (8, 50257), {**_EVERY_OPTION, "details": True}, {"weighted": True}),
        Case("few classes", (1000000, 128)),
        Case("few classes, every option", (1000000, 128), {**_EVERY_OPTION, "details": True}, {"weighted": True}),
    ),
    fixed=(2,),
    # Class-weight gathers and the reduction over rows are narrow; test_cross_entropy.py checks the other loads.
    wide_loads=False,
    large=(
        Case("a row a program", (1000, 4096), {"reduction": "none"}),
        Case("rows share tiles", (10000, 100), {"reduction": "none", "details": True}),
        Case("weights", (2000, 40000), {**_EVERY_OPTION, "reduction": "none", "details": True}, {"weighted": True}),
    ),
    replaces=(Replaced("cross_entropy(logits, target)", "loss", {"logits": sample(3, 8), "target": _THREE}),),
)


def _make_linear_cross_entropy(shape, dtype, generator, bias=True):
    """shape is (..., H, V); inputs are x, weight, target, bias."""
    *rows, H, V = shape
    x, weight = randn((*rows, H), dtype, generator), 3 * torch.randn((V, H), generator=generator) / H**0.5
    b = torch.randn(V, generator=generator).to(dtype) if bias else None
    return x, weight.to(dtype), _targets(tuple(rows), V, generator), b


def _of_logits(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def of_linear(x, weight, target, bias=None, *, num_valid=None, chunk_bytes=None, accumulate=None, **options):
        return fn(F.linear(x, weight, bias), target, **options)

    return of_linear


def _linear_cross_entropy(x, weight, target, bias=None, **options):
    return linear_cross_entropy(x, weight, target, bias=bias, **options)


def _bad_linear(**replaced: Any) -> Inputs:
    made = {"x": torch.ones(3, 4), "weight": torch.ones(7, 4), "target": torch.zeros(3, dtype=torch.long), "bias": None}
    return tuple((made | replaced).values())


# The smallest budget: chunks of 128 rows.
_SMALL = {"chunk_bytes": 1}
LINEAR_CROSS_ENTROPY = Op(
    name="linear_cross_entropy",
    public=_linear_cross_entropy,
    reference=_of_logits(reference_cross_entropy),
    eager=_of_logits(eager_cross_entropy),
    make=_make_linear_cross_entropy,
    cases=(
        Case("masked", (11, 24, 100), draws=8),
        Case("least", (1, 1, 2), draws=64),
        Case("no bias", (3, 5, 32, 128), {}, {"bias": False}),
        Case("two chunks", (140, 16, 60), _SMALL),
        Case("two chunks summed", (140, 16, 60), {**_SMALL, "reduction": "sum"}),
        Case("two chunks in the weight's dtype", (140, 16, 60), {**_SMALL, "accumulate": "weight"}),
        Case("valid rows alone", (180, 16, 60), {**_SMALL, "num_valid": _valid(180)}),
        Case("one loss a row", (2, 70, 16, 60), {**_SMALL, "reduction": "none"}),
        Case("one loss a valid row", (140, 16, 60), {**_SMALL, "reduction": "none", "num_valid": _valid(140)}),
        Case("every option", (11, 24, 300), {**_EVERY_OPTION, "divisor": 5.0}, draws=8),
        Case("divisor on the device", (11, 24, 100), {"divisor": torch.tensor(5)}, draws=8),
    ),
    empty=((0, 8, 12),),
    bad=(
        *_bad_cross_entropy("linear_cross_entropy", _bad_linear),
        Bad(lambda: _bad_linear(x=torch.ones(3, 5)), r"linear_cross_entropy: x must be .*got \(3, 5\) and \(7, 4\)"),
        Bad(lambda: _bad_linear(bias=torch.ones(6)), r"linear_cross_entropy: bias must have shape \(7,\), got \(6,\)"),
        Bad(lambda: _bad_linear(weight=torch.ones(7, 4).half()), r"weight must have x's dtype torch.float32, got .*16"),
        Bad(_bad_linear, r"ChunkOptions: accumulate must be one of .*got 'fp16'", {"accumulate": "fp16"}),
        Bad(_bad_linear, r"ChunkOptions: chunk_bytes must be positive, got -5", {"chunk_bytes": -5}),
        Bad(_bad_linear, r"linear_cross_entropy: fp8 goes with x in bf16, .*got torch.float32", {"fp8": True}),
    ),
    launches=("linear_cross_entropy_fwd", "linear_cross_entropy_bwd"),
    models=(
        Case("Llama-3-8B", (8192, 4096, 128256), {}, {"bias": False}),
        Case("Gemma-2-2B", (32768, 2304, 256000), {"softcap": 30.0}, {"bias": False}),
        Case("Qwen3-1.7B, one loss a row", (16384, 2048, 151936), {"reduction": "none"}, {"bias": False}),
        Case("every option", (8192, 2048, 32000), _EVERY_OPTION),
    ),
    dtensor="refused",  # split by rows; tests/distributed/test_vocabulary_parallel.py: by classes
    products=True,
    large=(Case("several chunks", (1000, 1024, 60), {"reduction": "none", "chunk_bytes": 2**26}),),
    replaces=(
        Replaced(
            "linear_cross_entropy(x, Head(weight, bias), target)",
            "loss",
            {"x": sample(3, 8), "weight": sample(5, 8), "bias": sample(5), "target": _THREE},
        ),
    ),
)
