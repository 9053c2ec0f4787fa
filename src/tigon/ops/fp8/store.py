"""Weights in e4m3 while they are needed: quantised at each use, or kept until a parameter changes.

    policy    trainable weights                        frozen weights (no parameter requires a gradient)
    "use"     quantised before y and before dx         likewise
    "step"    both copies kept until a weight changes  likewise
    "auto"    as "use", or as "step" (below)           as "step"

"auto" keeps the copies of trainable weights where gradients are accumulated: a forward pass came after a backward pass,
and no weight had changed between them. Copies are then kept from the next change of the weights on, when the optimizer
has its memory, as long as each step has several micro-batches. A checkpoint's second forward pass is part of a backward
pass, and does not count. On a GPU half as much memory as torch has reserved must be free: weights and gradients take 4
bytes a parameter or more, the copies take 2.

A weight has changed if another tensor, other memory or another version stands in its place, or if it is frozen or
trained since: PEFT freezes weights before it merges adapters into them. In-place edits and `load_state_dict` give a
parameter a new version; writes through `parameter.data` do not. Fused optimizers give none either, so a trainable
weight counts as changed after each step of any optimizer. A part of a larger buffer, as some optimizers lay out all
parameters, is always quantised anew. The largest magnitude is kept by the same rule under every policy, so that several
micro-batches measure it once.

In a CUDA graph no rule of the host runs in a replay: while a graph is captured, trainable weights are measured and
quantised by the graph itself, in each replay. A replay may also change them, so from then on calls outside the graph
keep nothing of them. Frozen weights use the copies kept before the capture, which then stay as
long as the `JointWeight`; a replay does not see later edits of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from tigon.kernels import is_captured
from tigon.ops.fp8.gathered import GatheredCopies, GatheredWeight
from tigon.ops.fp8.recipe import Weight
from tigon.ops.fp8.untraced import run_untraced
from tigon.ops.fp8.weight import measure_weights, quantize_transposed, quantize_weight

Policy = Literal["auto", "use", "step"]
POLICIES = ("auto", "use", "step")
_steps = 0  # of all optimizers


class JointWeight:
    """The e4m3 copies of one weight, or of several weights (Nᵢ, K) with one input, stacked and with one scale.

    Holds no parameter alive, and no copies after `deepcopy` and pickling: they are a cache.

    Args:
        policy: see the module.
        is_versioned: whether every write to a parameter gives it a new version. FSDP2 and ZeRO-3 fill gathered
            parameters without: then weights are measured at each forward pass, and not kept.
    """

    __slots__ = ("__weakref__", "_captured", "_fits", "_is_replayed", "_kept", "is_versioned", "policy")

    def __init__(self, policy: Policy = "auto", *, is_versioned: bool = True) -> None:
        if policy not in POLICIES:
            raise ValueError(f"JointWeight: policy must be one of {POLICIES}, got {policy!r}.")
        self.policy, self.is_versioned = policy, is_versioned
        self._kept: Copies | None = None
        self._fits: bool | None = None  # whether there was memory for copies when they were first to be kept
        self._is_replayed = False  # whether a CUDA graph reads trainable weights, which its replays may change
        self._captured: list[Copies] = []  # read by CUDA graphs: their memory must stay

    def read(self, parameters: Sequence[Tensor]) -> Copies | GatheredCopies:
        """The copies for a forward pass with these parameters, and for the backward pass that belongs to it."""
        if all(type(p) is GatheredWeight for p in parameters):
            return GatheredCopies()
        is_frozen = not any(p.requires_grad for p in parameters)
        captured = is_captured(parameters[0])
        recording = captured and torch.cuda.is_current_stream_capturing()
        # Rehearsals of a capture must launch the capture's kernels; they may keep what frozen weights have.
        self._is_replayed |= recording and not is_frozen
        is_fixed = is_frozen or not (captured or self._is_replayed)
        is_usable = self.is_versioned and is_fixed and all(map(_owns_memory, parameters))
        is_kept = is_usable and not recording
        keeps = self.policy == "step" or (self.policy == "auto" and is_frozen)
        follows = self.policy == "auto" and not is_frozen
        kept = self._kept if is_usable else None
        if kept is not None and kept.is_current(parameters):
            if kept.keeps == keeps or follows:
                kept.note_forward()
                if recording and not any(kept is other for other in self._captured):
                    self._captured.append(kept)
                return kept
        elif kept is not None and follows and kept.is_accumulated:
            if self._fits is None:
                self._fits = _has_room(parameters[0].device)
            keeps = self._fits
        found = Copies(parameters, keeps and is_kept)
        if is_kept or not captured:
            self._kept = found if is_kept else None
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the copies that are kept now, also for CUDA graphs."""
        others = [copies for copies in self._captured if copies is not self._kept]
        return sum(copies.nbytes for copies in (self._kept, *others) if copies is not None)

    def clear(self) -> None:
        """Drop the copies. CUDA graphs that were captured before must not be replayed afterwards."""
        self._kept = None
        self._captured.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_joint_weight, (self.policy, self.is_versioned)


