"""The recipe for logits: hidden states, weight, bias, the elementwise steps since; and the logits' cross entropy."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.fusion.logits.labels import plain, valid_count
from tigon.fusion.logits.sharded_head import Regather, full_shape, is_released
from tigon.fusion.logits.split import gathered_linear, here, is_split, on_any_device, whole_input
from tigon.kernels import autocast_dtype
from tigon.kernels.autocast import autocast_as
from tigon.losses.choices import choice_logits
from tigon.losses.head.chunk_options import ChunkOptions
from tigon.losses.head.fp8 import why_unfit
from tigon.losses.head.head import Head
from tigon.losses.linear_cross_entropy import linear_cross_entropy
from tigon.losses.linear_logprob import linear_logprob
from tigon.ops.cross_entropy import CrossEntropy
from tigon.ops.logprob import LogProb

# Not fp64: there `logits.float()`, which models call, narrows the logits, so the plain head runs.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class GradientHooks:
    """The code that waits for the gradient with respect to logits, and to every tensor derived from these logits.

    hooks: an engine's backward hooks (FSDP, DeepSpeed), which the loss takes over. in_vain: a loss was computed
    without the logits, so that no gradient will reach them.
    """

    def __init__(self) -> None:
        self.hooks: list[Callable[[Tensor], Tensor | None]] = []
        self.in_vain = False


class Recipe:
    """steps(hidden Wᵀ + bias): how to build the logits, and how to take their cross entropy without building them."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ledger: Any,
        *,
        autocast: torch.dtype | None,
        sample: Tensor,
        regather: Regather | None = None,
    ) -> None:
        self.hidden, self.weight, self.bias, self.ledger = hidden, weight, bias, ledger
        self.regather, self.autocast, self.dtype = regather, autocast, autocast or hidden.dtype
        self.steps: tuple[tuple[str, Any], ...] = ()
        self.waiting = GradientHooks()
        # Optimizers with fused=True do not bump version counters, so the recipe keeps a weight sample as well.
        self.sample = sample
        self.split = is_split(weight)

    def _note_versions(self) -> None:
        self.versions = () if torch.compiler.is_compiling() else tuple(map(get_version, self._tensors()))

    @classmethod
    def build(
        cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, ledger: Any, regather: Regather | None = None
    ) -> Recipe | None:
        """The recipe for F.linear(hidden, weight, bias), or None where only the plain head can run.

        regather: gathers a weight that is freed before the logits or the loss are computed.
        """
        device = hidden.device.type
        autocast = autocast_dtype(device)
        tensors: tuple[Any, ...] = (hidden, weight) if bias is None else (hidden, weight, bias)
        if is_split(weight):  # `head_forward` asks for a recipe only where the logits are gathered next
            whole = whole_input(hidden, weight, bias)
            if whole is None:
                return None
            hidden, tensors = whole, (whole, *map(here, tensors[1:]))
        for t in tensors:
            # A DTensor or any other subclass overrides F.linear.
            if type(t) not in (Tensor, torch.nn.Parameter) or t.dtype not in DTYPES or is_released(t):
                return None
            if t.device != hidden.device or (autocast is None and t.dtype != hidden.dtype):
                return None
        if hidden.dim() == 0 or hidden.shape[-1] != weight.shape[-1] or autocast not in (None, *DTYPES):
            return None
        recipe = cls(hidden, weight, bias, ledger, autocast=autocast, sample=_sample(weight), regather=regather)
        recipe._note_versions()
        return recipe

    def gather(self) -> AbstractContextManager[None]:
        return nullcontext() if self.regather is None else self.regather.gather(self.weight)

    def then(self, step: str, value: Any = None) -> Recipe:
        dtype = value if step == "cast" else self.dtype
        return self._with(steps=(*self.steps, (step, value)), dtype=dtype)

    def before(self, step: str) -> Recipe | None:
        """The recipe without its last step; None if the last step is another."""
        return self._with(steps=self.steps[:-1]) if self.steps and self.steps[-1][0] == step else None

    def _tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that the recipe reads; for a split head this device's part."""
        return self.hidden, here(self.weight), here(self.bias), *(v for step, v in self.steps if step == "add")

    def plus(self, other: Any) -> Recipe | None:
        """The recipe with a vector added, as in Bart and Marian; None if `other` is no vector or a step came before."""
        V = full_shape(self.weight)[0]
        if self.split:
            return None
        if type(other) not in (Tensor, torch.nn.Parameter) or other.numel() != V or other.shape[-1:] != (V,):
            return None
        if other.dim() > self.hidden.dim() or other.device != self.hidden.device or self.steps:
            return None
        if other.requires_grad and torch.is_grad_enabled():
            return None
        if other.dtype == self.dtype:
            return self.then("add", other.detach().reshape(V))
        # Under autocast a buffer is wider than the logits. The loss narrows the buffer, as F.linear narrows a bias.
        wider = other.dtype == torch.float32 and self.autocast is not None
        return self.then("cast", torch.float32).then("add", other.detach().reshape(V)) if wider else None

    def rows(self, take: Callable[[Tensor], Tensor]) -> Recipe:
        """The same logits for other rows: `take` maps hidden states as the caller mapped the logits."""
        return self._with(hidden=take(self.hidden))

    @property
    def has_columns(self) -> bool:
        """Whether `columns` has a recipe: a slice of a split weight, or of one that gets new memory, is none."""
        if any(step == "log_softmax" for step, _ in self.steps):
            return False
        return not self.split and (self.regather is None or self.regather.keeps_memory)

    def columns(self, count: int) -> Recipe:
        """The logits for the first `count` words."""
        bias = None if self.bias is None else self.bias[:count]
        steps = tuple((step, v[:count] if step == "add" else v) for step, v in self.steps)
        with self.gather():  # torch makes no view into memory that was released
            weight = self.weight[:count]
            sample = _sample(weight)
        return self._with(weight=weight, bias=bias, sample=sample, steps=steps)

    def _with(self, **changes: Any) -> Recipe:
        if not torch.compiler.is_compiling():
            self.check()
        hidden, weight, bias, sample, steps, dtype = (
            changes.get(name, getattr(self, name)) for name in ("hidden", "weight", "bias", "sample", "steps", "dtype")
        )
        changed = Recipe(
            hidden, weight, bias, self.ledger, autocast=self.autocast, sample=sample, regather=self.regather
        )
        changed.steps, changed.dtype, changed.waiting = steps, dtype, self.waiting
        changed._note_versions()
        return changed

    def check(self, *, use: bool = False, sample: bool = False) -> None:
        """Raise if this recipe would no longer give the logits that the plain head computed in its forward.

        use: the logits or the loss are computed next, so that a weight that is gathered for them must be in memory.
        sample: compare weight values as well. Where a head is split, either all devices raise or none does: an
            optimizer step may change one device's part only, and the other devices would wait for that device's logits.
        """
        reason = self._stale(use)
        if sample and (reason is None or self.split):
            changed = torch.ones((), dtype=torch.bool, device=self.hidden.device)
            if reason is None:
                now = _sample(self.weight)
                changed = ((now != self.sample) & (now == now)).any()
            if self.split:
                changed = on_any_device(changed, self.weight)
            if reason is None and bool(changed):
                reason = "the head's weight changed in place"
        if reason is not None:
            raise RuntimeError(_STALE.format(reason))

    def _stale(self, use: bool) -> str | None:
        tensors = self._tensors()
        names = ("hidden states", "weight", "bias", "second bias")[: len(tensors)]
        for name, t, version in zip(names, tensors, self.versions, strict=False):  # none are kept under compile
            if t is not None and get_version(t) != version:
                return f"the head's {name} changed in place"
        for name, t in zip(names, tensors, strict=True):
            if t is not None and (use or self.regather is None) and is_released(t):
                return f"the memory of the head's {name} was released"
        return None

    def logits(self) -> Tensor:
        """Build the logits: the plain model's operations in the same order, under the autocast state in its forward."""
        with self.gather(), autocast_as(self.hidden.device.type, self.autocast):
            if not torch.compiler.is_compiling():
                self.check(use=True, sample=True)
            linear = gathered_linear if self.split else F.linear
            z = linear(self.hidden, self.weight, self.bias)
            for step, value in self.steps:
                if step == "mul":
                    z = z * value
                elif step == "div":
                    z = z / value
                elif step == "add":
                    z = z + value
                elif step == "tanh":
                    z = torch.tanh(z)
                elif step == "log_softmax":
                    z = F.log_softmax(z, -1)
                else:
                    z = z.to(value)
        return z

    def scale_and_softcap(self) -> tuple[float, float | None] | None:
        """The steps as softcap · tanh(scale · z / softcap), or None where they have another form."""
        before, after, tanh = 1.0, 1.0, False
        for step, value in self.steps:
            if step == "log_softmax":
                return None
            if step == "add":
                continue  # always the first step: `cross_entropy` adds the vector to the bias
            if step == "tanh":
                if tanh:
                    return None
                tanh = True
            elif step != "cast":
                factor = value if step == "mul" else (1.0 / value if value else math.inf)
                before, after = (before, after * factor) if tanh else (before * factor, after)
        if not (math.isfinite(before) and math.isfinite(after) and before != 0):
            return None
        if not tanh:
            return before, None
        return (before * after, after) if after > 0 else None

    def head(self) -> Head | None:
        """The head that gives these logits; None where the steps have another form than a softcap and a scale."""
        form = self.scale_and_softcap() if self.steps else (1.0, None)
        if form is None:
            return None
        bias = self.bias
        for step, value in self.steps:
            if step == "add":
                bias = value if bias is None else bias + value
        return Head(self.weight, bias, form[1], form[0])

    def cross_entropy(self, target: Tensor, ignore_index: int, reduction: Any, label_smoothing: float) -> Tensor:
        device = self.hidden.device.type
        # The dtype that F.cross_entropy would return: fp32 under autocast, else the logits' dtype.
        dtype = self.dtype if autocast_dtype(device) is None else torch.float32
        valid, target = valid_count(target, ignore_index), plain(target)
        # Tigon's losses define the mean over no label as 0. A fused model must agree with torch's F.cross_entropy,
        # which returns NaN.
        count = (target != ignore_index).sum() if reduction == "mean" else None
        config = CrossEntropy(
            ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing, divisor=count
        )
        with self.gather(), autocast_as(device, self.autocast):
            head = self._check_head()
            chunks = ChunkOptions(valid_tokens=valid, fp8=self._is_fp8(head))
            loss = linear_cross_entropy(self.hidden, head, target, config=config, chunks=chunks)
        self._count()
        return self.hand_on(loss.to(dtype))

    def _is_fp8(self, head: Head) -> bool:
        """Whether the loss multiplies in FP8."""
        if not self.ledger.fp8_head or type(head.weight) not in (Tensor, torch.nn.Parameter):
            return False
        return not why_unfit(head.weight, autocast_dtype(self.hidden.device.type) or self.hidden.dtype)

    def logprob(self, target: Tensor, temperature: float) -> LogProb:
        """The targets' `linear_logprob` results, for a weight that stays in memory."""
        with autocast_as(self.hidden.device.type, self.autocast):
            result = linear_logprob(self.hidden, self._check_head(), target, temperature=temperature)
        self._count()
        return result._replace(logprob=self.hand_on(result.logprob), entropy=self.hand_on(result.entropy))

    def choices(self, tokens: Any) -> Tensor:
        """The logits for a few classes, (…, K), for a weight that stays in memory."""
        with autocast_as(self.hidden.device.type, self.autocast):
            chosen_logits = choice_logits(self.hidden, self._check_head(), tokens)
        self._count()
        return self.hand_on(chosen_logits)

    def _check_head(self) -> Head:
        """The head, for a loss that is computed now."""
        if not torch.compiler.is_compiling():
            self.check(use=True)
        head = self.head()
        assert head is not None  # callers check `scale_and_softcap` first
        return head

    def _count(self) -> None:
        self.ledger.count("head", outside=True)
        self.waiting.in_vain = True

    def hand_on(self, result: Tensor) -> Tensor:
        """Put the hooks that the logits have so far on `result`, which was computed in their place."""
        if result.requires_grad:
            for hook in self.waiting.hooks:
                result.register_hook(hook)
        return result


