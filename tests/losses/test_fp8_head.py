"""linear_cross_entropy with fp8=True: its errors against fp64 are those of the recipe, whatever the options."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from flat import linear_cross_entropy, linear_logprob
from modes import NothingWaits
from torch.utils.checkpoint import checkpoint

import tigon
from tigon.fusion.memory.estimate import AllocationTracker
from tigon.kernels.dispatch import meta_as_gpu
from tigon.losses import inputs
from tigon.losses.head import fp8
from tigon.losses.head.vocabulary_parallel import Shards
from tigon.ops.cross_entropy import cross_entropy_reference
from tigon.ops.fp8.columns import fold_scales
from tigon.ops.fp8.recipe import E4M3, round_up

SMALL = {"chunk_bytes": 1}  # chunks of 128 rows


def make_head(device, rows=300, H=64, V=203, ignored=0.2, seed=0):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, H, generator=random)
    weight, bias = torch.randn(V, H, generator=random) / H**0.5, torch.randn(V, generator=random)
    target = torch.randint(0, V, (rows,), generator=random)
    target[: int(ignored * rows)] = -100
    target = target[torch.randperm(rows, generator=random)].to(device)
    return *(t.to(device, torch.bfloat16).requires_grad_() for t in (x, weight, bias)), target


def compute_exact(x, weight, bias, target, upstream=None, **options):
    """Loss and gradients in fp64."""
    leaves = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    loss = reduce(F.linear(*leaves), target, **options)
    upstream = torch.ones_like(loss) if upstream is None else upstream.double()
    return loss.detach(), *torch.autograd.grad(loss, leaves, upstream)


def reduce(logits, target, reduction="mean", label_smoothing=0.0, z_loss=0.0, softcap=None, scale=1.0):
    losses = cross_entropy_reference(logits, target, -100, label_smoothing, z_loss, softcap or 0.0, scale)
    total = losses.sum() / ((target != -100).sum() if reduction == "mean" else 1)
    return losses if reduction == "none" else total


def round_to_e4m3(t, scale):
    return (t / scale).clamp(-448, 448).float().to(E4M3).double()


def find_scale(amax):
    return torch.exp2(torch.ceil(torch.log2(amax / 448)))


def emulate(x, weight, bias, target, upstream=None, group=10**9, **options):
    """The recipe in fp64 from its description, with e4m3 and bf16 rounded where the head rounds them."""
    x, weight, bias = (t.detach().double() for t in (x, weight, bias))
    sx, sw = find_scale(x.abs().amax(1, True)), find_scale(weight.abs().amax())
    qx, qw = round_to_e4m3(x, sx), round_to_e4m3(weight, sw)
    logits = (qx @ qw.t() * sx * sw + bias).bfloat16().double().requires_grad_()
    loss = reduce(logits, target, **options)
    upstream = torch.ones_like(loss) if upstream is None else upstream.double()
    d = torch.autograd.grad(loss, logits, upstream)[0].bfloat16().double()
    ids = target.clamp(min=0)
    db, targets, d = d.sum(0), d.gather(1, ids[:, None]), d.scatter(1, ids[:, None], 0.0)
    sd = find_scale(d.abs().amax(1, True)).clamp(min=2.0**-126)
    qd = round_to_e4m3(d, sd)
    dx = qd @ qw * sd * sw + targets * weight[ids]
    dw = torch.zeros_like(weight).index_add(0, ids, targets * x)
    for rows in torch.arange(len(x), device=x.device).split(group):
        c = (sd[rows] * sx[rows]).amax()
        dw += c * qd[rows].t() @ round_to_e4m3(x[rows] * sd[rows] / c, 1)
    return loss.detach(), dx, dw, db


def measure_error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


def run(x, weight, bias, target, upstream=None, **options):
    loss = linear_cross_entropy(x, weight, target, bias=bias, fp8=True, **options)
    return loss.detach(), *torch.autograd.grad(loss, (x, weight, bias), upstream)


OPTIONS = (
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.1, "z_loss": 1e-3},
    {"softcap": 3.0, "scale": 0.7},
)


@pytest.mark.parametrize("walk", [{}, SMALL], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_errors_are_those_of_the_recipe(options, walk, backend, device):
    head = make_head(device, rows=700 if walk else 300)
    upstream = torch.randn(len(head[-1]), device=device) if "none" in options.values() else None
    exact = compute_exact(*head, upstream, **options)
    emulated = emulate(*head, upstream, **options)
    found = run(*head, upstream, **options, **walk)
    assert [t.dtype for t in found] == [torch.float32, *[torch.bfloat16] * 3]
    scale = exact[0].abs().mean()
    assert (found[0] - exact[0]).abs().mean() <= 1.05 * (emulated[0] - exact[0]).abs().mean() + 1e-5 * scale
    for ours, theirs, truth in zip(found[1:], emulated[1:], exact[1:], strict=True):
        assert measure_error(ours, truth) <= 1.05 * measure_error(theirs, truth) + 2**-9
        assert measure_error(ours, truth) < 0.025


@pytest.mark.parametrize("tokens", [240, 256, 273, 300])
def test_the_number_of_tokens_does_not_matter(tokens, device):
    """The targets' gradients are all near −1 / tokens: rounded to e4m3, their error would grow to 0.06."""
    head = make_head(device, rows=tokens, ignored=0.0)
    for ours, truth in zip(run(*head)[1:3], compute_exact(*head)[1:3], strict=True):
        assert measure_error(ours, truth) < 0.015


