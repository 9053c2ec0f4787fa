"""Content clusters for cold-start items: residual k-means on the data's device.

    level 1 clusters the embeddings, level l + 1 the residuals of the levels before

An item tower is then an id embedding plus the embeddings of its clusters. Ids are dropped out in training, so that the
cluster embeddings alone also form a useful vector: that of a new item.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tigon.retrieve.arguments import as_int, as_number, read_int, require_tensors

# Distances in memory at a time: 256 MiB in fp32.
DISTANCES = 1 << 26


class Clusters(nn.Module):
    """The clusters that `fit` found.

    Args:
        centers: (levels, size, D) fp32, kept as a buffer.
    """

    centers: Tensor

    def __init__(self, centers: Tensor) -> None:
        super().__init__()
        self.register_buffer("centers", centers)

    def forward(self, embeddings: Tensor) -> Tensor:
        """Assign items to clusters, new items as well as fitted items.

        Args:
            embeddings: (n, D) floats.

        Returns: (n, levels) int64, from 0 to size − 1.
        Raises: ValueError for another width.
        """
        _check("Clusters", embeddings)
        if embeddings.shape[1] != self.centers.shape[2]:
            raise ValueError(
                f"Clusters: embeddings must be (n, {self.centers.shape[2]}), as wide as the clustered embeddings, got "
                f"{tuple(embeddings.shape)}."
            )
        rest = embeddings.detach().float()
        levels = []
        for centers in self.centers:
            levels.append(_nearest(rest, centers))
            rest = rest - centers[levels[-1]]
        return torch.stack(levels, 1)


def fit(embeddings: Tensor, levels: int = 2, size: int = 1024, *, iterations: int = 25, seed: int = 0) -> Clusters:
    """Cluster items by their content, level by level.

    Args:
        embeddings: (N, D) floats, finite, from the items' text, image or attributes.
        levels: clusters per item.
        size: clusters per level, at most N.
        iterations: of Lloyd's algorithm, per level. A centre without items moves to the item farthest from its own
            centre.
        seed: selects the items that the centres start at.
    Returns: `Clusters`, which is called with embeddings.
    Raises: ValueError for numbers and shapes that do not fit, and for NaN and infinity.

    Source: residual quantization, Chen et al. 2010, https://doi.org/10.3390/s101211259.
    """
    _check("clusters.fit", embeddings)
    N = len(embeddings)
    if min(as_int(number) or 0 for number in (levels, iterations, size)) < 1 or size > N:
        raise ValueError(
            f"clusters.fit: levels and iterations must be positive and size from 1 to {N:,}, the number of items, got "
            f"{levels}, {iterations} and {size}."
        )
    if not bool(embeddings.isfinite().all()):
        at = int((~embeddings.isfinite()).any(1).nonzero()[0])
        raise ValueError(f"clusters.fit: embeddings must be finite, got NaN or infinity in row {at:,}.")
    draw = torch.Generator().manual_seed(read_int("clusters.fit", "seed", seed, least=0))
    rest = embeddings.detach().float()
    levels_found = []
    for _ in range(levels):
        centers = rest[torch.randperm(N, generator=draw)[:size].to(rest.device)].clone()
        for _ in range(iterations):
            nearest = _nearest(rest, centers)
            # Sums in cluster order, not by atomics: the same bits on every run.
            order = nearest.argsort(stable=True)
            counts = nearest.bincount(minlength=size)
            sums = torch.segment_reduce(rest[order].double(), "sum", lengths=counts, unsafe=True, initial=0)
            moved = (sums / counts[:, None].clamp(min=1)).float()
            empty = (counts == 0).nonzero()[:, 0]
            if len(empty):
                far = (rest - centers[nearest]).square().sum(1).topk(min(len(empty), N)).indices
                moved[empty] = rest[far]
            if torch.equal(moved, centers):
                break
            centers = moved
        levels_found.append(centers)
        rest = rest - centers[_nearest(rest, centers)]
    return Clusters(torch.stack(levels_found))


class ClusteredEmbedding(nn.Module):
    """Item vectors: an id embedding, dropped out in training, plus the embeddings of the item's clusters.

    Args:
        clusters: (N, levels) integers, as `Clusters` returned them for the items.
        size: clusters per level.
        dim: the vector width.
        dropout: the share of items whose id is left out in a call in training mode.

    Raises: ValueError for clusters outside a level, and a dropout outside [0, 1].
    """

    clusters: Tensor

    def __init__(self, clusters: Tensor, size: int, dim: int = 64, *, dropout: float = 0.2) -> None:
        super().__init__()
        share = as_number(dropout)
        if share is None or not 0 <= share <= 1 or (as_int(dim) or 0) < 1:
            raise ValueError(
                f"ClusteredEmbedding: dropout must be from 0 to 1 and dim positive, got {dropout} and {dim}."
            )
        require_tensors("ClusteredEmbedding", clusters=clusters)
        self.size, self.dropout = read_int("ClusteredEmbedding", "size", size), share
        self.register_buffer("clusters", self._check_clusters(clusters))
        items, levels = clusters.shape
        self.id = nn.Embedding(items, dim)
        self.level = nn.Embedding(levels * size, dim)
        for table in (self.id, self.level):
            nn.init.normal_(table.weight, std=0.1)

    def _check_clusters(self, clusters: Tensor) -> Tensor:
        if clusters.dim() != 2 or clusters.dtype.is_floating_point or clusters.shape[1] < 1:
            raise ValueError(
                f"ClusteredEmbedding: clusters must be (items, levels) integers, got {tuple(clusters.shape)} "
                f"{clusters.dtype}."
            )
        if clusters.numel() and not 0 <= int(clusters.min()) <= int(clusters.max()) < self.size:
            raise ValueError(
                f"ClusteredEmbedding: clusters must be from 0 to {self.size - 1:,}, got {int(clusters.min())} to "
                f"{int(clusters.max())}."
            )
        return clusters.long()

    def embed_clusters(self, clusters: Tensor) -> Tensor:
        """Compute vectors for items that have no id yet.

        Args:
            clusters: (n, levels) integers, as in the constructor.

        Returns: (n, dim).
        Raises: ValueError for another level count, or clusters outside a level.
        """
        clusters = self._check_clusters(clusters)
        if clusters.shape[1] != self.clusters.shape[1]:
            raise ValueError(
                f"ClusteredEmbedding: clusters must have {self.clusters.shape[1]} levels, got {clusters.shape[1]}."
            )
        return self._sum(clusters)

    def _sum(self, clusters: Tensor) -> Tensor:
        places = clusters + self.size * torch.arange(clusters.shape[1], device=clusters.device)
        total: Tensor = self.level(places).sum(1)
        return total

    def forward(self, items: Tensor | None = None) -> Tensor:
        """Compute item vectors.

        Args:
            items: (n,), rows. None: all.

        Returns: (n, dim).
        """
        ids = self.id.weight if items is None else self.id(items)
        if self.training and self.dropout:
            kept = torch.rand(len(ids), 1, device=ids.device) >= self.dropout
            ids = ids * kept
        return ids + self._sum(self.clusters if items is None else self.clusters[items])


def _check(name: str, embeddings: Tensor) -> None:
    require_tensors(name, embeddings=embeddings)
    if embeddings.dim() != 2 or not embeddings.dtype.is_floating_point or embeddings.shape[1] < 1:
        raise ValueError(
            f"{name}: embeddings must be (items, D) floats, got {tuple(embeddings.shape)} {embeddings.dtype}."
        )


def _nearest(x: Tensor, centers: Tensor) -> Tensor:
    """(N,), each row's nearest centre; the first among equals."""
    offset = centers.square().sum(1)
    pieces = x.split(max(DISTANCES // len(centers), 1))
    if not pieces:
        return torch.zeros(0, dtype=torch.int64, device=x.device)
    return torch.cat([(offset - 2 * piece @ centers.t()).argmin(1) for piece in pieces])
