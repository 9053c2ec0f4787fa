"""Losses: of logits, of two distributions, and of hidden states and the head's weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.bench.cases.row import (
    OVERWRITES_INPUTS,
    Implementation,
    Loader,
    Op,
    liger,
    liger_ops,
    plain,
    quack,
    tigon,
    torch_own,
)
from tigon.bench.inputs import Draw, Expected, Inputs, Shape, chunks_of, expect_loss

# ------------------------------------------------------------------------------------------------------ cross_entropy


def _eager_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(_wide(logits), target)


def _torch_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _make_cross_entropy(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    draw = Draw(device, dtype)
    # Spread by 2: flatter logits leave a gradient that is all target, and a wrong softmax within the tolerance.
    logits = draw.normal(*shape, scale=2.0).requires_grad_()
    arguments = {"logits": logits, "target": draw.targets(shape[0], shape[1], ignored)}
    return Inputs(arguments, ("logits",), ("loss",), draw.loss_grads())


def _summed_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, reduction="sum")


def _load_quack_cross_entropy() -> Callable[..., Any]:
    from quack import cross_entropy

    return lambda logits, target: cross_entropy(logits, target, reduction="mean")


# -------------------------------------------------------------------------------- two distributions: kl_div, jsd, tvd


def _kl(input: Tensor, target: Tensor) -> Tensor:
    return F.kl_div(input, target, reduction="sum", log_target=True)


def _jsd(input: Tensor, target: Tensor) -> Tensor:
    """With β = ½, as trl's generalised knowledge distillation writes it."""
    mixture = torch.logsumexp(torch.stack([input - math.log(2), target - math.log(2)]), dim=0)
    return 0.5 * _kl(mixture, target) + 0.5 * _kl(mixture, input)