def test_classes_that_are_no_target_keep_their_gradient(device):
    """Their probabilities are near 2⁻¹⁶. Beside 1 − p of a target e4m3 would round most of them to zero."""
    x, weight, bias, target = make_head(device, rows=64, H=16, V=65536)
    bias = (0.1 * bias.detach()).requires_grad_()
    dw, exact = run(x, weight, bias, target)[2], compute_exact(x, weight, bias, target)[2]
    others = torch.ones(65536, dtype=torch.bool, device=device)
    others[target[target != -100]] = False
    assert measure_error(dw[others], exact[others]) < 0.06


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(40,), (16, 24)])
def test_rows_are_added_by_id(lengths, dtype, backend, device):
    x, factor = torch.randn(300, 48, device=device).bfloat16(), torch.randn(300, device=device).bfloat16()
    ids = torch.randint(0, 30, (300,), device=device)
    ids[:100] = 7  # longer than a piece of a sum
    parts = [torch.randn(length, 48, device=device).to(dtype) for length in lengths]
    expected = torch.cat(parts).double().index_add_(0, ids, x.double() * factor.double()[:, None])
    fp8.add_by_id(parts, x, factor, ids)
    assert measure_error(torch.cat(parts), expected) < (1e-6 if dtype == torch.float32 else 4e-3)


def test_the_loss_is_close_on_many_classes(device):
    head = make_head(device, rows=2048, V=1024)
    assert abs(run(*head)[0] - compute_exact(*head)[0]) < 2.5e-3


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_one_chunk_and_several_agree(reduction, device):
    head = make_head(device, rows=700)
    upstream = torch.rand(700, device=device) if reduction == "none" else None
    (loss, dx, dw, db), several = (run(*head, upstream, reduction=reduction, **walk) for walk in ({}, SMALL))
    torch.testing.assert_close(several[0], loss, rtol=1e-5, atol=1e-5)
    for a, b, most in zip(several[1:], (dx, dw, db), (0.004, 0.012, 0.004), strict=True):
        assert measure_error(a, b.double()) < most  # of several chunks x has other scales in each dW


@pytest.mark.parametrize(
    ("rows", "budget", "sums"),
    [(300, None, 1), (100, None, 1), (700, 1, 6), (1300, 512, 2), (700, 512, 1), (1024, 512, 2)],
)
def test_the_gradients_of_several_chunks_share_products(rows, budget, sums, device, monkeypatch):
    """budget: rows of bf16 logits. Half as many gradients again fit beside the logits of a quarter of the rows."""
    calls = []
    monkeypatch.setattr(fp8, "fold_scales", lambda *scales: calls.append(scales) or fold_scales(*scales))
    head = make_head(device, rows=rows, V=208, ignored=0.0)
    run(*head, **({} if budget is None else {"chunk_bytes": 416 * budget}))
    assert len(calls) == sums
    assert sum(len(scale) for scale, _ in calls) == rows


def test_several_chunks_are_summed_in_fp32(device):
    head = make_head(device, rows=128 * 32, V=64, ignored=0.0)
    exact, error = compute_exact(*head)[2], {}
    for accumulate in ("fp32", "weight"):
        dw = run(*head, accumulate=accumulate, **SMALL)[2]
        error[accumulate] = measure_error(dw, emulate(*head, group=128)[2])
        assert measure_error(dw, exact) < 0.035
    assert error["fp32"] < 0.75 * error["weight"]


