"""The modules are their functions, with parameters where torch has them."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

import tigon
from tigon import nn


def test_rms_norm_with_an_offset(device):
    module, x = nn.RMSNorm(20, offset=1.0, cast="gemma", device=device), torch.randn(3, 20, device=device)
    torch.testing.assert_close(module(x), F.rms_norm(x, (20,), eps=1e-6))  # an untrained norm scales by one
    torch.nn.init.normal_(module.weight)
    assert torch.equal(module(x), tigon.rms_norm(x, module.weight, offset=1.0, cast="gemma"))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), module(x))
    assert "(20,), eps=None, elementwise_affine=True, offset=1.0, cast='gemma'" in repr(module)


@pytest.mark.parametrize(
    ("module", "act"),
    [
        (nn.SwiGLU(), F.silu),
        (nn.GEGLU(), lambda g: F.gelu(g, approximate="tanh")),
        (nn.GEGLU("none"), F.gelu),
        (nn.ReGLU(), F.relu),
        (nn.ReGLU(squared=True), lambda g: F.relu(g).square()),
        (nn.SwiGLU(gate_multiplier=0.5, multiplier=3.0), lambda g: 3 * F.silu(0.5 * g)),
        (nn.GEGLU(gate_multiplier=0.5, multiplier=3.0), lambda g: 3 * F.gelu(0.5 * g, approximate="tanh")),
        (nn.ReGLU(gate_multiplier=0.5, multiplier=3.0), lambda g: 3 * F.relu(0.5 * g)),
    ],
)
def test_gated(module, act, device):
    gate, up = torch.randn(3, 20, device=device), torch.randn(3, 20, device=device)
    torch.testing.assert_close(module(gate, up), act(gate) * up)
    torch.testing.assert_close(module(torch.cat((gate, up), -1)), act(gate) * up)


@pytest.mark.parametrize("bias", [True, False])
def test_dyt(bias, device):
    module = nn.DyT(20, init_alpha=0.8, bias=bias, device=device)
    x = torch.randn(3, 20, device=device)
    torch.testing.assert_close(module(x), torch.tanh(0.8 * x))  # untrained
    assert {n for n, _ in module.named_parameters()} == {"alpha", "weight"} | ({"bias"} if bias else set())
    for p in module.parameters():
        torch.nn.init.normal_(p)
    expected = module.weight * torch.tanh(module.alpha * x)
    torch.testing.assert_close(module(x), expected + module.bias if bias else expected)
    assert repr(module) == f"DyT(20, init_alpha=0.8, bias={bias})"


def test_poly_norm(device):
    module = nn.PolyNorm(eps=1e-3, device=device)
    x = torch.randn(3, 20, device=device)
    powers = [x**k * torch.rsqrt((x**k).square().mean(-1, keepdim=True) + 1e-3) for k in (3, 2, 1)]
    torch.testing.assert_close(module(x), sum(powers) / 3)  # untrained
    for p in module.parameters():
        torch.nn.init.normal_(p)
    torch.testing.assert_close(module(x), sum(w * u for w, u in zip(module.weight, powers, strict=True)) + module.bias)
    assert repr(module) == "PolyNorm(eps=0.001)"


def test_relu2(device):
    x = torch.randn(3, 20, device=device)
    torch.testing.assert_close(nn.ReLU2()(x), F.relu(x).square())
    torch.testing.assert_close(nn.ReLU2(multiplier=3.0)(x), 3 * F.relu(x).square())


def test_losses(device):
    x, weight = torch.randn(6, 8, device=device), torch.randn(11, 8, device=device)
    bias, target = torch.randn(11, device=device), torch.randint(0, 11, (6,), device=device)
    expected = F.cross_entropy(F.linear(x, weight, bias), target, label_smoothing=0.1)
    torch.testing.assert_close(
        nn.CrossEntropyLoss(config=tigon.CrossEntropy(label_smoothing=0.1))(F.linear(x, weight, bias), target), expected
    )
    linear = nn.LinearCrossEntropyLoss(config=tigon.CrossEntropy(label_smoothing=0.1))
    head = tigon.Head(weight, bias)
    torch.testing.assert_close(linear(x, head, target), expected)
    torch.testing.assert_close(linear(x, head, target, valid_tokens=6), expected)
    torch.testing.assert_close(linear(x, head, target, divisor=12), expected / 2)


HEAD_LOSSES = {
    "GRPOLoss": "grpo", "RLOOLoss": "rloo", "DPOLoss": "dpo", "ORPOLoss": "orpo", "CPOLoss": "cpo", "KTOLoss": "kto",
    "SimPOLoss": "simpo", "DistillationLoss": "distill", "TopKDistillationLoss": "distill_topk",
}  # fmt: skip


@pytest.mark.parametrize("name", HEAD_LOSSES)
def test_a_loss_of_a_head_is_its_function(name, monkeypatch):
    kind, function = getattr(nn, name), getattr(tigon.losses, HEAD_LOSSES[name])
    assert kind.function is function
    config = type(kind().options["config"])(ignore_index=3)
    module, calls = kind(config, tigon.losses.ChunkOptions(chunk_bytes=9)), []
    monkeypatch.setattr(kind, "function", staticmethod(lambda *tensors, **options: calls.append((tensors, options))))
    module("x", "head", "target", valid_tokens=4, ignore_index=None)
    module("x", "head", ignore_index=5)
    expected = {"config": config, "chunks": tigon.losses.ChunkOptions(valid_tokens=4, chunk_bytes=9)}
    assert calls[0] == (("x", "head", "target"), expected)
    assert calls[1][1]["config"].ignore_index == 5
    assert "ignore_index=3" in repr(module)
    with pytest.raises(ValueError, match=rf"{name}: config must be a {type(config).__name__}, got 3"):
        kind(3)


def test_a_subclass_of_a_loss_keeps_its_function():
    kind = type("OwnLoss", (nn.RLOOLoss,), {})
    assert kind.function is tigon.losses.rloo
    assert kind().options["config"] == tigon.losses.RLOO()


@pytest.mark.parametrize("make", [
    lambda: nn.KLDivLoss(reduction="none"), lambda: nn.JSDLoss(beta=2.0), lambda: nn.TVDLoss(temperature=0.0),
])  # fmt: skip
def test_losses_refuse_when_they_are_made(make):
    with pytest.raises(ValueError, match="must"):
        make()


def test_class_weights_move_and_are_saved_with_the_module(device):
    weight, logits = torch.rand(11), torch.randn(6, 11, device=device)
    target = torch.randint(0, 11, (6,), device=device)
    ours, theirs = nn.CrossEntropyLoss(weight).to(device), torch.nn.CrossEntropyLoss(weight).to(device)
    torch.testing.assert_close(ours(logits, target), theirs(logits, target))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert nn.CrossEntropyLoss(details=True)(logits, target).predicted.shape == (6,)


def test_embedding(device):
    ours = nn.Embedding(9, 5, padding_idx=2, device=device)
    theirs = torch.nn.Embedding(9, 5, padding_idx=2, device=device)
    assert ours.weight[2].abs().max() == 0
    theirs.load_state_dict(ours.state_dict())
    ids = torch.tensor([[1, 2, 8], [8, 8, 2]], device=device)
    assert torch.equal(ours(ids), theirs(ids))
    for module in (ours, theirs):
        module(ids).square().sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
    assert "9, 5, padding_idx=2" in repr(ours)


def test_softmaxes(device):
    x, mask = torch.randn(2, 5, 5, device=device), torch.randn(5, 5, device=device)
    torch.testing.assert_close(nn.Softmax(dim=1)(x), torch.nn.Softmax(dim=1)(x))
    scores = nn.Softmax(-1, scale=0.5, causal=True)
    assert torch.equal(scores(x, mask), tigon.softmax(x, -1, scale=0.5, mask=mask, causal=True))
    assert torch.equal(nn.Sparsemax(dim=1)(x), tigon.sparsemax(x, 1))
    assert "scale=0.5, causal=True" in repr(scores)


@pytest.mark.parametrize(
    ("module", "function"), [(nn.KLDivLoss, tigon.kl_div), (nn.JSDLoss, tigon.jsd), (nn.TVDLoss, tigon.tvd)]
)
def test_divergences(module, function, device):
    student, teacher = torch.randn(6, 11, device=device), torch.randn(6, 11, device=device)
    mask = torch.tensor([True, True, False, True, True, False], device=device)
    loss = module(temperature=2.0)
    assert torch.equal(loss(student, teacher, mask), function(student, teacher, mask=mask, temperature=2.0))
    assert "temperature=2.0" in repr(loss)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (nn.RMSNorm(20, cast="gemma"), torch.nn.RMSNorm(20, eps=1e-6)),
        (nn.RMSNorm((20,), 1e-2, elementwise_affine=False), torch.nn.RMSNorm(20, 1e-2, elementwise_affine=False)),
        (nn.LayerNorm(20), torch.nn.LayerNorm(20)),
        (nn.LayerNorm(20, 1e-2, bias=False), torch.nn.LayerNorm(20, 1e-2, bias=False)),
        (nn.LayerNorm(20, elementwise_affine=False), torch.nn.LayerNorm(20, elementwise_affine=False)),
        (nn.GroupNorm(2, 6, 1e-2), torch.nn.GroupNorm(2, 6, 1e-2)),
        (nn.GroupNorm(3, 6, affine=False), torch.nn.GroupNorm(3, 6, affine=False)),
    ],
    ids=str,
)
def test_norms_take_the_parameters_of_torchs(ours, theirs, device):
    ours, theirs, x = copy.deepcopy(ours).to(device), copy.deepcopy(theirs).to(device), torch.randn(3, 6, 20).to(device)
    torch.testing.assert_close(ours(x), theirs(x))  # untrained they are the same
    for p in theirs.parameters():
        torch.nn.init.normal_(p)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(x), theirs(x))
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]


@pytest.mark.parametrize("make", [
    lambda **to: nn.RMSNorm(20, offset=1.0, **to), lambda **to: nn.LayerNorm(20, bias=False, **to),
    lambda **to: nn.DyT(20, **to), lambda **to: nn.PolyNorm(**to), lambda **to: nn.Embedding(9, 20, 3, **to),
])  # fmt: skip
def test_parameters_made_on_meta_start_as_others_do(make, device):
    """FSDP makes modules on the meta device, gives them memory, and calls reset_parameters."""
    late = make(device="meta").to_empty(device=device)
    for parameter in late.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    torch.manual_seed(0)
    late.reset_parameters()
    torch.manual_seed(0)
    for parameter, expected in zip(late.parameters(), make(device=device).parameters(), strict=True):
        assert torch.equal(parameter, expected)


@pytest.mark.parametrize("module", [nn.RMSNorm, nn.LayerNorm, nn.DyT])
def test_normalized_shape_as_torch_takes_it(module):
    assert module((20,)).weight.shape == module(20).weight.shape == (20,)
    with pytest.raises(ValueError, match=r"normalized_shape must name the last dimension alone, got \(4, 5\)"):
        module((4, 5))
