"""Liger's losses of logits and of a head: the answers of plain PyTorch, in its conventions, and inputs that stay."""

from __future__ import annotations

import plain
import pytest
import torch
from numerics import check

import tigon
from tigon.integrations import liger

M, V, H = 12, 37, 16
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def logits(dtype, seed=0, rows=M):
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)).mul(2).to(dtype)


def targets(seed=1, rows=M, ignore_index=-100):
    t = torch.randint(V, (rows,), generator=torch.Generator().manual_seed(seed))
    t[::4] = ignore_index
    return t


def head(dtype, seed=0, rows=M, width=H, bias=True):
    g = torch.Generator().manual_seed(seed)
    x, weight, b = (torch.randn(s, generator=g) for s in ((rows, width), (V, width), (V,)))
    return x.to(dtype), (0.7 * weight).to(dtype), b.to(dtype) if bias else None


CLASS_WEIGHTS = torch.rand(V, generator=torch.Generator().manual_seed(3)) + 0.5
CE = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"lse_square_scale": 1e-2},
    "softcap": {"softcap": 3.0, "lse_square_scale": 1e-2, "label_smoothing": 0.1},
    "another ignored": {"ignore_index": 5},
}


# ---------------------------------------------------------------------------------------------------- cross entropy


@DTYPES
@pytest.mark.parametrize("options", CE.values(), ids=CE.keys())
def test_cross_entropy(dtype, options):
    target = targets(ignore_index=options.get("ignore_index", -100))
    for op in (
        lambda x: liger.liger_cross_entropy(x, target, **options),
        lambda x: liger.LigerCrossEntropyLoss(**options)(x, target),
    ):
        check(op, lambda x: plain.cross_entropy(x, target, **options)[0], logits(dtype))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_with_class_weights(reduction):
    options = {"reduction": reduction, "label_smoothing": 0.1, "lse_square_scale": 1e-2}
    check(
        lambda x: liger.LigerCrossEntropyLoss(CLASS_WEIGHTS, **options)(x, targets()),
        lambda x: plain.cross_entropy(x, targets(), CLASS_WEIGHTS, **options)[0],
        logits(torch.float32),
    )


def test_ignored_rows_of_the_callers_logits_stay():
    x = logits(torch.float32).requires_grad_()
    before = x.detach().clone()
    loss = liger.liger_cross_entropy(x, targets())
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    assert torch.equal(x.detach(), before)
    x.grad = None
    loss.backward()
    assert torch.equal(x.grad, first)
    with torch.no_grad():
        liger.LigerCrossEntropyLoss()(x, targets())
    assert torch.equal(x.detach(), before)


def outputs(found, wanted):
    """What was asked for, as the formula has it; the rest is None."""
    assert isinstance(found, liger.CrossEntropyOutput)
    others = (found.z_loss, found.token_accuracy, found.predicted_tokens)
    assert [t is not None for t in others] == list(wanted)
    assert not any(t.requires_grad for t in others if t is not None)
    return found.loss, *(numbers(t) for t in others if t is not None)


def numbers(t):
    """Classes as numbers, whose error is 0 or more than any allowance."""
    return t if t.is_floating_point() else t.float()


@pytest.mark.parametrize("fused", [False, True], ids=["of logits", "of a head"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)])
def test_what_cross_entropy_returns_beside_the_loss(reduction, wanted, fused):
    names = ("return_z_loss", "return_token_accuracy", "return_predicted_tokens")
    options = {"reduction": reduction, "lse_square_scale": 1e-2}
    ask = {**options, **{name: bool(want) for name, want in zip(names, wanted, strict=True)}}
    x, weight, _ = head(torch.float32)

    def expected(x, weight):
        logits = x @ weight.t() if fused else x
        loss, *others = plain.cross_entropy(logits, target, **options)
        return loss, *(numbers(t) for t, want in zip(others, wanted, strict=True) if want)

    def op(x, weight):
        if fused:
            return outputs(liger.LigerFusedLinearCrossEntropyLoss(**ask)(weight, x, target), wanted)
        return outputs(liger.LigerCrossEntropyLoss(**ask)(x, target), wanted)

    x = x if fused else logits(torch.float32)
    right = (x @ weight.t() if fused else x).argmax(-1)
    target = torch.where(torch.arange(M) % 3 > 0, right, targets())
    check(op, expected, x, weight, grad=[0, 1] if fused else [0])


