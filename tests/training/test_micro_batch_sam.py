"""MicroBatchSAM against the textbook, written out in fp64; and what two passes must not leave behind."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tigon.training import MicroBatchSAM

X = torch.randn(16, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randn(16, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
RHO = 0.3


def net(*between):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), *between, nn.Linear(8, 1)).double()


def loss_of(model, rows=slice(None)):
    return F.mse_loss(model(X[rows]), Y[rows])


def shards(m):
    return [slice(i, i + 16 // m) for i in range(0, 16, 16 // m)]


def textbook(model, m, rho=RHO, adaptive=False, eta=0.0, loss=loss_of):
    """The gradient, by parameter: of copies whose weights are moved by hand."""
    params = list(model.parameters())
    total = [torch.zeros_like(p) for p in params]
    for rows in shards(m):
        own = torch.autograd.grad(loss(model, rows), params)
        scale = [p.detach().abs() + eta if adaptive else torch.ones_like(p) for p in params]
        norm = torch.cat([(s * g).flatten() for s, g in zip(scale, own, strict=True)]).norm()
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for p, s, g in zip(moved.parameters(), scale, own, strict=True):
                p += rho * s**2 * g / norm
        for t, g in zip(total, torch.autograd.grad(loss(moved, rows), list(moved.parameters())), strict=True):
            t += g / m
    return total


def grads(model):
    return [p.grad for p in model.parameters()]


def close(ours, theirs):
    torch.testing.assert_close(list(ours), list(theirs), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("adaptive", "eta"), [(False, 0.0), (True, 0.0), (True, 0.1)])
@pytest.mark.parametrize("m", [1, 4])
def test_is_sam_for_one_shard_and_msam_for_more_along_a_training(m, adaptive, eta):
    ours, theirs = net(), net()
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    sam = MicroBatchSAM(torch.optim.SGD(ours.parameters(), **options), rho=RHO, adaptive=adaptive, eta=eta)
    plain = torch.optim.SGD(theirs.parameters(), **options)
    for _ in range(4):
        expected = loss_of(ours).detach()
        if m == 1:
            loss = sam.step(lambda: loss_of(ours))
        else:
            loss = sam.step([lambda rows=rows: loss_of(ours, rows) for rows in shards(m)])
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        sam.zero_grad()
        for p, g in zip(theirs.parameters(), textbook(theirs, m, RHO, adaptive, eta), strict=True):
            p.grad = g
        plain.step()
        close(ours.parameters(), theirs.parameters())
    unperturbed = torch.autograd.grad(loss_of(ours), list(ours.parameters()))
    assert (textbook(ours, m, RHO, adaptive, eta)[0] - unperturbed[0]).norm() > 0.01 * unperturbed[0].norm()


def test_accumulating_shard_by_shard_by_weight_or_in_the_closure():
    ours = net()
    sam = MicroBatchSAM(torch.optim.AdamW(ours.parameters(), fused=True), rho=RHO)
    for rows in shards(4):
        loss = sam.accumulate(lambda rows=rows: loss_of(ours, rows), weight=0.25)
        torch.testing.assert_close(loss, loss_of(ours, rows).detach())
    expected = textbook(ours, 4)
    close(grads(ours), expected)
    total = nn.utils.clip_grad_norm_(ours.parameters(), 0.01)
    torch.testing.assert_close(total, torch.cat([g.flatten() for g in expected]).norm())
    sam.zero_grad()
    assert all(g is None for g in grads(ours))
    for rows in shards(4):
        sam.accumulate(lambda rows=rows: loss_of(ours, rows) * 0.25)
    close(grads(ours), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_keep_their_bits(dtype, device):
    model = net().to(device, dtype)
    before = copy.deepcopy(model.state_dict())
    x, y = X.to(device, dtype), Y.to(device, dtype)
    seen = []

    def closure():
        seen.append([p.detach().clone() for p in model.parameters()])
        return F.mse_loss(model(x), y)

    sam = MicroBatchSAM(torch.optim.SGD(model.parameters(), lr=1.0), rho=RHO)
    sam.accumulate(closure)
    sam.accumulate(closure)
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name]), name
    first, second, third, _ = seen
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, third, strict=True))
    moved = torch.cat([(b.float() - a.float()).flatten() for a, b in zip(first, second, strict=True)]).norm()
    assert moved.item() == pytest.approx(RHO, rel=2e-2)


@pytest.mark.parametrize("failing", [1, 2])
def test_a_pass_that_raises_leaves_weights_and_gradients(failing):
    model = net()
    sam = MicroBatchSAM(torch.optim.SGD(model.parameters(), lr=1.0), rho=RHO)
    sam.accumulate(lambda: loss_of(model))
    before, gathered = copy.deepcopy(model.state_dict()), [g.clone() for g in grads(model)]
    calls = []

    def closure():
        calls.append(1)
        if len(calls) == failing:
            raise KeyError("lost")
        return loss_of(model)

    with pytest.raises(KeyError, match="lost"):
        sam.accumulate(closure)
    assert len(calls) == failing
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(torch.equal(g, old) for g, old in zip(grads(model), gathered, strict=True))


def test_dropout_is_the_same_in_both_passes_and_draws_once(device):
    model = net(nn.Dropout(0.5)).to(device)
    masks = []
    model[2].register_forward_hook(lambda module, args, out: masks.append(out == 0))
    sam = MicroBatchSAM(torch.optim.SGD(model.parameters(), lr=1.0), model, rho=RHO)
    x, y = X.to(device), Y.to(device)

    def closure():
        torch.rand(3)  # the host's numbers, too
        return F.mse_loss(model(x), y)

    torch.manual_seed(3)
    closure()
    after = torch.rand(4), torch.rand(4, device=device)
    torch.manual_seed(3)
    sam.accumulate(closure)
    assert torch.equal(torch.rand(4), after[0])
    assert torch.equal(torch.rand(4, device=device), after[1])
    alone, first, second = masks
    assert torch.equal(first, alone)
    assert torch.equal(second, first)
    assert 0 < second.double().mean() < 1


class Counting(nn.Module):
    """Counts what it sees in a buffer, as routers with a bias do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.seen += x.detach().sum()
        return x


