"""`tigon doctor --check`: every operator and gradient on this machine, against the PyTorch reference in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import tigon
from tigon.losses import DPO, GRPO, ORPO, Distill, Hidden, Rollout, distill, dpo, grpo, orpo
from tigon.ops.gated_linear import gated_linear
from tigon.ops.prefix_attention import PrefixLayout

ROWS, WEIGHT, LOGITS, CLASSES = (256, 1024), (1024,), (256, 1000), 1000
SEQUENCES = (4, 32, 64)
HEAD = (CLASSES, SEQUENCES[-1])
# A result is wrong above this ‖out − ref‖ / ‖ref‖, or above twice the reference's error in the same dtype.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-3}


def _ids(like: Tensor, *shape: int) -> Tensor:
    """Labels, the same on every device."""
    return (7919 * torch.arange(math.prod(shape), device=like.device) % CLASSES).view(shape)


def _angles(q: Tensor) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(q.shape[2]), 100.0 ** -torch.linspace(0, 1, q.shape[3] // 2)).repeat(1, 2)[None]
    return angles.cos().to(q), angles.sin().to(q)


def _moe_mlp(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    token = torch.arange(len(x), device=x.device)
    index = torch.stack((token % len(down), (token + 3) % len(down)), 1)
    return tigon.moe_mlp(x, index, weights, (gate_up, None), (down, None))


def _prefix_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return tigon.prefix_attention(q, k, v, PrefixLayout([64, 32], [[16] * 3, [8] * 2], device=q.device))


def _quantized_embedding(weight: Tensor) -> Tensor:
    codes, scale_offset = tigon.quantize_rows(weight.detach().float())
    return tigon.quantized_embedding(codes, scale_offset, _ids(weight, 64, 4), mode="sum")


def _grpo(x: Tensor, head: Tensor, old: Tensor, reference: Tensor) -> Tensor:
    logprob = tigon.linear_logprob(x.detach(), head.detach(), _ids(x, 4, 32)).logprob
    advantages = torch.tensor([1.0, -0.5, 0.5, -1.0], dtype=logprob.dtype, device=x.device)
    rollout = Rollout(advantages, logprob + 0.1 * old.detach(), logprob + 0.1 * reference.detach())
    return grpo(x, head, _ids(x, 4, 32), rollout, config=GRPO(beta=0.04))[0]


# Tensor shapes, and the operator as a function of the tensors.
CALLS: dict[str, tuple[tuple[tuple[int, ...], ...], Callable[..., Any]]] = {
    "rms_norm": ((ROWS, WEIGHT), tigon.rms_norm),
    "add_rms_norm": ((ROWS, ROWS, WEIGHT), tigon.add_rms_norm),
    "layer_norm": ((ROWS, WEIGHT, WEIGHT), tigon.layer_norm),
    "group_norm": (((4, 64, 100), (64,), (64,)), lambda x, w, b: tigon.group_norm(x, 8, w, b)),
    "dyt": ((ROWS, (1,), WEIGHT, WEIGHT), tigon.dyt),
    "poly_norm": ((ROWS, (3,), ()), tigon.poly_norm),
    "swiglu": ((ROWS, ROWS), tigon.swiglu),
    "geglu": ((ROWS, ROWS), tigon.geglu),
    "reglu": ((ROWS, ROWS), tigon.reglu),
    "relu2": ((ROWS,), tigon.relu2),
    "gated_residual": ((ROWS, ROWS, ROWS), tigon.gated_residual),
    "gated_linear": ((ROWS, ROWS, (128, 1024)), gated_linear),
    "moe_mlp": (((64, 128), (64, 2), (8, 128, 128), (8, 128, 64)), _moe_mlp),
    "rope": (((2, 4, 64, 64), (2, 2, 64, 64)), lambda q, k: tigon.rope(q, k, *_angles(q))),
    "qk_norm_rope": (
        ((2, 4, 64, 64), (2, 2, 64, 64), (64,), (64,)),
        lambda q, k, wq, wk: tigon.qk_norm_rope(q, k, wq, wk, *_angles(q)),
    ),
    "softmax": ((ROWS,), lambda x: tigon.softmax(x, -1)),
    "sparsemax": ((ROWS,), tigon.sparsemax),
    "outer_softmax": (((256, 96),), tigon.outer_softmax),
    "prefix_attention": (((160, 4, 32), (160, 2, 32), (160, 2, 32)), _prefix_attention),
    "cross_entropy": ((LOGITS,), lambda x: tigon.cross_entropy(x, _ids(x, 256))),
    "logprob": ((LOGITS,), lambda x: tuple(tigon.logprob(x, _ids(x, 256))[:2])),
    "kl_div": ((LOGITS, LOGITS), lambda x, y: tigon.kl_div(x, y.detach(), reduction="batchmean", temperature=1.0)),
    "jsd": ((LOGITS, LOGITS), lambda x, y: tigon.jsd(x, y.detach(), temperature=1.0)),
    "tvd": ((LOGITS, LOGITS), lambda x, y: tigon.tvd(x, y.detach(), temperature=1.0)),
    "embedding": ((HEAD,), lambda w: tigon.embedding(_ids(w, 512), w)),
    "embedding_bag": ((HEAD,), lambda w: tigon.embedding_bag(_ids(w, 64, 4), w, mode="sum")),
    "quantized_embedding": ((HEAD,), _quantized_embedding),
    "linear_cross_entropy": ((SEQUENCES, HEAD), lambda x, w: tigon.linear_cross_entropy(x, w, _ids(x, 4, 32))),
    "linear_logprob": ((SEQUENCES, HEAD), lambda x, w: tigon.linear_logprob(x, w, _ids(x, 4, 32)).logprob),
    "dpo": (
        (SEQUENCES, HEAD, SEQUENCES, HEAD),
        lambda x, w, rx, rw: dpo(x, w, _ids(x, 4, 32), Hidden(rx.detach(), rw.detach()), config=DPO(beta=0.01))[0],
    ),
    "orpo": ((SEQUENCES, HEAD), lambda x, w: orpo(x, w, _ids(x, 4, 32), config=ORPO())[0]),
    "grpo": ((SEQUENCES, HEAD, (4, 32), (4, 32)), _grpo),
    "distill": (
        ((128, 64), HEAD, (128, 64), HEAD),
        lambda x, w, tx, tw: distill(x, w, Hidden(tx.detach(), tw.detach()), config=Distill(loss_type="jsd"))[0],
    ),
}


def check_operator(name: str, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """A row with "status" (ok, wrong or failed), "error" and the "reason" of a failure."""
    row: dict[str, Any] = {"op": name, "device": str(device), "status": "ok", "reason": "", "error": None}
    shapes, call = CALLS[name]
    # Multiples of 3/32: exact in every dtype, and no sum equals 1, where sparsemax's gradient jumps.
    draw = torch.Generator().manual_seed(0)
    values = [(torch.randn(shape, generator=draw) * 16 / 3).round() * 3 / 32 for shape in shapes]
    try:
        cpu = torch.device("cpu")
        expected = _run(call, values, cpu, torch.float64)
        row["error"] = _compare(_run(call, values, device, dtype), expected)
        bound = max(TOLERANCE[dtype], 2 * _compare(_run(call, values, cpu, dtype), expected))
        if not row["error"] <= min(bound, 0.5):  # NaN is not <=
            row["status"], row["reason"] = "wrong", f"error {row['error']:.1e} above {bound:.1e}"
    except Exception as error:  # the row reports any error
        row["status"], row["reason"] = "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return row


def _run(call: Callable[..., Any], values: list[Tensor], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Outputs and gradients in fp64 on the CPU."""
    inputs = [value.to(device, dtype).requires_grad_() for value in values]
    result = call(*inputs)
    outputs = result if isinstance(result, tuple) else (result,)
    # Partly along the output: a gradient that sums over the whole output would be a small difference of large sums.
    roots = [out for out in outputs if out.requires_grad]
    upstream = [out.detach() / out.detach().abs().mean() + 1 for out in roots]
    grads = torch.autograd.grad(roots, inputs, upstream, allow_unused=True) if roots else ()
    return [t.detach().double().cpu() for t in (*outputs, *grads) if t is not None]


def _compare(values: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative error among outputs and gradients."""
    return max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in zip(values, expected, strict=True))
