"""Norms of attention heads that wait for the heads' rotation, so that both run in one pass.

Attention modules norm each q and k head, transpose, and rotate:

    query_states = self.q_norm(query_states.view(hidden_shape)).transpose(1, 2)
    key_states = self.k_norm(key_states.view(hidden_shape)).transpose(1, 2)
    query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)

In such a module (qk_norm.py) a fused norm returns a `HeadNorm`: the heads, and the norm to apply. A HeadNorm notes a
transposition. In the rewritten forward (rotary.py) the rotary function hands two HeadNorms to `tigon.qk_norm_rope`. Any
other use of a HeadNorm computes the normed tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tigon.fusion.logits.deferred import Deferred
from tigon.fusion.parts.norm_formula import RMSForm
from tigon.ops.qk_norm_rope import qk_norm_rope
from tigon.ops.rms_norm import rms_norm


class HeadNorm(Deferred):
    """The (B, T, H, D) or (B, H, T, D) result of a norm over D, not computed yet.

    The object lives within one attention module's forward, from the norm to the rotation.
    """

    fields = ("x", "weight", "form", "patch", "normed")

    def __init__(self, x: Tensor, weight: Tensor, form: RMSForm, patch: Any) -> None:
        self.x, self.weight, self.form, self.patch = x, weight, form, patch
        self.normed: Tensor | None = None

    def build(self, why: str = "") -> Tensor:
        if self.normed is None:
            self.patch.ledger.count("norm", self.patch.key)
            norm: Callable[..., Tensor] = functools.partial(rms_norm, **self.form.options)
            self.normed = norm(self.x, self.weight)
            self.patch.ledger.recompute.note(self.normed, norm, self.x, self.weight)
        return self.normed

    def transpose(self, dim0: int, dim1: int) -> Any:
        dims = {dim0 % self.x.dim(), dim1 % self.x.dim()}
        if self.normed is not None or self.x.dim() - 1 in dims:
            return self.build().transpose(dim0, dim1)
        return HeadNorm(self.x.transpose(dim0, dim1), self.weight, self.form, self.patch)

    @property
    def shape(self) -> Any:
        return self.x.shape

    @property
    def dtype(self) -> torch.dtype:
        """The normed tensor's dtype. Under autocast heads are narrow beside a weight in fp32."""
        x, weight = self.x.dtype, self.weight.dtype
        return x if self.form.cast == "gemma" or x == weight else torch.promote_types(x, weight)

    @property
    def device(self) -> Any:
        return self.x.device

    def __repr__(self) -> str:
        return f"HeadNorm(shape={tuple(self.x.shape)}, dtype={self.x.dtype})"


def strip_norm(value: Any) -> Any:
    """The heads before their norm."""
    return value.x if isinstance(value, HeadNorm) else value


def fuse_rope(q: Any, k: Any) -> Callable[..., Any] | None:
    """A function that norms and rotates the bare q and k heads in one pass; None if their norms do not match."""
    if not isinstance(q, HeadNorm) or not isinstance(k, HeadNorm) or q.normed is not None or k.normed is not None:
        return None
    if q.form != k.form or q.x.dtype != k.x.dtype or q.weight.dtype != k.weight.dtype:
        return None
    form = q.form

    def rope(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        for head in (q, k):
            head.patch.ledger.count("norm", head.patch.key)
        run: Callable[..., tuple[Tensor, Tensor]] = functools.partial(qk_norm_rope, **form.options, **options)
        rotated = run(x, y, q.weight, k.weight, cos, sin)
        q.patch.ledger.recompute.note(rotated, run, x, y, q.weight, k.weight, cos, sin)
        return rotated

    return rope
