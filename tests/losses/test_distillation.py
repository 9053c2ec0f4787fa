"""Distillation: every kind against whole logits, the code of TRL and Liger, and what it may not cost."""

import types

import pytest
import torch
import torch.nn.functional as F
from flat import distill, distill_reference, distill_topk, distill_topk_reference
from modes import NothingWaits, Watch

import tigon.losses.distillation as module
from tigon.losses import ValidCount, inputs

N, H, WIDE, V, K = 24, 10, 16, 37, 5


def batch(device="cpu", rows=N, dtype=torch.float64, ignored=4):
    """The student's head, the teacher's, and targets of which every fourth is ignored."""
    x, weight, bias = torch.randn(rows, H), torch.randn(V, H) / 2, torch.randn(V)
    teacher = torch.randn(rows, WIDE), torch.randn(V, WIDE) / 2, torch.randn(V)
    target = torch.randint(0, V, (rows,))
    if ignored:
        target[1::ignored] = -100
    student = tuple(t.to(device, dtype).requires_grad_() for t in (x, weight, bias))
    return student, tuple(t.to(device, dtype) for t in teacher), target.to(device)


def given(teacher, k=K, missing=True):
    """The K likeliest classes of the teacher; some rows lack one, in whose place is another's id."""
    x, weight, bias = teacher
    logprobs, ids = (x @ weight.t() + bias).log_softmax(-1).topk(k)
    if missing:
        logprobs[::3, -1], ids[::3, -1] = -torch.inf, ids[::3, 0]
    return ids, logprobs


def head(teacher):
    """As arguments of distill."""
    return {"teacher_x": teacher[0], "teacher_weight": teacher[1], "teacher_bias": teacher[2]}


def compare(ours, theirs, leaves, rtol, atol):
    """Losses, metrics of the same names, and the gradients of 3 · loss."""
    (loss, found), (expected, metrics) = ours, theirs
    assert found.keys() == metrics.keys()
    grads, wanted = torch.autograd.grad(3 * loss, leaves), torch.autograd.grad(3 * expected, leaves)
    for got, right in zip((loss, *found.values(), *grads), (expected, *metrics.values(), *wanted), strict=True):
        torch.testing.assert_close(got.double(), right.double(), rtol=rtol, atol=atol)
    assert not any(t.requires_grad for t in found.values())


KINDS = ["kl", "reverse_kl", "jsd", "tvd", "cosine"]
OPTIONS = [
    {},
    {"reduction": "sum", "temperature": 2.0},
    {"reduction": "mean", "hard_weight": 0.3},
    {"temperature": 0.5, "temperature_squared": True, "hard_weight": 0.8, "divisor": 7.0},
    {"softcap": 3.0, "scale": 0.7, "hard_weight": 0.5, "temperature": 1.5},
    {"hard_weight": 1.0, "divisor": torch.tensor(5)},
]


