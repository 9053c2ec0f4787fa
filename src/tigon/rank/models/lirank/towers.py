"""Layers after the inputs: an MLP with self-gated layers, and towers shared by labels.

    h = dropout(relu(norm(x W + b)));   y = h ⊙ σ(h G + c)

Source: LiRank, Borisyuk et al. 2024, https://arxiv.org/abs/2402.06859, sections 3.3 and 3.4; gates: Huang et al. 2020,
GateNet, https://arxiv.org/abs/2007.03519
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.fusion.engine.patch import is_hooked
from tigon.kernels import is_traced, use_triton
from tigon.ops.gated_residual import gated_residual
from tigon.rank.kernels.batch_norm_relu import batch_norm_relu
from tigon.rank.kernels.row_dot import row_dot
from tigon.rank.models.lirank import padded_linear
from tigon.rank.models.lirank.config import LiRankConfig, Norm


class BatchNorm(nn.BatchNorm1d):
    """Batch normalisation; a single-row batch, which has no variance, uses the running statistics."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training and len(input) == 1:
            return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(input)

    def relu(self, h: Tensor) -> Tensor | None:
        """relu(forward) for rows with optional zero padding columns, which are kept. None if no kernel applies.

        Kernels also require that the module has no hooks or wrappers, and that weights are fp32.
        """
        if type(self) is not BatchNorm or is_hooked(self) or self.momentum is None or is_traced(h) or h.dim() != 2:
            return None
        mean, variance = self.running_mean, self.running_var
        if any(t is None or t.dtype != torch.float32 for t in (self.weight, self.bias, mean, variance)):
            return None
        assert mean is not None
        assert variance is not None
        if not use_triton(h, self.weight, self.bias, mean, variance):
            return None
        training = self.training and len(h) != 1
        if training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return batch_norm_relu(
            h, self.weight, self.bias, (mean, variance), training=training, momentum=self.momentum, eps=self.eps
        )


class Hidden(nn.Module):
    """An MLP layer.

    Args:
        inputs, width: input and output widths. gate: whether the layer gates itself. norm: before the activation.
            dropout: before the gate.
    """

    def __init__(self, inputs: int, width: int, gate: bool, norm: Norm, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, width)
        self.norm = {"none": nn.Identity, "batch": BatchNorm, "layer": nn.LayerNorm}[norm](width)
        self.dropout = nn.Dropout(dropout)
        self.gate = nn.Linear(width, width) if gate else None

    def forward(self, x: Tensor) -> Tensor:
        return padded_linear.first_columns(self.forward_padded(x), self.linear.out_features)

    def forward_padded(self, x: Tensor) -> Tensor:
        """`forward` with zero padding columns in the output if the next layer benefits; x may be padded too."""
        y: Tensor = self.dropout(self._activate(x))
        if self.gate is None:
            return y
        gates = padded_linear.linear(self.gate, y)
        y = padded_linear.widen(y, gates.shape[-1])
        # Layer norm outputs fp32 under autocast; gates do not.
        return gated_residual(None, gates, y) if gates.dtype == y.dtype else y * gates.sigmoid()

    def _activate(self, x: Tensor) -> Tensor:
        """relu(norm(linear(x))), with zero padding columns if they cost no copy."""
        if isinstance(self.norm, nn.Identity):
            return padded_linear.linear_relu(self.linear, x)
        h = padded_linear.linear(self.linear, x)
        if isinstance(self.norm, BatchNorm) and (y := self.norm.relu(h)) is not None:
            return y
        # Use contiguous rows: batch statistics on strided rows are several times slower on a GPU.
        return F.relu(self.norm(padded_linear.first_columns(h, self.linear.out_features).contiguous()))


class MLP(nn.Sequential):
    """Stacked hidden layers."""

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        for layer in self:
            assert isinstance(layer, Hidden)
            width = layer.linear.out_features
        return padded_linear.first_columns(self.forward_padded(x), width)

    def forward_padded(self, x: Tensor) -> Tensor:
        """`forward` with zero padding columns in the output if they were faster."""
        width = x.shape[-1]
        for layer in self:
            assert isinstance(layer, Hidden)
            # Hooks and wrappers must see unpadded inputs and outputs.
            plain = type(layer) is Hidden and not is_hooked(layer)
            x = layer.forward_padded(x) if plain else layer(padded_linear.first_columns(x, width))
            width = layer.linear.out_features
        return x


