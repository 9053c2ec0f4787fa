"""Losses of given logits, and of two distributions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cases.inputs import Draw, Expected, Inputs, Shape, expect_loss, expect_rows, split_rows
from cases.row import (
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
from tigon import logprob

# ------------------------------------------------------------------------------------------------------ cross_entropy


def _eager_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(_widen(logits), target)


def _liger_cross_entropy(logits: Tensor, target: Tensor) -> tuple[Any, ...]:
    return logits, target, None, -100, 0.0, 0.0, "mean", None, False


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _make_cross_entropy(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    draw = Draw(device, dtype)
    # Spread by 2: flatter logits leave a gradient that is all target, and a wrong softmax within the tolerance.
    logits = draw.normal(*shape, scale=2.0).requires_grad_()
    arguments = {"logits": logits, "target": draw.targets(shape[0], shape[1], ignored)}
    return Inputs(arguments, ("logits",), ("loss",), draw.loss_grads(shape[0]))


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


def _apply_to_logits(divergence: Callable[..., Tensor], probabilities: bool) -> Callable[..., Tensor]:
    normalise = F.softmax if probabilities else F.log_softmax

    def formula(input: Tensor, target: Tensor) -> Tensor:
        return divergence(normalise(input, dim=-1), normalise(target, dim=-1))

    return formula


def _eager_batchmean(divergence: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def eager(input: Tensor, target: Tensor) -> Tensor:
        return divergence(_widen(input), _widen(target)) / input.shape[0]

    return eager


def _make_pair(normalise: Callable[..., Tensor] | None) -> Callable[..., Inputs]:
    """A student that learned something of its teacher: independent ones leave no small difference to get wrong."""

    def make(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
        draw = Draw(device, dtype)
        target = draw.normal(*shape, scale=2.0)
        input = draw.normal(*shape).add_(target)
        if normalise is not None:
            for part in (input, target):
                for rows in split_rows(*shape):
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


def _count_pair_bytes(backward: int) -> Callable[[Shape, int], tuple[int, int]]:
    """Of two inputs forward, and of `backward` tensors of their size backward."""
    return lambda s, b: (2 * s[0] * s[1] * b, backward * s[0] * s[1] * b)


def _make_divergences() -> list[Op]:
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
                nbytes=_count_pair_bytes(backward),
                counted=(f"two {given}", "target → dinput" if backward == 2 else f"two {given} → dinput"),
                implementations={
                    "tigon": Implementation(tigon(name, reduction="batchmean", **given_logs)),
                    **plain(_eager_batchmean(formula)),
                    "liger": Implementation(liger(peer, arguments), gpu_only=True),
                },
            )
        )
        whole = _apply_to_logits(formula, probabilities)
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
    logp = F.log_softmax(_widen(logits), dim=-1)
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
    arguments = {"logits": inputs.arguments["logits"], "ids": target.double()}
    wide = replace(inputs, arguments=arguments)
    return expect_rows(lambda logits, ids: _eager_logprob(logits, ids.long()), rowwise=("logits", "ids"))(wide)


OPS = (
    Op(
        name="cross_entropy",
        shape_names=("tokens", "vocabulary"),
        shapes=((8192, 128256), (32768, 32000)),
        extra=((1, 128256), (17, 128256), (4096, 128256), (10**6, 256)),
        small=((256, 4096),),
        make=_make_cross_entropy,
        expect=expect_loss(
            lambda logits, target: F.cross_entropy(logits, target, reduction="sum"),
            ("logits", "target"),
            lambda inputs: (inputs.arguments["target"] != -100).sum(),
        ),
        nbytes=lambda s, b: (s[0] * s[1] * b + 8 * s[0], 2 * s[0] * s[1] * b + 8 * s[0]),
        counted=("logits, targets", "logits, targets → dlogits"),
        implementations={
            "tigon": Implementation(tigon("cross_entropy")),
            **plain(_eager_cross_entropy),
            **torch_own(
                lambda logits, target: F.cross_entropy(logits, target), "F.cross_entropy of the logits as they are"
            ),
            "liger": Implementation(
                liger("LigerCrossEntropyFunction", _liger_cross_entropy, lambda out: out[0]),
                note=OVERWRITES_INPUTS,
                overwrites=True,
                gpu_only=True,
            ),
            **quack(_load_quack_cross_entropy),
        },
    ),
    *_make_divergences(),
    Op(
        name="logprob",
        shape_names=("tokens", "vocabulary"),
        shapes=((8192, 128256), (32768, 32000)),
        extra=((17, 128256), (4096, 128256)),
        small=((256, 4096),),
        make=_make_logprob,
        expect=_expect_logprob,
        nbytes=lambda s, b: (s[0] * s[1] * b + 8 * s[0], 2 * s[0] * s[1] * b + 8 * s[0]),
        counted=("logits, targets", "logits, targets → dlogits"),
        implementations={
            "tigon": Implementation(lambda: lambda logits, target: tuple(logprob(logits, target)[:2])),
            **plain(_eager_logprob),
        },
    ),
)