def _make_joint_weight(policy: Policy, is_versioned: bool) -> JointWeight:
    return JointWeight(policy, is_versioned=is_versioned)


class Copies:
    """Parameters' largest magnitude, and their e4m3 copies if they are kept. Callers pass the parameters each time.

    is_accumulated: whether a forward pass came after a backward pass, so that a step has several micro-batches.
    """

    __slots__ = ("_is_differentiated", "_marks", "_rows", "_tensors", "_transposed", "amax", "is_accumulated", "keeps")

    def __init__(self, parameters: Sequence[Tensor], keeps: bool) -> None:
        self.keeps = keeps
        # A parameter itself could not be swapped for another (`torch.utils.swap_tensors`) while a weakref exists.
        self._tensors = [(id(p), weakref.ref(p.untyped_storage())) for p in parameters]
        self._marks = [_mark(p) for p in parameters]
        self.amax = measure_weights(parameters)
        self._rows: Weight | None = None
        self._transposed: Weight | None = None
        self._is_differentiated = self.is_accumulated = False

    def note_forward(self) -> None:
        """A further forward pass begins with the same weights."""
        if self._is_differentiated and torch._C._current_graph_task_id() == -1:
            self.is_accumulated = True

    def is_current(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these are the same parameters, unchanged."""
        return len(parameters) == len(self._tensors) and all(
            known == id(p) and storage() is p.untyped_storage() and mark is not None and mark == _mark(p)
            for (known, storage), mark, p in zip(self._tensors, self._marks, parameters, strict=True)
        )

    def read_rows(self, parameters: Sequence[Tensor]) -> Weight:
        """The weights as they are, stacked: (N, K)."""
        rows = self._rows or quantize_weight(parameters, self.amax)
        if self._may_keep():
            self._rows = rows
        return rows

    def read_transposed(self, parameters: Sequence[Tensor]) -> Weight:
        """Their transposition (K, N); or that of some of them, with the same scale. Called by backward passes."""
        self._is_differentiated = True
        if len(parameters) < len(self._tensors):
            return quantize_transposed(parameters, self.amax)
        transposed = self._transposed or quantize_transposed(parameters, self.amax)
        if self._may_keep():
            self._transposed = transposed
        return transposed

    def _may_keep(self) -> bool:
        # Memory of a graph holds a copy only after a replay.
        return self.keeps and not (self.amax.is_cuda and torch.cuda.is_current_stream_capturing())

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for weight in (self._rows, self._transposed) if weight is not None for t in weight)


def _mark(p: Tensor) -> tuple[int, int, int] | None:
    """A parameter's address, version, and steps if it trains; None for an inference tensor, which has no version."""
    return None if p.is_inference() else (p.data_ptr(), p._version, _steps if p.requires_grad else -1)


def _count_step() -> None:
    global _steps
    _steps += 1


def _note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    # A compiled step gives versions, and may allow no call outside the graph. Fused optimizers are never compiled.
    if not torch.compiler.is_compiling() or any(group.get("fused") for group in optimizer.param_groups):
        run_untraced(_count_step)


register_optimizer_step_post_hook(_note_step)


def _has_room(device: torch.device) -> bool:
    """Whether the copies of a model's weights fit beside all that training has needed so far."""
    if device.type != "cuda":
        return True
    return torch.cuda.mem_get_info(device)[0] >= torch.cuda.memory_reserved(device) // 2


def _owns_memory(p: Tensor) -> bool:
    """Whether p fills its storage. Optimizers write to a buffer of many parameters without giving them versions."""
    return p.untyped_storage().nbytes() == p.nbytes
