"""Functions and modules with torch's names: torch's arguments give torch's results, or are refused.

A function or module with such a name fails without a row here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tigon
from tigon.lazy import find_homes

pytestmark = pytest.mark.filterwarnings("ignore:reduction")  # torch warns about kl_div's default

SHARED = [name for name in find_homes("tigon") if callable(getattr(F, name, None))]
MODULES = [name for name in tigon.nn.__all__ if hasattr(torch.nn, name)]


class Call(NamedTuple):
    """A call with torch's arguments. refused: the beginning of the error, if Tigon gives no result."""

    args: tuple[Any, ...]
    options: dict[str, Any] = {}  # noqa: RUF012
    refused: str | None = None


class Made(NamedTuple):
    """Like `Call`, for a module. inputs: the instance's call arguments; None if construction is refused."""

    args: tuple[Any, ...]
    options: dict[str, Any]
    inputs: tuple[Tensor, ...] | None
    refused: str | None = None


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Small, so that eps matters beside a variance.
X, W, B = randn(3, 5, 8, scale=1e-3), randn(8, seed=1), randn(8, seed=2)
Z, TARGET, CLASSES = randn(6, 5), torch.tensor([0, 4, 1, 1, -100, 2]), torch.tensor([1.0, 0.5, 2.0, 0.25, 3.0])
LOGS, SHARES = randn(4, 7).log_softmax(-1), randn(4, 7, seed=1).softmax(-1)
IMAGE, MAP = randn(2, 5, 3, 4), torch.randint(0, 5, (2, 3, 4), generator=torch.Generator().manual_seed(3))
TABLE, IDS = randn(9, 4), torch.tensor([[0, 8, 3], [3, 3, 2]])
FLAT, BEGINS, FACTORS = torch.tensor([0, 8, 3, 3, 2]), torch.tensor([0, 2, 2]), randn(2, 3, seed=4)
CONFIG = r"\w+ must be passed as config=tigon.CrossEntropy\(\w+=…\)"
POSITIONAL, KEYWORD = "takes .*positional", "got an unexpected keyword argument"
NORMALIZED = "weight must be a tensor, got .*: normalized_shape of torch.nn.functional"
SECOND = r"cross_entropy: logits must have their classes in the last dimension.*movedim\(1, -1\)"

