"""What `tigon bench` measures: one row per operator in OPS.

A row knows how to draw random inputs, how many bytes and FLOPs the operator needs at least, what the right answer is in
fp64, and who implements it. Peers are imported when they are first asked for; one that is missing becomes a line in the
report, not an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.bench.inputs import (
    Expected,
    Inputs,
    Shape,
    expect_cross_entropy,
    expect_linear_cross_entropy,
    expect_rows,
    make_cross_entropy,
    make_gated,
    make_gated_linear,
    make_linear_cross_entropy,
    make_rms_norm,
    make_rope,
)

Loader = Callable[[], Callable[..., Any]]


@dataclass(frozen=True)
class Implementation:
    load: Loader
    note: str = ""
    # It writes into its inputs or into the incoming gradient: it gets a private copy, renewed before each round.
    overwrites: bool = False
    # Measured only when it is named in --peers.
    on_request: bool = False
    gpu_only: bool = False


@dataclass(frozen=True)
class Op:
    """One operator.

    shape_names: what the numbers of a shape mean.
    shapes: of real models, for a GPU.  small: for a CPU and for --quick.
    make(shape, dtype, device, ignored): random inputs; `ignored` is the fraction of targets that are -100.
    expect(inputs): the right answer in fp64.
    nbytes(shape, itemsize): fewest bytes moved by the (forward, backward).
    flops(shape): of the (forward, backward), where arithmetic is the floor; None where memory is.
    floor(inputs): closures timed in the same run, whose sum is the floor; None: nbytes at the copy bandwidth.
    """

    name: str
    shape_names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    small: tuple[Shape, ...]
    make: Callable[[Shape, torch.dtype, torch.device, float], Inputs]
    expect: Callable[[Inputs], Expected]
    nbytes: Callable[[Shape, int], tuple[int, int]]
    implementations: dict[str, Implementation]
    flops: Callable[[Shape], tuple[int, int]] | None = None
    floor: Callable[[Inputs], list[Callable[[], Any]]] | None = None


# ------------------------------------------------------------------------------------------- eager: what models write


def _eager_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    x32 = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _eager_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _eager_geglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def _eager_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def rotate_half(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def _eager_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target)


def _eager_linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, num_valid: int) -> Tensor:
    return _eager_cross_entropy(F.linear(x, weight), target)


# ------------------------------------------------------------------------------------------------- implementations


def _plain(eager: Callable[..., Any]) -> dict[str, Implementation]:
    return {"eager": Implementation(lambda: eager), "compile": Implementation(lambda: torch.compile(eager))}


def _tigon(name: str, **options: Any) -> Loader:
    def load() -> Callable[..., Any]:
        import tigon

        op = getattr(tigon, name)
        return lambda **kwargs: op(**kwargs, **options)

    return load


def _load_gated_linear() -> Callable[..., Any]:
    from tigon.ops.gated_linear import gated_linear

    return gated_linear


def _eager_gated_linear(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    return F.linear(F.silu(gate) * up, weight)


def _load_liger_gated_linear() -> Callable[..., Any]:
    product = _liger("LigerSiLUMulFunction", lambda gate, up: (gate, up))()
    return lambda gate, up, weight: F.linear(product(gate=gate, up=up), weight)


def _gated_linear_gemms(inputs: Inputs) -> list[Callable[[], Any]]:
    """Products of y, of the inner gradient and of dW by cuBLAS. gate stands in for act(gate) · up: as large."""
    (dy,) = inputs.grads or ()
    product, w = inputs.arguments["gate"].detach(), inputs.arguments["weight"].detach()
    y, scratch, dw = torch.empty_like(dy), torch.empty_like(product), torch.empty_like(w)
    return [
        lambda: torch.mm(product, w.T, out=y),
        lambda: torch.mm(dy, w, out=scratch),
        lambda: torch.mm(dy.T, product, out=dw),
    ]


def _tigon_linear_cross_entropy(compact: bool = False, **options: Any) -> Loader:
    def load() -> Callable[..., Any]:
        from tigon import linear_cross_entropy

        def run(x: Tensor, weight: Tensor, target: Tensor, num_valid: int) -> Tensor:
            return linear_cross_entropy(x, weight, target, num_valid=num_valid if compact else None, **options)

        return run

    return load


def _liger(
    function: str, arguments: Callable[..., tuple[Any, ...]], pick: Callable[[Any], Any] = lambda out: out
) -> Loader:
    """A Liger autograd function with the positional arguments that its own modules pass by default."""

    def load() -> Callable[..., Any]:
        import liger_kernel.ops

        apply = getattr(liger_kernel.ops, function).apply
        return lambda **kwargs: pick(apply(*arguments(**kwargs)))

    return load


def _liger_linear_cross_entropy(accum_dtype: torch.dtype | None) -> Loader:
    def arguments(x: Tensor, weight: Tensor, target: Tensor, num_valid: int) -> tuple[Any, ...]:
        tail = (None, None, -100, 0.0, 0.0, "mean", None, False, accum_dtype)
        return (x, weight, target, *tail)

    return _liger("LigerFusedLinearCrossEntropyFunction", arguments, lambda out: out[0])


def _load_cce() -> Callable[..., Any]:
    from cut_cross_entropy import linear_cross_entropy

    return lambda x, weight, target, num_valid: linear_cross_entropy(x, weight, target)


def _load_quack_rms_norm() -> Callable[..., Any]:
    from quack import rmsnorm

    return lambda x, weight: rmsnorm(x, weight, eps=1e-6)


def _load_quack_cross_entropy() -> Callable[..., Any]:
    from quack import cross_entropy

    return lambda logits, target: cross_entropy(logits, target, reduction="mean")


def _load_quack_linear_cross_entropy() -> Callable[..., Any]:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda x, weight, target, num_valid: chunked_linear_cross_entropy(x, weight, target, reduction="mean")


def _three_gemms(inputs: Inputs) -> list[Callable[[], Any]]:
    """Whole-batch cuBLAS products: logits, dX, dW. The logits stand in for their gradient: same size, as random."""
    x, w = inputs.arguments["x"].detach(), inputs.arguments["weight"].detach()
    logits = torch.mm(x, w.T)
    dx, dw = torch.empty_like(x), torch.empty_like(w)
    return [
        lambda: torch.mm(x, w.T, out=logits),
        lambda: torch.mm(logits, w, out=dx),
        lambda: torch.mm(logits.T, x, out=dw),
    ]


_OVERWRITES_DY = "writes dx over the incoming gradient"
_OVERWRITES_INPUTS = "overwrites its inputs; they are renewed before each round"

# Bytes: each input read once and each output written once, in the forward and in the backward.
OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op(
            name="rms_norm",
            shape_names=("rows", "width"),
            shapes=((32768, 4096), (16384, 8192), (8192, 16384), (262144, 128), (8192, 4096)),
            small=((256, 1024), (2048, 128)),
            make=make_rms_norm,
            expect=expect_rows(_eager_rms_norm, rowwise=("x",), summed=("weight",)),
            # forward: x, weight → y.  backward: dy, x, weight → dx, dweight.
            nbytes=lambda s, b: ((2 * s[0] * s[1] + s[1]) * b, (3 * s[0] * s[1] + 2 * s[1]) * b),
            implementations={
                "tigon": Implementation(_tigon("rms_norm", eps=1e-6)),
                **_plain(_eager_rms_norm),
                "liger": Implementation(
                    _liger("LigerRMSNormFunction", lambda x, weight: (x, weight, 1e-6, 0.0, "llama", True, None)),
                    note=_OVERWRITES_DY,
                    overwrites=True,
                    gpu_only=True,
                ),
                "quack": Implementation(_load_quack_rms_norm, on_request=True, gpu_only=True),
            },
        ),
        *(
            Op(
                name=name,
                shape_names=("rows", "width"),
                shapes=((16384, 14336),),
                small=((256, 1024),),
                make=make_gated,
                expect=expect_rows(eager, rowwise=("gate", "up")),
                # forward: gate, up → y.  backward: dy, gate, up → dgate, dup.
                nbytes=lambda s, b: (3 * s[0] * s[1] * b, 5 * s[0] * s[1] * b),
                implementations={
                    "tigon": Implementation(_tigon(name)),
                    **_plain(eager),
                    "liger": Implementation(
                        _liger(liger, lambda gate, up: (gate, up)),
                        note=_OVERWRITES_INPUTS,
                        overwrites=True,
                        gpu_only=True,
                    ),
                },
            )
            for name, eager, liger in (
                ("swiglu", _eager_swiglu, "LigerSiLUMulFunction"),
                ("geglu", _eager_geglu, "LigerGELUMulFunction"),
            )
        ),
        Op(
            name="gated_linear",
            shape_names=("rows", "width", "out"),
            shapes=((16384, 14336, 4096),),
            small=((256, 512, 128),),
            make=make_gated_linear,
            expect=expect_rows(_eager_gated_linear, rowwise=("gate", "up"), summed=("weight",)),
            # forward: gate, up, W → y.  backward: dy, gate, up, W → dgate, dup, dW.
            nbytes=lambda s, b: (
                (2 * s[0] * s[1] + s[1] * s[2] + s[0] * s[2]) * b,
                (4 * s[0] * s[1] + 2 * s[1] * s[2] + s[0] * s[2]) * b,
            ),
            flops=lambda s: (2 * math.prod(s), 4 * math.prod(s)),
            floor=_gated_linear_gemms,
            implementations={
                "tigon": Implementation(_load_gated_linear, note="the product is not kept"),
                **_plain(_eager_gated_linear),
                "liger": Implementation(
                    _load_liger_gated_linear, note=_OVERWRITES_INPUTS, overwrites=True, gpu_only=True
                ),
            },
        ),
        Op(
            name="rope",
            shape_names=("batch", "tokens", "query heads", "key heads", "head width"),
            shapes=((4, 4096, 32, 8, 128),),
            small=((2, 128, 4, 2, 64),),
            make=make_rope,
            expect=expect_rows(_eager_rope, rowwise=("q", "k")),
            # forward: q, k, cos, sin → q, k.  backward the same.
            nbytes=lambda s, b: (2 * (s[0] * s[1] * (s[2] + s[3]) * s[4] + s[1] * s[4]) * b,) * 2,
            implementations={
                "tigon": Implementation(_tigon("rope")),
                **_plain(_eager_rope),
                "liger": Implementation(
                    _liger("LigerRopeFunction", lambda q, k, cos, sin: (q, k, cos, sin)),
                    note=_OVERWRITES_INPUTS,
                    overwrites=True,
                    gpu_only=True,
                ),
            },
        ),
        Op(
            name="cross_entropy",
            shape_names=("tokens", "vocabulary"),
            shapes=((8192, 128256), (32768, 32000)),
            small=((256, 4096),),
            make=make_cross_entropy,
            expect=expect_cross_entropy,
            # forward: logits, targets.  backward: logits, targets → dlogits.
            nbytes=lambda s, b: (s[0] * s[1] * b + 8 * s[0], 2 * s[0] * s[1] * b + 8 * s[0]),
            implementations={
                "tigon": Implementation(_tigon("cross_entropy")),
                **_plain(_eager_cross_entropy),
                "liger": Implementation(
                    _liger(
                        "LigerCrossEntropyFunction",
                        lambda logits, target: (logits, target, None, -100, 0.0, 0.0, "mean", None, False),
                        lambda out: out[0],
                    ),
                    note=_OVERWRITES_INPUTS,
                    overwrites=True,
                    gpu_only=True,
                ),
                "quack": Implementation(_load_quack_cross_entropy, on_request=True, gpu_only=True),
            },
        ),
        Op(
            name="linear_cross_entropy",
            shape_names=("tokens", "width", "vocabulary"),
            shapes=((8192, 4096, 128256), (32768, 4096, 128256), (16384, 2048, 151936), (32768, 2304, 256000)),
            small=((256, 64, 4096),),
            make=make_linear_cross_entropy,
            expect=expect_linear_cross_entropy,
            # forward: x, W, targets.  backward: x, W, targets → dx, dW.
            nbytes=lambda s, b: ((s[0] + s[2]) * s[1] * b + 8 * s[0], 2 * (s[0] + s[2]) * s[1] * b + 8 * s[0]),
            flops=lambda s: (2 * math.prod(s), 4 * math.prod(s)),
            floor=_three_gemms,
            implementations={
                "tigon": Implementation(_tigon_linear_cross_entropy(), note="dW accumulated in fp32"),
                "tigon-weight": Implementation(
                    _tigon_linear_cross_entropy(accumulate="weight"), note="dW accumulated in the weight's dtype"
                ),
                "tigon-compact": Implementation(
                    _tigon_linear_cross_entropy(compact=True), note="ignored rows left out", on_request=True
                ),
                **_plain(_eager_linear_cross_entropy),
                "liger": Implementation(
                    _liger_linear_cross_entropy(None), note="dW accumulated in the weight's dtype", gpu_only=True
                ),
                "liger-fp32": Implementation(
                    _liger_linear_cross_entropy(torch.float32), note="dW accumulated in fp32", gpu_only=True
                ),
                "cce": Implementation(_load_cce, note="filters small gradients by default", gpu_only=True),
                "quack": Implementation(_load_quack_linear_cross_entropy, on_request=True, gpu_only=True),
            },
        ),
    )
}
