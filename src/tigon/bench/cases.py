"""What `tigon bench` measures: one row per operator in OPS.

A row knows how to draw random inputs, how many bytes and FLOPs the operator needs at least, what the right answer is in
fp64, and who implements it. Peers are imported when they are first asked for; one that is missing becomes a line in the
report, not an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Shape = tuple[int, ...]
# The compared part of an output or gradient and its fp64 value: (index, expected).
Expected = dict[str, list[tuple[Any, Tensor]]]
Loader = Callable[[], Callable[..., Any]]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
# ‖out − ref‖ / ‖ref‖ beyond which a result counts as wrong: a few roundings of the dtype (fp32 lets tf32 through).
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-3, torch.float64: 1e-9}
# Elements that the fp64 reference holds at a time.
REFERENCE_ELEMENTS = 1 << 24


@dataclass
class Inputs:
    """Arguments of one case by name, which of them get gradients, and the upstream gradients (None: a scalar loss)."""

    arguments: dict[str, Any]
    wrt: tuple[str, ...]
    outputs: tuple[str, ...]
    grads: tuple[Tensor, ...] | None = None

    def clone(self) -> Inputs:
        """The same values and strides in fresh memory, for implementations that overwrite what they are given."""
        arguments = {
            k: _clone(v).requires_grad_(k in self.wrt) if isinstance(v, Tensor) else v
            for k, v in self.arguments.items()
        }
        grads = None if self.grads is None else tuple(_clone(g) for g in self.grads)
        return Inputs(arguments, self.wrt, self.outputs, grads)


def _clone(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t.detach())


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


@dataclass
class _Draw:
    """Random tensors from one seed. Never zeros: they can run faster than data will, and hide unwritten outputs."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(0)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        t = torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)
        return t if scale == 1.0 else t.mul_(scale)

    def targets(self, n: int, v: int, ignored: float) -> Tensor:
        target = torch.randint(v, (n,), generator=self.generator, device=self.device)
        if ignored:
            target[torch.randperm(n, generator=self.generator, device=self.device)[: int(n * ignored)]] = -100
        return target


# ------------------------------------------------------------------------------------------------------------ inputs


