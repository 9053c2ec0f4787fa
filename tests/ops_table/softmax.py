"""Softmax and sparsemax rows."""

from __future__ import annotations

import torch

from ops_table.row import Bad, Case, Op, Replaced, sample
from tigon.ops.softmax import softmax, softmax_reference
from tigon.ops.sparsemax import sparsemax, sparsemax_reference


def _make_softmax(shape, dtype, generator, mask=None, mask_dtype=None):
    """mask: the mask's shape, or None. A third of the elements are -inf, but never a whole row."""
    x = (2 * torch.randn(shape, generator=generator)).to(dtype)
    if mask is None:
        return x, None
    # The first dimension varies from step to step, as does a mask that does not broadcast along this dimension.
    sizes = tuple(n if n == 1 else m for n, m in zip(mask, shape[-len(mask) :], strict=True))
    values = torch.randn(sizes, generator=generator)
    hidden = torch.rand(sizes, generator=generator) < 0.3
    hidden[..., 0] = False
    return x, values.masked_fill(hidden, -torch.inf).to(mask_dtype or dtype)


def _softmax(x, mask=None, **options):
    return softmax(x, **{"dim": -1, "mask": mask} | options)


def _softmax_reference(x, mask=None, **options):
    return softmax_reference(x, mask=mask, **options)


def eager_softmax(x, mask=None, *, dim=-1, scale=1.0, causal=False):
    """Hand-written attention: each step in the scores' dtype."""
    z = x * scale
    if mask is not None:
        z = z + mask.to(z.dtype)
    if causal:
        T, S = x.shape[-2:]
        z = z.masked_fill(torch.ones(T, S, dtype=torch.bool, device=x.device).triu(S - T + 1), -torch.inf)
    return torch.softmax(z, dim)


def _masked_by(mask, x=(2, 3, 4)):
    return lambda: (torch.ones(x), mask)


_SCORES = {"x": sample(2, 5, 7), "mask": sample(5, 7), "scale": 0.3, "dim": -1, "T": 5, "S": 7}
SOFTMAX = Op(
    name="softmax",
    public=_softmax,
    reference=_softmax_reference,
    eager=eager_softmax,
    make=_make_softmax,
    cases=(
        Case("masked", (3, 5, 100)),
        Case("least", (1, 2), draws=64),
        Case("rows share tiles", (3, 50, 16)),
        Case("more rows than programs", (5, 17000)),
        Case("beyond one tile", (2, 33000)),
        Case("beyond one tile, in parts", (1, 33000)),
        Case("another dimension", (3, 40, 7), {"dim": -2}),
        Case("scale", (3, 5, 100), {"scale": 0.125}),
        Case("causal, more keys than queries", (2, 3, 5, 24), {"causal": True}),
        Case("attention mask", (2, 3, 6, 24), {"scale": 0.3, "causal": True}, {"mask": (2, 1, 6, 24)}),
        Case("one mask for all", (2, 3, 6, 24), {"scale": -1.5}, {"mask": (6, 24), "mask_dtype": torch.float32}),
        Case("all beyond one tile", (1, 3, 33000), {"scale": 2.0, "causal": True}, {"mask": (1, 1, 33000)}),
    ),
    empty=((0, 8), (2, 0), (3, 0, 8)),
    bad=(
        Bad(lambda: (torch.ones(2, 4).int(),), r"softmax: x must have a float dtype, got torch.int32"),
        Bad(lambda: (torch.ones(2, 4),), r"softmax: dim must name a dimension of x, which has 2, got 2", {"dim": 2}),
        Bad(lambda: (torch.tensor(1.0),), r"softmax: dim must name a dimension of x, which has 0, got -1"),
        Bad(
            lambda: (torch.ones(4),),
            r"softmax: causal must come with x \(\.\.\., T, S\).*got x \(4,\)",
            {"causal": True},
        ),
        Bad(_masked_by(torch.ones(2, 4)), r"softmax: mask must broadcast to x's shape \(2, 3, 4\), got \(2, 4\)"),
        Bad(_masked_by(torch.ones(4).bool()), r"softmax: mask must be floats .*got torch.bool"),
        Bad(_masked_by(torch.ones(4).requires_grad_()), r"softmax: mask must not require a gradient"),
    ),
    launches=("softmax_fwd", "softmax_bwd"),
    models=(
        Case("Llama-2-7B", (32768, 32000)),
        Case("attention", (4, 32, 2048, 2048), {"scale": 0.088, "causal": True}),
        Case("masked attention", (4, 32, 1024, 1024), {"scale": 0.088}, {"mask": (4, 1, 1024, 1024)}),
        Case("short attention", (16, 12, 128, 128), {"scale": 0.125}, {"mask": (16, 1, 1, 128)}),
        Case("long attention", (1, 4, 4096, 8192), {"causal": True}),
        Case("very long attention", (1, 4, 4096, 16384), {"causal": True}, {"mask": (1, 1, 4096, 16384)}),
        Case("Llama-3-8B", (8192, 128256)),
        Case("odd width", (8192, 50257)),
        Case("few rows", (17, 128256)),
    ),
    fixed=(1,),
    large=(
        Case("a row a tile", (1000, 4096)),
        Case("attention", (70, 3, 100, 100), {"scale": 0.3, "causal": True}, {"mask": (70, 1, 100, 100)}),
        Case("beyond one tile", (200, 40000)),
    ),
    replaces=(
        Replaced("softmax(x, dim, scale=scale, mask=mask)", "y", _SCORES),
        Replaced("softmax(x, dim, scale=scale, mask=mask)", "y", {**_SCORES, "dim": 1}),
        Replaced("softmax(x, -1, scale=scale, mask=mask, causal=True)", "y", _SCORES, (1,)),
    ),
)


