"""Causal depthwise convolution over tokens: y_t = act(Σ_j w_j · x_(t - W + 1 + j) + b), for each channel by itself.

The short convolution before a state-space or delta-rule layer; act is silu or nothing. No token sees a later token or
another document.

Source: Gu & Dao 2023, https://arxiv.org/abs/2312.00752; after delta rules: Yang et al. 2024,
https://arxiv.org/abs/2406.06484.
"""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import Tensor

from tigon.kernels import check_plain, use_triton
from tigon.ops.causal_conv1d.launches import causal_conv1d_launch
from tigon.ops.causal_conv1d.reference import causal_conv1d_reference
from tigon.ops.example import Example
from tigon.ops.offsets import check_documents, find_documents

__all__ = ["causal_conv1d", "causal_conv1d_reference"]

MOST_TAPS = 8  # that the kernels keep in registers


@overload
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = ..., *, activation: Literal["silu"] | None = ...,
    initial_state: Tensor | None = ..., offsets: Tensor | None = ..., return_state: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip


@overload
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = ..., *, activation: Literal["silu"] | None = ...,
    initial_state: Tensor | None = ..., offsets: Tensor | None = ..., return_state: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Literal["silu"] | None = None,
    initial_state: Tensor | None = None,
    offsets: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolve each channel with its W weights over the present token and the W - 1 before.

    Args:
        x: (B, T, C), any float dtype and strides: for inputs (B, C, T) pass x.transpose(1, 2), which copies nothing.
            Kernels are fastest where channels have unit stride.
        weight: (C, W), any float dtype, W from 2 to 8. The last weight multiplies the present token: torch's
            `Conv1d(C, C, W, groups=C).weight` is (C, 1, W).
        bias: (C,), or None.
        activation: "silu", or None. Everything is computed in fp32 (fp64 for fp64), and rounded once.
        initial_state: (B, C, W - 1), the inputs before the first token, oldest first; zeros by default. With offsets
            (documents, C, W - 1).
        offsets: (documents + 1,) int32 or int64 on x's device, as for `varlen_attention`: documents that lie behind one
            another in x, whose B is then 1. Documents may be empty. On a GPU the host never reads offsets, and a token
            in no document gets NaN.
        return_state: also return the last W - 1 inputs of each sequence or document, in x's dtype. A shorter sequence
            keeps inputs of the initial state. The returned state has a gradient, too.
    Returns: (B, T, C) in x's dtype and memory order; with return_state (y, state).
    Raises: ValueError for invalid shapes, dtypes, devices, activations or offsets.

    Replaces::

        y = F.conv1d(F.pad(x.transpose(1, 2), (W - 1, 0)), weight.unsqueeze(1), bias, groups=C).transpose(1, 2)

    and, with activation="silu", after it::

        y = F.silu(y)
    """
    _check(x, weight, bias, activation, initial_state, offsets)
    if not use_triton(x, weight, bias, initial_state):
        options: dict[str, Any] = {"initial_state": initial_state, "offsets": offsets, "return_state": return_state}
        return causal_conv1d_reference(x, weight, bias, activation=activation, **options)
    documents = None if offsets is None else find_documents(offsets, x.shape[1])
    tensors = x, weight, bias, initial_state, offsets, documents
    y, state = causal_conv1d_launch(*tensors, activation == "silu", return_state)
    return (y, state) if return_state else y


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, initial_state: Tensor | None,
    offsets: Tensor | None,
) -> None:  # fmt: skip
    check_plain("causal_conv1d", x=x, weight=weight, bias=bias, initial_state=initial_state)
    if x.dim() != 3 or not x.dtype.is_floating_point:
        raise ValueError(f"causal_conv1d: x must be (B, T, C) floats, got {tuple(x.shape)} {x.dtype}.")
    C = x.shape[2]
    if weight.dim() != 2 or weight.shape[0] != C or not 2 <= weight.shape[1] <= MOST_TAPS:
        raise ValueError(
            f"causal_conv1d: weight must be ({C}, W), a row per channel of x {tuple(x.shape)} with W from 2 "
            f"to {MOST_TAPS}, got {tuple(weight.shape)}."
        )
    if activation not in (None, "silu"):
        raise ValueError(f"causal_conv1d: activation must be 'silu' or None, got {activation!r}.")
    check_documents("causal_conv1d", "x", x, offsets, initial_state, (C, weight.shape[1] - 1))
    if bias is not None and bias.shape != (C,):
        raise ValueError(f"causal_conv1d: bias must be ({C},), a number per channel, got {tuple(bias.shape)}.")
    for name, t in (("weight", weight), ("bias", bias), ("initial_state", initial_state)):
        if t is not None and (not t.dtype.is_floating_point or t.device != x.device):
            raise ValueError(f"causal_conv1d: {name} must be floats on {x.device}, got {t.dtype} on {t.device}.")


EXAMPLES = {
    "causal_conv1d": Example(
        "Sequences", ((2, 64, 96), (96, 4), (96,)), lambda x, w, b: causal_conv1d(x, w, b, activation="silu")
    ),
}
