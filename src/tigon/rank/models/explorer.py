"""Exploration by Thompson sampling: scores with last-layer weights drawn from their posterior.

    w ~ N(ŵ, a² (λ I + Σ p (1 − p) φ φᵀ)⁻¹)

φ is the last layer's input with a 1 appended for its bias, p a label's probability, and the sum runs over the training
rows: Laplace's approximation for a logistic regression on φ, with the fitted layer as mean. A request uses the same
draw for all its candidates. Frequently shown items have a narrow posterior and score as without exploration; rarely
shown items sometimes get high scores.

Source: Riquelme et al. 2018, NeuralLinear, https://arxiv.org/abs/1802.09127; Chapelle and Li 2011,
https://papers.nips.cc/paper/4321-an-empirical-evaluation-of-thompson-sampling
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tigon.files import DamagedFileError, read_tensors
from tigon.manifest import check_manifest, write_manifest
from tigon.rank.data.batch import labelled_rows
from tigon.rank.data.batches import BatchOptions, BatchSource, check_schema, eval_mode, get_device

FILE = "explorer.safetensors"
# Above this row count, read a sample and scale its sums to all rows.
ROWS = 1 << 20


class Explorer:
    """Posterior over a ranker's last-layer weights.

    Args:
        mean: by label, (D + 1,) fp64, the layer's weights and its bias.
        precision: by label, (D + 1, D + 1) fp64, inverse covariance; positive definite.

    Attributes:
        factor: by label, the precision's lower Cholesky factor.
    """

    def __init__(self, mean: dict[str, Tensor], precision: dict[str, Tensor]) -> None:
        self.mean = {label: w.double().cpu() for label, w in mean.items()}
        self.precision = {label: x.double().cpu() for label, x in precision.items()}
        self.factor = {label: torch.linalg.cholesky(x) for label, x in self.precision.items()}

    @classmethod
    def fit(
        cls,
        ranker: Any,
        data: BatchSource,
        batch_options: BatchOptions = BatchOptions(),
        *,
        ridge: float = 1.0,
        rows: int = ROWS,
        seed: int = 0,
    ) -> Explorer:
        """Fit the posterior in one pass over a table, and store it as `ranker.explorer`.

        Args:
            ranker: a `rank.Ranker` with a last layer, as `rank.LiRank` and `rank.LiGR` have.
            data: `rank.Impressions`, the training data. Labels are read only to find the rows with a value.
            batch_options: `rank.BatchOptions`, batching for the table.
            ridge: λ, the prior precision.
            rows: for larger tables, approximate number of rows to sample; sums are scaled to all rows.
            seed: for sampling.
        Returns: the explorer.
        Raises: ValueError for a ranker without a last layer for labels, a non-positive ridge, and data without
            requests.
        """
        if not ridge > 0:
            raise ValueError(f"Explorer.fit: ridge must be above 0, got {ridge}.")
        if not len(data):
            raise ValueError("Explorer.fit: data has no requests.")
        check_schema("Explorer.fit", ranker, data)
        layers = _layers("Explorer.fit", ranker)
        device, total = get_device(ranker), int(getattr(data, "rows", 0))
        order = torch.Generator().manual_seed(seed) if total > rows else None
        sums = {label: torch.zeros(len(w), len(w), dtype=torch.float64, device=device) for label, w in layers.items()}
        seen = 0
        with eval_mode(ranker):
            for batch in batch_options.batches(data, device, order):
                with batch_options.autocast(device):
                    found = ranker.label_features(batch)
                for label, phi in found.items():
                    phi = _append_one(phi)
                    p = (phi @ layers[label].to(phi)).sigmoid()
                    counts = p * (1 - p) * (1.0 if batch.weights is None else batch.weights)
                    if (known := labelled_rows(batch, label)) is not None:
                        counts = counts * known
                    scaled = phi * counts.sqrt()[:, None]
                    sums[label] += (scaled.T @ scaled).double()
                seen += len(batch.rows)
                if order is not None and seen >= rows:
                    break
        share = max(total, seen) / max(seen, 1)
        explorer = cls(
            layers, {label: x * share + ridge * torch.eye(len(x), device=device) for label, x in sums.items()}
        )
        ranker.explorer = explorer
        return explorer

    def check(self, name: str, ranker: Any) -> None:
        """Raise if the ranker's last layer has changed since the explorer was fitted. name: the caller's."""
        layers = _layers(name, ranker)
        same = layers.keys() == self.mean.keys() and all(
            w.shape == self.mean[label].shape and torch.equal(w.double().cpu(), self.mean[label])
            for label, w in layers.items()
        )
        if not same:
            raise ValueError(
                f"{name}: explore must match the ranker's weights, which have changed since; refit with "
                "rank.Explorer.fit(ranker, data)."
            )

    def save(self, folder: str | Path) -> None:
        """Write explorer.safetensors beside the ranker's files; called by `save_pretrained`.

        Args:
            folder: must exist.
        """
        from safetensors.torch import save_file

        parts = {"mean": self.mean, "precision": self.precision}
        tensors = {f"{part}.{label}": x.contiguous() for part, of in parts.items() for label, x in of.items()}
        place = Path(folder) / FILE
        save_file(tensors, f"{place}.partial")
        os.replace(f"{place}.partial", place)
        write_manifest(folder, [FILE])

    @classmethod
    def load(cls, folder: str | Path) -> Explorer | None:
        """Load an explorer written by `save`; None if the folder has none.

        Args:
            folder: the ranker's folder.
        Raises: ValueError for a damaged file.
        """
        place = Path(folder) / FILE
        if not place.exists():
            return None
        check_manifest(folder, [FILE])
        found: dict[str, dict[str, Tensor]] = {"mean": {}, "precision": {}}
        for key, value in read_tensors(place).items():
            part, _, label = key.partition(".")
            found.setdefault(part, {})[label] = value
        try:
            shapes = {label: tuple(w.shape) for label, w in found["mean"].items()}
            if {label: (len(x), *x.shape[1:]) for label, x in found["precision"].items()} != {
                label: (*shape, *shape) for label, shape in shapes.items()
            } or len(found) > 2:
                raise ValueError("the tensors are not from an explorer")
            return cls(found["mean"], found["precision"])
        except (ValueError, TypeError, RuntimeError) as error:
            raise DamagedFileError(f"{place} is damaged: {str(error).splitlines()[0].rstrip('.')}.") from error


class WeightSampler:
    """Weight draws, one per request in order, independent of how requests are batched."""

    def __init__(self, explorer: Explorer, explore: float, seed: int) -> None:
        if not 0 <= explore < float("inf"):
            raise ValueError(f"rank.sample_weights: explore must be at least 0, got {explore}.")
        self.explorer, self.explore = explorer, explore
        # NumPy's normals form a stream: the draws do not depend on the batch sizes.
        self.streams = {label: np.random.default_rng([seed, n]) for n, label in enumerate(explorer.mean)}

    def weights(self, label: str, requests: int) -> Tensor:
        """(requests, D + 1) fp64 weights for the next requests, on the CPU."""
        mean, factor = self.explorer.mean[label], self.explorer.factor[label]
        z = torch.from_numpy(self.streams[label].standard_normal((requests, len(mean))))
        # L⁻ᵀ z has covariance (L Lᵀ)⁻¹.
        spread: Tensor = torch.linalg.solve_triangular(factor.T, z.T, upper=True).T
        return mean + self.explore * spread

    def logits(self, ranker: Any, batch: Any) -> dict[str, Tensor]:
        """label → (C,) logits for a batch's candidates, with weights drawn per request."""
        request = torch.repeat_interleave(batch.offsets.diff())
        found = {}
        for label, phi in ranker.label_features(batch).items():
            w = self.weights(label, batch.requests).to(phi.device, torch.float32)
            found[label] = (_append_one(phi) * w[request.to(phi.device)]).sum(1)
        return _apply_calibration(ranker, batch, found)