def test_rows_that_do_not_count_have_no_gradient(backend, device):
    x, weight, bias, target = make_head(device)
    with torch.no_grad():
        x[target == -100] = math.nan
    count = int((target != -100).sum())
    loss, dx, dw, db = run(x, weight, bias, target, valid_tokens=count)
    assert not dx[target == -100].any()
    kept = target != -100
    expected = run(x.detach()[kept].requires_grad_(), weight, bias, target[kept])
    for a, b in zip((loss, dx[kept], dw, db), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-5)


def test_ignored_rows_that_are_visited(device, monkeypatch):
    """A GPU that does not know the count visits all rows: ignored ones are exact zeros in e4m3."""
    x, weight, bias, target = make_head(device)
    with torch.no_grad():
        x[target == -100] *= 1e4
    count = int((target != -100).sum())
    expected = run(x, weight, bias, target, valid_tokens=count)
    # For the valid count, a number that leaves no row out.
    found = run(x, weight, bias, target, valid_tokens=len(target))
    assert not found[1][target == -100].any()
    for ours, theirs in zip(found, expected, strict=True):
        assert measure_error(ours, theirs.double()) < 0.012


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nothing_counts(reduction, device):
    x, weight, bias, target = make_head(device)
    target = torch.full_like(target, -100)
    upstream = torch.ones(len(target), device=device) if reduction == "none" else None
    for valid in (None, 0, len(target)):
        for t in run(x, weight, bias, target, upstream, reduction=reduction, valid_tokens=valid):
            assert not t.any()


def test_no_tokens(device):
    x, weight, bias, target = make_head(device, rows=0)
    loss, dx, dw, db = run(x, weight, bias, target)
    assert loss == 0
    assert dx.shape == (0, 64)
    assert not dw.any()
    assert not db.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["x", "weight"])
def test_what_is_not_finite_reaches_the_loss(where, bad, device):
    x, weight, bias, target = make_head(device)
    with torch.no_grad():
        x[(target != -100).nonzero()[3], 5] = bad if where == "x" else 1.0
        weight[7, 5] = bad if where == "weight" else 1.0
    loss, dx, _, _ = run(x, weight, bias, target)
    assert not loss.isfinite()
    assert not dx.isfinite().all()


def test_each_gradient_alone(device, monkeypatch):
    x, weight, bias, target = make_head(device)
    _, dx, dw, db = run(x, weight, bias, target)
    for wanted, expected, unused in (
        (x, dx, ("transpose_rows", "to_columns", "fold_scales")),
        (weight, dw, ("quantize_transposed",)),
        (bias, db, ("quantize_transposed", "transpose_rows")),
    ):
        leaves = [t if t is wanted else t.detach() for t in (x, weight, bias)]
        with monkeypatch.context() as patch:
            for name in unused:
                patch.setattr(fp8, name, None)
            loss = linear_cross_entropy(leaves[0], leaves[1], target, bias=leaves[2], fp8=True)
            assert torch.equal(*torch.autograd.grad(loss, wanted), expected)
    monkeypatch.setattr(fp8, "quantize_transposed", None)
    with torch.no_grad():
        linear_cross_entropy(x, weight, target, bias=bias, fp8=True)


def test_a_checkpoint_changes_no_bit(device):
    x, weight, bias, target = make_head(device)

    def compute_loss(x):
        return linear_cross_entropy(2 * x, weight, target, bias=bias, fp8=True)

    plain = torch.autograd.grad(compute_loss(x), (x, weight, bias))
    again = torch.autograd.grad(checkpoint(compute_loss, x, use_reentrant=False), (x, weight, bias))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_nothing_waits(device, monkeypatch):
    x, weight, bias, target = make_head(device, rows=700)
    monkeypatch.setattr(inputs, "checked_target", lambda name, target, *_: target)  # on a CPU it looks at the targets
    with NothingWaits():
        linear_cross_entropy(x, weight, target, bias=bias, fp8=True, valid_tokens=700, **SMALL)  # with the gradients


def test_main_grad(device):
    x, weight, bias, target = make_head(device, rows=700)
    _, dx, dw, _ = run(x, weight, bias, target, **SMALL)
    main_grad = torch.ones(weight.shape, device=device)
    loss = linear_cross_entropy(x, weight, target, bias=bias, fp8=True, main_grad=main_grad, **SMALL)
    assert torch.equal(torch.autograd.grad(loss, x)[0], dx)
    assert measure_error(main_grad - 1, dw.double()) < 0.003