_STALE = (
    "tigon: these logits were never built, and {} after the model's forward, so they can no longer be built. Read "
    "outputs.logits before optimizer.step(), or call the model without labels, or fusion.remove() first."
)


def get_version(t: Tensor | None) -> int:
    return -1 if t is None or t.is_inference() else t._version


def _sample(weight: Tensor) -> Tensor:
    """A copy of about two thousand elements spread over the weight."""
    weight = here(weight)
    rows, columns = weight.shape
    return weight.detach()[:: max(1, rows // 64), :: max(1, columns // 32)].clone()


def is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def fusable(
    logits: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> tuple[Any, ...] | None:
    """The arguments for `Recipe.cross_entropy`, from F.cross_entropy's; None for a use that the fused loss lacks.

    Only two dimensions: in (N, C, d) the classes are not the last dimension. Probabilities as targets, class weights
    and the deprecated flags go to PyTorch. So do arguments that PyTorch refuses, so that you see PyTorch's message.
    """
    if weight is not None or size_average is not None or reduce is not None:
        return None
    if reduction not in ("mean", "sum", "none") or not 0.0 <= label_smoothing <= 1.0:
        return None
    if not isinstance(target, Tensor) or target.dtype != torch.int64:  # logits are floats: no lazy target passes
        return None
    if len(logits.shape) != 2 or tuple(target.shape) != tuple(logits.shape[:1]) or target.device != logits.device:
        return None
    if logits.recipe.scale_and_softcap() is None:
        return None
    return target, ignore_index, reduction, label_smoothing
