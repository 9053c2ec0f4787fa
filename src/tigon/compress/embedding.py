"""8-bit embeddings: a scale and an offset per row, dequantized on lookup."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tigon.compress.finding import Left
from tigon.compress.report import LayerRow, Report, swap
from tigon.kernels import use_triton
from tigon.ops.quantized_table import quantize_rows, quantized_embedding


class ByteEmbedding(nn.Module):
    """Replaces nn.Embedding with a uint8 table; no gradient.

    codes: (N, D) uint8. scales: (N, 2), scale and offset as fp16 bits in int16. dtype: the output dtype.
    """

    codes: Tensor
    scales: Tensor
    like: Tensor

    def __init__(self, num_embeddings: int, embedding_dim: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.register_buffer("codes", torch.zeros(num_embeddings, embedding_dim, dtype=torch.uint8))
        self.register_buffer("scales", torch.zeros(num_embeddings, 2, dtype=torch.int16))
        # Only carries the dtype, so that model.to(dtype) changes the output dtype.
        self.register_buffer("like", torch.zeros(0, dtype=dtype), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @classmethod
    def of(cls, weight: Tensor) -> ByteEmbedding:
        """Quantize a float table (N, D)."""
        made = cls(weight.shape[0], weight.shape[1], weight.dtype)
        codes, scales = quantize_rows(weight)
        made.codes, made.scales = codes, scales.view(torch.int16)
        return made

    def forward(self, ids: Tensor) -> Tensor:
        # Bags with a single row each. Padding ids read their row as in nn.Embedding.
        codes, scales, flat = self.codes, self.scales.view(torch.float16), ids.reshape(-1, 1)
        if not use_triton(scales):  # the reference dequantizes a whole table, so pass only the rows looked up
            codes, scales = codes[flat[:, 0]], scales[flat[:, 0]]
            flat = torch.arange(len(flat), device=flat.device)[:, None]
        rows = quantized_embedding(codes, scales, flat, mode="sum", dtype=self.dtype)
        return rows.view(*ids.shape, self.embedding_dim)

    def widened(self) -> Tensor:
        """The dequantized table (N, D)."""
        scale, offset = self.scales.view(torch.float16).float().split(1, 1)
        return torch.addcmul(offset, self.codes.float(), scale).to(self.dtype)

    @property
    def weight(self) -> Tensor:
        """Same as `widened`, for code that reads a table's weight dtype or device."""
        return self.widened()

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, bits=8"


def embeddings(model: nn.Module, *, bits: int = 8) -> Report:
    """Convert every nn.Embedding in a model to 8-bit rows, in place.

    Args:
        model: any module. Skipped: tables with shared weights, such as tied heads, subclasses with their own lookup,
            and tables with sparse gradients or max_norm.
        bits: bits per number; only 8.
    Returns: a `Report` with a row for each converted table; error is ‖w − ŵ‖² / ‖w‖². Skipped tables are in `left` with
        their reasons. `remove()` restores the tables.
    Raises: ValueError for other bits, non-finite numbers, and a model without nn.Embedding.

    A row with D numbers takes D + 4 bytes: 34 at width 30, where fp32 takes 120.

    Source: Borisyuk et al. 2024, LiRank, https://arxiv.org/abs/2402.06859
    """
    from tigon.compress.saving import describe

    if bits != 8:
        raise ValueError(f"embeddings: bits must be 8, the width that rows are stored in, got {bits}.")
    rows, left, new = [], [], {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding):
            continue
        reason = _why_not(model, module)
        if reason is not None:
            left.append(Left(name, reason))
            continue
        weight = module.weight.detach()
        if not bool(torch.isfinite(weight).all()):
            raise ValueError(f"embeddings: the table {name} must be finite, got NaN or infinite numbers.")
        layer = new[name] = ByteEmbedding.of(weight).train(module.training)
        off = (layer.widened().double() - weight.double()).square().sum() / weight.double().square().sum().clamp_min(
            1e-30
        )
        rows.append(
            LayerRow(name, "embedding", "bits", 1.0, (8, 8), 0, layer.codes.numel() + 2 * layer.scales.numel(),
                     weight.numel() * weight.element_size(), float(off), 0.0)
        )  # fmt: skip
    if not rows and not left:
        raise ValueError("embeddings: the model must have an nn.Embedding, got none.")
    before = swap(model, new)
    describe(model)
    return Report(rows, [], left, 0, "", [], model, before)


def _why_not(model: nn.Module, module: Any) -> str | None:
    if type(module) is not nn.Embedding:
        return f"it is a {type(module).__name__}, which may read rows in its own way"
    if type(module.weight) not in (Tensor, nn.Parameter):
        return f"its weight is {type(module.weight).__name__}: quantised or sharded"
    places = sum(p is module.weight for _, p in model.named_parameters(remove_duplicate=False))
    if places > 1:
        return "its weight is tied: another layer has the same"
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        return "it renorms its rows, or is trained sparsely"
    return None
