"""TRL's trainers with prompts computed once: the losses, metrics and gradients of the unshared trainer.

The plain run is TRL's own; the rows of a micro-batch are the same in both.
"""

import collections
import copy
import itertools
import types

import pytest
import torch

import tigon

pytest.importorskip("trl", minversion="1.16")
pytest.importorskip("datasets")
import trl_cases as cases
from test_trl import assert_same

from tigon.integrations import trl
from tigon.integrations.trl.shared_prefix import Sharing, find_rows, pack, shuffle_by_groups

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("task", "family"), [("dpo", "gemma2"), ("dpo", "mistral"), ("grpo", "qwen3"), ("grpo", "granite")]
)
def test_losses_metrics_and_gradients(task, family, tmp_path):
    plain_trainer, trainer = cases.twins(getattr(cases, task), tmp_path, family, max_steps=1)
    fusion = trl.fuse(trainer, shared_prefix=True)
    plain = cases.train(plain_trainer)
    assert_same(plain, cases.train(trainer))
    report = fusion.report()
    assert 0 < report.shared["rows"] < 0.85 * report.shared["separate"]
    assert not report.unshared
    for model in report.models.values():
        assert model.calls["prefix"] == 2
        assert not model.logits_built_by


def test_a_hybrid_hands_the_state_of_a_prompt_to_its_completions(tmp_path):
    plain, trainer = cases.twins(cases.grpo, tmp_path, "qwen3_5_text", max_steps=1)
    fusion = trl.fuse(trainer, shared_prefix=True)
    assert_same(cases.train(plain), cases.train(trainer))
    report = fusion.report()
    assert 0 < report.shared["rows"] < 0.85 * report.shared["separate"]
    assert not report.unshared
    assert report.models["policy"].calls["recurrence"] == 1


def test_rloo_over_several_micro_batches(tmp_path):
    """A step is two micro-batches of two prompts; in the shared run each has whole groups, in the plain one it may not.

    RLOO's loss of a step is a mean over sequences, whatever micro-batch they are in.
    """
    options = {"gradient_accumulation_steps": 2, "max_steps": 2}
    plain_trainer, trainer = cases.twins(cases.rloo, tmp_path, **options)
    fusion = trl.fuse(trainer, shared_prefix=True)
    plain, shared = cases.train(plain_trainer), cases.train(trainer)
    for name, moved in plain[1].items():
        assert (shared[1][name] - moved).norm() <= 1e-3 * moved.norm() + 3e-7 * moved.numel() ** 0.5, name
    assert fusion.report().shared["rows"] < 0.8 * fusion.report().shared["separate"]


def test_distributed_data_parallel(tmp_path, launched):
    plain_trainer, trainer = cases.twins(cases.dpo, tmp_path, ddp_find_unused_parameters=True, max_steps=1)
    fusion = trl.fuse(trainer, shared_prefix=True)
    assert_same(cases.train(plain_trainer), cases.train(trainer))
    assert isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    assert fusion.report().shared