def test_a_weight_in_fp32_is_rounded_once(device):
    x, weight, bias, target = make_head(device)
    wide = [t.detach().float().requires_grad_() for t in (x, weight, bias)]
    with torch.autocast(device.type, torch.bfloat16):
        loss = linear_cross_entropy(wide[0], wide[1], target, bias=wide[2], fp8=True)
    found, expected = torch.autograd.grad(loss, wide), run(x, weight, bias, target)[1:]
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        assert measure_error(a, b.double()) < 0.01  # under autocast the reference's products round once more


def test_compiled_code_computes_the_same(device):
    x, weight, _, target = make_head(device)
    torch._dynamo.reset()
    options = tigon.losses.ChunkOptions(fp8=True)

    def compute_loss(x, weight):
        return tigon.linear_cross_entropy(2 * x, weight, target, chunks=options)

    compiled = torch.compile(compute_loss, backend="aot_eager", fullgraph=True)
    for a, b in zip(*(torch.autograd.grad(f(x, weight), (x, weight)) for f in (compute_loss, compiled)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("dtype", "H", "message"),
    [
        (torch.float16, 64, r"fp8 goes with x in bf16, or under autocast to bf16, got torch.float16"),
        (torch.float32, 64, r"fp8 goes with x in bf16, .*, got torch.float32"),
        (torch.bfloat16, 24, r"fp8 goes with a width H divisible by 16, got weight \(50, 24\)"),
    ],
)
def test_a_head_that_cannot_is_refused(dtype, H, message):
    x, weight, target = torch.ones(3, H, dtype=dtype), torch.ones(50, H, dtype=dtype), torch.zeros(3).long()
    with pytest.raises(ValueError, match=f"linear_cross_entropy: {message}"):
        linear_cross_entropy(x, weight, target, fp8=True)


def test_devices_and_losses_that_cannot_are_refused(monkeypatch):
    x, weight, _, target = make_head("cpu")
    with pytest.raises(ValueError, match=r"linear_logprob: chunks\.fp8 must be left out: .*, got True"):
        linear_logprob(x, weight, target, fp8=True)
    x, target = x.view(2, 150, 64), target.view(2, 150)
    with pytest.raises(ValueError, match=r"orpo: chunks\.fp8 must be left out"):
        tigon.losses.orpo(x, weight, target, chunks=tigon.losses.ChunkOptions(fp8=True))
    teacher = tigon.losses.Hidden(x, weight)
    with pytest.raises(ValueError, match=r"distill: chunks\.fp8 must be left out"):
        tigon.losses.distill(x, weight, teacher, target, chunks=tigon.losses.ChunkOptions(fp8=True))
    shards = Shards(None, 0, (100, 103))
    monkeypatch.setattr(Shards, "describe", lambda self: f"{self.sizes} classes on ranks (0, 1)")
    with pytest.raises(
        ValueError, match=r"fp8 goes with all classes on each device, got \(100, 103\) classes on ranks"
    ):
        fp8.check_fp8("linear_cross_entropy", weight, torch.bfloat16, shards)
    monkeypatch.setattr(fp8, "why_unsupported", lambda device: "its tensor cores have no FP8.")
    weight = SimpleNamespace(is_cuda=True, device="cuda:1", shape=weight.shape, numel=weight.numel)
    with pytest.raises(ValueError, match=r"fp8 goes with a device that .*, got cuda:1: its tensor cores have no FP8\."):
        fp8.check_fp8("linear_cross_entropy", weight, torch.bfloat16, None)


def measure_peak(N, H, V, **walk):
    x, weight = (
        torch.empty(n, H, device="meta", dtype=torch.bfloat16, requires_grad=walk.pop("trained", True)) for n in (N, V)
    )
    target = torch.empty(N, device="meta", dtype=torch.int64)
    with meta_as_gpu(), AllocationTracker() as books:
        loss = linear_cross_entropy(x, weight, target, **walk)
        torch.autograd.grad(loss, [t for t in (x, weight) if t.requires_grad])
    return books.peak.total


@pytest.mark.parametrize(
    "shape",
    [
        (8192, 4096, 128256),  # one sum
        (8200, 4096, 128256),
        (10007, 2560, 151936),
        (32768, 4096, 128256),
        (16384, 2048, 128256),
        (2048, 2048, 50257),  # padded
    ],
    ids=str,
)
def test_memory_is_that_of_bf16_and_the_weights_in_e4m3(shape):
    _, H, V = shape
    weights, blocks = 2 * round_up(V) * H, 2 * fp8.BLOCK_BYTES
    assert measure_peak(*shape, fp8=True) <= measure_peak(*shape) + weights + blocks
