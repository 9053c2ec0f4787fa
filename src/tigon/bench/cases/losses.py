"""Losses of given logits, and of two distributions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.bench import ranges
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
from tigon.bench.inputs import Draw, Expected, Inputs, Shape, chunks_of, expect_loss, expect_rows

# ------------------------------------------------------------------------------------------------------ cross_entropy


def _eager_cross_entropy(
    logits: Tensor, target: Tensor, softcap: float | None = None, label_smoothing: float = 0.0
) -> Tensor:
    return F.cross_entropy(_capped(_wide(logits), softcap), target, label_smoothing=label_smoothing)


def _torch_cross_entropy(
    logits: Tensor, target: Tensor, softcap: float | None = None, label_smoothing: float = 0.0
) -> Tensor:
    return F.cross_entropy(_capped(logits, softcap), target, label_smoothing=label_smoothing)


def _liger_cross_entropy(
    logits: Tensor, target: Tensor, softcap: float | None = None, label_smoothing: float = 0.0
) -> tuple[Any, ...]:
    return logits, target, None, -100, 0.0, label_smoothing, "mean", softcap, False


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _make_cross_entropy(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    draw = Draw(device, dtype)
    # Spread by 2: flatter logits leave a gradient that is all target, and a wrong softmax within the tolerance.
    logits = draw.normal(*shape, scale=2.0).requires_grad_()
    arguments = {"logits": logits, "target": draw.targets(shape[0], shape[1], ignored)}
    return Inputs(arguments, ("logits",), ("loss",), draw.loss_grads(shape[0]))


def _summed_cross_entropy(
    logits: Tensor, target: Tensor, softcap: float | None = None, label_smoothing: float = 0.0
) -> Tensor:
    return F.cross_entropy(_capped(logits, softcap), target, reduction="sum", label_smoothing=label_smoothing)


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
        return Inputs(arguments, ("input",), ("loss",), draw.loss_grads(shape[0]))

    return make


def _liger_tvd(input: Tensor, target: Tensor) -> tuple[Any, ...]:
    return input, target, None, "batchmean", -100


_DIVERGENCES: tuple[tuple[str, Callable[..., Tensor], bool, tuple[str, Callable[..., tuple[Any, ...]]]], ...] = (
    ("kl_div", _kl, False, ("LigerKLDivLossFunction", lambda input, target: (input, target, "batchmean", True, 1e-10))),
    ("jsd", _jsd, False, ("LigerJSDFunction", lambda input, target: (input, target, None, 0.5, -100, None, None))),
    ("tvd", _tvd, True, ("LigerTVDLossFunction", _liger_tvd)),
)


def _bytes_of_pairs(backward: int) -> Callable[[Shape, int], tuple[int, int]]:
    """Of two inputs forward, and of `backward` tensors of their size backward."""
    return lambda s, b: (2 * s[0] * s[1] * b, backward * s[0] * s[1] * b)


def _divergences() -> list[Op]:
    ops = []
    for name, formula, probabilities, (peer, arguments) in _DIVERGENCES:
        common: dict[str, Any] = {
            "shape_names": ("tokens", "vocabulary"),
            "shapes": ((8192, 128256),),
            "small": ((256, 4096),),
            "tiny": (8, 64),
        }
        given_logs = {"log_target": True} if name == "kl_div" else {}
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
                nbytes=_bytes_of_pairs(backward),
                counted=(f"two {given}", "target → dinput" if backward == 2 else f"two {given} → dinput"),
                drawn=ranges.logits,
                implementations={
                    "tigon": Implementation(tigon(name, reduction="batchmean", **given_logs)),
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
                drawn=ranges.logits,
                implementations={
                    "tigon": Implementation(tigon(name, reduction="batchmean", temperature=1.0)),
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


# ------------------------------------------------------------------------------------------------------------ logprob


def _eager_logprob(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logp = F.log_softmax(_wide(logits), dim=-1)
    return logp.gather(-1, target.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(-1)


def _make_logprob(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    draw, wide = Draw(device, dtype), Draw(device, torch.promote_types(dtype, torch.float32))
    logits = draw.normal(*shape, scale=2.0).requires_grad_()
    arguments = {"logits": logits, "target": draw.targets(shape[0], shape[1], 0.0)}
    grads = (wide.normal(shape[0]), wide.normal(shape[0], scale=0.1))
    return Inputs(arguments, ("logits",), ("logprob", "entropy"), grads)


def _expect_logprob(inputs: Inputs) -> Expected:
    """Ids stay ids: only the logits become fp64."""
    target = inputs.arguments["target"]
    wide = Inputs({"logits": inputs.arguments["logits"], "at": target.double()}, *_kept(inputs))
    return expect_rows(lambda logits, at: _eager_logprob(logits, at.long()), rowwise=("logits", "at"))(wide)


def _kept(inputs: Inputs) -> tuple[Any, Any, Any]:
    return inputs.wrt, inputs.outputs, inputs.grads


def _tigon_logprob() -> Callable[..., Any]:
    from tigon import logprob

    return lambda logits, target: tuple(logprob(logits, target)[:2])


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
        drawn=ranges.labelled_logits,
        implementations={
            "tigon": Implementation(tigon("cross_entropy")),
            **plain(_eager_cross_entropy),
            **torch_own(_torch_cross_entropy, "F.cross_entropy of the logits as they are"),
            "liger": Implementation(
                liger(
                    "LigerCrossEntropyFunction",
                    _liger_cross_entropy,
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
        name="logprob",
        shape_names=("tokens", "vocabulary"),
        shapes=((8192, 128256), (32768, 32000)),
        extra=((17, 128256), (4096, 128256)),
        small=((256, 4096),),
        tiny=(8, 64),
        make=_make_logprob,
        expect=_expect_logprob,
        nbytes=lambda s, b: (s[0] * s[1] * b + 8 * s[0], 2 * s[0] * s[1] * b + 8 * s[0]),
        counted=("logits, targets", "logits, targets → dlogits"),
        drawn=ranges.logits,
        implementations={"tigon": Implementation(lambda: _tigon_logprob()), **plain(_eager_logprob)},
    ),
)