CALLS = {
    "cross_entropy": [
        Call((Z, TARGET)),
        Call((Z, TARGET, CLASSES)),
        Call((Z, TARGET), {"weight": CLASSES}),
        Call((Z, TARGET), {"weight": CLASSES, "reduction": "sum"}, CONFIG),
        Call((Z, TARGET.clamp(min=0)), {"ignore_index": 1, "label_smoothing": 0.1}, CONFIG),
        Call((Z[0], TARGET[0])),
        Call((Z, TARGET, None, None, 1), {}, POSITIONAL),
        Call((Z, TARGET), {"size_average": False}, KEYWORD),
        Call((), {"input": Z, "target": TARGET}, "missing 1 required positional argument: 'logits'"),
        Call((Z, Z.softmax(-1)), {}, r"cross_entropy: target must have shape \(6,\)"),
        Call((IMAGE, MAP), {}, SECOND),
        Call((randn(2, 5, 5), torch.zeros(2, 5).long()), {}, SECOND),
    ],
    "embedding": [
        Call((IDS, TABLE)),
        Call((IDS, TABLE, 3)),
        Call((IDS, TABLE), {"padding_idx": -1}),
        Call((IDS, TABLE, None, 1.0), {}, POSITIONAL),
        Call((IDS, TABLE), {"max_norm": 1.0}, KEYWORD),
        Call((IDS, TABLE), {"sparse": True}, KEYWORD),
    ],
    "embedding_bag": [
        Call((IDS, TABLE)),
        Call((IDS, TABLE), {"mode": "sum", "per_sample_weights": FACTORS}),
        Call((FLAT, TABLE, BEGINS)),
        Call((FLAT, TABLE), {"offsets": BEGINS, "padding_idx": 3, "mode": "sum"}),
        Call((FLAT, TABLE, torch.tensor([0, 2, 2, 5])), {"include_last_offset": True, "padding_idx": -1}),
        Call((FLAT, TABLE, BEGINS[:0]), {}, "embedding_bag: offsets must ascend from 0 to 5"),
        Call((FLAT.int(), TABLE, BEGINS.int()), {}, "embedding_bag: offsets must be 1-d int64"),
        Call((IDS, TABLE, None, 1.0), {}, POSITIONAL),
        Call((IDS, TABLE), {"mode": "max"}, "embedding_bag: mode must be 'sum' or 'mean', got 'max'"),
        Call((IDS, TABLE), {"sparse": True}, KEYWORD),
        Call((), {"input": IDS, "weight": TABLE}, KEYWORD),
    ],
    "group_norm": [
        Call((X, 5)),
        Call((X, 1, randn(5), randn(5, seed=1), 1e-3)),
        Call((X, 5), {"weight": randn(5), "eps": 1e-6}),
        Call((), {"input": X, "num_groups": 5}, KEYWORD),
    ],
    "kl_div": [
        Call((LOGS, SHARES)),
        Call((LOGS, SHARES), {"reduction": "batchmean"}),
        Call((LOGS, SHARES.log()), {"reduction": "sum", "log_target": True}),
        Call((LOGS.view(2, 2, 7), SHARES.view(2, 2, 7))),
        Call((LOGS[0], SHARES[0]), {"reduction": "mean"}),
        Call((LOGS.view(2, 2, 7), SHARES.view(2, 2, 7)), {"reduction": "batchmean"}, r"kl_div: input must be \(M, V\)"),
        Call((LOGS[0], SHARES[0]), {"reduction": "batchmean"}, r"kl_div: input must be \(M, V\)"),
        Call((LOGS, SHARES), {"reduction": "none"}, "kl_div: reduction must be one of"),
        Call((LOGS, SHARES[0]), {}, "kl_div: target must be floats of input's shape"),
        Call((LOGS, SHARES, None, None, "sum"), {}, POSITIONAL),
        Call((LOGS, SHARES), {"size_average": False}, KEYWORD),
    ],
    "layer_norm": [
        Call((X, (8,)), {}, NORMALIZED),
        Call((X, (8,), W), {}, NORMALIZED),
        Call((X, X.shape[-2:]), {}, NORMALIZED),
        Call((X, [8], W, B), {}, POSITIONAL),
        Call((X, (8,), W, B, 1e-5), {}, POSITIONAL),
        Call((X, (8,)), {"weight": W}, "got multiple values for argument 'weight'"),
        Call((X,), {"normalized_shape": (8,), "weight": W}, KEYWORD),
    ],
    "linear_cross_entropy": [
        Call((Z, randn(7, 5), TARGET.clamp(min=0))),
        Call((Z, randn(7, 5), TARGET.clamp(min=0)), {"label_smoothing": 0.1, "reduction": "sum"}, CONFIG),
        Call((Z, randn(7, 5), TARGET), {"linear_bias": randn(7)}, KEYWORD),
        Call((Z, randn(7, 5), TARGET), {"weight": randn(7)}, "weight must be passed as head=tigon.Head"),
    ],
    "rms_norm": [
        Call((X, (8,)), {}, NORMALIZED),
        Call((X, (8,), W), {}, POSITIONAL),
        Call((X, [8]), {"eps": 1e-6}, NORMALIZED),
        Call((X,), {"normalized_shape": (8,), "weight": W}, KEYWORD),
    ],
    "softmax": [
        Call((X, -1)),
        Call((X,), {"dim": 1}),
        Call((X, 0), {"dtype": torch.float64}),
        Call((X.bfloat16(), -1), {"dtype": torch.float32}),
        Call((X,), {}, "missing 1 required positional argument: 'dim'"),
        Call((X, -1, 3, torch.float32), {}, POSITIONAL),
        Call((X.long(), -1), {"dtype": torch.float32}),
    ],
}