@DTYPES
@pytest.mark.parametrize("options", CE.values(), ids=CE.keys())
def test_fused_linear_cross_entropy(dtype, options):
    target = targets(ignore_index=options.get("ignore_index", -100))
    check(
        lambda x, w, b: liger.LigerFusedLinearCrossEntropyLoss(**options)(w, x, target, b),
        lambda x, w, b: plain.cross_entropy(torch.nn.functional.linear(x, w, b), target, **options)[0],
        *head(dtype),
    )


FURTHER = {
    "token scaling": {"use_token_scaling": True},
    "token scaling, sum": {"use_token_scaling": True, "reduction": "sum", "lse_square_scale": 1e-2},
    "token scaling, none": {"use_token_scaling": True, "reduction": "none", "softcap": 5.0},
    "class weights": {"ce_weight": CLASS_WEIGHTS, "label_smoothing": 0.1},
    "class weights and z-loss": {"ce_weight": CLASS_WEIGHTS, "lse_square_scale": 1e-2, "softcap": 4.0},
    "class weights, sum": {"ce_weight": CLASS_WEIGHTS, "reduction": "sum"},
    "class weights, none": {"ce_weight": CLASS_WEIGHTS, "reduction": "none", "use_token_scaling": True},
    "sum in fp32": {"use_token_scaling": True, "accum_dtype": torch.float32},
}


@DTYPES
@pytest.mark.parametrize("options", FURTHER.values(), ids=FURTHER.keys())
def test_fused_linear_cross_entropy_in_chunks(dtype, options, monkeypatch):
    """More rows than the 128 that a chunk holds at least."""
    monkeypatch.setenv("TIGON_CHUNK_BYTES", "1")
    target = targets(rows=300)
    theirs = {k: v for k, v in options.items() if k not in ("use_token_scaling", "ce_weight", "accum_dtype")}

    def expected(x, w, b):
        return plain.cross_entropy(
            torch.nn.functional.linear(x, w, b), target, options.get("ce_weight"),
            token_scaling="use_token_scaling" in options, **theirs,
        )[0]  # fmt: skip

    check(
        lambda x, w, b: liger.liger_fused_linear_cross_entropy(x, w, target, b, **options),
        expected, *head(dtype, rows=300), roundings=8,
    )  # fmt: skip


def test_chunks_of_logits_are_not_kept(monkeypatch):
    """What the backward pass needs of a chunk is computed again: no saved tensor is as wide as the classes."""
    monkeypatch.setenv("TIGON_CHUNK_BYTES", "1")
    x, weight, _ = (None if t is None else t.requires_grad_() for t in head(torch.float32, rows=300, bias=False))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        liger.liger_fused_linear_cross_entropy(x, weight, targets(rows=300), use_token_scaling=True)
    assert not [shape for shape in saved if shape[-1:] == (V,)]


def test_all_ignored_is_zero():
    """As Liger has it; torch's mean of nothing is NaN."""
    x, weight, _ = (None if t is None else t.requires_grad_() for t in head(torch.float32, bias=False))
    nothing = torch.full((M,), -100)
    for loss in (
        liger.liger_cross_entropy(x @ weight.t(), nothing),
        liger.liger_fused_linear_cross_entropy(x, weight, nothing),
        liger.liger_fused_linear_cross_entropy(x, weight, nothing, use_token_scaling=True),
    ):
        x.grad = weight.grad = None
        loss.backward()
        assert loss == 0
        assert not x.grad.any()
        assert not weight.grad.any()


