"""Optimizer state that a capture bakes in: memory addresses, and numbers on the host."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from tigon.training.micro_batch_sam import MicroBatchSAM


class OptimizerState:
    """Optimizer memory and numbers that a graph works on, from before the capture to its end.

    leaves: without optimizers, the parameters whose gradients the graph leaves for others.
    """

    def __init__(self, optimizers: Sequence[Optimizer], leaves: Sequence[Tensor] = ()) -> None:
        groups = [group for o in optimizers for group in o.param_groups]
        parameters = list_parameters(optimizers) or leaves
        self._optimizers = [(o, o.state, len(o.param_groups)) for o in optimizers]
        self._grads: list[tuple[Tensor, int, Tensor | None]] = [(p, p.data_ptr(), p.grad) for p in parameters]
        self._hands_over = bool(leaves)
        self._made: list[tuple[Tensor, Tensor]] = []
        self._added: list[Tensor] = []
        self._versions = [None if p.grad is None else p.grad._version for p in parameters]
        self._groups = [(group, _numbers(group), _tensors(group)) for group in groups]

    def end_capture(self) -> None:
        """Record the gradients that existed before the capture and still do: the graph adds to them.

        Others were created in the graph's memory, where the next replay of any graph overwrites them; held here, they
        keep their place.
        """
        self._grads = [(p, address, grad if grad is p.grad else None) for p, address, grad in self._grads]
        if self._hands_over:
            kept = zip(self._grads, self._versions, strict=True)
            self._added = [grad for (*_, grad), before in kept if grad is not None and grad._version != before]
            self._made = [(p, p.grad) for p, _, grad in self._grads if grad is None and p.grad is not None]
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """Drop the gradients created in a graph's own memory."""
        for p, _, grad in self._grads:
            if grad is None:
                p.grad = None

    def end_replay(self) -> None:
        """Put the gradients that this graph makes where an optimizer finds them, or drop them; others count changes."""
        self.clear_gradients()
        if self._added:
            increment_version(self._added)
        for p, grad in self._made:
            p.grad = grad

    def is_stale(self) -> bool:
        if any(o.state is not state or len(o.param_groups) != n for o, state, n in self._optimizers):
            return True
        if any(group.get(name) is not t for group, _, tensors in self._groups for name, t in tensors):
            return True
        return any(
            p.data_ptr() != address or (grad is not None and p.grad is not grad) for p, address, grad in self._grads
        )

    def check_numbers(self) -> None:
        """Raise if a learning rate, or another optimizer number, has changed since the capture."""
        for group, numbers, _ in self._groups:
            now = _numbers(group)
            if now == numbers:
                continue
            name = next((name for name, number in numbers.items() if now.get(name) != number), None)
            if name is not None:
                raise ValueError(
                    f"graph_step: the optimizer's {name} must stay as it was in the capture, {numbers[name]!r}, got "
                    f"{now.get(name)!r}, which a replay would not see. Make the learning rate a tensor on the GPU, "
                    "which schedulers update in place: lr=torch.tensor(1e-4, device='cuda'). After other changes "
                    "call reset()."
                )


def list_optimizers(given: Any) -> list[Optimizer]:
    several = list(given) if isinstance(given, Sequence) else [] if given is None else [given]
    for i, optimizer in enumerate(several):
        if isinstance(optimizer, MicroBatchSAM):
            raise TypeError(
                "graph_step: optimizer must not be a MicroBatchSAM, which cannot be captured: it sets the random "
                "state between its two passes."
            )
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                "graph_step: optimizer must be a torch.optim.Optimizer, several, or None, got "
                f"{type(optimizer).__name__}."
            )
        # Accelerate's wrapper is an optimizer around another, and the inner optimizer steps.
        while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
            several[i] = optimizer = inner
    return several


def list_parameters(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    return list({id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}.values())


def check_capturable(optimizer: Optimizer) -> None:
    if not all(group.get("capturable", True) for group in optimizer.param_groups):
        raise ValueError(
            f"graph_step: optimizer must be made with capturable=True, so that it counts its steps on the GPU, got "
            f"{type(optimizer).__name__} with capturable=False."
        )


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    """A group's numbers that a capture bakes in; a tensor on the CPU counts as a number."""
    numbers = {}
    for name, value in group.items():
        if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
            value = float(value)
        if name != "initial_lr" and isinstance(value, (int, float, complex, str, tuple)):
            numbers[name] = value
    return numbers


def _tensors(group: dict[str, Any]) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in group.items() if name != "initial_lr" and isinstance(value, Tensor)]


def read_host_state(optimizers: Sequence[Optimizer]) -> dict[Any, Any]:
    """State that a step may change on the host: a replay would skip or repeat the change."""
    numpy: Any = sys.modules.get("numpy.random")  # layers of transformers' speech models draw there
    drawn = None if numpy is None else pickle.dumps(numpy.get_state())
    state: dict[Any, Any] = {"random numbers": (random.getstate(), torch.get_rng_state().tolist(), drawn)}
    for at, optimizer in enumerate(optimizers):
        kind = type(optimizer).__name__
        for i, group in enumerate(optimizer.param_groups):
            for name, value in _numbers(group).items():
                state[f"{kind}'s {name}", at, i] = value
            for name, t in _tensors(group):
                state[f"{kind}'s {name}", at, i] = t._version
        for i, parameter_state in enumerate(optimizer.state.values()):
            for name, value in _numbers(parameter_state).items() if isinstance(parameter_state, dict) else ():
                state[f"{kind}'s state {name!r}", at, "state", i] = value
    return state


def check_host(before: dict[Any, Any], after: dict[Any, Any]) -> None:
    """Raise if the capture changed state on the host."""
    for key, value in before.items():
        if after.get(key) == value:
            continue
        if key == "random numbers":
            raise RuntimeError(
                "graph_step: step must draw its random numbers on the GPU, got a step that draws on the host, where a "
                "replay would not draw again."
            )
        raise RuntimeError(
            f"graph_step: step must not change {key[0]} from the host, since a replay would repeat the change of the "
            "capture, or make none. Call schedulers after the step. An optimizer that counts on the host cannot be "
            "captured."
        )
