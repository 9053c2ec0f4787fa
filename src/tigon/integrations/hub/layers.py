"""Layers for the `kernels` package, which binds their forwards to a model's modules in place of the modules' own.

`kernels` takes only the function `forward` from such a class: `self` is then the model's module, with its weights and
settings. So the classes have no constructor, and no members besides the two flags that `kernels` reads. Where an
operator does not apply (fp64, torch.func, another weight dtype), the class's own forward runs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tigon.fusion.engine.patch import is_functorch_active
from tigon.fusion.logits.recipe import DTYPES
from tigon.ops.acts import ACTS
from tigon.ops.gated import gated_unit, swiglu
from tigon.ops.rms_norm import rms_norm
from tigon.ops.rope import rope


class RMSNorm(nn.Module):
    """Llama's: x / rms(x) is rounded to x's dtype, then multiplied by the weight."""

    can_torch_compile = True
    has_backward = True

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if not _norm_fits(self, hidden_states):
            return type(self).forward(self, hidden_states)
        return rms_norm(hidden_states, self.weight, eps=_eps(self), cast="llama")


class RMSNormRoundedOnce(nn.Module):
    """OLMo's and Nemotron's: multiplied by the weight in fp32, and rounded at the end."""

    can_torch_compile = True
    has_backward = True

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if not _norm_fits(self, hidden_states):
            return type(self).forward(self, hidden_states)
        return rms_norm(hidden_states, self.weight, eps=_eps(self), cast="gemma")


class RMSNormZeroCentered(nn.Module):
    """Gemma's and Qwen3.5's: multiplied by 1 + weight in fp32, and rounded at the end."""

    can_torch_compile = True
    has_backward = True

    def forward(self: Any, x: Tensor) -> Tensor:
        if not _norm_fits(self, x):
            return type(self).forward(self, x)
        return rms_norm(x, self.weight, eps=_eps(self), offset=1.0, cast="gemma")


class RMSNormGated(nn.Module):
    """Qwen3-Next's: Llama's norm, times silu(gate)."""

    can_torch_compile = True
    has_backward = True

    def forward(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        x = hidden_states
        if not isinstance(gate, Tensor) or (gate.dtype, gate.shape) != (x.dtype, x.shape):
            return type(self).forward(self, x, gate)
        if self.weight.dtype != x.dtype or not _norm_fits(self, x):
            return type(self).forward(self, x, gate)
        return swiglu(gate, rms_norm(x, self.weight, eps=_eps(self), cast="llama"))


def _gated_mlp(act: Any, formula: str) -> type[nn.Module]:
    class GatedMLP(nn.Module):
        can_torch_compile = True
        has_backward = True

        def forward(self: Any, x: Tensor) -> Tensor:
            if is_functorch_active():
                return type(self).forward(self, x)
            return self.down_proj(gated_unit(self.gate_proj(x), self.up_proj(x), act=act))

    GatedMLP.__doc__ = f"""down_proj(act(gate_proj(x)) · up_proj(x)), act(g) = {formula}.

    The layers are called as modules: adapters and hooks keep working."""
    return GatedMLP


def _act_and_mul(act: Any, formula: str) -> type[nn.Module]:
    class ActAndMul(nn.Module):
        can_torch_compile = True
        has_backward = True

        def forward(self: Any, x: Tensor) -> Tensor:
            return type(self).forward(self, x) if is_functorch_active() else gated_unit(x, act=act)

    ActAndMul.__doc__ = f"""act of the first half of x times the second half, act(g) = {formula}."""
    return ActAndMul


def _made_for(act: str) -> tuple[str, str]:
    """Create an activation's two layers, and return their names."""
    camel = "".join(word.capitalize() for word in act.split("_"))
    # The names in other kernel repositories for the two usual MLPs.
    mlp, halves = {"silu": "SwiGLUMLP", "gelu_tanh": "GeGLUMLP"}.get(act, f"{camel}GatedMLP"), f"{camel}AndMul"
    for name, make in ((mlp, _gated_mlp), (halves, _act_and_mul)):
        layer = make(act, ACTS[act].formula)
        layer.__name__ = layer.__qualname__ = name
        globals()[name] = layer  # `kernels` looks a layer up as an attribute of this module
    return mlp, halves


LAYERS = {act: _made_for(act) for act in ACTS}  # activation → its layer names: MLP, packed halves


class RotaryPosEmb(nn.Module):
    """Llama's: rotated halves per head, the result in the promoted dtype of each with cos."""

    can_torch_compile = True
    has_backward = True

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if not _rotary_fits(q, k, cos, sin, unsqueeze_dim):
            return type(self).forward(self, q, k, cos, sin, unsqueeze_dim)
        turned_q, turned_k = rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return turned_q, turned_k


class RotaryPosEmbKept(nn.Module):
    """OLMo's: the same, with results in the dtypes of q and k."""

    can_torch_compile = True
    has_backward = True

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if not _rotary_fits(q, k, cos, sin, unsqueeze_dim):
            return type(self).forward(self, q, k, cos, sin, unsqueeze_dim)
        turned_q, turned_k = rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return turned_q.to(q.dtype), turned_k.to(k.dtype)


def _eps(module: Any) -> float:
    return module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps


def _norm_fits(module: Any, x: Tensor) -> bool:
    weight = module.weight
    if x.dtype not in DTYPES or x.dim() == 0 or is_functorch_active():
        return False
    if weight.dtype != x.dtype and weight.dtype.itemsize != 4:  # an fp32 weight beside a narrower x is usual
        return False
    return weight.shape == x.shape[-1:] and weight.device == x.device


def _rotary_fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> bool:
    if is_functorch_active() or any(t.dtype not in DTYPES for t in (q, k, cos, sin)):
        return False
    if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or unsqueeze_dim not in (1, 2) or cos.shape != sin.shape:
        return False
    batch, time, width = q.shape[0], q.shape[3 - unsqueeze_dim], q.shape[3]
    if (k.shape[0], k.shape[3 - unsqueeze_dim], k.shape[3]) != (batch, time, width):
        return False
    return (
        cos.shape[0] in (1, batch) and cos.shape[1:] == (time, width) and not (cos.requires_grad or sin.requires_grad)
    )
