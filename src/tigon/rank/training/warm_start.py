"""Warm starts from a fitted ranker: rows for new vocabulary values, and a penalty that keeps weights near the old fit.

    loss = data + λ/2 Σ_i [h₀ (w − w₀)² + h₋₁ (w − w₋₁)²]_i

w₀ are the first fit's weights and w₋₁ the last fit's; h is the diagonal Fisher information per row, the mean squared
gradient. With λ = n / m older data counts as n rows against m new rows: the quadratic approximates the log likelihood
of n rows around its maximum.

Source: LiRank, Borisyuk et al. 2024, https://arxiv.org/abs/2402.06859; quadratic Fisher penalties: Kirkpatrick et al.
2017, https://arxiv.org/abs/1612.00796
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.files import DamagedFileError, read_tensors
from tigon.manifest import check_manifest, write_manifest
from tigon.rank.data.batch import labelled_rows
from tigon.rank.data.batches import BatchOptions, BatchSource, check_schema, eval_mode, get_device
from tigon.rank.models.lirank.embedding_tables import EmbeddingTables

FILE = "priors.safetensors"
BATCHES = 256


@dataclass(frozen=True)
class FisherPrior:
    """A fit's weights and their Fisher information.

    Args:
        weights: by parameter name, on the CPU.
        fisher: same names and shapes, fp32: the mean squared gradient per row.
    """

    weights: dict[str, Tensor]
    fisher: dict[str, Tensor]

    @classmethod
    def estimate(
        cls, ranker: Any, data: BatchSource, batch_options: BatchOptions = BatchOptions(), *, batches: int = BATCHES,
        seed: int = 0, label_weights: Mapping[str, float] | None = None,
    ) -> FisherPrior:  # fmt: skip
        """Estimate a prior at a ranker's weights with one pass over the data.

        Labels are sampled from the ranker's own probabilities, so that row gradients are independent with mean 0. The
        squared batch gradient then equals, in expectation, the sum of the rows' squared gradients, and needs a single
        backward pass.

        Args:
            ranker: a `rank.Ranker`, trained with `loss="bce"`. data: `rank.Impressions`, its training data.
            batch_options: `rank.BatchOptions`, batching for the data.
            batches: maximum number of batches, sampled from the data. seed: for labels and batch selection.
            label_weights: loss weights, as in `FitOptions`.
        Returns: the prior.
        Raises: ValueError for data without requests or with another schema, and for 8-bit tables.
        """
        if not len(data):
            raise ValueError("FisherPrior.estimate: data has no requests.")
        check_schema("FisherPrior.estimate", ranker, data)
        if hasattr(ranker, "table_gradients"):
            ranker.table_gradients("dense")
        device, order = get_device(ranker), torch.Generator().manual_seed(seed)
        names = {name: p for name, p in ranker.named_parameters() if p.requires_grad}
        total = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in names.items()}
        draw, rows = torch.Generator().manual_seed(seed), 0
        # Use evaluation mode: batch normalisation in training mode would make rows depend on each other.
        with eval_mode(ranker, gradients=True):
            for batch in islice(batch_options.batches(data, device, order), batches):
                with batch_options.autocast(device):
                    loss = _sampled_label_loss(ranker(batch), batch, label_weights or {}, draw)
                gradients = torch.autograd.grad(loss, [*names.values()], allow_unused=True)
                for squares, g in zip(total.values(), gradients, strict=True):
                    if g is not None:
                        squares.addcmul_(g.float(), g.float())
                rows += len(batch.rows)
        weights = {name: p.detach().cpu().clone() for name, p in names.items()}
        return cls(weights, {name: (squares / rows).cpu() for name, squares in total.items()})

    def expand_to(self, old: nn.Module, new: nn.Module) -> FisherPrior:
        """The prior for a ranker from `rank.expand_vocabularies`, without a penalty on new rows.

        Args:
            old: the prior's ranker. new: the expanded ranker.
        """
        places, parameters = _row_places(old, new), dict(new.named_parameters())

        def expand(name: str, value: Tensor, blank: bool) -> Tensor:
            x = parameters[name].detach().cpu().to(value.dtype).clone()
            return _fill_rows(torch.zeros_like(x) if blank else x, value, places.get(name))

        return FisherPrior(
            {name: expand(name, value, False) for name, value in self.weights.items()},
            {name: expand(name, value, True) for name, value in self.fisher.items()},
        )


def _sampled_label_loss(
    logits: dict[str, Tensor], batch: Any, label_weights: Mapping[str, float], draw: torch.Generator
) -> Tensor:
    """Summed bce with labels sampled from the logits, over rows with a label value."""
    terms = []
    for label, z in logits.items():
        z = z.float()
        y = (torch.rand(len(z), generator=draw).to(z.device) < z.detach().sigmoid()).float()
        # A weight acts as a row count, and squares add up: multiply the gradient by its square root.
        counts = torch.ones_like(z) if batch.weights is None else batch.weights
        if (known := labelled_rows(batch, label)) is not None:
            counts = counts * known
        weight = (label_weights.get(label, 1.0) * counts).sqrt()
        terms.append(F.binary_cross_entropy_with_logits(z, y, weight, reduction="sum"))
    return torch.stack(terms).sum()


def save_priors(folder: str | Path, priors: Sequence[FisherPrior]) -> None:
    """Write priors.safetensors beside the ranker.

    Args:
        folder: must exist. priors: the first fit's and the last fit's, or a single prior for both.
    """
    from safetensors.torch import save_file

    tensors = {
        f"{number}.{part}.{name}": value.contiguous()
        for number, prior in enumerate(priors)
        for part in ("weights", "fisher")
        for name, value in getattr(prior, part).items()
    }
    place = Path(folder) / FILE
    save_file(tensors, f"{place}.partial", {"priors": json.dumps(len(priors))})
    os.replace(f"{place}.partial", place)
    write_manifest(folder, [FILE])


def load_priors(folder: str | Path) -> list[FisherPrior]:
    """Load priors written by `rank.save_priors`.

    Args:
        folder: the ranker's folder.
    Returns: one or two priors, the last fit's at the end.
    Raises: ValueError for a folder without priors, or a damaged file.
    """
    place = Path(folder) / FILE
    if not place.is_file():
        raise ValueError(
            f"rank.load_priors: folder must hold {FILE}, which rank.save_priors writes; {folder} has none."
        )
    check_manifest(folder, [FILE])
    found: dict[str, dict[str, dict[str, Tensor]]] = {}
    for key, value in read_tensors(place).items():
        number, _, rest = key.partition(".")
        part, _, name = rest.partition(".")
        found.setdefault(number, {}).setdefault(part, {})[name] = value
    shapes = [
        {part: {name: x.shape for name, x in of.items()} for part, of in parts.items()} for parts in found.values()
    ]
    if not shapes or any({*one} != {"weights", "fisher"} or one["weights"] != one["fisher"] for one in shapes):
        raise DamagedFileError(f"{place} is damaged: the tensors are not from priors.")
    return [FisherPrior(**found[number]) for number in sorted(found)]


def check_prior_options(options: Any) -> None:
    """Raise for fit options that cannot use a prior."""
    if (options.objective, options.loss) != ("impressions", "bce"):
        raise ValueError(
            "rank.fit: loss must be bce on impressions to continue from a prior, whose strengths are for label "
            f"probabilities, got {options.loss} on {options.objective}."
        )
    if options.table_optimizer != "adamw":
        raise ValueError(
            f"rank.fit: table_optimizer must be adamw with priors, which regularize every row, got "
            f"{options.table_optimizer}, whose steps update only the rows in a batch."
        )


class QuadraticPenalty:
    """Adds the penalty's gradient to the data gradient: two foreach operators per step, over all parameters.

    All priors' quadratics are merged into one, with summed h, around the h-weighted mean of their weights.

    Args:
        ranker: owns the parameters. priors: at least one. strength: λ.
    Raises: ValueError for priors with other parameters or shapes.
    """

    def __init__(self, ranker: nn.Module, priors: Sequence[FisherPrior], strength: float) -> None:
        names = {name: p for name, p in ranker.named_parameters() if p.requires_grad}
        for prior in priors:
            for name, p in names.items():
                shape = None if name not in prior.weights else tuple(prior.weights[name].shape)
                if shape != tuple(p.shape):
                    raise ValueError(
                        f"rank.fit: priors must match this ranker, whose {name} is {tuple(p.shape)}, got "
                        f"{'none' if shape is None else shape}; prior.expand_to(old, ranker) expands older priors."
                    )
        self.parameters: list[Tensor] = [*names.values()]
        self.fisher: list[Tensor] = []
        self.center: list[Tensor] = []
        for name, p in names.items():
            h = torch.stack([prior.fisher[name] for prior in priors])
            w = torch.stack([prior.weights[name].float() for prior in priors])
            total = h.sum(0)
            # With zero Fisher information, use the last prior's weight as centre, with strength 0.
            center = torch.where(total > 0, (h * w).sum(0) / total.clamp(min=torch.finfo(torch.float32).tiny), w[-1])
            self.fisher.append((strength * total).to(p.device, p.dtype))
            self.center.append(center.to(p.device, p.dtype))

    @torch.no_grad()
    def add(self) -> None:
        """Add to the gradients after a backward pass."""
        gradients = []
        for p in self.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            gradients.append(p.grad)
        off = torch._foreach_sub(self.parameters, self.center)
        torch._foreach_addcmul_(gradients, off, self.fisher)


# ------------------------------------------------------------------------------------------------- rows for new values


def expand_vocabularies(ranker: Any, schema: Any) -> Any:
    """Copy a ranker, with new rows for a schema's new values.

    Args:
        ranker: a `rank.Ranker`.
        schema: from `Impressions.read(…, schema=ranker.schema.expandable())`.
    Returns: another ranker, on the same device. New rows are initialised randomly.
    Raises: ValueError if the schema differs otherwise, which would change the meaning of codes or scales.
    """
    check_expansion(ranker.schema, schema)
    made = type(ranker)(schema, ranker.config)
    places = _row_places(ranker, made)
    state = ranker.state_dict()
    fresh = made.state_dict()
    made.load_state_dict(
        {name: _fill_rows(fresh[name].clone(), x.cpu(), places.get(name)) for name, x in state.items()}
    )
    return made.to(get_device(ranker)).train(ranker.training)


def check_expansion(old: Any, new: Any) -> None:
    """Raise if `new` is not `old` with values appended to its vocabularies."""
    if old.labels != new.labels:
        raise ValueError(
            f"rank.expand_vocabularies: schema must have the ranker's labels {old.labels}, got {new.labels}."
        )
    if old.fields.keys() == new.fields.keys() and [*old.fields] != [*new.fields]:
        raise ValueError(
            f"rank.expand_vocabularies: schema must have the fields in the ranker's order, {', '.join(old.fields)}."
        )
    for name in dict.fromkeys((*old.fields, *new.fields)):
        before, after = old.fields.get(name), new.fields.get(name)
        if before is None or after is None:
            which = "the ranker has no such field" if before is None else "which is missing"
            raise ValueError(
                f"rank.expand_vocabularies: schema must have the ranker's fields, got a difference in {name!r}: "
                f"{which}."
            )
        if before == after:
            continue
        known, found = getattr(before, "vocab", None), getattr(after, "vocab", None)
        if known is None or found is None or replace(before, vocab=found) != replace(after, grows=False):
            raise ValueError(
                f"rank.expand_vocabularies: schema must have the ranker's fields, got different options for {name!r}; "
                "read the data with schema=ranker.schema.expandable()."
            )
        if found[: len(known)] != known:
            place = next((i for i, (a, b) in enumerate(zip(known, found, strict=False)) if a != b), len(found))
            got = f"{found[place]!r} in place of" if place < len(found) else "none in place of"
            raise ValueError(
                f"rank.expand_vocabularies: schema must keep the ranker's values in order, got for {name!r} "
                f"{got} {known[place]!r}, whose row it would read; read the data with "
                "schema=ranker.schema.expandable()."
            )


def _row_places(old: nn.Module, new: nn.Module) -> dict[str, Tensor]:
    """For each expanded weight by name: the new position for each old row."""
    places: dict[str, Tensor] = {}
    modules = dict(new.named_modules())
    for name, module in old.named_modules():
        after = modules[name]
        if isinstance(module, EmbeddingTables) and isinstance(after, EmbeddingTables) and module.first != after.first:
            # Tables with the same width are stacked: each table's new rows are at its own end.
            rows = [torch.arange(b - a) + first
                    for a, b, first in zip(module.first, module.first[1:], after.first, strict=False)]  # fmt: skip
            for one, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                places[f"{name}.{one}"] = torch.cat(rows)
    return places


def _fill_rows(into: Tensor, value: Tensor, places: Tensor | None) -> Tensor:
    """Copy `value` into `into`, at the given row positions or at the start."""
    if into.shape == value.shape:
        return value
    into[slice(len(value)) if places is None else places] = value
    return into
