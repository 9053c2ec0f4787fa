"""The modules are their functions, with parameters where torch has them."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

import tigon
from tigon import nn


@pytest.mark.parametrize(
    "options", [{}, {"eps": 1e-2}, {"offset": 1.0, "cast": "gemma"}, {"elementwise_affine": False}]
)
def test_rms_norm(options, device):
    module = nn.RMSNorm(20, **options, device=device)
    x = torch.randn(3, 20, device=device)
    plain = {k: v for k, v in options.items() if k != "elementwise_affine"}
    assert torch.equal(module(x), tigon.rms_norm(x, module.weight, **plain))
    # Whatever the offset, an untrained norm scales by one.
    torch.testing.assert_close(module(x), F.rms_norm(x, (20,), eps=options.get("eps", 1e-6)))
    assert [n for n, _ in module.named_parameters()] == ([] if "elementwise_affine" in options else ["weight"])


def test_rms_norm_takes_the_weights_of_torchs(device):
    theirs = torch.nn.RMSNorm(20, eps=1e-6, device=device)
    torch.nn.init.normal_(theirs.weight)
    ours = nn.RMSNorm(20, device=device, cast="gemma")
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 20, device=device)
    torch.testing.assert_close(ours(x), theirs(x))


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


@pytest.mark.parametrize("make", [
    lambda: tigon.CrossEntropy(reduction="avg"), lambda: nn.KLDivLoss(reduction="none"), lambda: nn.JSDLoss(beta=2.0),
    lambda: nn.TVDLoss(temperature=0.0), lambda: tigon.CrossEntropy(label_smoothing=2.0),
    lambda: tigon.losses.GRPO(loss_type="ppo"), lambda: tigon.losses.DPO(beta=0.0),
    lambda: tigon.losses.Distill(loss_type="mse"), lambda: tigon.losses.DistillTopK(rest="head"),
    lambda: tigon.losses.CPO(loss_type="dpo"), lambda: tigon.losses.KTO(loss_type="bco"),
])  # fmt: skip
def test_losses_refuse_when_they_are_made(make):
    with pytest.raises(ValueError, match="must"):
        make()


@pytest.mark.parametrize("make", [
    lambda: nn.LinearCrossEntropyLoss(label_smooth=0.1), lambda: nn.CrossEntropyLoss(smoothing=0.1),
    lambda: tigon.losses.DPO(betta=1.0), lambda: nn.KLDivLoss(log_targets=True),
])  # fmt: skip
def test_losses_know_their_options(make):
    with pytest.raises(TypeError, match="unexpected keyword"):
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


def test_modules_copy_and_pickle(device):
    module = nn.RMSNorm(20, offset=1.0, cast="gemma", device=device)
    x = torch.randn(3, 20, device=device)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), module(x))
    assert "20, eps=None, offset=1.0, cast='gemma'" in repr(module)


def test_dtensor_inputs_take_the_reference():
    """FSDP2 and tensor parallelism hand norms DTensors: they stay sharded, and get sharded gradients."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

    if dist.is_initialized():
        pytest.skip("a process group is there already")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        x, w = torch.randn(4, 8), torch.randn(8)
        dx = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
        dw = distribute_tensor(w, mesh, [Replicate()]).requires_grad_()
        y = tigon.swiglu(tigon.rms_norm(dx, dw), dx)
        assert isinstance(y, DTensor)
        y.sum().backward()
        x.requires_grad_()
        w.requires_grad_()
        tigon.swiglu(tigon.rms_norm(x, w), x).sum().backward()
        torch.testing.assert_close(dx.grad.full_tensor(), x.grad)
        torch.testing.assert_close(dw.grad.full_tensor(), w.grad)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
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


@pytest.mark.parametrize(
    "make",
    [
        lambda **to: nn.RMSNorm(20, offset=1.0, **to),
        lambda **to: nn.RMSNorm(20, elementwise_affine=False, **to),
        lambda **to: nn.LayerNorm(20, **to),
        lambda **to: nn.LayerNorm(20, bias=False, **to),
        lambda **to: nn.GroupNorm(2, 20, **to),
        lambda **to: nn.DyT(20, **to),
        lambda **to: nn.PolyNorm(**to),
        lambda **to: nn.Embedding(9, 20, padding_idx=3, **to),
    ],
)
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
