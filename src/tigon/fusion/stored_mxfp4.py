"""Layers of gpt-oss that transformers has loaded in MXFP4: replaced by layers with the same bytes in 4-bit stacks.

transformers reorders the checkpoint's bytes for kernels without a backward pass, and calls the experts with the
router's choices in those kernels' form. The new layer is that of a dense checkpoint, with 4-bit stacks in place of the
dense stacks; the kernels' own layouts restore the order of the bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tigon.fusion.engine.patch import is_hooked
from tigon.fusion.parts.stacks import is_kept_in_mxfp4, replace_stack
from tigon.ops.experts.quantized import Format, QuantizedExperts

QUANTIZER = "hf_quantizer", "quantization_config", "quantization_method", "is_quantized"
"""What transformers notes on a model and its configuration, and refuses to train and to save by."""


def take_over_mxfp4(model: nn.Module, format: Format) -> list[str]:
    """Replace layers that transformers keeps in MXFP4, one after another, and return the names of their experts.

    Raises: ValueError for another format, for a fused model, for layers with hooks, for layers without the model around
        them, and for a layer whose bytes are not those of all experts; before any layer is replaced.
    """
    layers = [(n, m) for n, m in model.named_modules() if is_kept_in_mxfp4(m._modules.get("experts"))]
    if not layers:
        return []
    if format != "mxfp4":
        raise ValueError(
            f"quantize_experts: format must be 'mxfp4' for experts that are in MXFP4 already, got {format!r}."
        )
    if any("_tigon" in vars(m) for m in model.modules()):
        raise ValueError("quantize_experts: model must not be fused: call tigon.quantize_experts before tigon.fuse.")
    for name, layer in layers:
        if any(is_hooked(m) for m in (layer, *layer.children())):
            raise ValueError(f"quantize_experts: {name} must have no hooks: load the model on one device.")
    owners: list[Any] = [m for m in model.modules() if hasattr(m, "config")]
    config = next((m.config for m in owners if hasattr(m.config, "num_local_experts")), None)
    if config is None:
        raise ValueError("quantize_experts: model must hold its configuration, to replace layers that are in MXFP4.")
    shapes = {n: tuple(p.shape) for n, p in _make_layer(config).experts.named_parameters() if p.dim() == 3}
    for name, layer in layers:  # the bytes are read twice: kept, those of all layers would need the memory twice
        for stack, shape in shapes.items():
            _check_bytes(*_read_bytes(layer.experts, stack), shape, f"{name}.experts.{stack}")
    names = [name for name, _ in layers]
    del layers, layer  # each layer's memory is freed when the next one is taken
    for name in names:
        model.set_submodule(name, _rebuild_layer(model.get_submodule(name), config))
    for owner in [*owners, *(m.config for m in owners)]:
        for attribute in QUANTIZER:
            getattr(owner, "__dict__", {}).pop(attribute, None)
    return [f"{name}.experts" for name in names]


def _make_layer(config: Any) -> Any:
    """The layer of a dense checkpoint, on the meta device."""
    from transformers.models.gpt_oss import modeling_gpt_oss

    make: Any = modeling_gpt_oss.GptOssMLP
    with torch.device("meta"):
        return make(config)


def _rebuild_layer(stored: Any, config: Any) -> nn.Module:
    """The layer of a dense checkpoint, with the router, the biases and the bytes of a stored one."""
    layer = _make_layer(config)
    layer.router = stored.router
    layer.train(stored.training)
    experts, dtype = layer.experts, stored.router.weight.dtype
    experts.limit, experts.alpha = stored.experts.limit, stored.experts.alpha
    for name in ("gate_up_proj", "down_proj"):
        quantized = QuantizedExperts.from_mxfp4(*_read_bytes(stored.experts, name), by_columns=True)
        replace_stack(experts, name, quantized, dtype)
        bias = getattr(stored.experts, f"{name}_bias").detach().to(dtype)  # the checkpoint's are in bf16
        setattr(experts, f"{name}_bias", nn.Parameter(bias, requires_grad=False))
    return layer  # type: ignore[no-any-return]


def _check_bytes(blocks: Tensor, scales: Tensor, shape: tuple[int, ...], path: str) -> None:
    """shape: of the dense stack, (E, K, N)."""
    E, K, N = shape
    if blocks.shape != (E, N, K // 32, 16) or scales.shape != blocks.shape[:3]:
        raise ValueError(
            f"quantize_experts: {path} must have blocks {(E, N, K // 32, 16)} and scales {(E, N, K // 32)}, "
            f"got {tuple(blocks.shape)} and {tuple(scales.shape)}."
        )


def _read_bytes(experts: Any, name: str) -> tuple[Tensor, Tensor]:
    """A stack's blocks (E, N, K / 32, 16) and scales (E, N, K / 32), both uint8, in the checkpoint's order."""
    stack = getattr(experts, name)
    if isinstance(stack, Tensor):  # the placeholder of a stack that was never loaded
        raise ValueError(f"quantize_experts: {name} of {type(experts).__name__} must be loaded from a checkpoint.")
    # The layouts of the kernels restore the order, as transformers has them do to save a checkpoint.
    kept = stack, getattr(experts, f"{name}_precision_config").weight_scale
    codes, scales = (t.storage.layout.unswizzle_data(t.storage.data).transpose(-1, -2) for t in kept)
    return codes.unflatten(-1, (-1, 16)).contiguous(), scales.contiguous()
