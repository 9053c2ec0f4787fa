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

from tigon.fusion.parts.norm_formula import RMSForm
from tigon.ops.qk_norm_rope import qk_norm_rope
from tigon.ops.rms_norm import rms_norm


class HeadNorm:
    """The (B, T, H, D) or (B, H, T, D) result of a norm over D, not computed yet.

    A HeadNorm is not a Tensor, also for `isinstance`. The object lives within one attention module's forward, from the
    norm to the rotation.
    """

    def __init__(self, x: Tensor, weight: Tensor, form: RMSForm, patch: Any) -> None:
        self.x, self.weight, self.form, self.patch = x, weight, form, patch
        self.normed: Tensor | None = None

    def tensor(self) -> Tensor:
        if self.normed is None:
            self.patch.ledger.count("norm", self.patch.key)
            norm: Callable[..., Tensor] = functools.partial(rms_norm, **self.form.options)
            self.normed = norm(self.x, self.weight)
            self.patch.ledger.recompute.note(self.normed, norm, self.x, self.weight)
        return self.normed

    def transpose(self, dim0: int, dim1: int) -> Any:
        dims = {dim0 % self.x.dim(), dim1 % self.x.dim()}
        if self.normed is not None or self.x.dim() - 1 in dims:
            return self.tensor().transpose(dim0, dim1)
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

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(as_tensor(a) for a in args), **{k: as_tensor(v) for k, v in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        if name in ("x", "normed"):  # copy and pickle ask an uninitialised object
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __repr__(self) -> str:
        return f"HeadNorm(shape={tuple(self.x.shape)}, dtype={self.x.dtype})"

    __hash__ = object.__hash__


def as_tensor(value: Any) -> Any:
    if isinstance(value, HeadNorm):
        return value.tensor()
    if type(value) in (list, tuple):
        return type(value)([as_tensor(v) for v in value])
    return value


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


def _make_method(name: str) -> Callable[..., Any]:
    def method(self: HeadNorm, *args: Any) -> Any:
        return getattr(self.tensor(), name)(*(as_tensor(a) for a in args))

    return method


_OPERATORS = """
    add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod pow rpow matmul rmatmul neg pos abs invert
    eq ne lt le gt ge and or xor getitem setitem iter len bool float int index contains iadd isub imul itruediv
"""
for _name in _OPERATORS.split():
    setattr(HeadNorm, f"__{_name}__", _make_method(f"__{_name}__"))
