"""Liger's gated MLPs over tigon.swiglu and tigon.geglu, and its experts, made from a model's configuration.

The projections are modules that are called, so that an adapter on one of them counts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tigon.ops.acts import ACTS
from tigon.ops.experts import moe_mlp
from tigon.ops.gated import geglu, swiglu

SILU = ACTS["silu"].aliases
# Liger runs "gelu" by the tanh formula too.
GELU = ("gelu", *ACTS["gelu_tanh"].aliases)


class _Gated(nn.Module):
    """down(act(gate(x)) · up(x)).

    Attributes:
        names: of the projections: gate, up, down, or gate and up in one, down.
        acts: what config.hidden_act may be, or nothing if it is not looked at.
    """

    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    acts: tuple[str, ...] = SILU
    gate_multiplier = down_multiplier = 1.0
    down_proj: nn.Module
    gate_proj: nn.Module
    up_proj: nn.Module

    def __init__(self, config: Any, intermediate_size: int | None = None, *, bias: bool = False) -> None:
        super().__init__()
        self.config = config
        self.hidden_size: int = config.hidden_size
        self.intermediate_size: int = config.intermediate_size if intermediate_size is None else intermediate_size
        act = self._act(config)
        if self.acts and act not in self.acts:
            raise ValueError(
                f"{type(self).__name__}: config.hidden_act must be one of {', '.join(self.acts)}, got {act!r}."
            )
        *into, out = self.names
        width = self.intermediate_size * (2 if len(into) == 1 else 1)
        for name in into:
            setattr(self, name, nn.Linear(self.hidden_size, width, bias=bias))
        setattr(self, out, nn.Linear(self.intermediate_size, self.hidden_size, bias=bias))

    def _act(self, config: Any) -> Any:
        return config.hidden_act

    def _gated(self, *projected: Tensor) -> Tensor:
        return swiglu(*projected, gate_multiplier=self.gate_multiplier, multiplier=self.down_multiplier)

    def forward(self, x: Tensor) -> Tensor:
        *into, out = (getattr(self, name) for name in self.names)
        y: Tensor = out(self._gated(*(layer(x) for layer in into)))
        return y


class LigerSwiGLUMLP(_Gated):
    """down_proj(silu(gate_proj(x)) · up_proj(x)), for x (..., D) of any width."""

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        super().__init__(config, intermediate_size)


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    """As `LigerSwiGLUMLP`."""


class LigerMLP(_Gated):
    """down_proj(silu(gate_proj(x)) · up_proj(x)), for x (..., D)."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)


class LigerSwiGLUMLPForMuseGlimmer(LigerMLP):
    """As `LigerMLP`, with the activation by its name there, hidden_activation."""

    def _act(self, config: Any) -> Any:
        return getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)


class LigerHunyuanV1SwiGLUMLP(_Gated):
    """As `LigerMLP`. Its place in the model changes nothing."""

    def __init__(self, config: Any, layer_idx: int | None = None, is_shared_mlp: bool = False) -> None:
        super().__init__(config)
        self.layer_idx = layer_idx


class LigerPhi3SwiGLUMLP(LigerMLP):
    """down_proj(silu(gate) · up), with gate and up the halves of gate_up_proj(x)."""

    names = ("gate_up_proj", "down_proj")


class LigerBlockSparseTop2MLP(LigerMLP):
    """One expert of Mixtral: w2(silu(w1(x)) · w3(x))."""

    names = ("w1", "w3", "w2")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.ffn_dim, self.hidden_dim = self.intermediate_size, self.hidden_size


class LigerExperts(nn.Module):
    """`tigon.ops.experts.moe_mlp` with the weights of all experts: forward(x, top_k_index, top_k_weights).

    gate_up_proj (E, 2I, D) and down_proj (E, D, I) are not initialised: a model or a checkpoint does that.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        if config.hidden_act not in SILU:
            raise ValueError(f"LigerExperts: config.hidden_act must be silu or swish, got {config.hidden_act!r}.")
        counts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
        self.num_experts = next((n for n in counts if n is not None), None)
        if self.num_experts is None:
            raise ValueError("LigerExperts: config must have num_experts, num_local_experts or n_routed_experts.")
        self.hidden_dim = config.hidden_size
        self.intermediate_dim = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        width = self.intermediate_dim
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * width, self.hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, width))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x = hidden_states.reshape(-1, self.hidden_dim)
        index, weights = (t.reshape(-1, t.shape[-1]) for t in (top_k_index, top_k_weights))
        return moe_mlp(x, index, weights, self.gate_up_proj, self.down_proj).view(hidden_states.shape)


class LigerFalconH1SwiGLUMLP(_Gated):
    """down_proj(silu(gate_proj(x) · a) · up_proj(x)) · b, with (a, b) = config.mlp_multipliers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, bias=getattr(config, "mlp_bias", False))
        self.gate_multiplier, self.down_multiplier = (float(m) for m in config.mlp_multipliers)

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self.down_proj, "bias", None) is None:
            return super().forward(x)
        # With a bias the multiplier has to come after the bias.
        y = swiglu(self.gate_proj(x), self.up_proj(x), gate_multiplier=self.gate_multiplier)
        z: Tensor = self.down_proj(y) * self.down_multiplier
        return z


class LigerFalconH1MLP(LigerFalconH1SwiGLUMLP):
    """As `LigerFalconH1SwiGLUMLP`."""


class _GELU(_Gated):
    acts = ()

    def _act(self, config: Any) -> Any:
        return None

    def _gated(self, *projected: Tensor) -> Tensor:
        return geglu(*projected)


class LigerGEGLUMLP(_GELU):
    """down_proj(gelu(gate_proj(x)) · up_proj(x)), gelu by its tanh formula whatever the configuration says."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)


class LigerGEGLUMLPForGemma4(_GELU):
    """As `LigerGEGLUMLP`, twice as wide in layers that share keys and values if config.use_double_wide_mlp says so."""

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        shared = getattr(config, "num_kv_shared_layers", 0)
        first = getattr(config, "num_hidden_layers", 0) - shared
        wide = getattr(config, "use_double_wide_mlp", False) and shared > 0
        double = wide and layer_idx is not None and layer_idx >= first
        super().__init__(config, config.intermediate_size * (2 if double else 1))


class _Tiled(_Gated):
    """In tiles of the sequence, each of which the backward pass computes again: the width costs one tile of memory."""

    def __init__(self, config: Any, num_shards: int | None = None) -> None:
        super().__init__(config)
        self.num_shards = num_shards

    def forward(self, x: Tensor) -> Tensor:
        shards = self.num_shards or math.ceil(x.shape[-2] / x.shape[-1])
        tiles = x.chunk(max(1, shards), dim=-2)
        return torch.cat([checkpoint(super(_Tiled, self).forward, t, use_reentrant=False) for t in tiles], dim=-2)


class LigerTiledSwiGLUMLP(_Tiled):
    """`LigerSwiGLUMLP` in num_shards tiles of the sequence, by default as many as it has widths."""

    def _act(self, config: Any) -> Any:
        return getattr(config, "hidden_act", "silu")


class LigerTiledGEGLUMLP(_Tiled):
    """`LigerGEGLUMLP` in num_shards tiles of the sequence, by default as many as it has widths."""

    acts = GELU

    def _act(self, config: Any) -> Any:
        return getattr(config, "hidden_act", "gelu")

    def _gated(self, *projected: Tensor) -> Tensor:
        return geglu(*projected)
