"""Unsupervised node embeddings: neighbourhoods become compact, the whole graph spreads out (G2R).

    loss = Σ_i 1/(2n) log det(I + d/ε zᵀ diag(a_i) z) − γ ½ log det(I + γ d/(n ε) zᵀz)

a_i is row i of the adjacency matrix, normalised to sum 1. The encoder has two graph convolutions, z = A relu(A x W₁ +
b₁) W₂ + b₂ with A = D^-½ (adjacency + I) D^-½. Each row of z is scaled to absolute sum 1.

Sources: G2R, Han et al. 2022, https://arxiv.org/abs/2202.06241; GCN, Kipf & Welling 2017,
https://arxiv.org/abs/1609.02907.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor, nn

from tigon.files import DamagedFileError, load_state, read_json, read_tensors
from tigon.kernels import check_tensors
from tigon.losses.coding_rates import RowGroups, coding_rate
from tigon.losses.options import check_choice, check_positive
from tigon.manifest import check_manifest, write_manifest

__all__ = ["G2R", "group_neighbors"]

CONFIG, WEIGHTS = "config.json", "model.safetensors"
OPTIONS = ("features", "hidden", "out", "eps", "gamma")


def group_neighbors(edge_index: Tensor, nodes: int, *, normalize: Literal["rows", "columns"] = "rows") -> RowGroups:
    """Convert a graph's neighbourhoods to row groups: group i contains the nodes with an edge to node i.

    Args:
        edge_index: (2, e) integers, sources and targets, as in PyG. Duplicate edges count once; self-loops are ignored.
        nodes: n, the node count.
        normalize: "rows": each node's neighbour weights sum to 1, as in the paper. "columns": each node's weights sum
            to 1 over all groups, as in the authors' code.
    Returns: `tigon.losses.RowGroups` with n groups; nodes without neighbours have empty groups.
    Raises: ValueError for invalid shapes or node numbers.
    """
    check_choice("group_neighbors", "normalize", normalize, ("rows", "columns"))
    source, target = list_edges("group_neighbors", edge_index, nodes)
    counts = target.bincount(minlength=nodes)
    share = counts[target] if normalize == "rows" else source.bincount(minlength=nodes)[source]
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return RowGroups(offsets, source, 1 / share.double())


class G2R(nn.Module):
    """A node encoder fitted to a graph without labels.

    Args:
        features: F, features per node.
        hidden: width of the first convolution.
        out: d, embedding width.
        eps: ε in the coding rate.
        gamma: γ, the whole graph's weight relative to the neighbourhoods.
        encoder: replaces the two convolutions: a module called with x and edge_index that returns (n, d). features,
            hidden and out are then ignored.
    Raises: ValueError for non-positive numbers.
    """

    def __init__(
        self, features: int, hidden: int = 1024, out: int = 512, *, eps: float = 0.05, gamma: float = 0.5,
        encoder: nn.Module | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_positive("G2R", features=features, hidden=hidden, out=out, eps=eps, gamma=gamma)
        self.features, self.hidden, self.out, self.eps, self.gamma = features, hidden, out, eps, gamma
        self.encoder = _Convolutions(features, hidden, out) if encoder is None else encoder

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Embeddings with gradients.

        Args:
            x: (n, F) floats, dense or a sparse matrix.
            edge_index: (2, e) integers, sources and targets. Undirected graphs need both directions.

        Returns: (n, d); absolute values in a row sum to 1.
        """
        return nn.functional.normalize(self.encoder(x, edge_index), p=1.0)

    def fit(
        self, x: Tensor, edge_index: Tensor, *, epochs: int = 20, nodes: int = 768,
        normalize: Literal["rows", "columns"] = "rows", optimizer: torch.optim.Optimizer | None = None, seed: int = 0,
        done: int = 0, after: Callable[[int, Tensor], object] | None = None,
    ) -> list[float]:  # fmt: skip
        """Fit the encoder, one step per epoch.

        Args:
            x, edge_index: as in `forward`; no gradients.
            epochs: number of steps.
            nodes: neighbourhoods sampled per step; all if there are fewer.
            normalize: as in `group_neighbors`.
            optimizer: over this module's parameters; default `self.optimizer()`.
            seed: for sampling neighbourhoods. The module's current weights are the initial weights.
            done: epochs already completed when resuming; sampling continues as in an uninterrupted fit.
            after: callback after each epoch with the epoch number, from 1, and the loss, a 0-d tensor. A true return
                value stops the fit.
        Returns: loss per step, an estimate if neighbourhoods are sampled.
        Raises: ValueError for invalid shapes or node numbers, non-finite features, and a graph without edges.
        """
        check_positive("G2R.fit", epochs=epochs, nodes=nodes)
        check_tensors("G2R.fit", x=x)
        check_features("G2R.fit", x)
        n = len(x)
        source, target = list_edges("G2R.fit", edge_index, n)
        connected = target.unique().cpu()
        if not len(connected):
            raise ValueError("G2R.fit: edge_index must hold an edge between two nodes, got none.")
        groups = group_neighbors(edge_index, n, normalize=normalize)
        kept = edge_index
        if isinstance(self.encoder, _Convolutions):
            kept = _adjacency(torch.stack([source, target]), n, x.dtype)
        optimizer = optimizer or self.optimizer()
        draw = torch.Generator().manual_seed(seed)
        losses = []
        for epoch in range(1, epochs + 1):
            drawn = connected[torch.randperm(len(connected), generator=draw)[:nodes]]
            if epoch <= done:
                continue
            self.train()
            z = self(x, kept)
            apart = coding_rate(z, groups.select(drawn), eps=self.eps) * (len(connected) / len(drawn))
            loss = apart - self.gamma * coding_rate(z, eps=self.eps, gamma=self.gamma)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            if after is not None and after(epoch, losses[-1]):
                break
        return cast("list[float]", torch.stack(losses).tolist()) if losses else []

    def optimizer(self, lr: float = 1e-3, weight_decay: float = 1e-4) -> torch.optim.Optimizer:
        """Default optimizer for `fit`: Adam over this module's parameters.

        Args:
            lr: step size.
            weight_decay: L2 coefficient, multiplied by each weight and added to the gradient.
        """
        return torch.optim.Adam(self.parameters(), lr=lr, weight_decay=weight_decay)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors; no pickles.

        Args:
            folder: created if missing.
        Raises: ValueError if the path is a file, or if the encoder is a custom module, which cannot be serialised.
        """
        from safetensors.torch import save_file

        folder = Path(folder)
        if not isinstance(self.encoder, _Convolutions):
            raise ValueError(
                "G2R.save_pretrained: encoder must be the two convolutions, got a "
                f"{type(self.encoder).__name__}: save its state_dict() yourself."
            )
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"G2R.save_pretrained: folder must be a folder, got the file {folder}.")
        folder.mkdir(parents=True, exist_ok=True)
        save_file({k: v.detach().cpu().clone() for k, v in self.state_dict().items()}, folder / f"{WEIGHTS}.partial")
        about = {"kind": "g2r", **{name: getattr(self, name) for name in OPTIONS}}
        (folder / f"{CONFIG}.partial").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        # Rename each file into place only when complete, config.json last: if config.json exists, the weights do too.
        for name in (WEIGHTS, CONFIG):
            os.replace(folder / f"{name}.partial", folder / name)
        write_manifest(folder, (WEIGHTS, CONFIG))

    @classmethod
    def from_pretrained(cls, folder: str | Path, device: torch.device | str | None = None) -> G2R:
        """Load a model written by `save_pretrained`, in evaluation mode.

        Args:
            folder: the saved folder; for a `tigon graph fit` run, a seed's folder.
            device: device for the weights; None: CPU.
        Raises: ValueError for a folder without a model or with inconsistent files.
        """
        folder = Path(folder)
        if not (folder / CONFIG).is_file():
            raise ValueError(f"G2R.from_pretrained: folder must hold {CONFIG}, which {folder} does not.")
        check_manifest(folder, (CONFIG, WEIGHTS))
        about = read_json(folder / CONFIG, required=OPTIONS)
        tensors = read_tensors(folder / WEIGHTS, required=("encoder.weight1", "encoder.weight2"))
        sizes = (about["features"], about["hidden"], about["out"])
        # Check before allocating a model with these sizes.
        if [*tensors["encoder.weight1"].shape, *tensors["encoder.weight2"].shape] != [*sizes[:2], *sizes[1:]]:
            raise DamagedFileError(f"{folder / WEIGHTS} does not fit {CONFIG} beside it, whose sizes are {sizes}.")
        try:
            model = cls(**{name: about[name] for name in OPTIONS})
        except (ValueError, TypeError) as error:
            raise DamagedFileError(f"{folder / CONFIG} has unknown model options: {error}") from error
        load_state(model, tensors, folder / WEIGHTS)
        return model.to(device).eval()

    @torch.no_grad()
    def encode(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Embeddings without gradients, in evaluation mode.

        Args:
            x: (n, F) floats, node features.
            edge_index: (2, e) integers, as in PyG.

        Returns: (n, d).
        """
        training = self.training
        self.eval()
        try:
            return cast(Tensor, self(x, edge_index))
        finally:
            self.train(training)