def test_adapters_checkpointing_and_a_reference_of_the_policy(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    trainers = []
    for name in ("plain", "fused"):
        torch.manual_seed(5)
        options = {"peft_config": copy.deepcopy(config), "gradient_checkpointing": True, "max_steps": 2}
        trainers.append(cases.dpo(tmp_path / name, cases.model(), **options))
    fusion = trl.fuse(trainers[1], shared_prefix=True)
    assert_same(cases.train(trainers[0]), cases.train(trainers[1]))
    assert fusion.report().shared
    assert "rows in place of" in str(fusion.report())


def test_a_router_loss_keeps_its_rows(tmp_path):
    plain, trainer = cases.twins(cases.dpo, tmp_path, "mixtral", max_steps=1)
    fusion = trl.fuse(trainer, shared_prefix=True)
    assert_same(cases.train(plain), cases.train(trainer))
    report = fusion.report()
    assert not report.shared
    assert report.unshared == {"a router's loss counts the tokens of every prompt": 2}
    assert "Prompts computed once per row: a router's loss" in str(report)


def test_prompts_that_differ_keep_their_rows(tmp_path):
    plain, trainer = cases.twins(cases.sft, tmp_path, max_steps=1)
    fusion = trl.fuse(trainer, shared_prefix=True)
    assert_same(cases.train(plain), cases.train(trainer))
    (reason,) = fusion.report().unshared
    assert reason in ("no two rows share a prompt", "a row is not a prompt followed by a completion")


def test_auto_shares_where_prompts_are_a_quarter(tmp_path):
    trainer = cases.dpo(tmp_path / "long", cases.model(), max_steps=1)
    with trl.fuse(trainer, shared_prefix="auto") as fusion:
        cases.train(trainer)
        assert fusion.report().shared
    short = cases.rows("chosen", "rejected", prompt=["a"] * 8)
    trainer = cases.dpo(tmp_path / "short", cases.model(), max_steps=1)
    trainer = type(trainer)(
        cases.model(), ref_model=cases.reference(trainer.model), args=trainer.args, train_dataset=short,
        processing_class=cases.tokenizer(),
    )  # fmt: skip
    with trl.fuse(trainer, shared_prefix="auto") as fusion:
        cases.train(trainer)
        assert not fusion.report().shared
        assert fusion.report().unshared == {"prompts are less than a quarter of the tokens": 2}
    with trl.fuse(trainer, shared_prefix=True) as fusion:
        cases.train(trainer)
        assert fusion.report().shared


def test_what_cannot_share_is_refused_by_name_and_left_by_auto(tmp_path):
    trainer = cases.orpo(tmp_path / "orpo", cases.model())
    before = dict(vars(trainer))
    with pytest.raises(
        ValueError, match="shared_prefix=True for the policy of ORPOTrainer: its loss does not use log-"
    ):
        trl.fuse(trainer, shared_prefix=True)
    assert vars(trainer) == before
    assert "forward" not in vars(trainer.model)
    with trl.fuse(trainer, shared_prefix="auto") as fusion:
        assert [(row.kind, row.fused) for row in fusion.report().rows] == [("loss", True), ("prefix", False)]

    plain, trainer = cases.twins(cases.dpo, tmp_path / "dropping", max_steps=2)
    for held in (trainer.model, trainer.ref_model):
        layer = held.model.layers[1]
        forward = layer.forward
        layer.forward = lambda *args, shared_prefix=None, forward=forward, **kwargs: forward(*args, **kwargs)
    with trl.fuse(trainer, shared_prefix="auto") as fusion:
        assert_same(cases.train(plain), cases.train(trainer))
        (reason,) = fusion.report().unshared
        assert reason.startswith("LlamaAttention did not receive the layout")

    policy = cases.model()
    tigon.fuse(policy)
    trainer = cases.sft(tmp_path / "before", policy)
    with pytest.raises(ValueError, match="the model was already fused, without shared_prefix"):
        trl.fuse(trainer, shared_prefix=True)
    with pytest.raises(ValueError, match="shared_prefix must be True, False or 'auto', got 'yes'"):
        trl.fuse(cases.sft(tmp_path / "word", cases.model()), shared_prefix="yes")


def test_remove(tmp_path):
    trainer = cases.grpo(tmp_path, cases.model())
    before = dict(vars(trainer))
    attention = trainer.model.config._attn_implementation
    trl.fuse(trainer, shared_prefix=True).remove()
    assert vars(trainer).keys() == before.keys()
    assert all(vars(trainer)[name] is value for name, value in before.items())
    assert trainer.model.config._attn_implementation == attention


def test_packing_rows():
    """Left padding before a prompt, right padding after a completion, a row without labels, prompts alike or not."""
    ids = torch.tensor([
        [0, 0, 5, 6, 7, 8, 0],
        [0, 0, 5, 6, 9, 0, 0],
        [0, 3, 5, 6, 7, 8, 4],
        [0, 0, 5, 6, 1, 1, 1],
        [5, 6, 9, 9, 9, 0, 0],
    ])  # fmt: skip
    mask = (ids != 0).long()
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :4] = -100
    labels[3] = -100
    labels[4, 2:4] = ids[4, 2:4]
    packed = pack(ids, labels, find_rows(ids, mask, labels))
    batch = packed.batch
    assert batch.layout.prefix_lengths == (2, 3, 2)
    assert batch.layout.suffix_lengths == ((2, 1), (3,), (3,))
    assert batch.input_ids[0].tolist() == [5, 6, 3, 5, 6, 5, 6, 7, 8, 9, 7, 8, 4, 9, 9, 9]
    assert packed.position_ids[0].tolist() == [2, 3, 1, 2, 3, 0, 1, 4, 5, 4, 4, 5, 6, 2, 3, 4], (
        "columns, as TRL has them"
    )
    assert packed.labels[0].tolist() == [7, 8, 9, 7, 8, 4, 9, 9, 9]
    assert batch.separate_rows == 18
    flat = torch.zeros(30).scatter(0, packed.place, packed.labels[0].float()).view(5, 6)
    assert torch.equal(flat, labels.clamp(min=0)[:, 1:].float())
    labels[0, 2:] = ids[0, 2:]  # no prompt
    assert find_rows(ids, mask, labels) is None
    assert find_rows(ids, mask, torch.full_like(ids, -100)) is None


