"""TRL's own trainers, plain and with Tigon's losses: the same logs and the same gradients, step by step.

The plain run is the specification: its losses and metrics are TRL's own code on TRL's own operators.
"""

import copy

import pytest
import torch

import tigon

pytest.importorskip("trl", minversion="1.16")
pytest.importorskip("datasets")
import trl_cases as cases

from tigon.fusion.fp8.layers import ignore_sizes
from tigon.integrations import trl

pytestmark = pytest.mark.filterwarnings("ignore")
LOSS = {
    "sft": {"policy linear_logprob": 1},
    "dpo": {"policy linear_logprob": 1, "reference linear_logprob": 1},
    "kto": {"policy linear_logprob": 2, "reference linear_logprob": 2},  # of the completions, and of those mismatched
    "orpo": {"orpo": 1},
    "grpo": {"policy linear_logprob": 1},
    "rloo": {"policy linear_logprob": 2},  # the old policy's as well
    "distillation": {"distill": 1},
    "gkd": {"distill": 1},
}


def assert_same(plain, fused, rtol=1e-4):
    (plain_rows, plain_moved), (fused_rows, fused_moved) = plain, fused
    assert len(plain_rows) == len(fused_rows) > 1
    for one, other in zip(plain_rows, fused_rows, strict=True):
        assert one.keys() == other.keys()
        assert {k: v for k, v in other.items() if v is not None} == pytest.approx(
            {k: v for k, v in one.items() if v is not None}, rel=rtol, abs=rtol / 10
        )
    assert plain_moved.keys() == fused_moved.keys()
    moved = 0
    for name, step in plain_moved.items():
        difference = (fused_moved[name] - step).norm()
        # A float32 weight of about 1 is stored to 6e-8: what it moved by is known no better.
        assert difference <= rtol * step.norm() + 3e-7 * step.numel() ** 0.5, (name, difference, step.norm())
        moved += float(step.norm()) > 1e-4
    assert moved > len(plain_moved) / 2, "nothing was learnt, and nothing compared"


