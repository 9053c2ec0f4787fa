"""Prompt rankers: shared prefixes beside one sequence a candidate, files, calibration, teachers."""

from __future__ import annotations

import json
import math

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("jinja2")
from prompts import TOLD, film, model, prompt, requests, tokenizer

from tigon.rank.models.prompt import Calibration, PromptRanker, Request, add_teacher_scores, calibrate
from tigon.rank.models.prompt.calibrate import fit_calibration
from tigon.rank.models.prompt.distillation import check_teacher
from tigon.rank.models.prompt.model import soft_target

AGE = {"age": 1, "occupation": 1}


def ranker(dtype=torch.float64, **options):
    return PromptRanker(model().to(dtype).eval(), tokenizer(), prompt(), **options)


def separately(own, listed):
    """Logits of each task's answers, a sequence for each candidate and task, by the plain model."""
    found = {name: [] for name in own.prompt.tasks}
    for request in listed:
        encoded = own.encoder.encode(request, labelled=False)
        for suffixes in encoded.suffixes:
            for name, suffix in zip(own.prompt.tasks, suffixes, strict=True):
                ids = torch.tensor([encoded.prefix + suffix])
                found[name].append(own.model(ids, use_cache=False).logits[0, -1, own.encoder.answers[name]])
    return {name: torch.stack(rows) for name, rows in found.items()}


def test_probabilities_are_those_of_separate_sequences():
    """The islands of fp32 in a model of fp64 (its norms) round alike, unless a last bit of fp64 differs there."""
    own = ranker()
    want = separately(own, requests())
    (batch,) = own.batches(requests())
    z = own.logits(batch)
    assert z.dtype == torch.float64
    for t, name in enumerate(own.prompt.tasks):
        torch.testing.assert_close(z[batch.task == t][:, own.columns[t]], want[name], rtol=0, atol=1e-10)
    assert {name: len(scores) for name, scores in own.score([]).items()} == {"like": 0, "stars": 0}
    for tokens in (10_000, 150, 1):  # one pass, several, one candidate each
        got = own.probabilities(requests(), tokens=tokens)
        for name, logits in want.items():
            assert got[name].shape == logits.shape
            torch.testing.assert_close(got[name].double(), logits.softmax(-1), rtol=0, atol=1e-6)
    assert not torch.allclose(got["like"][0], got["like"][1], atol=1e-3)
    scores = own.score(requests())
    torch.testing.assert_close(scores["like"], got["like"][:, 0])
    torch.testing.assert_close(scores["stars"], got["stars"] @ torch.arange(1.0, 6.0))


def test_a_step_has_the_gradients_of_separate_sequences():
    own = ranker()
    want = separately(own, requests())
    right = own.labels(requests())
    assert right["stars"].isnan().tolist() == [False] * 6 + [True]
    total = 0.0
    for name, task in own.prompt.tasks.items():
        known = ~right[name].isnan()
        at = torch.tensor([task.values.index(v) for v in right[name][known].tolist()])
        total = total + task.weight / 1.5 * torch.nn.functional.cross_entropy(want[name][known], at)
    plain = torch.autograd.grad(total, list(own.model.parameters()))
    (batch,) = own.batches(requests(), labelled=True)
    loss = own.loss(batch)
    torch.testing.assert_close(loss.double(), total, rtol=1e-6, atol=0)
    for got, p in zip(torch.autograd.grad(loss, list(own.model.parameters())), plain, strict=True):
        assert (got - p).abs().max() <= 1e-5 * max(g.abs().max() for g in plain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])  # real logits, and the fused loss without any
def test_the_loss_over_the_whole_vocabulary(dtype):
    """μ times the cross entropy of the right answer's token among all words, beside that among the answers."""
    exact = ranker()
    total, logits = 0.0, separately(exact, requests())
    for name, task in exact.prompt.tasks.items():
        own, answers = exact.labels(requests())[name], exact.encoder.answers[name]
        ids = [
            torch.tensor([encoded.prefix + suffixes[list(exact.prompt.tasks).index(name)]])
            for request in requests() for encoded in (exact.encoder.encode(request),) for suffixes in encoded.suffixes
        ]  # fmt: skip
        words = torch.cat([exact.model(one, use_cache=False).logits[0, -1:] for one in ids])
        known = ~own.isnan()
        at = torch.tensor([task.values.index(value) for value in own[known].tolist()])
        among = torch.nn.functional.cross_entropy(logits[name][known], at)
        over_all = torch.nn.functional.cross_entropy(words[known], torch.tensor(answers)[at])
        total = total + task.weight / 1.5 * (among + 0.3 * over_all)
    want = torch.autograd.grad(total, list(exact.model.parameters()))
    own = ranker(dtype, vocabulary_weight=0.3)
    (batch,) = own.batches(requests(), labelled=True)
    loss = own.loss(batch)
    close = 1e-6 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(loss.double(), total, rtol=close, atol=0)
    most = max(g.abs().max() for g in want)
    for got, expected in zip(torch.autograd.grad(loss, list(own.model.parameters())), want, strict=True):
        assert (got - expected).abs().max() <= 10 * close * most
    assert loss > 2 * ranker(dtype).loss(batch)  # so that the second part is no rounding


