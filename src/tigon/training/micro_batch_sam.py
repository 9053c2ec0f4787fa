"""Micro-batch sharpness-aware minimization (mSAM): flat minima, by gradients taken where each shard's loss is high.

    e_j = rho · g_j / ‖g_j‖,  g_j = ∇L_j(p)            j = 1 … m, over the disjoint shards of a batch
    p.grad = Σ_j ∇L_j(p + e_j) / m                     and then the step of any optimizer

m = 1 is SAM. Adaptive (ASAM): e_j = rho · s² g_j / ‖s g_j‖ with s = |p| + eta, element by element.

Source: Behdin et al. 2023, https://arxiv.org/abs/2302.09693 and https://arxiv.org/abs/2212.04343; SAM: Foret et al.
2020, https://arxiv.org/abs/2010.01412; adaptive: Kwon et al. 2021, https://arxiv.org/abs/2102.11600
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tigon.training.passes import two_passes

Closure = Callable[[], Tensor]


class MicroBatchSAM(Optimizer):
    """Two passes over each shard of a batch, then a step of the wrapped optimizer.

    Args:
        optimizer: any torch optimizer, already constructed. Groups, state and checkpoints are shared with it.
        model: the model as the loss calls it: wrapped in DistributedDataParallel, or sharded by `fully_shard`. The
            wrapper determines a rank's shard (see below), and running statistics are updated by the first pass alone.
            None: the model has neither wrappers nor statistics.
        rho: the perturbation's length, in units of the weights; dimensionless if adaptive. At least 0. Stored per group
            as "sam_rho", which may differ between groups: 0 leaves a group's parameters in place.
        adaptive: measure steps in units of each weight's size.
        eta: added to that size.
        backward: called with the loss in place of `loss.backward()`: `accelerator.backward`, or
            `lambda loss: scaler.scale(loss).backward()`. A factor on the loss does not change the perturbation.
    Raises: TypeError if optimizer is not an Optimizer, for LBFGS, or for a model sharded by FSDP1; ValueError for a rho
        or an eta that is negative or not finite.

        sam = MicroBatchSAM(torch.optim.AdamW(model.parameters(), lr=1e-3), model, rho=0.05)
        for shard in batch.chunk(4):
            sam.accumulate(lambda: loss_of(model, shard), weight=1 / 4)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        sam.step()
        sam.zero_grad()

    **A shard** is, on one device, the batch in one `accumulate` call. Under DistributedDataParallel each rank has its
    own shard, so that m is the rank count times the calls per rank, and gradients are reduced once, in the second pass.
    Under `fully_shard` a shard is the data seen by the ranks that hold one copy of the weights: all ranks on a 1-d
    mesh, a replica group on a 2-d mesh.

    **Both passes use the same** random numbers from torch, on the host and on the parameters' devices. Numbers from
    other sources (numpy, a Generator) are drawn twice.

    **Exact**: after `accumulate` the weights have their previous bits, also where it raised. They are kept in the
    memory of the first pass's gradient; that is one buffer of the parameters' size more than the optimizer takes.

    Where a gradient overflows, nothing is perturbed, the second pass overflows as well, and GradScaler skips the step.
    In bf16 or fp16 parameters a perturbation below half a unit in the last place is rounded away: keep fp32 weights,
    with autocast or FSDP2's mixed precision.
    """

    def __init__(
        self, optimizer: Optimizer, model: nn.Module | None = None, *, rho: float = 0.05, adaptive: bool = False,
        eta: float = 0.0, backward: Callable[[Tensor], Any] | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError(
                "MicroBatchSAM: optimizer must be a torch.optim.Optimizer that steps along p.grad, got "
                f"{type(optimizer).__name__}."
            )
        refuse_fsdp1(model)
        self.optimizer, self.model = optimizer, model
        self.rho, self.adaptive, self.eta = check_finite("rho", rho), adaptive, check_finite("eta", eta)
        self.backward = backward or Tensor.backward
        for group in optimizer.param_groups:
            group.setdefault("sam_rho", self.rho)
        # Optimizer.__init__ would create its own groups and state. __setstate__, which unpickling calls, creates only
        # the hooks.
        self.__setstate__({})

    def accumulate(self, closure: Closure, *, weight: float | Tensor = 1.0) -> Tensor:
        """Add a shard's gradient, at its perturbed weights, to p.grad.

        Args:
            closure: () → the shard's loss, a scalar with its graph; called twice. Must not call backward, nor fetch
                other data the second time.
            weight: this loss's weight in the batch's loss: 1 / m, or the shard's token share. Keep 1 if your closure
                divides.
        Returns: (), the loss before the perturbation, detached, without weight.
        Raises: ValueError if closure returns no scalar with a graph, or if two parameters share memory; RuntimeError if
            none of the optimizer's parameters gets a gradient; TypeError for sparse gradients.
        """

        def run() -> Tensor:
            with torch.enable_grad():
                loss = closure()
                if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                    raise ValueError(
                        "MicroBatchSAM.accumulate: closure must return the loss, a scalar tensor that requires grad, "
                        f"got {_describe(loss)}."
                    )
                self.backward(loss * weight)
            return loss.detach()

        params, rho = self._parameters()
        return two_passes(run, params, rho, self.model, adaptive=self.adaptive, eta=self.eta)

    def step(self, closure: Closure | Sequence[Closure] | None = None) -> Tensor | None:  # type: ignore[override]
        """Step along p.grad; with n closures, after accumulating each with weight 1 / n.

        Args:
            closure: a closure for each shard, as in `accumulate`; a single closure is SAM. None: you have filled p.grad
                already.
        Returns: (), the mean of the closures' losses, or None without closures.
        """
        losses = []
        closures = () if closure is None else (closure,) if callable(closure) else tuple(closure)
        for each in closures:
            losses.append(self.accumulate(each, weight=1 / len(closures)))
        self.optimizer.step()
        return torch.stack(losses).mean() if losses else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with their own rho if you set "sam_rho".

        Args:
            param_group: as torch's optimizers take it; its "sam_rho" is rho for these parameters.
        """
        self.optimizer.add_param_group({"sam_rho": self.rho, **param_group})

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, whose groups have "sam_rho"; there is no other state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint from this optimizer, or from the wrapped optimizer alone.

        Args:
            state_dict: the result of `state_dict` on this optimizer or on the wrapped optimizer.
        """
        self.optimizer.load_state_dict(state_dict)
        for group in self.optimizer.param_groups:
            group.setdefault("sam_rho", self.rho)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self).copy()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def _parameters(self) -> tuple[list[nn.Parameter], list[float]]:
        """The trained parameters, without duplicates, and each parameter's rho."""
        weights = {
            id(p): (p, check_finite("sam_rho", group["sam_rho"]))
            for group in self.param_groups
            for p in group["params"]
            if p.requires_grad
        }
        return [p for p, _ in weights.values()], [rho for _, rho in weights.values()]


def check_finite(name: str, value: float) -> float:
    if not 0.0 <= float(value) < float("inf"):
        raise ValueError(f"MicroBatchSAM: {name} must be finite and at least 0, got {value}.")
    return float(value)


def refuse_fsdp1(model: nn.Module | None) -> None:
    modules = () if model is None else model.modules()
    if any(type(m).__name__ == "FullyShardedDataParallel" for m in modules):
        raise TypeError(
            "MicroBatchSAM: model must be sharded by torch.distributed.fsdp.fully_shard, got FullyShardedDataParallel."
        )


def _describe(loss: Any) -> str:
    if not isinstance(loss, Tensor):
        return type(loss).__name__
    return f"shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