# ------------------------------------------------------------------------------------------------------------ answers


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_that_of_whole_logits(kind, options):
    student, teacher, target = batch()
    options = {
        "loss_type": kind,
        "beta": 0.3,
        "teacher_softcap": 4.0,
        "teacher_scale": 1.2,
        **options,
        "bias": student[2],
    }
    if kind == "cosine":
        options |= {"temperature": 1.0}
    for labels in (target, target.clamp(min=0) if options.get("hard_weight") else None):
        ours = distill(*student[:2], target=labels, **head(teacher), **options)
        compare(ours, distill_reference(*student[:2], target=labels, **head(teacher), **options), student, 1e-10, 1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rest", ["tail", "renormalize", "drop"])
@pytest.mark.parametrize("kind", KINDS[:-1])
def test_every_kind_of_given_classes_is_that_of_whole_logits(kind, rest, options):
    student, teacher, target = batch()
    options = {"loss_type": kind, "beta": 0.3, "rest": rest, **options, "bias": student[2]}
    ids, logprobs = given(teacher)
    ours = distill_topk(*student[:2], ids, logprobs, target, **options)
    theirs = distill_topk_reference(*student[:2], ids, logprobs, target, **options)
    compare(ours, theirs, student, 1e-9, 1e-11)


# What the kernels branch on: kind, a softmax of its own for the cross entropy, softcaps. The least budget: two chunks.
BRANCHES = [
    ({"loss_type": "kl"}, None),
    ({"loss_type": "kl", "temperature": 2.0, "hard_weight": 0.3}, None),
    ({"loss_type": "reverse_kl", "hard_weight": 0.3}, None),
    ({"loss_type": "jsd", "beta": 0.3, "softcap": 3.0, "teacher_softcap": 4.0}, None),
    ({"loss_type": "tvd", "temperature": 2.0}, None),
    ({"loss_type": "cosine", "hard_weight": 0.3, "softcap": 3.0}, None),
    ({"loss_type": "kl"}, "tail"),
    ({"loss_type": "jsd", "temperature": 2.0, "hard_weight": 0.3, "softcap": 3.0}, "tail"),
    ({"loss_type": "kl"}, "renormalize"),
    ({"loss_type": "tvd", "hard_weight": 0.3}, "renormalize"),
    ({"loss_type": "kl", "temperature": 2.0}, "drop"),
    ({"loss_type": "reverse_kl", "hard_weight": 0.3}, "drop"),
]


@pytest.mark.parametrize(("options", "rest"), BRANCHES, ids=str)
def test_kernels(options, rest, triton_backend, device):
    student, teacher, target = batch(device, 140, torch.float32)
    options = {**options, "bias": student[2]}
    exact = [t.detach().double().requires_grad_() for t in student]
    wide = tuple(t.double() for t in teacher)
    if rest:
        ids, logprobs = given(wide)
        ours = distill_topk(*student[:2], ids, logprobs.float(), target, rest=rest, chunk_bytes=1, **options)
        theirs = distill_topk_reference(*exact[:2], ids, logprobs, target, rest=rest, **{**options, "bias": exact[2]})
    else:
        ours = distill(*student[:2], target=target, chunk_bytes=1, **head(teacher), **options)
        theirs = distill_reference(*exact[:2], target=target, **head(wide), **{**options, "bias": exact[2]})
    torch.testing.assert_close(ours[0].double(), theirs[0], rtol=1e-5, atol=1e-6)
    got, wanted = torch.autograd.grad(ours[0], student), torch.autograd.grad(theirs[0], exact)
    for a, b in zip(got, wanted, strict=True):
        assert (a - b).norm() < 3e-6 * b.norm()


def test_jsd_at_its_ends_is_kl():
    student, teacher, _ = batch()
    for beta, kind in ((0.0, "kl"), (1.0, "reverse_kl")):
        ours = distill(*student[:2], **head(teacher), beta=beta)[0]
        assert torch.equal(ours, distill(*student[:2], **head(teacher), loss_type=kind)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_that_is_its_teacher_has_nothing_to_learn(kind, backend, device):
    dtype = torch.float64 if backend == "torch" else torch.float32
    student, _, _ = batch(device, dtype=dtype)
    teacher = tuple(t.detach() for t in student)
    loss, _ = distill(*student[:2], bias=student[2], **head(teacher), loss_type=kind, temperature=1.0)
    assert abs(loss) < 1e-6
    assert all(g.norm() < 1e-6 for g in torch.autograd.grad(loss, student))


@pytest.mark.parametrize("rest", ["tail", "renormalize", "drop"])
@pytest.mark.parametrize("kind", KINDS[:-1])
def test_all_classes_given_is_the_teachers_head(kind, rest, backend, device):
    dtype = torch.float64 if backend == "torch" else torch.float32
    student, teacher, target = batch(device, dtype=dtype)
    ids, logprobs = given(teacher, V, missing=False)
    atol = 1e-6 if dtype == torch.float32 else 1e-12
    ours = distill_topk(*student[:2], ids, logprobs, target, rest=rest, loss_type=kind)
    theirs = distill(*student[:2], teacher[0], teacher[1], target, teacher_bias=teacher[2], loss_type=kind)
    compare(ours, theirs, student[:2], rtol=1e-4 if atol == 1e-6 else 1e-10, atol=atol)


# --------------------------------------------------------------------------------------------------- TRL's and Liger's


@pytest.mark.parametrize("num_items", [None, 7])
@pytest.mark.parametrize("reduction", ["batchmean", "sum", "mean"])
@pytest.mark.parametrize(("beta", "temperature"), [(0.0, 1.0), (1.0, 2.0), (0.5, 1.0), (0.3, 0.7)])
def test_trls_generalized_jsd(beta, temperature, reduction, num_items):
    theirs = pytest.importorskip("trl.experimental.gkd.gkd_trainer").GKDTrainer.generalized_jsd_loss
    student, teacher, target = batch()
    logits = F.linear(*student), F.linear(*teacher)
    expected = theirs(
        *logits, labels=target, beta=beta, temperature=temperature, reduction=reduction, num_items_in_batch=num_items
    )
    if num_items and reduction != "batchmean":
        pytest.skip("TRL's num_items_in_batch comes before its reduction")
    ours, found = distill(
        *student[:2], target=target, bias=student[2], **head(teacher), beta=beta, temperature=temperature,
        reduction=reduction, divisor=num_items,
    )  # fmt: skip
    # TRL holds its β in the logits' dtype, and takes log(1 − β) there.
    compare((ours, found), (expected, {"soft_loss": expected.detach()}), student, 1e-9, 1e-11)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("num_items", [None, 7])
def test_trls_distillation_trainer(beta, num_items, device):
    theirs = pytest.importorskip("trl.trainer.distillation_trainer")._chunked_divergence_loss
    student, teacher, target = batch(device, dtype=torch.float32)
    transforms = {"softcap": 3.0, "scale": 0.7, "teacher_softcap": 4.0, "teacher_scale": 1.2}
    expected, _, count = theirs(
        student[0].view(2, -1, H), teacher[0].view(2, -1, WIDE), student[1], teacher[1], (target != -100).view(2, -1),
        beta, num_items, student[2], teacher[2], 0.7, 1.2, 3.0, 4.0, 0.9,
    )  # fmt: skip
    assert count == (target != -100).sum()
    options = {**transforms, **head(teacher), "beta": beta, "temperature": 0.9, "divisor": num_items}
    ours, _ = distill(*student[:2], target=target, bias=student[2], **options)
    compare((ours, {}), (expected, {}), student, 1e-4, 1e-6)


@pytest.mark.parametrize("add_tail", [True, False])
@pytest.mark.parametrize("missing", [True, False])
def test_trls_server_distillation(add_tail, missing):
    """loss_add_tail is rest="tail", without it "renormalize"."""
    trl = pytest.importorskip("trl.experimental.server_distillation.server_distillation_trainer")
    student, teacher, target = batch()
    ids, logprobs = given(teacher, missing=missing)
    shape = (2, N // 2)
    reduce = trl.ServerDistillationTrainer._reduce_divergence_loss
    stub = types.SimpleNamespace(loss_add_tail=add_tail, _reduce_divergence_loss=reduce)
    log_q = (F.linear(*student) / 1.5).log_softmax(-1).view(*shape, V)
    result = {"topk_logprobs": logprobs.view(*shape, K), "topk_token_ids": ids.view(*shape, K)}
    method = trl.ServerDistillationTrainer._compute_server_forward_kl_loss
    expected = getattr(method, "__wrapped__", method)(stub, result, log_q, target.view(shape))
    rest = "tail" if add_tail else "renormalize"
    ours, _ = distill_topk(*student[:2], ids, logprobs, target, rest=rest, bias=student[2], temperature=1.5)
    # Where a class is missing, -inf minus -inf makes gradients of TRL's NaN.
    torch.testing.assert_close(ours, expected)
    if not missing:
        compare((ours, {}), (expected, {}), student, 1e-9, 1e-11)


@pytest.mark.parametrize(("name", "kind"), [("JSD", "jsd"), ("CosineSimilarity", "cosine")])
def test_ligers_chunked_losses(name, kind):
    liger = pytest.importorskip("liger_kernel.chunked_loss")
    student, teacher, target = batch(dtype=torch.float32)
    options = {"weight_hard_loss": 0.3, "weight_soft_loss": 0.7, "beta": 0.4 if kind == "jsd" else 1.0}
    theirs = getattr(liger, f"LigerFusedLinear{name}Loss")(
        **options, temperature=1.5 if kind == "jsd" else 1.0, compiled=False, chunk_size=8, return_soft_hard_loss=True
    )
    loss, soft, hard = theirs(*student[:2], *teacher[:2], target, student[2], teacher[2])
    ours = distill(
        *student[:2], target=target, bias=student[2], **head(teacher), loss_type=kind, beta=0.4, hard_weight=0.3,
        temperature=1.5 if kind == "jsd" else 1.0,
    )  # fmt: skip
    if kind == "cosine":
        # Liger's backward pass divides by the norm of a vector of norm 1: only its values are compared.
        torch.testing.assert_close(
            torch.stack(ours[1:] and [ours[0], *ours[1].values()]), torch.stack([loss, soft, hard])
        )
        return
    compare(ours, (loss, {"soft_loss": soft, "hard_loss": hard}), student, 1e-4, 1e-6)


# -------------------------------------------------------------------------------------------------- rows that count


@pytest.mark.parametrize("topk", [False, True])
@pytest.mark.parametrize("chunk_bytes", [1, None])
def test_leaving_ignored_rows_out_changes_nothing(chunk_bytes, topk, backend, device):
    student, teacher, target = batch(device, 180, torch.float32, ignored=4)
    count = int((target != -100).sum())

    def call(**options):
        if topk:
            return distill_topk(*student[:2], *given(teacher), target, hard_weight=0.5, **options)
        return distill(*student[:2], *teacher[:2], target, hard_weight=0.5, **options)

    num_valid = ValidCount(target) if topk else count + 7
    compare(call(num_valid=num_valid, chunk_bytes=chunk_bytes), call(num_valid=180), student[:2], 1e-4, 1e-6)
    assert call(num_valid=count - 1)[0].isnan()


def test_ignored_rows_may_hold_anything(backend, device):
    student, teacher, target = batch(device, dtype=torch.float32)
    expected = distill(*student[:2], *teacher[:2], target)
    with torch.no_grad():
        wrong = student[0].detach().clone()
        wrong[target == -100] = torch.nan
    x = wrong.requires_grad_()
    loss, _ = distill(x, student[1], *teacher[:2], target, num_valid=N)
    torch.testing.assert_close(loss, expected[0])
    dx, _ = torch.autograd.grad(loss, (x, student[1]))
    assert not dx[target == -100].any()


# ------------------------------------------------------------------------------------------------- what stays visible


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whose", ["student", "teacher"])
def test_a_row_that_is_not_a_number_is_seen_and_stays_alone(kind, whose, backend, device):
    student, teacher, _ = batch(device, dtype=torch.float32)
    with torch.no_grad():
        (student if whose == "student" else teacher)[0][3, 2] = torch.nan
    loss, _ = distill(*student[:2], *teacher[:2], loss_type=kind, hard_weight=0.0)
    (dx,) = torch.autograd.grad(loss, student[:1])
    assert loss.isnan()
    rows = torch.arange(N, device=device) != 3
    assert dx[rows].isfinite().all()
    assert kind == "tvd" or dx[3].isnan().all()  # a sign of nothing is nothing: its row may be NaN or 0


def test_an_infinite_divergence_is_infinite(backend, device):
    student, teacher, _ = batch(device, dtype=torch.float32)
    never = torch.zeros(V, device=device)
    never[3] = -torch.inf
    assert distill(*student[:2], *teacher[:2], bias=never, loss_type="kl")[0] == torch.inf
    assert distill(*student[:2], *teacher[:2], teacher_bias=never, loss_type="reverse_kl")[0] == torch.inf
    for kind in ("kl", "reverse_kl", "jsd", "tvd"):
        # A class that neither side ever takes, such as the padding of a vocabulary.
        loss, _ = distill(*student[:2], *teacher[:2], bias=never, teacher_bias=never, loss_type=kind)
        keep = torch.arange(V, device=device) != 3
        expected, _ = distill(student[0], student[1][keep], teacher[0], teacher[1][keep], loss_type=kind)
        torch.testing.assert_close(loss, expected)
        assert all(g.isfinite().all() for g in torch.autograd.grad(loss, student[:2]))


@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize("rest", ["tail", "renormalize", "drop"])
def test_an_id_out_of_range_is_loud_in_the_kernel(rest, kind, triton_backend, device, monkeypatch):
    monkeypatch.setattr(module, "_check_ids", lambda *_: None)
    student, teacher, _ = batch(device, 4, torch.float32)
    ids, logprobs = given(teacher, missing=False)
    ids[2, 1] = V
    loss, _ = distill_topk(*student[:2], ids, logprobs, rest=rest, loss_type=kind)
    assert loss.isnan()
    logprobs[2, 1] = -torch.inf  # not given: its id is never looked at
    assert distill_topk(*student[:2], ids, logprobs, rest=rest, loss_type=kind)[0].isfinite()


@pytest.mark.parametrize("options", [{}, {"temperature": 2.0}, {"loss_type": "cosine"}], ids=str)
def test_a_target_out_of_range_is_loud_in_the_kernel(options, triton_backend, device, monkeypatch):
    monkeypatch.setattr(inputs, "checked_target", lambda name, target, *_: target)
    student, teacher, target = batch(device, 4, torch.float32)
    target[2] = V
    loss, _ = distill(*student[:2], *teacher[:2], target, hard_weight=0.5, **options)
    assert loss.isnan()
    dx = torch.autograd.grad(loss, student[0])[0]
    assert dx[2].isnan().all()
    assert dx[3].isfinite().all()


# ------------------------------------------------------------------------------------------------------ what it costs


@pytest.mark.parametrize("topk", [False, True])
def test_products_memory_and_waiting(topk, device, triton_backend, monkeypatch):
    """Four products a token, one of them the teacher's; two chunks of logits; and the host never waits."""
    monkeypatch.setattr(inputs, "checked_target", lambda name, target, *_: target)  # these look at the numbers of a CPU
    monkeypatch.setattr(module, "_check_ids", lambda *_: None)
    student, teacher, target = batch(device, 512, torch.float32)
    ids, logprobs = given(teacher)
    sides = 1 if topk else 2
    options = {"num_valid": 512, "chunk_bytes": sides * 256 * V * 4}
    with Watch() as work, NothingWaits():
        if topk:
            loss, _ = distill_topk(*student[:2], ids, logprobs, target, **options)
        else:
            loss, _ = distill(*student[:2], *teacher[:2], target, **options)
    assert work.products == 512 * V * (3 * H + (0 if topk else WIDE))
    assert work.largest == 256 * 40  # each side's chunk, where 37 classes take the room of 40
    saved = [t for t in loss.grad_fn.saved_tensors if t is not None]
    assert {t.shape for t in saved} <= {(512, H), (V, H), (0,)}


def test_nothing_of_the_teacher_gets_a_gradient(device):
    student, teacher, target = batch(device)
    learning = tuple(t.requires_grad_() for t in teacher)
    loss, _ = distill(*student[:2], target=target, **head(learning))
    loss.backward()
    assert student[0].grad is not None
    assert all(t.grad is None for t in learning)
    logprobs = given(learning)[1].detach().requires_grad_()
    distill_topk(*student[:2], given(teacher)[0], logprobs, target)[0].backward()
    assert logprobs.grad is None


def test_the_two_sides_may_have_dtypes_of_their_own(backend, device):
    student, teacher, _ = batch(device, dtype=torch.float32)
    half = tuple(t.bfloat16() for t in teacher)
    ours, _ = distill(*student[:2], *half[:2])
    torch.testing.assert_close(ours, distill(*student[:2], *teacher[:2])[0], rtol=2e-2, atol=0)


@pytest.mark.parametrize("kind", ["kl", "jsd", "cosine"])
@pytest.mark.parametrize("reduction", ["batchmean", "mean"])
def test_fp16_gradients_keep_their_range(kind, reduction, backend, device):
    """With the divisors, or the norms of logits, in them they would be zero."""
    rows, classes = 4, 3000
    inputs = (torch.randn(s) for s in ((rows, H), (classes, H), (rows, WIDE), (classes, WIDE)))
    x, weight, *teacher = (t.to(device, torch.float16) for t in inputs)
    options = {"loss_type": kind, "reduction": reduction, "divisor": 1e6}

    def grads(fn, leaves, teacher):
        leaves = [t.requires_grad_() for t in leaves]
        loss, _ = fn(*leaves, *teacher, **options)
        scale = 2.0**28 * (classes if reduction == "mean" else 1)
        return torch.autograd.grad(loss, leaves, torch.full_like(loss, scale))

    truth = grads(distill_reference, [x.double(), weight.double()], [t.double() for t in teacher])
    for a, b in zip(grads(distill, [x, weight], teacher), truth, strict=True):
        assert (a - b).norm() < 0.02 * b.norm()


# ------------------------------------------------------------------------------------------------------------ around


# ------------------------------------------------------------------------------------------------------ peaked logits


def _peaked(dtype):
    """Logits of std 30, as of models that are sure: a unit in bf16's last place of one is 0.125."""
    g = torch.Generator().manual_seed(2)
    x, weight = torch.randn(48, 64, generator=g), torch.randn(300, 64, generator=g) * 30 / 8
    near = x + 0.05 * torch.randn(x.shape, generator=g)
    return [t.to(dtype) for t in (x, weight, near, weight)]


def _error(got, exact):
    return float((got.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("chunk_bytes", [1, None])
def test_fp32_logits_of_peaked_distributions(beta, chunk_bytes, backend, device):
    """Within 1 % of fp64, as Liger's fp32 projection. Rounded to bf16 they put the gradient off by ten times that."""
    inputs = _peaked(torch.bfloat16)
    exact = [t.double().requires_grad_(i < 2) for i, t in enumerate(inputs)]
    expected = torch.autograd.grad(distill_reference(*exact, beta=beta)[0], exact[:2])
    errors = {}
    for logits_dtype in (None, torch.float32):
        ours = [t.to(device).requires_grad_(i < 2) for i, t in enumerate(inputs)]
        loss, _ = distill(*ours, beta=beta, logits_dtype=logits_dtype, chunk_bytes=chunk_bytes)
        got = torch.autograd.grad(loss, ours[:2])
        errors[logits_dtype] = [_error(g.cpu(), e) for g, e in zip(got, expected, strict=True)]
    assert max(errors[torch.float32]) < 0.01
    assert errors[None][0] > 0.05, "the test no longer has peaked logits"


@pytest.mark.parametrize("rest", ["tail", "renormalize"])
def test_fp32_logits_of_a_list(rest, backend, device):
    x, weight, near, _ = _peaked(torch.bfloat16)
    logprobs, ids = (near.double() @ weight.double().t()).log_softmax(-1).topk(8)
    exact = [t.double().requires_grad_() for t in (x, weight)]
    (expected,) = torch.autograd.grad(distill_topk_reference(*exact, ids, logprobs, rest=rest)[0], exact[:1])
    errors = {}
    for logits_dtype in (None, torch.float32):
        ours = [t.to(device).requires_grad_() for t in (x, weight)]
        given = ids.to(device), logprobs.float().to(device)
        loss, _ = distill_topk(*ours, *given, rest=rest, logits_dtype=logits_dtype)
        errors[logits_dtype] = _error(torch.autograd.grad(loss, ours[:1])[0].cpu(), expected)
    assert errors[torch.float32] < 0.01 < errors[None]


def test_fp32_logits_with_a_bias_and_ignored_rows(backend, device):
    x, weight, near, theirs = (t.to(device) for t in _peaked(torch.bfloat16))
    bias = torch.randn(300, generator=torch.Generator().manual_seed(3)).to(device, torch.bfloat16)
    target = torch.arange(48, device=device) % 300
    target[::3] = -100
    inputs = [t.requires_grad_() for t in (x, weight, bias)]
    options = {"hard_weight": 0.3, "temperature": 2.0}
    loss, _ = distill(x, weight, near, theirs, target, bias=bias, teacher_bias=bias.detach(), num_valid=32,
                      logits_dtype=torch.float32, **options)  # fmt: skip
    exact = [t.detach().double().requires_grad_() for t in inputs]
    answer, _ = distill_reference(
        exact[0], exact[1], near.double(), theirs.double(), target, bias=exact[2], teacher_bias=bias.detach().double(),
        **options,
    )  # fmt: skip
    torch.testing.assert_close(loss.double(), answer, rtol=1e-4, atol=1e-5)
    for got, expected in zip(*(torch.autograd.grad(*p) for p in ((loss, inputs), (answer, exact))), strict=True):
        assert _error(got, expected) < 0.01


def test_other_dtypes_of_logits_are_refused():
    x = _peaked(torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"ChunkOptions: logits_dtype must be None or torch.float32, got torch.float16"
    ):
        distill(*x, logits_dtype=torch.float16)