def test_it_is_saved(tmp_path):
    own, listed = ranker(torch.float32), requests()
    calibrate(own, listed, "isotonic")
    own.save_pretrained(tmp_path)
    again = PromptRanker.from_pretrained(tmp_path)
    for name, scores in own.score(listed).items():
        torch.testing.assert_close(again.score(listed)[name], scores, rtol=1e-5, atol=1e-6)
    told = json.loads((tmp_path / "ranker.json").read_text())
    assert told["kind"] == "prompt"
    assert told["calibration"]["like"]["kind"] == "isotonic"
    with pytest.raises(ValueError, match=r"must hold prompt.yaml"):
        PromptRanker.from_pretrained(tmp_path / "none")


@pytest.mark.parametrize("pure", [True, False])
def test_in_bf16(pure):
    """Pure or by autocast over fp32 weights: near the scores in fp32, and a loss in fp32 with all gradients."""
    own = ranker(torch.float32)
    want = own.score(requests())["like"]
    own.model.to(torch.bfloat16 if pure else torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=not pure):
        assert (own.score(requests())["like"] - want).abs().max() < 0.03
        (batch,) = own.batches(requests(), labelled=True)
        loss = own.loss(batch)
    assert loss.dtype == torch.float32
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in own.model.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype):
    """Probabilities, loss and gradients of labels and a teacher, beside the same in fp64 on the CPU."""
    want, got = ranker(), ranker(torch.float32).to("cuda")
    listed = add_teacher_scores(requests(), want)
    if dtype == torch.bfloat16:
        got.model.to(dtype)
    close = 4e-3 if dtype == torch.float32 else 6e-2  # a product of fp32 may be one of tf32
    p, q = want.probabilities(listed), got.probabilities(listed, tokens=150)
    for name, own in p.items():
        assert (q[name] - own).abs().max() < close
    losses, gradients = [], []
    for one in (want, got):
        (batch,) = one.batches(listed, labelled=True)
        loss = one.loss(batch)
        losses.append(loss.item())
        own = torch.autograd.grad(loss, list(one.model.parameters()))
        gradients.append(torch.cat([g.double().cpu().flatten() for g in own]))
    assert losses[1] == pytest.approx(losses[0], rel=close)
    assert (gradients[1] - gradients[0]).norm() < 4 * close * gradients[0].norm()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: PromptRanker(model(), tokenizer(), {**TOLD, "tasks": 3}), r"tasks must name at least one task"),
        (lambda: PromptRanker(model(), tokenizer(), prompt(), distil=2), r"distil must lie between 0 and 1, got 2"),
        (lambda: ranker(vocabulary_weight=-1), r"vocabulary_weight must be at least 0, got -1"),
        (lambda: PromptRanker(model(), tokenizer(), prompt(), prefix_len=512), r"prefix_len must leave room"),
        (lambda: PromptRanker(model(vocab_size=60), tokenizer(), prompt()), r"the head has 60 classes, but an answer"),
        (lambda: ranker().score(requests()[0]), r"requests must be a list of Request, got a single Request"),
        (lambda: ranker().score([Request([{"titel": "x", "year": 1}], AGE)]), r"did you mean 'titel'"),
        (
            lambda: calibrate(ranker(), [Request([film(0, rating=5)], AGE)]),
            r"task like: a calibration needs rows from both classes, got 1 rows that are all 1",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_gets_a_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


# ---------------------------------------------------------------------------------------------------- calibration


def test_platt_finds_the_curve():
    generator = torch.Generator().manual_seed(0)
    s = torch.rand(20_000, generator=generator, dtype=torch.float64)
    true = torch.sigmoid(0.5 * torch.logit(s) - 1)
    fitted = fit_calibration(s, (torch.rand(20_000, generator=generator) < true).double())
    assert fitted.x == pytest.approx((0.5, -1), abs=0.06)
    assert (fitted(s).double() - true).abs().max() < 0.02
    assert fitted(s)[s.argsort()].diff().ge(0).all()
    apart = fit_calibration(torch.tensor([0.1, 0.2, 0.8, 0.9]), torch.tensor([0, 0, 1, 1]))
    assert all(map(math.isfinite, apart.x))
    assert apart.x[0] > 0


def test_isotonic_is_the_rising_function_of_least_squares():
    s, y = torch.tensor([0.1, 0.2, 0.2, 0.4, 0.5, 0.7]), torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 1.0])
    fitted = fit_calibration(s, y, "isotonic")
    # by hand: 0 | (1 + 0 + 0) / 3 at 0.2 … 0.4 | 1 at 0.5 … 0.7
    assert fitted(s).tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3, 1, 1])
    assert fitted(torch.tensor([0.0, 0.15, 0.45, 0.99])).tolist() == pytest.approx([0, 1 / 6, 2 / 3, 1])
    assert Calibration.from_json(json.loads(json.dumps(fitted.to_json()))) == fitted
    assert fit_calibration(torch.tensor([0.3, 0.3]), torch.tensor([0, 1]), "isotonic")(s).tolist() == [0.5] * 6
    sklearn = pytest.importorskip("sklearn.isotonic")
    s, y = torch.rand(500), torch.rand(500).round()
    theirs = sklearn.IsotonicRegression(out_of_bounds="clip").fit(s.numpy(), y.numpy())
    at = torch.rand(500)
    torch.testing.assert_close(fit_calibration(s, y, "isotonic")(at), torch.tensor(theirs.predict(at.numpy())).float())


