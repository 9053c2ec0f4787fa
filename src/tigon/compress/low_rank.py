"""Low rank for the inputs that a matrix really has: the B A of rank r that is least in ‖(W − B A) L‖.

L Lᵀ is the second moment of the inputs. The answer is that of the SVD of W L, found by the eigenvectors of the smaller
of its two Gram matrices, in a fraction of the time; one decomposition serves all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-3  # of the mean square of the inputs: directions that calibration has not seen cost something too


class Spectrum:
    """A matrix, decomposed once.

    Args:
        weight: (M, N) fp32.
        moment: (N, N), the mean of x xᵀ over the inputs.
    """

    def __init__(self, weight: Tensor, moment: Tensor) -> None:
        self.weight = weight
        eye = torch.eye(len(moment), device=moment.device, dtype=moment.dtype)
        self.root = torch.linalg.cholesky(moment + (RIDGE * moment.diagonal().mean() + 1e-12) * eye)
        self.product = weight @ self.root
        tall = weight.shape[0] > weight.shape[1]
        self.tall = tall
        gram = self.product.t() @ self.product if tall else self.product @ self.product.t()
        self.vectors = torch.linalg.eigh(gram)[1].flip(1)  # the largest first

    def factors(self, rank: int) -> tuple[Tensor, Tensor]:
        """outer (M, r) and inner (r, N)."""
        own = self.vectors[:, :rank]
        if not self.tall:
            return own, own.t() @ self.weight
        return self.product @ own, torch.linalg.solve_triangular(self.root.t(), own, upper=True).t()