class _Convolutions(nn.Module):
    def __init__(self, features: int, hidden: int, out: int) -> None:
        super().__init__()
        self.weight1, self.bias1 = nn.Parameter(torch.empty(features, hidden)), nn.Parameter(torch.zeros(hidden))
        self.weight2, self.bias2 = nn.Parameter(torch.empty(hidden, out)), nn.Parameter(torch.zeros(out))
        for weight in (self.weight1, self.weight2):
            nn.init.xavier_uniform_(weight)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """edge_index: the edges, or the result of `_adjacency`."""
        check_tensors("G2R", x=x)
        if x.dim() != 2 or x.shape[1] != len(self.weight1):
            raise ValueError(f"G2R: x must be (n, {len(self.weight1)}), got {tuple(x.shape)}.")
        dtype = self.weight1.dtype
        if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"G2R: x must have the weights' dtype, {dtype}, got {x.dtype}: x.to({dtype}).")
        A = edge_index
        if A.layout == torch.strided:
            A = _adjacency(torch.stack(list_edges("G2R", edge_index, len(x))), len(x), x.dtype)
        h = torch.relu(A @ (x @ self.weight1) + self.bias1)
        return A @ (h @ self.weight2) + self.bias2


def check_features(name: str, x: Tensor) -> None:
    values = x.detach().coalesce().values() if x.layout == torch.sparse_coo else x.values() if x.is_sparse_csr else x
    if not bool(values.isfinite().all()):
        bad = values[~values.isfinite()]
        raise ValueError(f"{name}: x must be finite, got {float(bad[0])}, one of {len(bad):,} such numbers.")