def test_platt_leaves_tasks_alone_that_have_no_probability():
    """Scores from 1 to 5 are no probabilities: through a logit all of them would be one."""
    own = ranker()
    before = own.score(requests())
    assert list(calibrate(own, requests(), "platt")) == ["like"]
    after = own.score(requests())
    assert torch.equal(after["stars"], before["stars"])
    assert not torch.equal(after["like"], before["like"])
    with pytest.raises(ValueError, match=r"a platt calibration needs labels 0 and 1, got 5\.$"):
        fit_calibration(torch.rand(3), torch.tensor([0, 5, 1]))


def test_one_class_cannot_be_calibrated():
    with pytest.raises(ValueError, match=r"needs rows from both classes, got 3 rows that are all 1"):
        fit_calibration(torch.rand(3), torch.ones(3))
    with pytest.raises(ValueError, match=r"calibration must be one of platt, isotonic, got 'sigmoid'"):
        fit_calibration(torch.rand(3), torch.ones(3), "sigmoid")


# --------------------------------------------------------------------------------------------------------- teachers


def test_the_target_is_mixed():
    teacher = torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0]])
    labels, there = torch.tensor([0, -100, 1, -100]), torch.tensor([True, True, False, False])
    target, counted = soft_target(labels, teacher, there, 0.4)
    assert target.tolist() == [pytest.approx(row) for row in ([0.7, 0.3], [0.5, 0.5], [0, 1], [0, 0])]
    assert counted.tolist() == [1, 1, 1, 0]


def test_the_loss_of_a_student_is_its_cross_entropy_with_the_teacher():
    teacher = ranker(torch.float32)
    student = PromptRanker(model(1, num_hidden_layers=1), tokenizer(), prompt(), distil=1.0)
    check_teacher(student, teacher)
    listed = add_teacher_scores(requests(), teacher)
    want, own = teacher.probabilities(requests()), student.probabilities(requests())
    assert listed[1].teacher["like"][0] == pytest.approx(want["like"][4].tolist())
    terms = {name: -(p * own[name].log()).sum(-1).mean() for name, p in want.items()}
    (batch,) = student.batches(listed, labelled=True)
    assert student.loss(batch).item() == pytest.approx((terms["like"] + 0.5 * terms["stars"]).item() / 1.5, rel=1e-5)


def test_a_teacher_that_answers_other_questions():
    other = PromptRanker(model(), tokenizer(), prompt(tasks={"stars": TOLD["tasks"]["stars"]}))
    with pytest.raises(
        ValueError, match=r"the teacher must have task like with the answers .*; the teacher has no such task"
    ):
        check_teacher(ranker(), other)