def build_mlp(inputs: int, widths: Sequence[int], gate: bool, norm: Norm, dropout: float) -> MLP:
    """Build hidden layers with these widths."""
    ends = [inputs, *widths]
    return MLP(*(Hidden(a, b, gate, norm, dropout) for a, b in pairwise(ends)))


class Towers(nn.Module):
    """Label logits.

    Labels in the same tower share its hidden layers; without hidden layers a tower reads the shared layers directly.

    Args:
        labels: all labels. inputs: input width. config: with the towers' labels and hidden widths.

    Raises: ValueError for labels in no tower, in two towers, or not in the schema.
    """

    def __init__(self, labels: Sequence[str], inputs: int, config: LiRankConfig) -> None:
        super().__init__()
        widths, make = config.tower_mlp, (config.gate, config.norm, config.dropout)
        self.labels = [list(of) for of in (config.towers or {"all": labels}).values()]
        named = [label for of in self.labels for label in of]
        for label in [*labels, *named]:
            if named.count(label) != 1 or label not in labels:
                raise ValueError(
                    f"LiRank: towers must name each of the labels {', '.join(labels)} once, got {label!r} "
                    f"{named.count(label)} times."
                )
        self.hidden = nn.ModuleList(build_mlp(inputs, widths, *make) for _ in self.labels)
        self.shallow = not widths
        width = widths[-1] if widths else inputs
        self.heads = nn.ModuleList(nn.Linear(width, len(of)) for of in self.labels)

    def label_features(self, x: Tensor) -> dict[str, Tensor]:
        """label → (C, width), the input to its head; each tower is computed once."""
        found = [hidden(x) for hidden in self.hidden]
        return {label: x for of, x in zip(self.labels, found, strict=True) for label in of}

    def last_layer(self) -> dict[str, tuple[Tensor, Tensor]]:
        """label → (width,) weights and the bias for its logit."""
        heads = [
            (label, n, head) for of, head in zip(self.labels, self.heads, strict=True) for n, label in enumerate(of)
        ]
        return {label: (head.weight[n], head.bias[n]) for label, n, head in heads if isinstance(head, nn.Linear)}

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """label → (C,) logits."""
        result: dict[str, Tensor] = {}
        for of, hidden, head in zip(self.labels, self.hidden, self.heads, strict=True):
            result |= dict(zip(of, head(hidden(x)).unbind(-1), strict=True))
        return result

    def forward_sides(self, sides: Sequence[Tensor], widths: Sequence[int]) -> dict[str, Tensor]:
        """`forward` for concatenated sides; with kernels, without the concatenation copy.

        sides: (C, width) each, or wider with padding columns. widths: widths without padding.
        """
        plain = self.shallow and type(self) is Towers and not any(map(is_hooked, (self, *self.hidden)))
        plain = plain and all(padded_linear.is_plain(head) for head in self.heads)
        if not plain or not use_triton(*sides) or is_traced(sides[0]):
            joined: dict[str, Tensor] = self(padded_linear.concat_columns(sides, widths))
            return joined
        result: dict[str, Tensor] = {}
        for of, head in zip(self.labels, self.heads, strict=True):
            assert isinstance(head, nn.Linear)
            weights = head.weight.split(list(widths), 1)
            parts = [_product(x, weight) for x, weight in zip(sides, weights, strict=True)]
            result |= dict(zip(of, (functools.reduce(torch.add, parts) + head.bias).unbind(-1), strict=True))
        return result


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """(C, labels) in fp32 or wider: x (unpadded columns) times the weights for a few labels."""
    if len(weight) == 1:
        return row_dot(x, weight[0]).unsqueeze(1)
    found = F.linear(x, padded_linear.widen(weight, x.shape[1]))
    return found.to(torch.promote_types(found.dtype, torch.float32))
