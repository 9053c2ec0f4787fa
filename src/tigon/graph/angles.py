"""Principal angles between class subspaces, a measure for class separation in embeddings."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tigon.kernels import check_tensors
from tigon.losses.options import check_positive


def principal_angles(z: Tensor, labels: Tensor, *, dims: int = 8) -> Tensor:
    """Principal angles between the class subspaces for every pair of classes.

    A class subspace is spanned by the `dims` leading right singular vectors of the class's rows, uncentred. For
    orthonormal bases U and V, the cosines are the singular values of Uᵀ V.

    Args:
        z: (n, d) floats.
        labels: (n,) integers; rows with a negative label are ignored.
        dims: subspace dimension, at most d and at most the smallest class's row count.
    Returns: (C, C, dims) fp64, in radians, smallest first; C classes in label order. Orthogonal subspaces have π/2, the
        diagonal has 0.
    Raises: ValueError for bad shapes, a class with fewer rows than dims, and non-finite z.
    """
    name = "principal_angles"
    check_positive(name, dims=dims)
    check_tensors(name, z=z, labels=labels)
    if z.dim() != 2 or not z.is_floating_point():
        raise ValueError(f"{name}: z must be (n, d) floats, got {tuple(z.shape)} {z.dtype}.")
    if labels.shape != (len(z),):
        raise ValueError(f"{name}: labels must be ({len(z):,},), one per row of z, got {tuple(labels.shape)}.")
    if not bool(z.isfinite().all()):
        raise ValueError(f"{name}: z must be finite, got NaN or infinity.")
    bases = []
    for label in labels[labels >= 0].unique().tolist():
        rows = z.detach()[labels == label].double()
        if dims > min(rows.shape):
            raise ValueError(
                f"{name}: dims must be at most {min(rows.shape)}, as class {label} has {len(rows)} rows with "
                f"{rows.shape[1]} numbers, got {dims}."
            )
        # The small Gram matrix of a tall matrix would lose half the digits.
        bases.append(torch.linalg.svd(rows, full_matrices=False).Vh[:dims])
    if not bases:
        raise ValueError(f"{name}: labels must name a class, got none.")
    U = torch.stack(bases)
    cosines = torch.linalg.svdvals(torch.einsum("akd,bld->abkl", U, U))
    angles: Tensor = cosines.clamp(max=1).arccos()
    return angles


def plot_angles(file: str | Path, panels: dict[str, Tensor]) -> None:
    """Plot the mean principal angle for every class pair, in degrees, with a panel per `principal_angles` result.

    Args:
        file: output path, in a matplotlib format.
        panels: title → (C, C, dims) radians.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        1, len(panels), figsize=(4.5 * len(panels) + 0.5, 4), layout="constrained", squeeze=False
    )
    for one, (title, angles) in zip(axes[0], panels.items(), strict=True):
        degrees = angles.mean(-1).rad2deg().tolist()
        image = one.imshow(degrees, vmin=0, vmax=90, cmap="viridis")
        for i, row in enumerate(degrees):
            for j, value in enumerate(row):
                one.text(j, i, f"{value:.0f}", ha="center", va="center", color="white" if value < 50 else "black")
        one.set(title=title, xlabel="class", ylabel="class", xticks=range(len(degrees)), yticks=range(len(degrees)))
    figure.colorbar(image, ax=axes, label="mean principal angle, degrees")
    figure.savefig(file, dpi=120)
    plt.close(figure)