def test_running_statistics_see_the_first_pass_alone(device):
    model = net(nn.BatchNorm1d(8), Counting(), nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, track_running_stats=True),
                nn.Flatten()).to(device)  # fmt: skip
    x, y = X.to(device), Y.to(device)
    plain = copy.deepcopy(model)
    sam = MicroBatchSAM(torch.optim.SGD(model.parameters(), lr=1.0), model, rho=RHO)
    for _ in range(2):
        F.mse_loss(plain(x), y)
        sam.accumulate(lambda: F.mse_loss(model(x), y))
    assert len(list(model.buffers())) == 7
    for (name, ours), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs), name


def test_grad_scaler_and_a_shard_that_overflows():
    ours, theirs = net(), net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    base = torch.optim.SGD(ours.parameters(), lr=0.1)
    sam = MicroBatchSAM(base, rho=RHO, backward=lambda loss: scaler.scale(loss).backward())
    expected = textbook(theirs, 2)

    def step(factor):
        for i, rows in enumerate(shards(2)):
            sam.accumulate(lambda i=i, rows=rows: loss_of(ours, rows) * (factor if i else 1.0), weight=0.5)
        scaler.unscale_(sam)
        found = [g.clone() for g in grads(ours)]
        scaler.step(sam)
        scaler.update()
        sam.zero_grad()
        return found

    close(step(1.0), expected)
    with torch.no_grad():
        for p, g in zip(theirs.parameters(), expected, strict=True):
            p -= 0.1 * g
    close(ours.parameters(), theirs.parameters())
    before = copy.deepcopy(ours.state_dict())
    assert not all(g.isfinite().all() for g in step(1e308 * 10))
    assert all(torch.equal(t, before[name]) for name, t in ours.state_dict().items())
    assert scaler.get_scale() == 2.0**9
    step(1.0)
    assert not torch.equal(ours[0].weight, before["0.weight"])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 5, bias=False).double(), nn.Linear(5, 5, bias=False).double()
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))).mean(1, keepdim=True)


def test_tied_weights_are_moved_once():
    model = Tied()
    expected = textbook(model, 2)
    sam = MicroBatchSAM(torch.optim.SGD(model.parameters(), lr=1.0), model, rho=RHO)
    for rows in shards(2):
        sam.accumulate(lambda rows=rows: loss_of(model, rows), weight=0.5)
    close(grads(model), expected)