def forbid_the_plain_losses(monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("TRL's own operator ran")

    from trl.experimental.orpo import orpo_trainer
    from trl.kernels import chunked_divergence, chunked_logprob

    monkeypatch.setattr(chunked_logprob.ChunkedLogProbFunction, "forward", forbidden)
    monkeypatch.setattr(chunked_divergence.ChunkedDivergenceFunction, "forward", forbidden)
    monkeypatch.setattr(orpo_trainer, "selective_log_softmax", forbidden)


@pytest.mark.parametrize(
    ("task", "family"),
    [(task, "llama") for task in ("kto", "grpo", "rloo")]
    + [(task, "gemma2") for task in ("dpo", "orpo", "distillation", "gkd")] + [("sft", "mixtral")],
)  # fmt: skip
def test_losses_metrics_and_gradients(task, family, tmp_path, monkeypatch):
    plain_trainer, trainer = cases.twins(getattr(cases, task), tmp_path, family)
    fusion = trl.fuse(trainer)
    plain = cases.train(plain_trainer)
    forbid_the_plain_losses(monkeypatch)
    assert_same(plain, cases.train(trainer))
    report = fusion.report()
    assert report.calls == LOSS[task]
    assert report.total == {name: 3 * count for name, count in LOSS[task].items()}
    assert report.steps == 3
    assert not report.left
    assert all(row.fused for row in report.rows)
    for role, model in report.models.items():
        assert not model.logits_built_by, "whole logits were built"
        assert model.calls["head"] == 1, role
        assert model.calls["norm"] >= 5, role
    if family == "mixtral":
        assert any("aux_loss" in row for row in plain[0]) == (task == "sft")


@pytest.mark.parametrize("task", ["dpo", "gkd"])
def test_distributed_data_parallel(task, tmp_path, monkeypatch, launched):
    """Where the Trainer has DDP look for unused parameters, DDP clones what a model returns."""
    plain_trainer, trainer = cases.twins(getattr(cases, task), tmp_path, ddp_find_unused_parameters=True)
    fusion = trl.fuse(trainer)
    plain = cases.train(plain_trainer)
    forbid_the_plain_losses(monkeypatch)
    assert_same(plain, cases.train(trainer))
    assert isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    assert fusion.report().calls == LOSS[task]
    assert not any(model.logits_built_by for model in fusion.report().models.values())


def test_evaluation(tmp_path):
    for task in ("sft", "orpo"):
        plain, trainer = cases.twins(getattr(cases, task), tmp_path)
        fusion = trl.fuse(trainer)
        found = [{k: v for k, v in t.evaluate().items() if "per_second" not in k and "time" not in k}
                 for t in (plain, trainer)]  # fmt: skip
        assert found[1] == pytest.approx(found[0], rel=1e-5)
        assert fusion.report().total


def test_autocast_wraps_the_reference_before(tmp_path):
    """Mixed precision wraps the reference's forward while the trainer is made, the policy's when training begins."""
    plain, trainer = cases.twins(cases.dpo, tmp_path, bf16=True)
    fusion = trl.fuse(trainer)
    expected = cases.train(plain)
    found = cases.train(trainer)
    assert fusion.report().calls == LOSS["dpo"]
    for one, other in zip(expected[0], found[0], strict=True):
        # Rewards are differences of sums of log-probabilities of some tens, in bf16.
        assert other.get("loss", 0) == pytest.approx(one.get("loss", 0), abs=0.02)
        assert other.get("logps/chosen", 0) == pytest.approx(one.get("logps/chosen", 0), rel=5e-3)


def test_peft_takes_the_reference_from_the_policy(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    trainers = []
    for name in ("plain", "fused"):
        torch.manual_seed(5)
        trainers.append(cases.dpo(tmp_path / name, cases.model(), peft_config=copy.deepcopy(config)))
    fusion = trl.fuse(trainers[1])
    assert_same(cases.train(trainers[0]), cases.train(trainers[1]))
    assert fusion.report().calls == {"policy linear_logprob": 2}


@pytest.mark.parametrize(
    ("task", "options"),
    [("sft", {"gradient_checkpointing": True}), ("dpo", {}), ("grpo", {"beta": 0.1})],
)
def test_adapters_run_fused(task, options, tmp_path):
    """In the policy's forward pass, in generation, and under TRL's gradient checkpointing; none in the reference's."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
    trainers = []
    for name in ("plain", "fused"):
        torch.manual_seed(5)
        make = getattr(cases, task)
        trainers.append(make(tmp_path / name, cases.model(), peft_config=copy.deepcopy(config), **options))
    fusion = trl.fuse(trainers[1])
    assert_same(*map(cases.train, trainers))
    (policy,) = fusion.report().models.values()
    assert not policy.unfused_adapters
    if task == "dpo":  # the reference, which is the policy without its adapters, came last
        assert "adapters" not in policy.calls
        assert policy.adapters_off == policy.adapters_before == 14
        assert "switched off or merged; in the last step with adapters 14 ran." in policy.last_step()
    else:
        # A checkpoint computes a layer again, but for its last product.
        assert policy.calls["adapters"] == (26 if options.get("gradient_checkpointing") else 14)
        assert not policy.adapters_off


def test_a_reference_from_a_path_and_a_head_in_fp32(tmp_path):
    cases.model("llama").save_pretrained(tmp_path / "model")
    load = cases.transformers.AutoModelForCausalLM.from_pretrained
    made = [cases.grpo(tmp_path / n, load(tmp_path / "model"), beta=0.1, cast_lm_head_to_fp32=True, temperature=0.7,
                       entropy_coef=0.1) for n in "ab"]  # fmt: skip
    fusion = trl.fuse(made[1], keep_bytes=1 << 20)
    assert_same(*map(cases.train, made))
    assert fusion.report().total["reference linear_logprob"] > 0


def test_an_option_that_tigon_has_not_is_left(tmp_path):
    plain, trainer = cases.twins(cases.dpo, tmp_path, use_weighting=True, learning_rate=3.0)
    fusion = trl.fuse(trainer)
    assert_same(cases.train(plain), cases.train(trainer))
    report = fusion.report()
    assert report.left == {"use_weighting needs Σ p² for each token": 3}
    assert report.total == {"reference linear_logprob": 3}
    assert "Left to TRL: use_weighting" in str(report)


def test_a_batch_without_labels_is_zero_and_still_connected(tmp_path):
    trainer = cases.sft(tmp_path, cases.model())
    trl.fuse(trainer)
    ids = torch.arange(12).view(2, 6)
    output = trainer.model(input_ids=ids, labels=torch.full_like(ids, -100), fused_lm_head=True)
    assert output.log_probs.shape == (2, 5)
    output.log_probs.sum().backward()
    gradients = [p.grad for p in trainer.model.parameters()]
    assert all(g is not None and not g.any() for g in gradients)


def test_label_smoothing_builds_its_logits(tmp_path):
    plain, trainer = cases.twins(cases.sft, tmp_path, label_smoothing_factor=0.1)
    fusion = trl.fuse(trainer)
    assert_same(cases.train(plain), cases.train(trainer))
    report = fusion.report()
    assert report.headline() == ("SFTTrainer: the loss is TRL's own, from whole logits (label_smoothing_factor=0.1)")
    assert [row.fused for row in report.rows] == [False, True]
    assert "the metrics only" in report.rows[1].what
    assert report.left == {"the loss, from whole logits, for label_smoothing_factor=0.1": 3}
    assert "Left to TRL: the loss, from whole logits, for label_smoothing_factor=0.1 (3×)." in str(report)


def test_an_option_that_the_trainer_does_not_read_changes_no_report(tmp_path):
    """DPO ignores the smoothing of the Trainer's labels: its own is another option."""
    report = trl.fuse(cases.dpo(tmp_path, cases.model(), label_smoothing_factor=0.1)).report()
    assert report.headline() == "DPOTrainer: the loss runs in Tigon"
    assert not report.whole_logits


@pytest.mark.parametrize("task", ["sft", "orpo"])
def test_a_model_that_is_fused_alone_is_warned_about_once(task, tmp_path):
    policy = cases.model()
    fusion = tigon.fuse(policy)
    trainer = getattr(cases, task)(tmp_path, policy)
    with pytest.warns(UserWarning, match=r"Call tigon.integrations.trl.fuse\(trainer\)") as caught:
        trainer.train()
    assert sum("tigon.integrations.trl.fuse" in str(w.message) for w in caught) == 1
    report = fusion.report()
    assert report.steps >= 3
    assert (report.calls.get("head", 0), report.calls["norm"]) == (0, 5), "the layers of the last step, and no more"


def test_arguments_that_are_not_known(tmp_path, monkeypatch):
    from trl.trainer import utils

    class Later(utils._ChunkedLogProbFunction):
        @staticmethod
        def forward(ctx, hidden, weight, bias, targets, sinks):
            raise AssertionError

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Later)
    (row,) = trl.fuse(cases.sft(tmp_path, cases.model())).report().rows
    assert not row.fused
    assert "Later takes arguments that Tigon does not know" in row.what


@pytest.mark.parametrize(("task", "method"), [("gkd", "generalized_jsd_loss"), ("orpo", "odds_ratio_loss")])
def test_a_loss_of_ones_own_is_not_replaced(task, method, tmp_path):
    trainer = getattr(cases, task)(tmp_path, cases.model())
    trainer.__class__ = type("Mine", (type(trainer),), {method: lambda *_, **__: None})
    report = trl.fuse(trainer).report()
    assert not {"generalized_jsd_loss", "get_batch_loss_metrics"} & vars(trainer).keys()
    if task == "orpo":
        assert [(row.fused, "or is your own" in row.what) for row in report.rows] == [(False, True)]


@pytest.mark.parametrize("task", ["dpo", "gkd", "orpo"])
def test_remove(task, tmp_path):
    plain, trainer = cases.twins(getattr(cases, task), tmp_path)
    roots = [getattr(trainer, name, None) for name in ("model", "ref_model", "teacher_model")]
    held = [trainer, *(module for root in roots if root is not None for module in root.modules())]
    before = [dict(vars(instance)) for instance in held]
    fusion = trl.fuse(trainer)
    assert trl.fuse(trainer) is fusion
    fusion.remove()
    for instance, attributes in zip(held, before, strict=True):
        now = vars(instance)
        assert now.keys() == attributes.keys()
        assert all(now[name] is value for name, value in attributes.items()), type(instance)
    fusion.remove()
    assert "removed again" in fusion.report().headline()
    rows, moved = cases.train(plain)
    again, moved_again = cases.train(trainer)
    assert rows == again
    assert all(torch.equal(moved[name], moved_again[name]) for name in moved)
    assert not fusion.report().total


def test_a_model_that_was_fused_before(tmp_path):
    policy = cases.model()
    own = tigon.fuse(policy)
    trainer = cases.sft(tmp_path, policy)
    with trl.fuse(trainer) as fusion:
        cases.train(trainer)
        assert fusion.report().calls == LOSS["sft"]
        assert own.report().calls["norm"] == 5, "counted by step"
    assert own.report().active
    assert fusion.models["policy"] is own


def test_a_model_that_was_fused_between(tmp_path):
    plain, trainer = cases.twins(cases.sft, tmp_path, gradient_checkpointing=True)
    own = tigon.fuse(trainer.model)
    with trl.fuse(trainer) as fusion:
        assert_same(cases.train(plain), cases.train(trainer))
        assert fusion.report().calls == LOSS["sft"]
        assert own.report().calls["norm"] == 5 + 4, "those of the layers again in the backward pass"
    assert own.report().active
    own.remove()
    trainer.train()
    assert fusion.report().total == {"policy linear_logprob": 3}


def test_parts_by_choice(tmp_path):
    fusion = trl.fuse(cases.sft(tmp_path, cases.model()), losses=False, parts=tigon.PARTS - {"norm"})
    report = fusion.report()
    assert not report.rows
    assert {row.kind for row in report.models["policy"].fused_rows} >= {"mlp", "rotary"}
    assert "norm" not in {row.kind for row in report.models["policy"].rows}


def test_the_report_is_for_one_screen_and_for_programs(tmp_path):
    import json

    trainer = cases.dpo(tmp_path, cases.model())
    fusion = trl.fuse(trainer)
    assert "No step has run yet." in str(fusion.report())
    cases.train(trainer)
    text = str(fusion.report())
    assert text.startswith("DPOTrainer: the loss runs in Tigon\n")
    assert "Ran in the last of 3 steps: policy linear_logprob 1, reference linear_logprob 1." in text
    assert "reference: LlamaForCausalLM" in text
    assert len(text.splitlines()) <= 24
    assert json.loads(json.dumps(fusion.report().to_dict()))["calls"] == LOSS["dpo"]


def test_a_trainer_of_transformers_gets_its_model_fused(tmp_path):
    from transformers import Trainer, TrainingArguments

    trainer = Trainer(cases.model(), TrainingArguments(str(tmp_path), report_to=[], use_cpu=True))
    report = trl.fuse(trainer).report()
    assert [row.fused for row in report.rows] == [False]
    assert any(row.kind == "head" for row in report.models["policy"].fused_rows)


def test_what_is_no_trainer_is_refused():
    with pytest.raises(TypeError, match="fuse: trainer must be a TRL or transformers trainer, got Linear"):
        trl.fuse(torch.nn.Linear(2, 2))


def test_fp8(tmp_path):
    trainer = cases.sft(tmp_path, cases.model(), bf16=True)
    with ignore_sizes():
        fusion = trl.fuse(trainer, fp8=True)
        trainer.train()
    (report,) = fusion.report().models.values()
    assert sum(row.calls for row in report.rows if row.kind == "fp8") == 3
