"""xIELU."""

import torch
import torch.nn.functional as F

from ops_table.row import Case, Op, randn
from tigon.ops.xielu import xielu, xielu_reference


def _make(shape, dtype, generator, alphas=(0.3, -0.6), beta=0.5, eps=-0.05):
    """eps so far from zero that its place shows."""
    numbers = [torch.tensor(value).to(dtype) for value in (*alphas, beta, eps)]
    return randn(shape, dtype, generator), numbers[0][None], numbers[1][None], *numbers[2:]


def eager_xielu(x, alpha_p, alpha_n, beta, eps):
    """The code in transformers."""
    p, n = F.softplus(alpha_p), beta + F.softplus(alpha_n)
    below = (torch.expm1(torch.min(x, eps)) - x) * n + beta * x
    return torch.where(x > 0, p * x * x + beta * x, below)


XIELU = Op(
    name="xielu",
    public=xielu,
    reference=xielu_reference,
    eager=eager_xielu,
    make=_make,
    cases=(
        Case("masked", (3, 5, 100), draws=4),
        Case("least", (1, 1), draws=64),
        Case("several blocks", (3, 1100), {}, {"alphas": (2.0, 1.5), "eps": -1e-6}),
    ),
    empty=((0, 8), (2, 0)),
    bad=(),
    launches=("xielu_fwd", "xielu_bwd"),
    models=(Case("Apertus 8B", (8192, 21504)),),
    large=(Case("flat", (1000, 4096)),),
    fixed=(3, 4),
)
