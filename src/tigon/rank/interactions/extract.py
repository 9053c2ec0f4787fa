"""Extract a LiRank's MLP over its fields: how strongly units read each field and affect the labels.

A field has several numbers in x₀, its embedding. They are combined by their joint contribution to a unit:

    w_uf = √(wᵀ C_f w)      w the unit's weights for the field's numbers, C_f their covariance over data rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tigon.data.arrow import nearest
from tigon.rank.data.batches import BatchOptions, BatchSource, check_schema, eval_mode
from tigon.rank.interactions.strengths import Array, Network
from tigon.rank.interactions.weights import norm_factor, to_array
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
        networks: a single network; its weights are the standard deviation, over data rows, of each field's contribution
            to a unit.
        left_out: field → reason for skipping the field.
        notes: caveats for interpreting the weights.
    """

    names: tuple[str, ...]
    networks: tuple[Network, ...]
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
    first, reach = _layers(ranker, [label] if label else ranker.labels)
    owners = ranker.inputs.owners()
    moments = _field_covariances(ranker, data, batch_options, seed, owners)
    largest = max(float(moment.trace()) for moment in moments.values())
    strengths, left_out = {}, {}
    for name, moment in moments.items():
        if float(moment.trace()) <= STILL * largest:
            left_out[name] = "it is the same in all rows"
            continue
        own = first[:, [place for place, owner in enumerate(owners) if owner == name]]
        strengths[name] = np.sqrt(np.einsum("ui,ij,uj->u", own, moment.numpy(), own).clip(min=0))
    if len(strengths) < 2:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise ValueError(
            f"{NAME}: there must be two fields that vary, got {len(strengths)}{f' ({why})' if why else ''}."
        )
    network = Network(np.stack([*strengths.values()], 1), reach)
    return FieldMLP(tuple(strengths), (network,), left_out, _notes(ranker, left_out))


def _check(ranker: Any, label: str | None) -> None:
    if not isinstance(ranker, LiRank):
        raise ValueError(
            f"{NAME}: ranker must be a rank.LiRank, whose MLP reads the fields of a row, got a {type(ranker).__name__}."
        )
    if label is not None and label not in ranker.labels:
        raise ValueError(f"{NAME}: there is no label {label!r}; {nearest(label, ranker.labels)}")
    # Towers after cross layers read products of fields rather than fields.
    if ranker.mlp is None and (ranker.cross is not None or not any(len(tower) for tower in _towers(ranker))):  # type: ignore[arg-type]
        raise ValueError(f"{NAME}: ranker must have an MLP over its fields, by mlp=…, got one without.")


def _towers(ranker: LiRank) -> list[nn.Module]:
    return [*ranker.towers.hidden]


def _layers(ranker: LiRank, labels: Sequence[str]) -> tuple[Array, Array]:
    """(U, wide) first-layer weights, and (U,) the units' effect on labels."""
    shared = [] if ranker.mlp is None else _weights(ranker.mlp)
    heads = {name: np.abs(to_array(w)) for name, (w, _) in ranker.last_layer().items()}
    skipped = 0 if ranker.cross is None else ranker.inputs.width
    firsts: list[Array] = [] if not shared else [shared[0]]
    reaches: list[Array] = []
    for own, tower in zip(ranker.towers.labels, _towers(ranker), strict=True):
        reach = np.zeros(next(iter(heads.values())).shape)
        for name in own:
            if name in labels:
                counts = 1.0 if len(labels) == 1 else abs(ranker.score_weights[name])
                reach = reach + counts * heads[name]
        later = _weights(tower)
        for weight in reversed(later if shared else later[1:]):
            reach = reach @ np.abs(weight)
        if shared:
            reaches.append(reach[skipped:])
        elif later:
            firsts.append(later[0])
            reaches.append(reach)
    if not shared:
        return np.concatenate(firsts), np.concatenate(reaches)
    total = np.sum(reaches, axis=0)
    for weight in reversed(shared[1:]):
        total = total @ np.abs(weight)
    return firsts[0], total


def _weights(layers: Any) -> list[Array]:
    """Hidden-layer weights, with norm factors applied."""
    result = []
    for place, layer in enumerate(layers, 1):
        assert isinstance(layer, Hidden)
        weight = to_array(layer.linear.weight)
        if isinstance(layer.norm, BatchNorm):
            weight = weight * norm_factor(layer.norm)[:, None]
        elif isinstance(layer.norm, nn.LayerNorm):
            weight = weight * to_array(layer.norm.weight)[:, None]
        if not np.isfinite(weight).all():
            raise ValueError(f"{NAME}: weights must be finite, but some of layer {place} are not; did it diverge?")
        result.append(weight)
    return result


def _field_covariances(
    ranker: LiRank, data: BatchSource, batch_options: BatchOptions, seed: int, owners: Sequence[str]
) -> dict[str, Tensor]:
    """Covariance of each field's numbers in x₀, (d, d) fp64 on the CPU."""
    places = {name: [n for n, owner in enumerate(owners) if owner == name] for name in dict.fromkeys(owners)}
    device = ranker.device
    sums = torch.zeros(len(owners), dtype=torch.float64, device=device)
    squares = {name: torch.zeros(len(of), len(of), dtype=torch.float64, device=device) for name, of in places.items()}
    rows = 0
    with eval_mode(ranker):
        for batch in batch_options._replace(history_max=0).batches(data, device, torch.Generator().manual_seed(seed)):
            x = ranker.inputs(batch.context, batch.items, row_requests(batch, device)).double()
            sums += x.sum(0)
            for name, of in places.items():
                squares[name] += x[:, of].T @ x[:, of]
            rows += len(x)
            if rows >= MOST_ROWS:
                break
    if not rows:
        raise ValueError(f"{NAME}: data has no rows.")
    mean = sums / rows
    return {
        name: (squares[name] / rows - torch.outer(mean[of], mean[of])).cpu() for name, of in places.items()
    }  # fmt: skip


def _notes(ranker: LiRank, left_out: Mapping[str, str]) -> tuple[str, ...]:
    notes = [f"Field {name!r} is left out: {why}." for name, why in left_out.items()]
    if ranker.cross is not None:
        notes.append("What the cross layers join, beside the MLP, stands in no weight of the MLP.")
    hidden = chain([] if ranker.mlp is None else ranker.mlp, *_towers(ranker))  # type: ignore[arg-type]
    if any(isinstance(layer, Hidden) and layer.gate is not None for layer in hidden):
        notes.append("Gates, which scale units by what others read, are taken as constants.")
    return tuple(notes)