def _make_sparsemax(shape, dtype, generator, spread=1.0):
    return ((spread * torch.randn(shape, generator=generator)).to(dtype),)


def eager_sparsemax(x, dim=-1):
    """The paper's algorithm, as in the usual packages."""
    z = (x.float() if x.dtype != torch.float64 else x).movedim(dim, -1)
    if z.shape[-1] == 0:
        return x.clone()
    z = z - z.amax(-1, keepdim=True)
    ordered = z.sort(-1, descending=True).values
    total = ordered.cumsum(-1) - 1
    k = torch.arange(1, z.shape[-1] + 1, device=z.device)
    size = (k * ordered > total).sum(-1, keepdim=True)
    # Not clamp(min=0), whose gradient at 0 is 1: bf16 numbers can tie with the threshold.
    support = z >= ordered.gather(-1, size - 1)
    return torch.where(support, z - total.gather(-1, size - 1) / size, 0).movedim(-1, dim).to(x.dtype)


SPARSEMAX = Op(
    name="sparsemax",
    public=sparsemax,
    reference=sparsemax_reference,
    eager=eager_sparsemax,
    make=_make_sparsemax,
    cases=(
        Case("masked", (3, 5, 100)),
        Case("least", (1, 2), draws=64),
        Case("rows share tiles", (3, 50, 16)),
        Case("all of a row is its support", (4, 600), {}, {"spread": 1e-3}),
        Case("beyond one tile of the backward", (3, 9000), {}, {"spread": 0.1}),
        Case("beyond one tile", (2, 33000), {}, {"spread": 0.1}),
        Case("another dimension", (3, 40, 7), {"dim": 1}),
    ),
    empty=((0, 8), (2, 0)),
    bad=(
        Bad(lambda: (torch.ones(2, 4).int(),), r"sparsemax: x must have a float dtype, got torch.int32"),
        Bad(
            lambda: (torch.ones(2, 4),), r"sparsemax: dim must name a dimension of x, which has 2, got -3", {"dim": -3}
        ),
    ),
    launches=("sparsemax_fwd", "sparsemax_bwd"),
    models=(
        Case("Llama-2-7B", (32768, 32000)),
        Case("attention", (4, 32, 1024, 1024)),
        Case("short attention", (16, 12, 128, 128)),
        Case("Llama-3-8B", (4096, 128256)),
    ),
    large=(
        Case("a row a tile", (1000, 4096)),
        Case("rows share tiles", (10000, 100)),
        Case("beyond one tile", (100, 40000)),
    ),
    replaces=(Replaced("sparsemax(x)", "y", {"x": 2 * sample(3, 8)}),),
)
