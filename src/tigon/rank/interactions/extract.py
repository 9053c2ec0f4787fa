"""Extract a LiRank's MLP over its fields: how strongly units read each field and affect the labels.

A field has several numbers in x₀, its embedding. They are combined by their joint contribution to a unit:

    w_uf = √(wᵀ C_f w)      w the unit's weights for the field's numbers, C_f their covariance over data rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from tigon.data.arrow import nearest
from tigon.rank.data.batches import BatchOptions, BatchSource, check_schema, eval_mode
from tigon.rank.interactions.weights import Array, Network, compute_reach, norm_factor, to_array
from tigon.rank.models.lirank.model import LiRank, row_requests
from tigon.rank.models.lirank.towers import BatchNorm, Hidden

NAME = "extract_mlp"
MOST_ROWS = 100_000
# Numbers whose variance is below this fraction of the largest are treated as constant.
STILL = 1e-12


@dataclass(frozen=True)
class FieldMLP:
    """A ranker's MLP over its fields, as input for `rank.find_interactions`.

    Attributes:
        names: the fields that vary.
        network: its weights are the standard deviation, over data rows, of each field's contribution to a unit.
        left_out: field → reason for skipping the field.
        notes: caveats for interpreting the weights.
    """

    names: tuple[str, ...]
    network: Network
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def extract_mlp(
    ranker: LiRank,
    data: BatchSource,
    label: str | None = None,
    *,
    batch_options: BatchOptions = BatchOptions(8192),
    seed: int = 0,
) -> FieldMLP:
    """Extract the MLP from a fitted `rank.LiRank` for `rank.find_interactions`.

    Embedding weights alone are not comparable, so each field's variation is measured on data. Samples 100,000 rows at
    most. Labels are not read.

    Args:
        ranker: a LiRank with an MLP, in `mlp` or, without cross layers, in `tower_mlp`. 8-bit rankers work too.
        data: `rank.Impressions`, such as the training data.
        label: the output label for units' reach; None: all labels, by their weights in the score.
        batch_options: `rank.BatchOptions`, batching for data.
        seed: for sampling rows.
    Returns: the MLP. Cross layers and gates, which also combine fields, are not included; `notes` says so.
    Raises: ValueError for a ranker without such an MLP, an unknown label, data with another schema or without rows,
        non-finite weights, and fewer than two varying fields.
    """
    _check(ranker, label)
    check_schema(NAME, ranker, data)
    first, reach = _read_layers(ranker, [label] if label else ranker.labels)
    places: dict[str, list[int]] = {}
    for place, name in enumerate(ranker.inputs.owners):
        places.setdefault(name, []).append(place)
    covariances = _field_covariances(ranker, data, batch_options, seed, places)
    still = STILL * max(float(one.trace()) for one in covariances.values())
    strengths, left_out = {}, {}
    for name, covariance in covariances.items():
        if float(covariance.trace()) <= still:
            left_out[name] = "it is constant over all rows"
        else:
            own = first[:, places[name]]
            strengths[name] = np.sqrt(np.einsum("ui,ij,uj->u", own, covariance, own).clip(min=0))
    if len(strengths) < 2:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise ValueError(
            f"{NAME}: there must be two fields that vary, got {len(strengths)}{f' ({why})' if why else ''}."
        )
    network = Network(np.stack([*strengths.values()], 1), reach)
    return FieldMLP(tuple(strengths), network, left_out, _collect_notes(ranker, left_out))


def _check(ranker: Any, label: str | None) -> None:
    if not isinstance(ranker, LiRank):
        raise ValueError(
            f"{NAME}: ranker must be a rank.LiRank, whose MLP reads row fields, got a {type(ranker).__name__}."
        )
    if label is not None and label not in ranker.labels:
        raise ValueError(f"{NAME}: there is no label {label!r}; {nearest(label, ranker.labels)}")
    # Towers after cross layers read products of fields rather than fields.
    if ranker.mlp is None and (ranker.cross is not None or not ranker.config.tower_mlp or ranker.blocks is not None):
        raise ValueError(f"{NAME}: ranker must have an MLP over its fields, by mlp=…, got one without.")


def _read_layers(ranker: LiRank, labels: Sequence[str]) -> tuple[Array, Array]:
    """(U, wide) first-layer weights, and (U,) the units' effect on labels."""
    heads = {name: np.abs(to_array(w)) for name, (w, _) in ranker.last_layer().items()}
    towers = [_read_weights(tower) for tower in ranker.towers.hidden]
    own = []
    for names in ranker.towers.labels:
        weights = {name: 1.0 if len(labels) == 1 else abs(ranker.score_weights[name]) for name in labels}
        own.append(np.sum([weights.get(name, 0.0) * heads[name] for name in names], 0))
    if ranker.mlp is None:
        reaches = [compute_reach(reach, tower[1:]) for reach, tower in zip(own, towers, strict=True)]
        return np.concatenate([tower[0] for tower in towers]), np.concatenate(reaches)
    total = np.sum([compute_reach(reach, tower) for reach, tower in zip(own, towers, strict=True)], 0)
    shared = _read_weights(ranker.mlp)
    # Cross layers come before the MLP in the towers' input.
    return shared[0], compute_reach(total[0 if ranker.cross is None else ranker.inputs.width :], shared[1:])


def _read_weights(layers: Any) -> list[Array]:
    """Hidden-layer weights, with norm factors applied."""
    result = []
    for place, layer in enumerate(layers, 1):
        weight = to_array(layer.linear.weight)
        if isinstance(layer.norm, BatchNorm):
            weight = weight * norm_factor(layer.norm)[:, None]
        elif isinstance(layer.norm, nn.LayerNorm):
            weight = weight * to_array(layer.norm.weight)[:, None]
        if not np.isfinite(weight).all():
            raise ValueError(
                f"{NAME}: weights must be finite, but some in layer {place} are not; did training diverge?"
            )
        result.append(weight)
    return result


def _field_covariances(
    ranker: LiRank, data: BatchSource, batch_options: BatchOptions, seed: int, places: dict[str, list[int]]
) -> dict[str, Array]:
    """Covariance of each field's numbers in x₀, (d, d). places: field → its columns."""
    sums: dict[str, Any] = dict.fromkeys(places, 0.0)
    squares, rows, order = dict(sums), 0, torch.Generator().manual_seed(seed)
    with eval_mode(ranker):
        for batch in batch_options._replace(history_max=0).batches(data, ranker.device, order):
            x = ranker.inputs(batch.context, batch.items, row_requests(batch, ranker.device)).double()
            for name, columns in places.items():
                sums[name] = sums[name] + x[:, columns].sum(0)
                squares[name] = squares[name] + x[:, columns].T @ x[:, columns]
            rows += len(x)
            if rows >= MOST_ROWS:
                break
    if not rows:
        raise ValueError(f"{NAME}: data has no rows.")
    return {name: to_array(squares[name] / rows - torch.outer(sums[name], sums[name]) / rows**2) for name in places}


def _collect_notes(ranker: LiRank, left_out: Mapping[str, str]) -> tuple[str, ...]:
    notes = [f"Field {name!r} is left out: {why}." for name, why in left_out.items()]
    if ranker.cross is not None:
        notes.append("Interactions in the cross layers, beside the MLP, do not show in the MLP's weights.")
    if any(isinstance(layer, Hidden) and layer.gate is not None for layer in ranker.modules()):
        notes.append("Gates, which scale units by other units' inputs, are treated as constants.")
    return tuple(notes)