def test_nothing_but_lengths_is_copied_where_sharing_is_declined(monkeypatch):
    """A step whose prompts stay as they are copies six numbers a row to the host; ids and labels where sharing pays."""
    copied = []
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t: copied.append(tuple(t.shape)) or cpu(t))
    for name in ("tolist", "item", "numpy", "__bool__", "__int__"):
        own = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda t, own=own: copied.append(tuple(t.shape)) or own(t))

    swapped = types.SimpleNamespace(unshared=collections.Counter())
    model = cases.model().eval()
    ids = torch.randint(5, 50, (4, 40))
    ids[:, :8] = ids[0, :8]  # a fifth of the tokens
    labels = ids.clone()
    labels[:, :8] = -100
    different = ids.clone()
    different[:, 0] = torch.arange(4)
    few, none, rowless = (
        "prompts are less than a quarter of the tokens",
        "no two rows share a prompt",
        "a row is not a prompt followed by a completion",
    )
    for share, batch, wanted, reason in (
        ("auto", ids, labels, few), ("auto", different, labels, none), (True, different, labels, none),
        (True, ids, ids, rowless),
    ):  # fmt: skip
        copied.clear()
        swapped.unshared.clear()
        inputs = {"input_ids": batch, "attention_mask": torch.ones_like(ids), "labels": wanted}
        assert Sharing(swapped, "policy", share).run(model, None, (), inputs) is None
        assert swapped.unshared == {reason: 1}
        assert copied
        assert all(len(shape) == 2 and 6 in shape and 4 in shape for shape in copied), copied
    copied.clear()
    pack(ids, labels, find_rows(ids, None, labels))
    assert (2, 4, 40) in copied


def test_prompts_of_one_checksum_are_told_apart(monkeypatch):
    """Their tokens are compared: packed, they are two prefixes."""
    ids = torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]])
    labels = ids.clone()
    labels[:, :2] = -100
    rows = [row._replace(checksum=0) for row in find_rows(ids, None, labels)]
    assert pack(ids, labels, rows).batch.layout.prefix_lengths == (2, 2)
    assert len({row.checksum for row in find_rows(ids, None, labels)}) == 2


def test_groups_are_shuffled_whole():
    prompts = torch.tensor([[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5], [0, 6, 6], [0, 1, 2]])
    rows = {"prompt_ids": prompts, "prompt_mask": (prompts != 0).long(), "number": torch.arange(6), "none": None,
            "scalar": torch.tensor(7), "words": list("abcdef")}  # fmt: skip
    seen = set()
    for seed in range(20):
        torch.manual_seed(seed)
        shuffled = shuffle_by_groups(rows)
        order = shuffled["number"].tolist()
        assert sorted(order) == list(range(6))
        assert torch.equal(shuffled["prompt_ids"], prompts[order])
        assert shuffled["words"] == ["abcdef"[i] for i in order]
        assert len(list(itertools.groupby(shuffled["prompt_ids"].tolist()))) == 3
        assert shuffled["scalar"] == 7
        seen.add(tuple(order))
    assert len(seen) > 10