def sample_weights(ranker: Any, explore: float, *, seed: int = 0) -> WeightSampler:
    """Sampler for last-layer weights, one draw per request, for `rank.score(…, sampler=…)`.

    Args:
        ranker: a `rank.Ranker` with an explorer from `rank.Explorer.fit(ranker, data)`.
        explore: a, posterior scale: 1 for the exact posterior, 0 for no exploration.
        seed: for the draws.
    Returns: the sampler; use a new sampler for each scoring.
    Raises: ValueError for a ranker without an explorer, or with weights changed since, and for negative a.
    """
    return WeightSampler(_find_explorer("rank.sample_weights", ranker), explore, seed)


def estimate_propensities(
    ranker: Any, data: Any, explore: float, *, label: str | None = None, draws: int = 200, seed: int = 0
) -> Tensor:
    """Estimate how often Thompson sampling ranks each candidate first: propensities for off-policy estimates.

    Args:
        ranker: with an explorer. data: `rank.Impressions`; requests must contain all candidates that could be shown.
        explore: a, as in `rank.sample_weights`.
        label: the label whose logit orders the candidates; None: the first.
        draws: number of weight draws, shared by all requests. seed: for the draws.
    Returns: (n,) fp32 on the CPU, in the row order of `rank.score`; sums to 1 within a request.
    Raises: ValueError for a ranker without a matching explorer, and for an unknown label.
    """
    explorer = _find_explorer("rank.estimate_propensities", ranker)
    label = ranker.labels[0] if label is None else label
    if label not in explorer.mean:
        raise ValueError(f"rank.estimate_propensities: label must be one of {', '.join(explorer.mean)}, got {label!r}.")
    device, batch_options, parts = get_device(ranker), BatchOptions(), []
    w = WeightSampler(explorer, explore, seed).weights(label, draws).float().to(device)
    with eval_mode(ranker):
        for batch in batch_options.batches(data, device):
            with batch_options.autocast(device):
                phi = ranker.label_features(batch)[label]
            z = _append_one(phi) @ w.T
            request = torch.repeat_interleave(batch.offsets.diff().to(device))[:, None].expand_as(z)
            best = z.new_full((batch.requests, draws), -torch.inf).scatter_reduce(0, request, z, "amax")
            # On ties take the first, so that each draw chooses exactly one candidate.
            place = torch.arange(len(z), device=device)[:, None].where(z == best.gather(0, request), len(z))
            first = place.new_full(best.shape, len(z)).scatter_reduce(0, request, place, "amin")
            # Integer counts are bitwise reproducible.
            parts.append(torch.bincount(first.flatten(), minlength=len(z)).cpu() / draws)
    return torch.cat(parts)


