"""8-bit embeddings: a scale and an offset per row, dequantized on lookup."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tigon.compress.layers import ByteEmbedding
from tigon.compress.layout import swap_layers, write_layout
from tigon.compress.report import LayerRow, Report, Skipped


def embeddings(model: nn.Module, *, bits: int = 8) -> Report:
    """Convert every nn.Embedding in a model to 8-bit rows, in place.

    Args:
        model: any module. Skipped: tables with shared weights, such as tied heads, subclasses with their own lookup,
            and tables with sparse gradients or max_norm.
        bits: bits per number; only 8.
    Returns: a `Report` with a row for each converted table; error is ‖w − ŵ‖² / ‖w‖². Skipped tables are in `skipped`
        with their reasons. `remove()` restores the tables.
    Raises: ValueError for other bits, non-finite numbers, and a model without nn.Embedding.

    A row with D numbers takes D + 4 bytes: 34 at width 30, where fp32 takes 120.

    Source: Borisyuk et al. 2024, LiRank, https://arxiv.org/abs/2402.06859
    """
    if bits != 8:
        raise ValueError(f"embeddings: bits must be 8, the width of stored rows, got {bits}.")
    rows, skipped, new = [], [], {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding):
            continue
        reason = _find_obstacle(model, module)
        if reason is not None:
            skipped.append(Skipped(name, reason))
            continue
        weight = module.weight.detach()
        if not bool(torch.isfinite(weight).all()):
            raise ValueError(f"embeddings: the table {name} must be finite, got NaN or infinity.")
        layer = new[name] = ByteEmbedding.quantize(weight).train(module.training)
        error = (layer.weight.double() - weight).square().sum() / weight.double().square().sum().clamp_min(1e-30)
        size, before = layer.codes.numel() + 2 * layer.scales.numel(), weight.numel() * weight.element_size()
        rows.append(LayerRow(name, "embedding", "bits", 1.0, (8, 8), 0, size, before, float(error), 0.0))
    if not rows and not skipped:
        raise ValueError("embeddings: the model must have an nn.Embedding, got none.")
    replaced = swap_layers(model, new)
    write_layout(model)
    return Report(rows, [], skipped, 0, "", [], model, replaced)


def _find_obstacle(model: nn.Module, module: Any) -> str | None:
    if type(module) is not nn.Embedding:
        return f"a {type(module).__name__} may look up rows differently"
    if type(module.weight) not in (Tensor, nn.Parameter):
        return f"the weight is {type(module.weight).__name__}: quantised or sharded"
    if sum(p is module.weight for _, p in model.named_parameters(remove_duplicate=False)) > 1:
        return "the weight is tied to another layer"
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        return "max_norm, scale_grad_by_freq or sparse is set"
    return None
