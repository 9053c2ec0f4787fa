"""What goes into a benchmark case, and what must come out: random inputs from one seed, and the answer in fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]
# The compared part of an output or gradient and its fp64 value: (index, expected).
Expected = dict[str, list[tuple[Any, Tensor]]]

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


def make_rms_norm(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    draw = _Draw(device, dtype)
    x = draw.normal(*shape).requires_grad_()
    # Near one: a peer that writes dx over dy multiplies by the weight at every repeat, and must not overflow.
    weight = (1 + draw.normal(shape[-1], scale=0.02)).requires_grad_()
    return Inputs({"x": x, "weight": weight}, ("x", "weight"), ("y",), (draw.normal(*shape),))


def make_gated(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    draw = _Draw(device, dtype)
    gate, up = draw.normal(*shape).requires_grad_(), draw.normal(*shape).requires_grad_()
    return Inputs({"gate": gate, "up": up}, ("gate", "up"), ("y",), (draw.normal(*shape),))


def make_gated_linear(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    rows, width, out = shape
    draw = _Draw(device, dtype)
    gate, up = draw.normal(rows, width).requires_grad_(), draw.normal(rows, width).requires_grad_()
    weight = draw.normal(out, width, scale=width**-0.5).requires_grad_()
    arguments = {"gate": gate, "up": up, "weight": weight}
    return Inputs(arguments, ("gate", "up", "weight"), ("y",), (draw.normal(rows, out),))


def make_rope(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
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


def make_cross_entropy(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    draw = _Draw(device, dtype)
    # Spread by 2: flatter logits leave a gradient that is all target, and a wrong softmax within the tolerance.
    logits = draw.normal(*shape, scale=2.0).requires_grad_()
    return Inputs({"logits": logits, "target": draw.targets(shape[0], shape[1], ignored)}, ("logits",), ("loss",))


def make_linear_cross_entropy(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
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


def expect_rows(formula: Callable[..., Any], rowwise: tuple[str, ...], summed: tuple[str, ...] = ()) -> Any:
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


def expect_cross_entropy(inputs: Inputs) -> Expected:
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


def expect_linear_cross_entropy(inputs: Inputs) -> Expected:
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