def test_weights_that_share_memory_but_are_two_parameters():
    model = Tied()
    before = model.first.weight.detach().clone()
    model.last.weight = nn.Parameter(model.first.weight.detach())
    sam = MicroBatchSAM(torch.optim.SGD(model.parameters(), lr=1.0), rho=RHO)
    with pytest.raises(ValueError, match=r"two parameters must not share memory.*one nn\.Parameter"):
        sam.accumulate(lambda: loss_of(model))
    assert torch.equal(model.first.weight, before)
    assert model.first.weight.grad is None
    halves = torch.randn(10, dtype=torch.float64)  # one storage, different elements: as nn.LSTM's weights
    a, b = nn.Parameter(halves[:5]), nn.Parameter(halves[5:])
    MicroBatchSAM(torch.optim.SGD([a, b], lr=1.0)).accumulate(lambda: (a * b).square().sum())


def test_parameters_without_gradient_and_those_of_another_optimizer():
    model = net()
    unused = nn.Parameter(torch.randn(3, dtype=torch.float64))
    frozen, other = model[0].bias.requires_grad_(False), model[2].bias
    before = unused.detach().clone(), frozen.detach().clone(), other.detach().clone()
    seen = []

    def closure():
        seen.append([t.detach().clone() for t in (unused, frozen, other, model[0].weight)])
        return loss_of(model)

    sam = MicroBatchSAM(torch.optim.SGD([unused, frozen, model[0].weight, model[2].weight], lr=1.0), model, rho=RHO)
    sam.accumulate(closure)
    for now, first, second in zip(before, seen[0], seen[1], strict=False):
        assert torch.equal(first, now)
        assert torch.equal(second, now)
    assert not torch.equal(seen[0][3], seen[1][3])
    assert unused.grad is None
    assert frozen.grad is None
    # Of the second pass alone: a bias behind everything has the mean residual as its gradient, at the moved weights.
    moved = copy.deepcopy(model)
    params = [model[0].weight, model[2].weight]
    own = torch.autograd.grad(loss_of(model), params)
    norm = torch.cat([g.flatten() for g in own]).norm()
    with torch.no_grad():
        for p, g in zip((moved[0].weight, moved[2].weight), own, strict=True):
            p += RHO * g / norm
    torch.testing.assert_close(other.grad, torch.autograd.grad(loss_of(moved), moved[2].bias)[0])


def test_groups_schedulers_hooks_and_checkpoints():
    model = net()
    base = torch.optim.SGD([model[0].weight], lr=0.4)
    sam = MicroBatchSAM(base, rho=RHO)
    sam.add_param_group({"params": [model[2].weight], "sam_rho": 0.0, "lr": 0.1})
    sam.add_param_group({"params": [model[0].bias, model[2].bias]})
    assert isinstance(sam, torch.optim.Optimizer)
    assert sam.param_groups is base.param_groups
    assert sam.state is base.state
    assert [g["sam_rho"] for g in base.param_groups] == [RHO, 0.0, RHO]
    seen, stepped = [], []

    def closure():
        seen.append([model[i].weight.detach().clone() for i in (0, 2)])
        return loss_of(model)

    sam.register_step_post_hook(lambda *_: stepped.append(1))
    schedule = torch.optim.lr_scheduler.ExponentialLR(sam, 0.5)
    sam.step(closure)
    schedule.step()
    assert not torch.equal(seen[0][0], seen[1][0])
    assert torch.equal(seen[0][1], seen[1][1])
    assert len(stepped) == 1
    assert [g["lr"] for g in base.param_groups] == [0.2, 0.05, 0.2]

    model = net()
    sam = MicroBatchSAM(torch.optim.AdamW(model.parameters(), lr=0.01), rho=RHO)
    sam.step(lambda: loss_of(model))
    sam.param_groups[0]["sam_rho"] = 0.7  # as a schedule would
    saved = pickle.loads(pickle.dumps((sam.state_dict(), model.state_dict())))
    again = net()
    resumed = MicroBatchSAM(torch.optim.AdamW(again.parameters(), lr=0.5))
    again.load_state_dict(saved[1])
    resumed.load_state_dict(saved[0])
    assert resumed.param_groups[0]["sam_rho"] == 0.7
    assert resumed.param_groups[0]["lr"] == 0.01
    for one, opt in ((model, sam), (again, resumed)):
        opt.zero_grad()
        opt.step(lambda one=one: loss_of(one))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    plain = torch.optim.AdamW(again.parameters())
    plain.load_state_dict(sam.state_dict())
    sam.load_state_dict(torch.optim.AdamW(net().parameters(), lr=0.3).state_dict())
    assert (sam.param_groups[0]["lr"], sam.param_groups[0]["sam_rho"]) == (0.3, RHO)
    both = copy.deepcopy({"sam": sam, "model": model})
    assert both["sam"].param_groups[0]["params"][0] is both["model"][0].weight


