"""Token log-probabilities, from which SFT, DPO, KTO, GRPO and RLOO compute their losses.

TRL gives a model a forward that, with `fused_lm_head=True`, returns log-probabilities and entropies in place of logits.
That forward passes hidden states and the head's weight to an autograd function. Tigon's clone of the forward passes
them to tigon.linear_logprob instead.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tigon.fusion.engine.patch import BoundForward
from tigon.integrations.trl.swap import Side, Swaps, bind, clone, global_names, read_signature
from tigon.kernels import rehearsal
from tigon.losses.head.chunk_options import ChunkOptions
from tigon.losses.head.head import Head
from tigon.losses.linear_logprob import linear_logprob

ARGUMENTS = {
    "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale",
    "outputs",
}  # fmt: skip


def replace_projection(trainer: Any, swaps: Swaps, role: str, model: nn.Module, keep_bytes: int) -> None:
    for module in model.modules():
        forward = vars(module).get("forward")
        found, direct = _fused_forward(forward)
        if found is None:
            continue
        if not isinstance(forward, (types.MethodType, BoundForward)):
            swaps.record_kept(role, "the model's forward is wrapped by a non-method")
            continue
        function, name = found
        own = function.__globals__[name]
        signature = read_signature(own.forward, ARGUMENTS, skip=1)
        if signature is None:
            swaps.record_kept(role, f"{own.__name__} takes arguments that Tigon does not know")
            continue
        instead: dict[str, Any] = {name: _Projection(own, signature, role, swaps, keep_bytes)}
        if callable(on_gpu := function.__globals__.get("_use_triton")):
            # Leave rows without a label out on a CPU too, as TRL does on a GPU; in a CUDA graph nothing counts them.
            instead["_use_triton"] = lambda device, on_gpu=on_gpu: (
                not rehearsal.active and (device.type == "cpu" or on_gpu(device))
            )
        # Mixed precision has wrapped the reference's forward by now. The clone bypasses that wrapper, and so needs
        # autocast itself.
        context = contextlib.nullcontext if direct else trainer.accelerator.autocast
        new = _forward(forward, clone(function, **instead), context, role, swaps)
        swaps.put(module, "forward", types.MethodType(new, module))
        swaps.projections.add(role)
        if swaps.whole_logits:
            swaps.record_kept(role, f"the loss: TRL computes it from whole logits for {swaps.whole_logits}")
            swaps.record_replaced(
                role, "token log-probabilities and entropy, for the metrics only, by tigon.linear_logprob"
            )
        else:
            swaps.record_replaced(role, "token log-probabilities and entropy by tigon.linear_logprob")


def why_whole_logits(trainer: Any) -> str:
    """The option for which the trainer uses whole logits; otherwise empty.

    A trainer that does not read the option, such as DPOTrainer, ignores it.
    """
    reads = global_names(getattr(type(trainer), "compute_loss", None))
    if "compute_loss_func" in reads and getattr(trainer, "compute_loss_func", None) is not None:
        return "compute_loss_func"
    smoother = getattr(trainer, "label_smoother", None)
    if "label_smoother" in reads and smoother is not None and getattr(trainer.args, "loss_type", "nll") == "nll":
        return f"label_smoothing_factor={trainer.args.label_smoothing_factor}"
    return ""


def _fused_forward(forward: Any) -> tuple[tuple[types.FunctionType, str] | None, bool]:
    """TRL's forward, alone or in a wrapper, with its autograd function's name; whether there is no wrapper."""
    for depth, function in enumerate(_list_layers(forward)):
        if isinstance(function, types.FunctionType) and "fused_lm_head" in function.__code__.co_varnames:
            for name in global_names(function):
                value = function.__globals__.get(name)
                if isinstance(value, type) and issubclass(value, torch.autograd.Function):
                    return (function, name), depth == 0
    return None, False


def _list_layers(forward: Any) -> Iterator[Any]:
    """An instance's own forward and the functions that it wraps, outermost first."""
    layer = forward
    while layer is not None:
        layer = getattr(layer, "__func__", layer)
        yield layer
        layer = _attributes(layer).get("__wrapped__")


def loss_is_left_to_trl(model: nn.Module) -> bool:
    """Whether a TRL trainer will compute this model's loss by TRL's own operator."""
    forwards = [vars(module).get("forward") for module in model.modules()]
    if all(_fused_forward(forward)[0] is None for forward in forwards):
        return False
    layers = (layer for forward in forwards if forward is not None for layer in _list_layers(forward))
    return not any(vars(layer)["tigon"].active for layer in layers if "tigon" in _attributes(layer))


def _attributes(layer: Any) -> dict[str, Any]:
    return getattr(layer, "__dict__", {})


def _forward(
    before: types.MethodType | BoundForward,
    cloned: types.FunctionType,
    context: Callable[[], Any],
    role: str,
    swaps: Swaps,
) -> Callable[..., Any]:
    own = before.__func__

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("fused_lm_head") or not swaps.active:
            if swaps.active and swaps.whole_logits and torch.is_grad_enabled():
                swaps.left[f"the loss, from whole logits, for {swaps.whole_logits}"] += 1
            return own(self, *args, **kwargs)
        ledger = swaps.ledgers.get(role)
        if ledger is not None and not ledger.lazy:
            ledger.new_step()  # the model was fused before TRL put its forward around it
        with context():
            sharing = swaps.sharing.get(role)
            shared = None if sharing is None else sharing.run(self, cloned, args, kwargs)
            return cloned(self, *args, **kwargs) if shared is None else shared

    forward.__dict__["tigon"] = swaps
    return forward


class _Projection:
    """Replaces TRL's autograd function; `apply` takes the same arguments."""

    def __init__(self, own: Any, signature: inspect.Signature, role: str, swaps: Swaps, keep_bytes: int) -> None:
        self.own, self.signature, self.role, self.swaps, self.keep_bytes = own, signature, role, swaps, keep_bytes

    def apply(self, *args: Any) -> tuple[Tensor | None, ...]:
        a = bind(self.signature, args, {})
        temperature, outputs = a.get("temperature", 1.0), a.get("outputs", ())
        given = Head(a["weight"], a["bias"], a.get("final_logit_softcapping"), a.get("logit_scale", 1.0))
        side = Side(a["hidden"], given)
        reason = side.unusual()
        if "log_sum_sq_probs" in outputs:
            reason = "use_weighting needs Σ p² for each token"
        if reason is not None:
            self.swaps.left[reason] += 1
            return self.own.apply(*args)
        side = side.in_one_dtype()
        found = linear_logprob(
            side.x, side.head, a["targets"], temperature=temperature, chunks=ChunkOptions(keep_bytes=self.keep_bytes)
        )  # fmt: skip
        self.swaps.count(f"{self.role} linear_logprob", self.role)
        return (
            found.logprob,
            found.entropy if "entropy" in outputs else None,
            None,
            found.mean_logit / temperature if "mean_logits" in outputs else None,
            found.is_top1 if "is_top1" in outputs else None,
        )
