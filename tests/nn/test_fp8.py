"""FP8Linear is torch's linear layer, with FP8 products where the device has them."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

import tigon
from tigon import nn
from tigon.nn import fp8


@pytest.fixture
def products(monkeypatch):
    """As on a GPU with FP8 products: on others the reference computes them."""
    monkeypatch.setattr(fp8, "why_unsupported", lambda _: "")


def test_elsewhere_it_is_torchs_layer(device, monkeypatch):
    monkeypatch.setattr(fp8, "why_unsupported", lambda _: "no products")
    layer, x = nn.FP8Linear(32, 16, device=device), torch.randn(3, 32, device=device)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("bias", [True, False])
def test_forward_and_gradients(bias, products, device):
    layer = nn.FP8Linear(32, 16, bias=bias, device=device, dtype=torch.bfloat16)
    x = torch.randn(2, 3, 32, device=device).to(torch.bfloat16).requires_grad_()
    y = layer(x)
    y.sum().backward()
    ours = [x.grad, *(p.grad for p in layer.parameters())]
    again = tigon.fp8.linear(x, layer.weight, layer.bias)
    assert torch.equal(y, again)
    assert all(
        torch.equal(a, b) for a, b in zip(ours, torch.autograd.grad(again.sum(), [x, *layer.parameters()]), strict=True)
    )


def test_it_takes_the_place_of_a_linear_layer(products, device):
    linear = torch.nn.Linear(32, 16, device=device, dtype=torch.bfloat16).requires_grad_(False).eval()
    layer = nn.FP8Linear.from_linear(linear)
    assert layer.weight is linear.weight
    assert layer.bias is linear.bias
    assert not layer.training
    assert layer.state_dict().keys() == linear.state_dict().keys()
    x = torch.randn(4, 32, device=device).to(torch.bfloat16).requires_grad_()
    layer(x).sum().backward()
    assert layer.copies.nbytes == 0  # PEFT may merge into a frozen weight without a new version
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.copies.nbytes == 0
        assert torch.equal(other(x), layer(x))
    before = layer(x)
    layer.load_state_dict({k: -2 * v for k, v in layer.state_dict().items()})
    assert torch.equal(layer(x), -2 * before)


def test_compiled_code_sees_new_weights(products, device):
    layer = nn.FP8Linear(32, 16, device=device, dtype=torch.bfloat16)
    x = torch.randn(4, 32, device=device).to(torch.bfloat16).requires_grad_()

    def call(x):
        return layer(2 * x).relu()

    compiled = torch.compile(call, backend="eager")
    for frozen in (False, False, True, True):
        layer.requires_grad_(not frozen)
        y, eager = compiled(x), call(x)
        assert torch.equal(y, eager)
        assert torch.equal(*(torch.autograd.grad(t.sum(), x)[0] for t in (y, eager)))
        with torch.no_grad():
            layer.weight.mul_(-1.5)


def test_sharded_by_fsdp2(products, device, process_group):
    """FSDP2 fills gathered parameters without giving them a new version."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    mesh = torch.distributed.device_mesh.init_device_mesh(device.type, (1,))
    plain = torch.nn.Sequential(nn.FP8Linear(32, 16), nn.FP8Linear(16, 32)).to(device, torch.bfloat16)
    sharded = copy.deepcopy(plain)
    for layer in (*sharded, sharded):
        fsdp.fully_shard(layer, mesh=mesh)
    x = torch.randn(4, 32, device=device).to(torch.bfloat16)
    for model in (plain, sharded):
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
        for _ in range(3):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(plain(x), sharded(x))


def test_sizes_are_multiples_of_16():
    with pytest.raises(ValueError, match="FP8Linear: sizes must be multiples of 16, got 24 and 16"):
        nn.FP8Linear(24, 16)