def test_under_an_autocast_that_outlives_both_passes():
    """Autocast keeps its casts of the weights until it ends."""
    found = []
    for outside in (True, False):
        model = net().float()
        sam = MicroBatchSAM(torch.optim.SGD(model.parameters(), lr=1.0), rho=RHO)

        def loss(model=model):
            return F.mse_loss(model(X.float()).float(), Y.float())

        def within(loss=loss):
            with torch.autocast("cpu", torch.bfloat16):
                return loss()

        if outside:
            with torch.autocast("cpu", torch.bfloat16):
                sam.accumulate(loss)
                kept = loss()
        else:
            sam.accumulate(within)
            kept = within()
        found.append([*grads(model), kept.detach()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_steps_with_the_gradient_that_is_there():
    model = net()
    sam = MicroBatchSAM(torch.optim.SGD(model.parameters(), lr=0.5), rho=RHO)
    before = model[0].weight.detach().clone()
    loss_of(model).backward()
    own = model[0].weight.grad.clone()
    assert sam.step() is None
    torch.testing.assert_close(model[0].weight.detach(), before - 0.5 * own)


def sparse_embedding():
    table = nn.Embedding(4, 3, sparse=True)
    sam = MicroBatchSAM(torch.optim.SGD(table.parameters(), lr=1.0))
    sam.accumulate(lambda: table(torch.tensor([1])).sum())


PARAMETER = nn.Parameter(torch.ones(2))
SGD = torch.optim.SGD([PARAMETER], lr=1.0)
BAD = {
    "no optimizer": (lambda: MicroBatchSAM(PARAMETER), TypeError, "must be a torch.optim.Optimizer.*got Parameter"),
    "LBFGS": (lambda: MicroBatchSAM(torch.optim.LBFGS([PARAMETER])), TypeError, "got LBFGS"),
    "FSDP1": (  # by its name, since FSDP1 wants an accelerator
        lambda: MicroBatchSAM(SGD, nn.Sequential(type("FullyShardedDataParallel", (nn.Module,), {})())), TypeError,
        "model must be sharded by torch.distributed.fsdp.fully_shard",
    ),
    "rho": (lambda: MicroBatchSAM(SGD, rho=-0.1), ValueError, "rho must be finite and at least 0, got -0.1"),
    "eta": (lambda: MicroBatchSAM(SGD, eta=float("nan")), ValueError, "eta must be finite"),
    "no loss": (lambda: MicroBatchSAM(SGD).accumulate(lambda: None), ValueError, "must return the loss.*got NoneType"),
    "many losses": (lambda: MicroBatchSAM(SGD).accumulate(lambda: 2 * PARAMETER), ValueError, r"got shape \(2,\)"),
    "no graph": (lambda: MicroBatchSAM(SGD).accumulate(lambda: torch.ones(())), ValueError, "requires_grad=False"),
    "of something else": (
        lambda: MicroBatchSAM(SGD).accumulate(lambda: torch.ones((), requires_grad=True)), RuntimeError,
        "the first pass left no gradient",
    ),
    "sparse": (sparse_embedding, TypeError, "gradients must be dense, got a sparse one"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_calls_get_a_sentence(name):
    call, error, sentence = BAD[name]
    with pytest.raises(error, match=f"^MicroBatchSAM.*{sentence}"):
        call()
    assert PARAMETER.grad is None