MADE = {
    "CrossEntropyLoss": [
        Made((), {}, (Z, TARGET)),
        Made((CLASSES,), {}, (Z, TARGET.clamp(min=0))),
        Made((), {"reduction": "none"}, None, KEYWORD),
        Made((), {}, (IMAGE, MAP), SECOND),
        Made((None, False), {}, None, POSITIONAL),
    ],
    "Embedding": [
        Made((9, 4), {}, (IDS,)),
        Made((9, 4, 3), {}, (IDS,)),
        Made((9, 4), {"sparse": True}, None, KEYWORD),
        Made((9, 4, None, 1.0), {}, None, POSITIONAL),
    ],
    "GroupNorm": [
        Made((5, 5), {}, (X,)),
        Made((1, 5, 1e-3, False), {}, (X,)),
        Made((5, 5), {"eps": 1e-6}, (X,)),
    ],
    "KLDivLoss": [
        Made((), {}, (LOGS, SHARES)),
        Made((), {"reduction": "batchmean", "log_target": True}, (LOGS, SHARES.log())),
        Made((None, None, "sum"), {}, None, POSITIONAL),
        Made((), {"reduction": "none"}, None, "KLDivLoss: reduction must be one of"),
    ],
    "LayerNorm": [
        Made((8,), {}, (X,)),
        Made(((8,), 1e-3, True, False), {}, (X,)),
        Made((8,), {"elementwise_affine": False}, (X,)),
        Made(((5, 8),), {}, None, "LayerNorm: normalized_shape must name the last dimension alone"),
    ],
    "LinearCrossEntropyLoss": [Made((5, 7), {}, None, "LinearCrossEntropyLoss: config must be a CrossEntropy, got 5")],
    "RMSNorm": [
        Made((8,), {}, (X,)),
        Made((8,), {}, (X.double(),)),
        Made(((8,), 1e-6, False), {}, (X,)),
        Made(((5, 8),), {}, None, "RMSNorm: normalized_shape must name the last dimension alone"),
    ],
    "Softmax": [Made((1,), {}, (X,)), Made((), {"dim": -1}, (X,)), Made((), {}, None, "missing 1 required positional")],
}


def test_every_shared_name_has_its_calls():
    assert set(SHARED) <= set(CALLS)
    assert set(MODULES) <= set(MADE)
    assert {"kl_div", "embedding_bag", "cross_entropy"} <= set(SHARED)


def results(function: Any, args: tuple[Any, ...], options: dict[str, Any], device: torch.device) -> list[Tensor]:
    """A call's results, and the gradients for its first float tensors; targets and factors get none here."""

    def leaf(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        t = t.detach().to(device, copy=True)
        return t.requires_grad_() if t.is_floating_point() else t

    first = [leaf(t) for t in args[:2]]
    if len(args) > 1 and function.__name__ in ("kl_div", "KLDivLoss"):
        first[1] = first[1].detach()
    rest = [t.to(device) if isinstance(t, Tensor) else t for t in args[2:]]
    given = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in options.items()}
    y = function(*first, *rest, **given)
    leaves = [t for t in first if isinstance(t, Tensor) and t.requires_grad]
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y)
    return [y.detach(), *(torch.autograd.grad(y, leaves, upstream) if leaves else ())]


def compare(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6 * max(1.0, b.abs().max().item()))


@pytest.mark.parametrize(
    ("name", "call"), [pytest.param(n, c, id=f"{n}-{i}") for n in SHARED for i, c in enumerate(CALLS.get(n, ()))]
)
def test_a_function(name, call, backend, device):
    ours, theirs = getattr(tigon, name), getattr(F, name)
    if call.refused is not None:
        with pytest.raises((TypeError, ValueError), match=call.refused):
            results(ours, call.args, call.options, device)
        return
    if backend == "triton" and torch.float64 in call.options.values():
        pytest.skip("kernels have no fp64")
    compare(results(ours, call.args, call.options, device), results(theirs, call.args, call.options, device))


@pytest.mark.parametrize(
    ("name", "made"), [pytest.param(n, m, id=f"{n}-{i}") for n in MODULES for i, m in enumerate(MADE.get(n, ()))]
)
def test_a_module(name, made, backend, device):
    if made.refused is not None:
        with pytest.raises((TypeError, ValueError), match=made.refused):
            getattr(tigon.nn, name)(*made.args, **made.options)(*made.inputs or ())
        return
    inputs = made.inputs or ()
    if backend == "triton" and any(t.dtype == torch.float64 for t in inputs):
        pytest.skip("kernels have no fp64")
    dtype = torch.float64 if inputs[0].dtype == torch.float64 else torch.float32
    theirs = getattr(torch.nn, name)(*made.args, **made.options).to(device, dtype)
    ours = getattr(tigon.nn, name)(*made.args, **made.options).to(device, dtype)
    for parameter, start in zip(ours.parameters(), theirs.parameters(), strict=True):
        if name != "Embedding":  # random initial weights
            assert torch.equal(parameter, start)
    ours.load_state_dict(theirs.state_dict())
    ours.__name__ = theirs.__name__ = name
    compare(results(ours, inputs, {}, device), results(theirs, inputs, {}, device))


def test_the_mean_over_no_row_is_not_torch_s(backend, device):
    """The only differing result, as the operators page says: torch's is NaN."""
    z, target = Z.to(device), torch.full((6,), -100, device=device)
    assert tigon.cross_entropy(z, target) == 0
    assert F.cross_entropy(z, target).isnan()
