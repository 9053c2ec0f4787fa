"""Layers for the `kernels` package, which binds their forwards to a model's modules in place of the modules' own.

`kernels` takes only the function `forward` from such a class: `self` is then the model's module, with its weights and
settings. So the classes have no constructor, and no members besides the two flags that `kernels` reads. Where an
operator does not apply (fp64, torch.func, another weight dtype), the class's own forward runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tigon.fusion.engine.patch import is_functorch_active
from tigon.fusion.logits.recipe import DTYPES
from tigon.ops.acts import ACTS
from tigon.ops.gated import gated_unit
from tigon.ops.gated_rms_norm import gated_rms_norm
from tigon.ops.rms_norm import rms_norm
from tigon.ops.rope import rope


class Layer(nn.Module):
    """The flags that `kernels` reads."""

    can_torch_compile = True
    has_backward = True


def _add_layer(name: str, doc: str, forward: Callable[..., Any]) -> str:
    """Add a layer to this module, where `kernels` looks layers up by name."""
    forward.__name__, forward.__qualname__ = "forward", f"{name}.forward"
    globals()[name] = type(name, (Layer,), {"__doc__": doc, "__module__": __name__, "forward": forward})
    return name


def _norm_forward(offset: float, cast: Any) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor) -> Tensor:
        if not _norm_fits(self, x):
            own: Tensor = type(self).forward(self, x)
            return own
        return rms_norm(x, self.weight, eps=_eps(self), offset=offset, cast=cast)

    return forward


def _gated_norm_forward(self: Any, x: Tensor, gate: Tensor | None = None) -> Any:
    if not isinstance(gate, Tensor) or (gate.dtype, gate.shape) != (x.dtype, x.shape):
        return type(self).forward(self, x, gate)
    if self.weight.dtype != x.dtype or not _norm_fits(self, x):
        return type(self).forward(self, x, gate)
    return gated_rms_norm(x, gate, self.weight, eps=_eps(self))


# (offset, cast, whether the norm has a gate) → its layer name.
NORMS = {
    (0.0, "llama", False): _add_layer(
        "RMSNorm", "Llama's: x / rms(x) is rounded to x's dtype, then multiplied by the weight.",
        _norm_forward(0.0, "llama"),
    ),
    (0.0, "gemma", False): _add_layer(
        "RMSNormRoundedOnce", "OLMo's and Nemotron's: multiplied by the weight in fp32, and rounded at the end.",
        _norm_forward(0.0, "gemma"),
    ),
    (1.0, "gemma", False): _add_layer(
        "RMSNormZeroCentered", "Gemma's and Qwen3.5's: multiplied by 1 + weight in fp32, and rounded at the end.",
        _norm_forward(1.0, "gemma"),
    ),
    (0.0, "llama", True): _add_layer(
        "RMSNormGated", "Qwen3-Next's: Llama's norm, times silu(gate).", _gated_norm_forward
    ),
}  # fmt: skip


def _mlp_forward(act: Any) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor) -> Any:
        if is_functorch_active():
            return type(self).forward(self, x)
        # The layers are called as modules: adapters and hooks keep working.
        return self.down_proj(gated_unit(self.gate_proj(x), self.up_proj(x), act=act))

    return forward


def _halves_forward(act: Any) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor) -> Any:
        return type(self).forward(self, x) if is_functorch_active() else gated_unit(x, act=act)

    return forward


def _add_act_layers(act: str) -> tuple[str, str]:
    """Add an activation's two layers, and return their names."""
    camel, formula = "".join(word.capitalize() for word in act.split("_")), f"act(g) = {ACTS[act].formula}."
    # The names in other kernel repositories for the two usual MLPs.
    mlp = {"silu": "SwiGLUMLP", "gelu_tanh": "GeGLUMLP"}.get(act, f"{camel}GatedMLP")
    _add_layer(mlp, f"down_proj(act(gate_proj(x)) · up_proj(x)), {formula}", _mlp_forward(act))
    _add_layer(f"{camel}AndMul", f"act of the first half of x times the second half, {formula}", _halves_forward(act))
    return mlp, f"{camel}AndMul"


LAYERS = {act: _add_act_layers(act) for act in ACTS}  # activation → its layer names: MLP, packed halves


def _rotary_forward(keeps: bool) -> Callable[..., Any]:
    def forward(self: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        if not _rotary_fits(q, k, cos, sin, unsqueeze_dim):
            return type(self).forward(self, q, k, cos, sin, unsqueeze_dim)
        turned_q, turned_k = rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return (turned_q.to(q.dtype), turned_k.to(k.dtype)) if keeps else (turned_q, turned_k)

    return forward


# Whether the results have the dtypes of q and k → the layer name.
ROTARY = {
    False: _add_layer(
        "RotaryPosEmb", "Llama's: rotated halves per head, the result in the promoted dtype of each with cos.",
        _rotary_forward(keeps=False),
    ),
    True: _add_layer("RotaryPosEmbKept", "OLMo's: the same, with results in the dtypes of q and k.",
                     _rotary_forward(keeps=True)),
}  # fmt: skip


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