def _tvd(input: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (input - target).abs().sum()


def _of_logits(divergence: Callable[..., Tensor], probabilities: bool) -> Callable[..., Tensor]:
    normalise = F.softmax if probabilities else F.log_softmax

    def formula(input: Tensor, target: Tensor) -> Tensor:
        return divergence(normalise(input, dim=-1), normalise(target, dim=-1))

    return formula


def _eager_batchmean(divergence: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def eager(input: Tensor, target: Tensor) -> Tensor:
        return divergence(_wide(input), _wide(target)) / input.shape[0]

    return eager


def _make_pair(normalise: Callable[..., Tensor] | None) -> Callable[..., Inputs]:
    """A student that learned something of its teacher: independent ones leave no small difference to get wrong."""

    def make(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
        draw = Draw(device, dtype)
        target = draw.normal(*shape, scale=2.0)
        input = draw.normal(*shape).add_(target)
        if normalise is not None:
            for part in (input, target):
                for rows in chunks_of(*shape):
                    part[rows] = normalise(part[rows].float(), dim=-1).to(dtype)
        arguments = {"input": input.requires_grad_(), "target": target}
        return Inputs(arguments, ("input",), ("loss",), draw.loss_grads())

    return make


def _liger_tvd(input: Tensor, target: Tensor) -> tuple[Any, ...]:
    return input, target, None, "batchmean", -100


_DIVERGENCES: tuple[tuple[str, Callable[..., Tensor], bool, tuple[str, Callable[..., tuple[Any, ...]]]], ...] = (
    ("kl_div", _kl, False, ("LigerKLDivLossFunction", lambda input, target: (input, target, "batchmean", True, 1e-10))),
    ("jsd", _jsd, False, ("LigerJSDFunction", lambda input, target: (input, target, None, 0.5, -100, None, None))),
    ("tvd", _tvd, True, ("LigerTVDLossFunction", _liger_tvd)),
)


def _divergences() -> list[Op]:
    ops = []
    for name, formula, probabilities, (peer, arguments) in _DIVERGENCES:
        common: dict[str, Any] = {
            "shape_names": ("tokens", "vocabulary"),
            "shapes": ((8192, 128256),),
            "small": ((256, 4096),),
            "tiny": (8, 64),
        }
        given = "probabilities" if probabilities else "log-probabilities"
        # The gradient of KL(target ‖ input) by the input's log-probabilities is the target alone.
        backward = 2 if name == "kl_div" else 3
        ops.append(
            Op(
                name=name,
                **common,
                extra=((32768, 32000), (1, 32000), (17, 128256), (10**6, 256)),
                make=_make_pair(F.softmax if probabilities else F.log_softmax),
                expect=expect_loss(formula, ("input", "target"), lambda inputs: inputs.arguments["input"].shape[0]),
                nbytes=lambda s, b, backward=backward: (2 * s[0] * s[1] * b, backward * s[0] * s[1] * b),
                counted=(f"two {given}", "target → dinput" if backward == 2 else f"two {given} → dinput"),
                implementations={
                    "tigon": Implementation(tigon(name, reduction="batchmean")),
                    **plain(_eager_batchmean(formula)),
                    "liger": Implementation(liger(peer, arguments), gpu_only=True),
                },
            )
        )
        whole = _of_logits(formula, probabilities)
        ops.append(
            Op(
                name=f"{name}-logits",
                **common,
                extra=((32768, 32000),),
                make=_make_pair(None),
                expect=expect_loss(whole, ("input", "target"), lambda inputs: inputs.arguments["input"].shape[0]),
                nbytes=lambda s, b: (2 * s[0] * s[1] * b, 3 * s[0] * s[1] * b),
                counted=("both logits", "both logits → dinput"),
                implementations={
                    "tigon": Implementation(tigon(name, reduction="batchmean", logits=True)),
                    **plain(_eager_batchmean(whole)),
                    "liger": Implementation(
                        _load_liger_of_logits(peer, arguments, probabilities),
                        note=f"{'softmax' if probabilities else 'log_softmax'} by PyTorch, in fp32",
                        gpu_only=True,
                    ),
                },
            )
        )
    return ops


def _load_liger_of_logits(peer: str, arguments: Callable[..., tuple[Any, ...]], probabilities: bool) -> Loader:
    normalise = F.softmax if probabilities else F.log_softmax

    def load() -> Callable[..., Any]:
        apply = getattr(liger_ops(), peer).apply
        return lambda input, target: apply(
            *arguments(*(normalise(z, dim=-1, dtype=torch.float32) for z in (input, target)))
        )

    return load


# ----------------------------------------------------------------------------------------------- linear_cross_entropy


def _eager_linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, num_valid: int) -> Tensor:
    return _eager_cross_entropy(F.linear(x, weight), target)


def _make_linear_cross_entropy(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    n, h, v = shape
    draw = Draw(device, dtype)
    x, weight = draw.normal(n, h).requires_grad_(), draw.normal(v, h, scale=2 * h**-0.5).requires_grad_()
    target = draw.targets(n, v, ignored)
    # Known to the host in training too: labels are counted when they are first seen, long before the head runs.
    arguments = {"x": x, "weight": weight, "target": target, "num_valid": int((target != -100).sum())}
    return Inputs(arguments, ("x", "weight"), ("loss",), draw.loss_grads())


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
    lse = torch.cat([(x[rows].to(wide) @ ww.T).logsumexp(-1).double() for rows in chunks_of(n, v // 16)])
    picked = torch.cat([(x[r].double() * w[t[r]].double()).sum(-1) for r in chunks_of(n, 8 * w.shape[1])])
    loss = ((lse - picked) * valid).sum() / count
    scale = (valid.double() / count * inputs.loss_scale)[:, None]
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


def _tigon_linear_cross_entropy(compact: bool = False, **options: Any) -> Loader:
    def load() -> Callable[..., Any]:
        from tigon import linear_cross_entropy

        def run(x: Tensor, weight: Tensor, target: Tensor, num_valid: int) -> Tensor:
            return linear_cross_entropy(x, weight, target, num_valid=num_valid if compact else None, **options)

        return run

    return load


def _liger_linear_cross_entropy(accum_dtype: torch.dtype | None) -> Loader:
    def arguments(x: Tensor, weight: Tensor, target: Tensor, num_valid: int) -> tuple[Any, ...]:
        tail = (None, None, -100, 0.0, 0.0, "mean", None, False, accum_dtype)
        return (x, weight, target, *tail)

    return liger("LigerFusedLinearCrossEntropyFunction", arguments, lambda out: out[0])


def _load_cce() -> Callable[..., Any]:
    from cut_cross_entropy import linear_cross_entropy

    return lambda x, weight, target, num_valid: linear_cross_entropy(x, weight, target)


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


OPS = (
    Op(
        name="cross_entropy",
        shape_names=("tokens", "vocabulary"),
        shapes=((8192, 128256), (32768, 32000)),
        extra=((1, 128256), (17, 128256), (4096, 128256), (10**6, 256)),
        small=((256, 4096),),
        tiny=(8, 64),
        make=_make_cross_entropy,
        expect=expect_loss(
            _summed_cross_entropy, ("logits", "target"), lambda inputs: (inputs.arguments["target"] != -100).sum()
        ),
        nbytes=lambda s, b: (s[0] * s[1] * b + 8 * s[0], 2 * s[0] * s[1] * b + 8 * s[0]),
        counted=("logits, targets", "logits, targets → dlogits"),
        implementations={
            "tigon": Implementation(tigon("cross_entropy")),
            **plain(_eager_cross_entropy),
            **torch_own(_torch_cross_entropy, "F.cross_entropy of the logits as they are"),
            "liger": Implementation(
                liger(
                    "LigerCrossEntropyFunction",
                    lambda logits, target: (logits, target, None, -100, 0.0, 0.0, "mean", None, False),
                    lambda out: out[0],
                ),
                note=OVERWRITES_INPUTS,
                overwrites=True,
                gpu_only=True,
            ),
            **quack(_load_quack_cross_entropy),
        },
    ),
    *_divergences(),
    Op(
        name="linear_cross_entropy",
        shape_names=("tokens", "width", "vocabulary"),
        shapes=((8192, 4096, 128256), (32768, 4096, 128256), (16384, 2048, 151936), (32768, 2304, 256000)),
        extra=((4096, 2048, 32000),),
        small=((256, 64, 4096),),
        tiny=(8, 16, 64),
        make=_make_linear_cross_entropy,
        expect=expect_linear_cross_entropy,
        nbytes=lambda s, b: ((s[0] + s[2]) * s[1] * b + 8 * s[0], 2 * (s[0] + s[2]) * s[1] * b + 8 * s[0]),
        counted=("2·M·N·V FLOP", "4·M·N·V FLOP"),
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
            **plain(_eager_linear_cross_entropy),
            "liger": Implementation(
                _liger_linear_cross_entropy(None), note="dW accumulated in the weight's dtype", gpu_only=True
            ),
            "liger-fp32": Implementation(
                _liger_linear_cross_entropy(torch.float32), note="dW accumulated in fp32", gpu_only=True
            ),
            "cce": Implementation(_load_cce, note="filters small gradients by default", gpu_only=True),
            **quack(_load_quack_linear_cross_entropy),
        },
    ),
)