@DTYPES
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_items_in_batch": 31},
        {"num_items_in_batch": torch.tensor(31)},
        {"final_logit_softcapping": 3.0},
        {"label_smoothing": 0.1, "cu_seq_lens": 1},
    ],
)
def test_the_loss_of_a_causal_model(dtype, options):
    """Labels are shifted; what the model hands on to other parts is left out."""
    labels = targets().view(2, 6)

    def expected(x, weight):
        logits = (x @ weight.t())[:, :-1].flatten(0, 1)
        further = {"softcap": options.get("final_logit_softcapping")}
        further["label_smoothing"] = options.get("label_smoothing", 0.0)
        items = options.get("num_items_in_batch")
        of = plain.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum" if items else "mean", **further)[0]
        return of / items if items else of

    x, weight, _ = head(dtype)
    check(lambda x, w: liger.LigerForCausalLMLoss(x, w, labels, H, **options), expected, x.view(2, 6, H), weight)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    of_shifted = liger.LigerForCausalLMLoss(x.view(2, 6, H), weight, None, H, shift_labels=shifted, **options)
    torch.testing.assert_close(of_shifted, liger.LigerForCausalLMLoss(x.view(2, 6, H), weight, labels, H, **options))


def test_the_loss_of_a_causal_model_with_more():
    x, weight, _ = head(torch.float32)
    found = liger.fixed_fused_linear_cross_entropy(
        x, weight, targets(), 20, return_token_accuracy=True, return_predicted_tokens=True, use_token_scaling=True
    )
    loss, _, accuracy, predicted = plain.cross_entropy(x @ weight.t(), targets(), reduction="sum", token_scaling=True)
    got = liger.unpack_cross_entropy_result(found)
    torch.testing.assert_close(got[0], loss / 20)
    assert got[1] is None
    torch.testing.assert_close(got[2], accuracy)
    assert torch.equal(got[3], predicted)
    assert liger.unpack_cross_entropy_result(loss) == (loss, None, None, None)
    assert liger.unpack_cross_entropy_result((loss, accuracy)) == (loss, accuracy, None, None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'smoothing'"):
        liger.fixed_fused_linear_cross_entropy(x, weight, targets(), smoothing=0.1)


# ------------------------------------------------------------------------------------------------------ divergences


def log_probabilities(dtype, seed):
    return logits(torch.float32, seed).log_softmax(-1).to(dtype)


@DTYPES
@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum", "none"])
@pytest.mark.parametrize("log_target", [False, True])
def test_kl_div(dtype, reduction, log_target):
    """The arguments are torch.nn.KLDivLoss's: log-probabilities first, and a target of probabilities."""
    target = log_probabilities(dtype, 5) if log_target else logits(torch.float32, 5).softmax(-1).to(dtype)
    options = {"reduction": reduction, "log_target": log_target}
    for op in (liger.LigerKLDIVLoss(**options), lambda q, p: liger.liger_kl_div(q, p, **options)):
        check(op, lambda q, p: plain.kl_div(q, p, **options), log_probabilities(dtype, 4), target, grad=[0])


def test_kl_div_has_the_defaults_of_torch():
    q, p = log_probabilities(torch.float32, 4), logits(torch.float32, 5).softmax(-1)
    torch.testing.assert_close(liger.LigerKLDIVLoss()(q, p), torch.nn.KLDivLoss()(q, p))
    torch.testing.assert_close(liger.liger_kl_div(q, p), torch.nn.functional.kl_div(q, p))
    assert liger.LigerKLDIVLoss(1e-10, None, None, "batchmean", True).log_target


@DTYPES
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("labelled", [False, True])
def test_jsd(dtype, beta, labelled):
    labels = targets() if labelled else None
    check(
        lambda q, p: liger.LigerJSD(beta=beta)(q, p, labels), lambda q, p: plain.jsd(q, p, labels, beta=beta),
        log_probabilities(dtype, 4), log_probabilities(dtype, 5), grad=[0],
    )  # fmt: skip


@DTYPES
@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum", "none"])
@pytest.mark.parametrize("labelled", [False, True])
def test_tvd(dtype, reduction, labelled):
    labels = targets() if labelled else None
    p, q = (logits(torch.float32, seed).softmax(-1).to(dtype) for seed in (4, 5))
    check(
        lambda p, q: liger.LigerTVDLoss(reduction)(p, q, labels),
        lambda p, q: plain.tvd(p, q, labels, reduction=reduction), p, q, grad=[0],
    )  # fmt: skip


def test_divergences_from_a_teacher_that_requires_a_gradient():
    """Liger gives the target none; neither does it refuse it."""
    q = log_probabilities(torch.float32, 4).requires_grad_()
    p = log_probabilities(torch.float32, 5).requires_grad_()
    (liger.liger_jsd(q, p) + liger.liger_kl_div(q, p.exp()) + liger.liger_tvd(q.exp(), p.exp())).backward()
    assert q.grad is not None
    assert p.grad is None


@DTYPES
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_fused_linear_jsd(dtype, beta, temperature):
    x, weight, _ = head(dtype, 1)
    teacher_x, teacher_weight, _ = head(dtype, 2, width=24)
    labels = targets()

    def expected(x, weight):
        log_q, log_p = (
            plain.log_softmax(*pair, None, temperature)[1]
            for pair in ((x, weight), (teacher_x.to(x.dtype), teacher_weight.to(x.dtype)))
        )
        return plain.jsd(log_q, log_p, labels, beta=beta)

    loss = liger.LigerFusedLinearJSD(jsd_beta=beta, temperature=temperature)
    check(
        lambda x, w: loss(x, w, teacher_x.to(x.dtype), teacher_weight.to(x.dtype), labels), expected, x, weight
    )  # fmt: skip
    everything = loss(x, weight, teacher_x, teacher_weight)
    torch.testing.assert_close(everything, loss(x, weight, teacher_x, teacher_weight, targets().abs() % V))


# ----------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda x, w, t: liger.liger_cross_entropy(x, t, size_average=True), "size_average must be None"),
        (lambda x, w, t: liger.liger_cross_entropy(x, t, reduce=False), "reduce must be None"),
        (lambda x, w, t: liger.liger_kl_div(x, x, reduce=False), "reduce must be True"),
        (
            lambda x, w, t: liger.liger_fused_linear_cross_entropy(x, w, t, accum_dtype=torch.float16),
            "accum_dtype must be torch.float32 or the weight's",
        ),
    ],
)
def test_options_without_an_equal_are_named(call, sentence):
    x, weight, _ = head(torch.bfloat16)
    with pytest.raises(ValueError, match=sentence):
        call(x, weight, targets())


