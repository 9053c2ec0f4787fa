"""Exploration by Thompson sampling: scores with last-layer weights drawn from their posterior.

    w ~ N(ŵ, a² (λ I + Σ p (1 − p) φ φᵀ)⁻¹)

φ is what the last layer reads and a 1 for its bias, p the probability of a label, and the sum goes over the rows that
were seen: Laplace's approximation of a logistic regression on φ, whose mean is the fitted layer. A request has one draw
for all of its candidates. Items that were shown often have a narrow posterior, and are scored as without exploration;
rarely shown items sometimes get high scores.

Source: Riquelme et al. 2018, NeuralLinear, https://arxiv.org/abs/1802.09127; Chapelle and Li 2011,
https://papers.nips.cc/paper/4321-an-empirical-evaluation-of-thompson-sampling
"""

from __future__ import annotations

import os
from collections.abc import Iterator
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
# Above this number of rows a sample is read, and its sums are scaled to all rows.
ROWS = 1 << 20


class Explorer:
    """The posterior of the weights of a ranker's last layer.

    Args:
        mean: by label, (D + 1,) fp64, the layer's weights and its bias.
        precision: by label, (D + 1, D + 1) fp64, the inverse of their covariance; positive definite.

    Attributes:
        factor: by label, the lower Cholesky factor of the precision.
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
        """Fit the posterior in one pass over a table, and keep it as `ranker.explorer`.

        Args:
            ranker: a `rank.Ranker` with a last layer, as `rank.LiRank` and `rank.LiGR` have.
            data: `rank.Impressions`, the training data. Labels are read only to find the rows that have a value.
            batch_options: `rank.BatchOptions`, how the table is cut into batches.
            ridge: λ, of what is known of weights without any row.
            rows: of a table with more, about so many are read, of any requests, and count for all.
            seed: of which.
        Returns: the explorer.
        Raises: ValueError for a ranker without a last layer of labels, for a ridge that is not positive, and for data
            without requests.
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

    # ------------------------------------------------------------------------------------------------------- drawing

    def sampler(self, explore: float, seed: int = 0) -> WeightSampler:
        """Weights, drawn for one request after another.

        Args:
            explore: a, how far draws go: 1 as far as the data leaves open, 0 not at all.
            seed: of the draws.
        Raises: ValueError for a negative one.
        """
        return WeightSampler(self, explore, seed)

    def covariance(self, label: str) -> Tensor:
        """(D + 1, D + 1) fp64, of the weights and the bias of a label, at a = 1.

        Args:
            label: one of the ranker's.
        """
        return torch.cholesky_inverse(self.factor[label])

    def check(self, name: str, ranker: Any) -> None:
        """Raise if the ranker's last layer has changed since the explorer was fitted. name: of the caller."""
        layers = _layers(name, ranker)
        same = layers.keys() == self.mean.keys() and all(
            w.shape == self.mean[label].shape and torch.equal(w.double().cpu(), self.mean[label])
            for label, w in layers.items()
        )
        if not same:
            raise ValueError(
                f"{name}: explore must be of the ranker's weights, which have changed since; fit another: "
                "rank.Explorer.fit(ranker, data)."
            )

    # -------------------------------------------------------------------------------------------------------- a file

    def save(self, folder: str | Path) -> None:
        """Write explorer.safetensors, beside the ranker's files; `save_pretrained` calls it.

        Args:
            folder: that is there.
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
        """What `save` wrote; None for a folder without.

        Args:
            folder: of a ranker.
        Raises: ValueError for a file that is damaged.
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
                raise ValueError("its tensors are not those of an explorer")
            return cls(found["mean"], found["precision"])
        except (ValueError, TypeError, RuntimeError) as error:
            raise DamagedFileError(f"{place} is damaged: {str(error).splitlines()[0].rstrip('.')}.") from error


class WeightSampler:
    """Draws of weights, one for each request in order, independent of how requests are batched."""

    def __init__(self, explorer: Explorer, explore: float, seed: int) -> None:
        if not 0 <= explore < float("inf"):
            raise ValueError(f"rank.sample_weights: explore must be at least 0, got {explore}.")
        self.explorer, self.explore = explorer, explore
        # NumPy's normals are a stream: as many numbers from it as there are requests, in whatever pieces.
        self.streams = {label: np.random.default_rng([seed, n]) for n, label in enumerate(explorer.mean)}

    def weights(self, label: str, requests: int) -> Tensor:
        """(requests, D + 1) fp64, of the next requests, on the CPU."""
        mean, factor = self.explorer.mean[label], self.explorer.factor[label]
        z = torch.from_numpy(self.streams[label].standard_normal((requests, len(mean))))
        # (L Lᵀ)⁻¹ is the covariance of L⁻ᵀ z.
        spread: Tensor = torch.linalg.solve_triangular(factor.T, z.T, upper=True).T
        return mean + self.explore * spread

    def logits(self, ranker: Any, batch: Any) -> dict[str, Tensor]:
        """label → (C,) logits of a batch's candidates, by weights that are drawn for each request."""
        request = torch.repeat_interleave(batch.offsets.diff())
        found = {}
        for label, phi in ranker.label_features(batch).items():
            w = self.weights(label, batch.requests).to(phi.device, torch.float32)
            found[label] = (_append_one(phi) * w[request.to(phi.device)]).sum(1)
        return _apply_calibration(ranker, batch, found)


