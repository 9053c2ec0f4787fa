"""Low-rank factors weighted by the inputs: the rank-r B A that minimises ‖(W − B A) L‖.

L Lᵀ is the inputs' second moment. The solution is the SVD of W L, computed from eigenvectors of the smaller Gram matrix
in a fraction of the time. A single decomposition serves all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-3  # relative to the inputs' mean square: directions absent from calibration still have a cost


class Spectrum:
    """A matrix decomposed once for all ranks.

    Args:
        weight: (M, N) fp32.
        moment: (N, N), mean x xᵀ over the inputs.
    """

    def __init__(self, weight: Tensor, moment: Tensor) -> None:
        self.weight = weight
        eye = torch.eye(len(moment), device=moment.device, dtype=moment.dtype)
        self.root = torch.linalg.cholesky(moment + (RIDGE * moment.diagonal().mean() + 1e-12) * eye)
        self.product = weight @ self.root
        tall = weight.shape[0] > weight.shape[1]
        self.tall = tall
        gram = self.product.t() @ self.product if tall else self.product @ self.product.t()
        self.vectors = torch.linalg.eigh(gram)[1].flip(1)  # largest first

    def factors(self, rank: int) -> tuple[Tensor, Tensor]:
        """Factors outer (M, r) and inner (r, N)."""
        own = self.vectors[:, :rank]
        if not self.tall:
            return own, own.t() @ self.weight
        return self.product @ own, torch.linalg.solve_triangular(self.root.t(), own, upper=True).t()