@pytest.mark.parametrize(
    ("call", "option"),
    [
        (lambda x, w, t: liger.liger_fused_linear_cross_entropy(x, w, t, chunk_mem_const=8), "chunk_mem_const=8"),
        (lambda x, w, t: liger.LigerKLDIVLoss(eps=1e-3)((x @ w.t()).log_softmax(-1), (x @ w.t()).softmax(-1)), "eps"),
    ],
)
def test_options_without_effect_say_so(call, option):
    x, weight, _ = head(torch.float32)
    with pytest.warns(UserWarning, match=f"{option}.* has no effect here"):
        call(x, weight, targets())


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_fused_linear_jsd_of_peaked_logits(beta):
    """Liger projects to fp32 logits: of std 30, rounded to bf16, they put the gradient off by more than a tenth."""
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(32, 64, generator=g).bfloat16(), (torch.randn(200, 64, generator=g) * 30 / 8).bfloat16()
    near = (x + 0.05 * torch.randn(32, 64, generator=g)).bfloat16()

    def gradient(dtype, loss):
        ours = x.to(dtype).requires_grad_()
        return torch.autograd.grad(loss(ours, weight.to(dtype), near.to(dtype), weight.to(dtype)), ours)[0].double()

    def exact(x, w, t, v):
        log_q, log_p = (x @ w.t()).log_softmax(-1), (t @ v.t()).log_softmax(-1)
        return tigon.jsd(log_q, log_p, beta=beta)

    expected = gradient(torch.float64, exact)
    got = gradient(torch.bfloat16, liger.LigerFusedLinearJSD(jsd_beta=beta))
    assert (got - expected).norm() < 0.01 * expected.norm()