def _make_rms_norm(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    draw = _Draw(device, dtype)
    x = draw.normal(*shape).requires_grad_()
    # Near one: a peer that writes dx over dy multiplies by the weight at every repeat, and must not overflow.
    weight = (1 + draw.normal(shape[-1], scale=0.02)).requires_grad_()
    return Inputs({"x": x, "weight": weight}, ("x", "weight"), ("y",), (draw.normal(*shape),))


def _make_gated(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    draw = _Draw(device, dtype)
    gate, up = draw.normal(*shape).requires_grad_(), draw.normal(*shape).requires_grad_()
    return Inputs({"gate": gate, "up": up}, ("gate", "up"), ("y",), (draw.normal(*shape),))


def _make_rope(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    b, t, hq, hk, d = shape
    draw = _Draw(device, dtype)

    def heads(h: int) -> Tensor:  # as the projection leaves them: (B, T, H, D) in memory, seen as (B, H, T, D)
        return draw.normal(b, t, h, d).transpose(1, 2)

    inv_freq = 10000.0 ** (-torch.arange(0, d, 2, device=device, dtype=torch.float32) / d)
    angles = torch.outer(torch.arange(t, device=device, dtype=torch.float32), inv_freq).repeat(1, 2)[None]
    arguments = {
        "q": heads(hq).requires_grad_(),
        "k": heads(hk).requires_grad_(),
        "cos": angles.cos().to(dtype),
        "sin": angles.sin().to(dtype),
    }
    return Inputs(arguments, ("q", "k"), ("q_out", "k_out"), (heads(hq), heads(hk)))


def _make_cross_entropy(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    draw = _Draw(device, dtype)
    # Spread by 2: flatter logits leave a gradient that is all target, and a wrong softmax within the tolerance.
    logits = draw.normal(*shape, scale=2.0).requires_grad_()
    return Inputs({"logits": logits, "target": draw.targets(shape[0], shape[1], ignored)}, ("logits",), ("loss",))


def _make_linear_cross_entropy(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    n, h, v = shape
    draw = _Draw(device, dtype)
    x, weight = draw.normal(n, h).requires_grad_(), draw.normal(v, h, scale=2 * h**-0.5).requires_grad_()
    target = draw.targets(n, v, ignored)
    # Known to the host in training too: labels are counted when they are first seen, long before the head runs.
    arguments = {"x": x, "weight": weight, "target": target, "num_valid": int((target != -100).sum())}
    return Inputs(arguments, ("x", "weight"), ("loss",))


# -------------------------------------------------------------------------------------------------------- references


def _chunks(rows: int, row_elements: int) -> Iterator[slice]:
    step = max(1, REFERENCE_ELEMENTS // max(1, row_elements))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _expect_rows(formula: Callable[..., Any], rowwise: tuple[str, ...], summed: tuple[str, ...] = ()) -> Any:
    """Expected values of an operator that works row by row (along the first dimension), by autograd in fp64.

    The first and the last chunk of rows are compared: offsets beyond 2³¹ go wrong in the last. Gradients in `summed`
    add over all rows.
    """

    def expect(inputs: Inputs) -> Expected:
        assert inputs.grads is not None
        first = inputs.arguments[rowwise[0]]
        chunks = list(_chunks(first.shape[0], first[0].numel()))
        compared = [chunks[0]] if len(chunks) == 1 else [chunks[0], chunks[-1]]
        expected: Expected = {}
        totals: dict[str, Tensor] = {}
        for rows in chunks if summed else compared:
            part = {
                k: v.detach()[rows if k in rowwise else ...].double().requires_grad_(k in inputs.wrt)
                for k, v in inputs.arguments.items()
            }
            out = formula(**part)
            outs = out if isinstance(out, tuple) else (out,)
            grads = torch.autograd.grad(outs, [part[k] for k in inputs.wrt], [g[rows].double() for g in inputs.grads])
            for k, g in zip(inputs.wrt, grads, strict=True):
                if k in summed:
                    totals[k] = totals[k] + g if k in totals else g
                elif rows in compared:
                    expected.setdefault(f"d{k}", []).append((rows, g))
            if rows in compared:
                for name, o in zip(inputs.outputs, outs, strict=True):
                    expected.setdefault(name, []).append((rows, o.detach()))
        return expected | {f"d{k}": [(..., total)] for k, total in totals.items()}

    return expect


def _expect_cross_entropy(inputs: Inputs) -> Expected:
    logits, target = inputs.arguments["logits"].detach(), inputs.arguments["target"]
    valid = target != -100
    count = valid.sum()
    chunks = list(_chunks(*logits.shape))
    compared = [chunks[0]] if len(chunks) == 1 else [chunks[0], chunks[-1]]
    total, dlogits = torch.zeros((), dtype=torch.float64, device=logits.device), []
    for rows in chunks:
        x, t, ok = logits[rows].double(), target[rows].clamp_min(0)[:, None], valid[rows]
        lse = x.logsumexp(-1)
        total += ((lse - x.gather(1, t)[:, 0]) * ok).sum()
        if rows in compared:
            p = (x - lse[:, None]).exp()
            p.scatter_add_(1, t, -torch.ones_like(p[:, :1]))
            dlogits.append((rows, p * (ok.double() / count)[:, None]))
    return {"loss": [(..., total / count)], "dlogits": dlogits}


def _expect_linear_cross_entropy(inputs: Inputs) -> Expected:
    """The loss of all rows, dx of some rows, dW of some rows of W: everything at once in fp64 would not fit.

    For 16-bit inputs the log-sum-exp of every row comes from fp32 products, a thousand times finer than their rounding.
    """
    x, w, target = (inputs.arguments[k].detach() for k in ("x", "weight", "target"))
    (n, _), v = x.shape, w.shape[0]
    valid = target != -100
    count, t = valid.sum(), target.clamp_min(0)
    wide = torch.float64 if x.dtype.itemsize > 2 else torch.float32
    ww = w.to(wide)
    lse = torch.cat([(x[rows].to(wide) @ ww.T).logsumexp(-1).double() for rows in _chunks(n, v // 16)])
    picked = torch.cat([(x[r].double() * w[t[r]].double()).sum(-1) for r in _chunks(n, 8 * w.shape[1])])
    loss = ((lse - picked) * valid).sum() / count
    scale = (valid.double() / count)[:, None]
    tail = {"x": slice(max(0, n - 32), n), "w": slice(max(0, v - 32), v)}
    dx, dw = [], []
    w64 = w.double()
    for rows in (slice(0, min(32, n)), tail["x"]):
        p = (x[rows].double() @ w64.T - lse[rows, None]).exp()
        p.scatter_add_(1, t[rows, None], -torch.ones_like(p[:, :1]))
        dx.append((rows, (p * scale[rows]) @ w64))
    del w64, ww
    x64 = x.double()
    for cols in (slice(0, min(32, v)), tail["w"]):
        p = (x64 @ w[cols].double().T - lse[:, None]).exp()
        p -= (t[:, None] == torch.arange(v, device=x.device)[None, cols]).double()
        dw.append((cols, (p * scale).T @ x64))
    return {"loss": [(..., loss)], "dx": dx, "dweight": dw}


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
            make=_make_rms_norm,
            expect=_expect_rows(_eager_rms_norm, rowwise=("x",), summed=("weight",)),
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
                make=_make_gated,
                expect=_expect_rows(eager, rowwise=("gate", "up")),
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
            name="rope",
            shape_names=("batch", "tokens", "query heads", "key heads", "head width"),
            shapes=((4, 4096, 32, 8, 128),),
            small=((2, 128, 4, 2, 64),),
            make=_make_rope,
            expect=_expect_rows(_eager_rope, rowwise=("q", "k")),
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
            make=_make_cross_entropy,
            expect=_expect_cross_entropy,
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
            make=_make_linear_cross_entropy,
            expect=_expect_linear_cross_entropy,
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