def list_edges(name: str, edge_index: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Sources and targets, without duplicates and self-loops, sorted by target."""
    check_tensors(name, edge_index=edge_index)
    whole = not (edge_index.is_floating_point() or edge_index.is_complex() or edge_index.dtype == torch.bool)
    if edge_index.dim() != 2 or len(edge_index) != 2 or not whole:
        raise ValueError(
            f"{name}: edge_index must be (2, e) integers, sources and targets, got {tuple(edge_index.shape)} "
            f"{edge_index.dtype}."
        )
    edge_index = edge_index.long()  # torch cannot compare unsigned integers wider than 8 bits
    outside = edge_index[(edge_index < 0) | (edge_index >= nodes)]
    if len(outside):
        raise ValueError(f"{name}: edge_index must lie in [0, {nodes:,}), the nodes, got {int(outside[0]):,}.")
    source, target = edge_index
    pairs = (target * nodes + source)[source != target].unique()
    return pairs % nodes, pairs // nodes


def _adjacency(edges: Tensor, nodes: int, dtype: torch.dtype) -> Tensor:
    """D^-½ (adjacency + I) D^-½ as a sparse matrix with targets as rows; edges as returned by `list_edges`."""
    loops = torch.arange(nodes, device=edges.device).expand(2, nodes)
    source, target = torch.cat([edges, loops], 1)
    degree = target.bincount(minlength=nodes).to(dtype)
    values = (degree[source] * degree[target]).rsqrt()
    places = torch.stack([target, source])
    return torch.sparse_coo_tensor(places, values, (nodes, nodes), check_invariants=False).coalesce()