def sample_weights(ranker: Any, explore: float, *, seed: int = 0) -> WeightSampler:
    """Draws of the last layer's weights, one for each request, for `rank.score(…, sampler=…)`.

    Args:
        ranker: `rank.Ranker` for which `rank.Explorer.fit(ranker, data)` was called.
        explore: a, how far draws lie from the weights: 1 as far as the data leaves open, 0 not at all.
        seed: of the draws.
    Returns: the sampler; each scoring needs a new one.
    Raises: ValueError for a ranker without an explorer, or whose weights have changed since, and for a negative a.
    """
    return get_explorer("rank.sample_weights", ranker).sampler(explore, seed)


def estimate_propensities(
    ranker: Any, data: Any, explore: float, *, label: str | None = None, draws: int = 200, seed: int = 0
) -> Tensor:
    """How often Thompson sampling puts each candidate first: the probabilities that off-policy estimates ask for.

    Args:
        ranker: with an explorer. data: `rank.Impressions`, whose requests have all candidates that could be shown.
        explore: a, as of `rank.score`.
        label: whose logit candidates are ordered by; None: the first one's.
        draws: how many weights are drawn, for all requests together. seed: of them.
    Returns: (n,) fp32 on the CPU, for the rows request by request as `rank.score` has them; of a request they sum to 1.
    Raises: ValueError for a ranker without an explorer, or with one of other weights, and for an unknown label.
    """
    batch_options = BatchOptions()
    explorer = get_explorer("rank.estimate_propensities", ranker)
    label = ranker.labels[0] if label is None else label
    if label not in explorer.mean:
        raise ValueError(f"rank.estimate_propensities: label must be one of {', '.join(explorer.mean)}, got {label!r}.")
    w = explorer.sampler(explore, seed).weights(label, draws).float()
    device = get_device(ranker)

    def parts() -> Iterator[Tensor]:
        for batch in batch_options.batches(data, device):
            with batch_options.autocast(device):
                phi = ranker.label_features(batch)[label]
            z = _append_one(phi) @ w.T.to(phi.device)
            sizes = batch.offsets.diff().to(device)
            request = torch.repeat_interleave(sizes)[:, None].expand_as(z)
            best = z.new_full((batch.requests, draws), -torch.inf).scatter_reduce(0, request, z, "amax")
            # The first of equals, so that a draw chooses one candidate.
            place = (
                torch.arange(len(z), device=device)[:, None].expand_as(z).where(z == best.gather(0, request), len(z))
            )
            first = place.new_full(best.shape, len(z)).scatter_reduce(0, request, place, "amin")
            # Counted in integers: the same bits on every run.
            yield torch.bincount(first.flatten(), minlength=len(z)).cpu() / draws

    with eval_mode(ranker):
        return torch.cat([*parts()])


def get_explorer(name: str, ranker: Any) -> Explorer:
    """The explorer of a ranker; a ValueError without one. name: of the caller, for the error."""
    explorer: Explorer | None = getattr(ranker, "explorer", None)
    if explorer is None:
        raise ValueError(f"{name}: explore needs what rank.Explorer.fit(ranker, data) finds, and the ranker has none.")
    explorer.check(name, ranker)
    return explorer


def _layers(name: str, ranker: Any) -> dict[str, Tensor]:
    """By label, (D + 1,): the weights and the bias of the last layer, detached."""
    if not hasattr(ranker, "last_layer") or not ranker.labels:
        what = "has no last layer" if not hasattr(ranker, "last_layer") else "has no labels"
        raise ValueError(f"{name}: explore is for rankers with a last layer of labels; {type(ranker).__name__} {what}.")
    return {label: torch.cat((w, b[None])).detach() for label, (w, b) in ranker.last_layer().items()}


def _append_one(phi: Tensor) -> Tensor:
    """(n, D + 1) fp32: features, and a 1 for the bias."""
    return torch.cat((phi.float(), phi.new_ones(len(phi), 1, dtype=torch.float32)), 1)


def _apply_calibration(ranker: Any, batch: Any, logits: dict[str, Tensor]) -> dict[str, Tensor]:
    if getattr(ranker, "isotonic", None) is None:
        return logits
    out: dict[str, Tensor] = ranker.apply_calibration(logits, ranker.calibration_segments(batch))
    return out
