"""Tigon's in-batch softmax in sentence-transformers' trainer: its losses by their names, without B × B scores.

    model = SentenceTransformer("microsoft/mpnet-base")
    tigon.fuse(model)
    trainer = SentenceTransformerTrainer(model, args, train_dataset, loss=MultipleNegativesRankingLoss(model))

Arguments, losses and gradients are those of the library's classes, from which these derive: only what is computed from
the embeddings is replaced, by `tigon.losses.info_nce`.

Source: sentence-transformers 6.2, https://github.com/huggingface/sentence-transformers
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tigon.install import install
from tigon.losses.contrastive import Directions, info_nce

try:
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.util import cos_sim, dot_score
except ImportError as error:
    raise ImportError(
        f"tigon.integrations.sentence_transformers needs sentence-transformers 6: {install('embed')}."
    ) from error


class MultipleNegativesRankingLoss(losses.MultipleNegativesRankingLoss):
    """The library's MultipleNegativesRankingLoss (InfoNCE), without the B × B similarities in memory.

    Args: as in the library: model, scale, similarity_fct (cos_sim or dot_score), gather_across_devices, directions,
        partition_mode.
    Raises: ValueError for another similarity_fct, and for a hardness_mode, which only the library's class has.
    """

    def __init__(self, model: Any, *args: Any, **options: Any) -> None:
        super().__init__(model, *args, **options)
        _check(self)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None = None) -> Tensor:
        return _compute_loss(self, embeddings)


class CachedMultipleNegativesRankingLoss(losses.CachedMultipleNegativesRankingLoss):
    """The library's CachedMultipleNegativesRankingLoss (GradCache), whose loss runs in one pass over the batch.

    Args: as in the library: those of `MultipleNegativesRankingLoss`, and mini_batch_size, the rows that the model
        embeds at once.
    Raises: ValueError as `MultipleNegativesRankingLoss`.
    """

    def __init__(self, model: Any, *args: Any, **options: Any) -> None:
        super().__init__(model, *args, **options)
        _check(self)

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        loss = _compute_loss(self, [torch.cat(pieces) for pieces in reps])
        if with_backward:
            loss.backward()
        return loss.detach() if with_backward else loss


def _check(loss: Any) -> None:
    name = type(loss).__name__
    if loss.similarity_fct not in (cos_sim, dot_score):
        raise ValueError(
            f"{name}: similarity_fct must be cos_sim or dot_score, got {loss.similarity_fct}; sentence-transformers' "
            "own class takes others."
        )
    if loss.hardness_mode is not None and loss.hardness_strength:
        raise ValueError(
            f"{name}: hardness_mode must be None, got {loss.hardness_mode!r}; sentence-transformers' own "
            "class takes it."
        )


def _compute_loss(loss: Any, embeddings: list[Tensor]) -> Tensor:
    if len(embeddings) < 2:
        raise ValueError(f"{type(loss).__name__}: the data needs two columns, got {len(embeddings)}.")
    # As in the library: in fp32, unless autocast narrows the products.
    embeddings = [column.to(torch.promote_types(column.dtype, torch.float32)) for column in embeddings]
    if loss.similarity_fct is cos_sim:
        embeddings = [torch.nn.functional.normalize(column, dim=1) for column in embeddings]
    directions: Directions = loss.directions
    if loss.partition_mode == "per_direction" and len(set(directions)) > 1:
        directions = "symmetric"
    is_gathered = loss.gather_across_devices and dist.is_available() and dist.is_initialized()
    query, positive, *negatives = embeddings
    return info_nce(
        query, positive, negatives, scale=loss.scale, directions=directions,
        group=dist.group.WORLD if is_gathered and dist.get_world_size() > 1 else None,
    )  # fmt: skip
