"""RMS norm of x that also returns x as the residual stream, so that the norm's backward pass adds both gradients.

Autograd would sum the two gradients of x in a separate pass, which reads both and writes a third. `rms_norm`'s backward
kernel adds the stream's gradient instead, as for `add_rms_norm`: in fp32, before the single rounding.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tigon.kernels import is_traced, make_function, use_triton
from tigon.ops.rms_norm import Cast, _check, _rms_norm_bwd, _rms_norm_fwd, default_eps, rms_norm


def forked_rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float | None = None, offset: float = 0.0, cast: Cast = "llama"
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x), x); arguments as for `rms_norm`.

    Fused in eager mode with kernels only; otherwise a plain norm beside x, and autograd sums the gradients.
    """
    _check("forked_rms_norm", x, weight, cast)
    if eps is None:
        eps = default_eps(x.dtype)
    if not use_triton(x, weight) or is_traced(x):
        return rms_norm(x, weight, eps=eps, offset=offset, cast=cast), x
    result: tuple[Tensor, Tensor] = _forked(x, weight, eps, offset, cast)
    return result


def _forked_fwd(ctx: Any, x: Tensor, weight: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    y, rstd = _rms_norm_fwd.direct(x, weight, *options)  # type: ignore[attr-defined]
    ctx.set_materialize_grads(False)
    ctx.options = options
    ctx.save_for_backward(x, weight, rstd)
    # A returned input becomes a view whose gradient arrives here; no memory is copied.
    return y, x


def _forked_bwd(ctx: Any, dy: Tensor | None, ds: Tensor | None) -> tuple[Tensor | None, ...]:
    need_dx, need_dw, *_ = ctx.needs_input_grad
    if dy is None:  # norm unused: the stream's gradient passes through
        return (ds,)
    dx, dw = _rms_norm_bwd(dy, ds, *ctx.saved_tensors, *ctx.options, need_dx, need_dw)
    return dx if need_dx else None, dw if need_dw else None


_forked = make_function(_forked_fwd, _forked_bwd)
