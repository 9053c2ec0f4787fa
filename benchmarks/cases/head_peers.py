"""What Liger, cut-cross-entropy, QuACK and TRL have for the losses of a head, each imported when it is asked for."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cases.row import Implementation, Loader, liger


def liger_linear_cross_entropy(accum_dtype: torch.dtype | None, note: str) -> Implementation:
    def arguments(x: Tensor, weight: Tensor, target: Tensor, num_valid: int) -> tuple[Any, ...]:
        return x, weight, target, None, None, -100, 0.0, 0.0, "mean", None, False, accum_dtype

    load = liger("LigerFusedLinearCrossEntropyFunction", arguments, lambda out: out[0])
    return Implementation(load, note=note, gpu_only=True)


def liger_chunked(loss: str, call: Callable[..., Any], **options: Any) -> dict[str, Implementation]:
    """One of Liger's chunked losses as its module runs it by default: compiled."""

    def load() -> Callable[..., Any]:
        import liger_kernel.chunked_loss as chunked

        module = getattr(chunked, f"LigerFusedLinear{loss}Loss")(**options)

        def run(**arguments: Any) -> Any:
            out = call(module, **arguments)
            return out[0] if isinstance(out, tuple) else out

        return run

    return {"liger": Implementation(load, gpu_only=True)}


def liger_dpo(
    module: Any, x: Tensor, weight: Tensor, target: Tensor, ref_x: Tensor, ref_weight: Tensor, **_: Any
) -> Any:
    return module(weight, x, target, ref_input=ref_x, ref_weight=ref_weight)


def liger_orpo(module: Any, x: Tensor, weight: Tensor, target: Tensor, **_: Any) -> Any:
    return module(weight, x, target)


def liger_grpo(module: Any, x: Tensor, weight: Tensor, target: Tensor, **given: Any) -> Any:
    mask = (target != -100).to(x.dtype)
    logprobs = {"ref_per_token_logps": given["ref_logprob"], "old_per_token_logps": given["old_logprob"]}
    return module(x, weight, target, mask, given["advantages"], **logprobs)


def liger_jsd(module: Any, x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor) -> Any:
    return module(x, weight, teacher_x, teacher_weight, torch.zeros_like(x[:, 0], dtype=torch.long))


def load_cce() -> Callable[..., Any]:
    from cut_cross_entropy import linear_cross_entropy

    return lambda x, weight, target, num_valid: linear_cross_entropy(x, weight, target)


def load_quack() -> Callable[..., Any]:
    from quack.gemm_runtime import identity

    # QuACK 0.6.5 refuses to make a cache key of objects that it does not know, and chunks of as many rows as x is wide.
    key_of = identity.semantic_value_key

    def key_of_any(value: Any, seen: set[Any]) -> Any:
        try:
            return key_of(value, seen)
        except TypeError:
            return "opaque", type(value).__qualname__

    identity.semantic_value_key = key_of_any
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    def run(x: Tensor, weight: Tensor, target: Tensor, num_valid: int) -> Tensor:
        rows = 8192 if x.shape[-1] == 4096 else 4096
        loss: Tensor = chunked_linear_cross_entropy(x, weight, target, chunk_size=rows, reduction="mean")
        return loss

    return run


def _trl(kernel: str) -> Any:
    """An autograd function of `trl.kernels`, the fused head of TRL's trainers.

    Its backward imports `trl.trainer.utils` to ask whether DeepSpeed holds the head. That module needs datasets and
    pandas: where they are missing, the answer, no, is given in its place.
    """
    kernels = importlib.import_module("trl.kernels.chunked_logprob")
    try:
        importlib.import_module("trl.trainer.utils")
    except ImportError:
        answers: Any = types.ModuleType("trl.trainer.utils")
        answers.maybe_gather_lm_head_ctx = lambda *parameters: contextlib.nullcontext()
        sys.modules["trl.trainer.utils"] = answers
    if kernel == "ChunkedDivergenceFunction":
        kernels = importlib.import_module("trl.kernels.chunked_divergence")
    return getattr(kernels, kernel)


def _trl_logprob(outputs: tuple[str, ...]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Log-probabilities of the tokens that count, as `add_fused_lm_head` takes them from hidden states and labels.

    outputs: what the trainer has computed in the same pass, for the loss or for its metrics.
    """
    apply = _trl("ChunkedLogProbFunction").apply
    columns = 32768  # trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE

    def logprob(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        mask = target != -100
        found: Tensor = apply(x[mask], weight, None, target[mask], 1.0, columns, None, 1.0, outputs)[0]
        return found.new_zeros(mask.shape).masked_scatter(mask, found)

    return logprob


def load_trl_sft() -> Callable[..., Any]:
    logprob = _trl_logprob(("log_probs", "entropy", "is_top1"))

    def run(x: Tensor, weight: Tensor, target: Tensor, num_valid: int) -> Tensor:
        return -logprob(x, weight, target).sum() / (target != -100).sum().clamp(min=1)

    return run


def load_trl_logprob() -> Callable[..., Any]:
    logprob = _trl_logprob(("log_probs",))
    return lambda x, weight, target, num_valid: logprob(x, weight, target)


def trl_dpo(formula: Callable[..., Tensor]) -> Loader:
    """formula: the loss, of log-probabilities and the reference's."""

    def load() -> Callable[..., Any]:
        policy = _trl_logprob(("log_probs", "entropy", "mean_logits", "is_top1"))
        reference = _trl_logprob(("log_probs",))

        def run(x: Tensor, weight: Tensor, target: Tensor, ref_x: Tensor, ref_weight: Tensor, **_: Any) -> Tensor:
            with torch.no_grad():
                reference_logprob = reference(ref_x, ref_weight, target)
            return formula(policy(x, weight, target), reference_logprob)

        return run

    return load


def trl_grpo(formula: Callable[..., Tensor]) -> Loader:
    def load() -> Callable[..., Any]:
        logprob = _trl_logprob(("log_probs", "entropy"))
        return lambda x, weight, target, **rest: formula(logprob(x, weight, target), None, **rest)

    return load


def load_trl_distill() -> Callable[..., Any]:
    apply = _trl("ChunkedDivergenceFunction").apply

    def run(x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor) -> Tensor:
        divergence: Tensor
        divergence, _ = apply(x, weight, None, teacher_x, teacher_weight, None, 0.5)
        return divergence.sum() / x.shape[0]

    return run


def trl_peer(load: Loader, trainer: str) -> dict[str, Implementation]:
    note = f"the fused head of TRL's {trainer}, with what it computes for its metrics"
    return {"trl": Implementation(load, note=note, gpu_only=True, where_installed=True)}