def _find_explorer(name: str, ranker: Any) -> Explorer:
    """A ranker's explorer, or ValueError without one. name: the caller's, for the error."""
    explorer: Explorer | None = getattr(ranker, "explorer", None)
    if explorer is None:
        raise ValueError(f"{name}: explore needs rank.Explorer.fit(ranker, data) first: the ranker has no explorer.")
    explorer.check(name, ranker)
    return explorer


def _layers(name: str, ranker: Any) -> dict[str, Tensor]:
    """By label, (D + 1,): last-layer weights and bias, detached."""
    if not hasattr(ranker, "last_layer") or not ranker.labels:
        what = "has no last layer" if not hasattr(ranker, "last_layer") else "has no labels"
        raise ValueError(f"{name}: explore needs a ranker with a last layer per label; {type(ranker).__name__} {what}.")
    return {label: torch.cat((w, b[None])).detach() for label, (w, b) in ranker.last_layer().items()}


def _append_one(phi: Tensor) -> Tensor:
    """(n, D + 1) fp32: features with a 1 appended for the bias."""
    return torch.cat((phi.float(), phi.new_ones(len(phi), 1, dtype=torch.float32)), 1)


def _apply_calibration(ranker: Any, batch: Any, logits: dict[str, Tensor]) -> dict[str, Tensor]:
    if getattr(ranker, "isotonic", None) is None:
        return logits
    out: dict[str, Tensor] = ranker.apply_calibration(logits, ranker.calibration_segments(batch))
    return out
