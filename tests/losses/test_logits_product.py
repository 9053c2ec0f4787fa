"""The product that leaves its rows' statistics behind, and the loss that is made of them."""

from typing import Any

import pytest
import torch
from numerics import check
from torch import Tensor

import tigon
from tigon.backend import HAS_TRITON
from tigon.losses import chunked, logits_product
from tigon.losses.linear_cross_entropy import linear_cross_entropy_reference
from tigon.losses.logits_product import logits_and_parts
from tigon.ops.cross_entropy import cross_entropy_rows

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


@pytest.fixture(autouse=True)
def small(monkeypatch, device):
    """Taken for any size, by tiles of which there are several; those of a GPU are its own."""
    if not logits_product._is_hopper(device):
        pytest.skip("the product is for Hopper")
    monkeypatch.setattr(logits_product, "STATISTICS_IN_PRODUCT", True)
    monkeypatch.setattr(logits_product, "LEAST_TILES", 0)
    if device.type == "cpu":
        tile = 32, 64, 32, 2, {"num_warps": 8, "num_stages": 3}
        monkeypatch.setattr(logits_product, "_logits_tile", lambda: tile)


def inputs(device, rows=150, H=24, V=136, dtype=torch.bfloat16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, H, generator=generator).to(device, dtype)
    return x, torch.randn(V, H, generator=generator).to(device, dtype)


def targets(device, rows=150, V=136) -> Tensor:
    target = torch.randint(0, V, (rows,), generator=torch.Generator().manual_seed(6)).to(device)
    target[::5] = -100
    return target


@pytest.fixture
def products(monkeypatch) -> list[int]:
    """The rows that each product with statistics was given."""
    rows: list[int] = []

    def counted(x: Tensor, *rest: Any) -> Tensor:
        rows.append(x.shape[0])
        return logits_and_parts(x, *rest)

    monkeypatch.setattr(chunked, "logits_and_parts", counted)
    return rows


def expected(logits: Tensor, block: int, scale: float) -> Tensor:
    """The statistics of parts of the logits as they are."""
    parts = [z.double() for z in logits.split(block, 1)]
    tops = [z.amax(1) for z in parts]
    totals = [((z - top[:, None]) * scale).exp().sum(1) for z, top in zip(parts, tops, strict=True)]
    return torch.stack((torch.stack(tops), torch.stack(totals)))


# Fewer steps than a tile has quarters, and more; columns that fill the last tile, that end in it, in a pair of them.
@pytest.mark.parametrize(("H", "V"), [(24, 128), (72, 136), (264, 201)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_are_those_of_the_rounded_logits(dtype, H, V, triton_backend, device):
    x, weight = inputs(device, H=H, V=V, dtype=dtype)
    room = torch.full((150, -(-V // 64) * 64), 7.0, device=device, dtype=dtype)
    logits = room[:, :V]
    parts = logits_and_parts(x, weight, logits, 0.5)
    torch.testing.assert_close(logits, x @ weight.t(), rtol=1e-2, atol=1e-2)
    assert bool((room[:, V:] == 7.0).all())
    wanted = expected(logits, logits_product._logits_tile()[1], 0.5)
    assert torch.equal(parts[0].double(), wanted[0])
    torch.testing.assert_close(parts[1].double(), wanted[1], rtol=1e-5, atol=0)


OPTIONS = [
    {},
    {"reduction": "sum", "scale": 0.25},
    {"reduction": "none", "z_loss": 1e-2},
    {"divisor": 17.0, "z_loss": 1e-2, "scale": 3.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("chunk_bytes", [1, None])
def test_loss_and_gradients(options, chunk_bytes, triton_backend, device, products):
    x, weight = inputs(device)
    target = targets(device)

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return tigon.linear_cross_entropy(x, weight, target, chunk_bytes=chunk_bytes, **options)

    def reference(x: Tensor, weight: Tensor) -> Tensor:
        rest = -100, 0.0, options.get("z_loss", 0.0), 0.0, options.get("scale", 1.0)
        if "divisor" in options:
            return linear_cross_entropy_reference(x, weight, target, None, "sum", *rest) / options["divisor"]
        return linear_cross_entropy_reference(x, weight, target, None, options.get("reduction", "mean"), *rest)

    check(ours, reference, x, weight)
    assert products
    assert sum(products) % 120 == 0  # rows that count, in each of the calls


@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"label_smoothing": 0.1}, {"bias": True}], ids=str)
def test_what_it_is_not_for(options, triton_backend, device, products):
    x, weight = inputs(device)
    bias = torch.randn(136, device=device, dtype=x.dtype) if options.pop("bias", False) else None
    tigon.linear_cross_entropy(x.requires_grad_(), weight, targets(device), bias=bias, **options).backward()
    assert not products


def test_without_gradients(triton_backend, device, products):
    x, weight = inputs(device)
    loss = tigon.linear_cross_entropy(x, weight, targets(device), reduction="none")
    wanted = linear_cross_entropy_reference(x, weight, targets(device), None, "none")
    assert products
    torch.testing.assert_close(loss, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_in_its_row(value, triton_backend, device, products):
    """As without the statistics: a row of NaN, and the others untouched."""
    x, weight = inputs(device)
    x[1, 0] = value
    results = []
    for switch in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(logits_product, "STATISTICS_IN_PRODUCT", switch)
            leaf = x.clone().requires_grad_()
            loss = tigon.linear_cross_entropy(leaf, weight, targets(device), reduction="none")
            results.append((loss.detach(), *torch.autograd.grad(loss.nansum(), leaf)))
    assert len(products) == 2  # forward and backward, once
    for ours, before in zip(*results, strict=True):
        assert torch.equal(ours.isnan(), before.isnan())
        assert bool(ours[1].isnan().all())
        assert not bool(ours[2:].isnan().any())
        torch.testing.assert_close(ours[2:], before[2:], rtol=2e-2, atol=1e-3)


def test_a_target_out_of_range_is_nan(triton_backend, device):
    """On a GPU nothing has looked at the targets before."""
    x, weight = inputs(device)
    logits = torch.empty(150, 136, device=device, dtype=x.dtype)
    parts = logits_and_parts(x, weight, logits, 1.0)
    target = targets(device)
    target[1], target[2] = 136, -1
    loss = torch.empty(150, device=device)
    cross_entropy_rows(logits, target, loss, None, None, True, -100, 0.0, 0.0, 0.0, 1.0, parts=parts)
    assert loss.isnan().nonzero().flatten().tolist() == [1, 2]
    assert bool(logits[1:3].isnan().all())
    assert not bool(logits[3:].isnan().any())
    assert not bool(logits[::5].any())


def test_any_number_of_parts(triton_backend, device):
    """More of them than are read at a time, and the largest logit in the last."""
    generator = torch.Generator().manual_seed(7)
    logits = (4 * torch.randn(20, 150, generator=generator)).to(device, torch.bfloat16)
    logits[:, -1] += 20.0
    target = targets(device, 20, 150)
    loss = torch.empty(20, device=device)
    parts = expected(logits, 2, 0.5).float()
    cross_entropy_rows(logits, target, loss, None, None, False, -100, 0.0, 0.0, 0.0, 0.5, parts=parts)
    wanted = torch.nn.functional.cross_entropy(0.5 * logits.double(), target, reduction="none")
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-5)
