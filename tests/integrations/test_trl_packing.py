"""TRL's trainers without padding: the losses, metrics and gradients of the padded trainer, which is TRL's own."""

import copy
import itertools
import re
from collections import Counter

import pytest
import torch

pytest.importorskip("trl", minversion="1.16")
pytest.importorskip("datasets")
import transformers
import trl_cases as cases
from test_trl import assert_same

import tigon
from tigon.integrations import trl
from tigon.integrations.packing.padding_free import PaddingFree

pytestmark = pytest.mark.filterwarnings("ignore")
WORDS = ["the", "cat", "sat", "on", "the", "mat", "and", "was", "glad"]
TEXTS = [" ".join(itertools.islice(itertools.cycle(WORDS), n)) for n in (3, 9, 14, 5, 4, 12, 6, 8)]


def lengthen(trainer):
    """Give a trainer's samples different lengths, by repeating their answers."""

    def stretch(row, i):
        longer = {k: row[k] * (1 + i % 4) for k in ("chosen_ids", "completion_ids", "KL_completion_ids") if k in row}
        return {**row, **longer}

    trainer.train_dataset = trainer.train_dataset.map(stretch, with_indices=True)
    return trainer


def sft(folder, policy, **options):
    from trl import SFTConfig, SFTTrainer

    answers = [f" {text}" for text in TEXTS]
    data = cases.rows(prompt=cases.PROMPTS, completion=answers)
    args = SFTConfig(str(folder), **{**cases.COMMON, "max_length": 32, **options})
    return SFTTrainer(policy, args=args, train_dataset=data, eval_dataset=data, processing_class=cases.tokenizer())


def reward(folder, policy, **options):
    from trl import RewardConfig, RewardTrainer

    args = RewardConfig(str(folder), **{**cases.COMMON, "max_length": 32, **options})
    data = cases.rows(chosen=[f"{p} {t}" for p, t in zip(cases.PROMPTS, TEXTS, strict=True)], rejected=cases.SENTENCES)
    torch.manual_seed(5)
    config = copy.deepcopy(policy.config)
    config.num_labels = 1
    judge = transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    return RewardTrainer(judge, args=args, train_dataset=data, processing_class=cases.tokenizer())


def dpo(*args, **options):
    return lengthen(cases.dpo(*args, **options))


def kto(*args, **options):
    return lengthen(cases.kto(*args, **options))


@pytest.mark.parametrize(
    ("make", "family", "options"),
    [
        (sft, "mixtral", {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}),
        (dpo, "gemma2", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "max_steps": 2}),
        (kto, "qwen3", {"max_steps": 2}),
        (reward, "mistral", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "max_steps": 2}),
    ],
)
def test_losses_metrics_and_gradients(make, family, options, tmp_path):
    plain_trainer, trainer = cases.twins(make, tmp_path, family, **options)
    fusion = trl.fuse(trainer, packing=True)
    plain = cases.train(plain_trainer)
    assert_same(plain, cases.train(trainer))
    report = fusion.report()
    assert report.tokens["computed"] == report.tokens["real"] < 0.9 * report.tokens["padded"]
    assert not report.padded
    assert re.search(r"\d+% of the tokens of padded batches would be padding; packed: 0%", report.last_step())
    if "num_tokens" in plain[0][0]:  # TRL's own count of the tokens that are not padding
        assert report.tokens["real"] >= max(row.get("num_tokens", 0) for row in plain[0])
    fusion.remove()
    assert "forward" not in vars(trainer.model.base_model)


def test_adapters_checkpointing_and_shared_prompts(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    trainers = []
    for name in ("plain", "packed", "shared"):
        torch.manual_seed(5)
        options = {"peft_config": copy.deepcopy(config), "gradient_checkpointing": True, "max_steps": 2}
        trainers.append(dpo(tmp_path / name, cases.model(), **options))
    plain = cases.train(trainers[0])
    fusion = trl.fuse(trainers[1], packing=True)
    assert_same(plain, cases.train(trainers[1]))
    assert fusion.report().tokens["computed"] < 0.9 * fusion.report().tokens["padded"]
    fusion = trl.fuse(trainers[2], packing=True, shared_prefix=True)
    assert_same(plain, cases.train(trainers[2]))
    assert fusion.report().shared  # prompts computed once, and no padding either
    assert not fusion.report().tokens


def test_distributed_data_parallel(tmp_path, launched):
    plain_trainer, trainer = cases.twins(sft, tmp_path, ddp_find_unused_parameters=True, max_steps=2)
    fusion = trl.fuse(trainer, packing="auto")
    assert_same(cases.train(plain_trainer), cases.train(trainer))
    assert isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    assert fusion.report().tokens["computed"] < 0.9 * fusion.report().tokens["padded"]


def test_left_padding_evaluation_and_generation(tmp_path):
    plain_trainer, trainer = cases.twins(cases.grpo, tmp_path, max_steps=1, per_device_train_batch_size=8)
    fusion = trl.fuse(trainer, packing=True)
    assert_same(cases.train(plain_trainer), cases.train(trainer))
    assert fusion.report().tokens["computed"] < fusion.report().tokens["padded"]
    plain_trainer, trainer = cases.twins(sft, tmp_path)
    fusion = trl.fuse(trainer, packing=True)
    found = [{k: v for k, v in t.evaluate().items() if "per_second" not in k and "time" not in k}
             for t in (plain_trainer, trainer)]  # fmt: skip
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert fusion.report().tokens["computed"] < fusion.report().tokens["padded"]


def test_streams_and_metrics_of_the_user(tmp_path):
    """They get batches as TRL makes them, padded; the decoder drops the padding."""
    shapes, found = [], []

    def measure(prediction):
        shapes.append(prediction.predictions.shape[:2])
        return {}

    for name in ("plain", "packed"):
        trainer = sft(tmp_path / name, cases.model(), max_steps=1)
        trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()
        trainer.compute_metrics = measure
        fusion = trl.fuse(trainer, packing=name == "packed")
        found.append(cases.train(trainer))
        trainer.evaluate()
    assert_same(*found)
    assert shapes[0] == shapes[1]
    assert shapes[0][0] == len(TEXTS)
    assert fusion.report().tokens["computed"] == fusion.report().tokens["real"]


def test_batches_that_the_users_trainer_reads_stay_padded(tmp_path):
    class Reader(type(sft(tmp_path, cases.model()))):
        def compute_loss(self, model, inputs, *args, **options):
            self.real = int(inputs["attention_mask"].sum())
            return super().compute_loss(model, inputs, *args, **options)

    trainer = sft(tmp_path, cases.model(), max_steps=1)
    trainer.__class__ = Reader
    fusion = trl.fuse(trainer, packing=True)
    trainer.train()
    assert fusion.report().tokens["computed"] == trainer.real


def test_predictions_are_a_row_a_sample(tmp_path):
    trainer = sft(tmp_path, cases.model())
    with trl.fuse(trainer, packing=True):
        assert "cu_seq_lens_q" in next(iter(trainer.get_train_dataloader()))
        assert trainer.predict(trainer.eval_dataset).predictions.shape[0] == len(TEXTS)
    assert "cu_seq_lens_q" not in next(iter(trainer.get_train_dataloader()))


@pytest.mark.parametrize("mask", [[[1, 1, 0, 1], [1, 1, 1, 1]], [[1, 1, 0, 0], [0, 0, 1, 1]]])
def test_positions_that_tell_other_samples(mask):
    """A gap in a row, and a row that begins at the column behind the row before: attention by positions is wrong."""
    model, ids, mask = cases.model().eval(), torch.arange(1, 9).view(2, 4), torch.tensor(mask)
    expected = model.model(ids, mask, use_cache=False).last_hidden_state
    padded = Counter()
    PaddingFree(model, True, Counter(), padded)
    found = model.model(ids, mask, use_cache=False).last_hidden_state
    torch.testing.assert_close(found[mask != 0], expected[mask != 0])
    assert sum(padded.values()) == 1


def test_fsdp1_is_not_probed():
    """A call of an inner module would make it the root, and the model's own forward would fail. By its name alone."""
    model = cases.model()
    model.model.layers[0] = type("FullyShardedDataParallel", (torch.nn.Module,), {})()
    with pytest.raises(ValueError, match="not in memory as a whole"):
        PaddingFree(model, True, Counter(), Counter())


def test_rows_that_trl_packed_run_as_they_are(tmp_path):
    options = {"packing": True, "max_steps": 1}
    plain_trainer, trainer = cases.twins(cases.sft, tmp_path, **options)
    fusion = trl.fuse(trainer, packing="auto")
    assert_same(cases.train(plain_trainer), cases.train(trainer))
    assert [row.what for row in fusion.report().rows if row.kind == "packing"] == ["TRL's packed rows"]
    assert 0 < fusion.report().tokens["real"] <= fusion.report().tokens["padded"]


def test_a_copy_of_the_model_is_padded(tmp_path):
    trainer = sft(tmp_path, cases.model())
    trl.fuse(trainer, packing=True)
    copied = copy.deepcopy(trainer.model.model).eval()
    ids, mask = torch.arange(1, 13).view(2, 6), torch.tensor([[1] * 6, [1, 1, 0, 0, 0, 0]])
    expected = cases.model().eval().model(ids, mask, use_cache=False).last_hidden_state
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.zero_()
    found = copied(ids, mask, use_cache=False).last_hidden_state
    torch.testing.assert_close(found[mask != 0], expected[mask != 0])
    assert not trainer.model.model(ids, mask, use_cache=False).last_hidden_state[mask == 0].any()


def test_auto_leaves_attention_with_dense_masks_padded(tmp_path):
    trainer = sft(tmp_path, cases.model())
    fusion = trl.fuse(trainer, packing="auto", parts=())
    (row,) = (row for row in fusion.report().rows if row.kind == "packing")
    assert not row.fused
    assert "dense mask" in row.what
    assert "forward" not in vars(trainer.model.model)


@pytest.mark.parametrize(
    ("family", "further", "reason"),
    [
        ("gpt_oss", {"head_dim": 8, "num_local_experts": 4}, "reads the samples before"),
        ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}, "reads the samples before"),
        ("mamba", {"state_size": 4}, r"\(Mamba\w+\) .*would mix"),
    ],
)
def test_models_that_mix_samples_are_refused(family, further, reason, tmp_path):
    config = transformers.AutoConfig.for_model(family, **cases.SIZES, **further)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    trainer = sft(tmp_path, model)
    with pytest.raises(ValueError, match=f"packing=True for the policy of SFTTrainer: .*{reason}"):
        trl.fuse(trainer, packing=True, parts=tigon.PARTS - {"documents"})
    assert "_tigon_fusion" not in vars(trainer.model)
    assert not any("forward" in vars(m) and hasattr(m, "get_input_embeddings") for m in [trainer.model.base_model])


def test_a_hybrid_is_packed(tmp_path):
    plain, trainer = cases.twins(sft, tmp_path, "qwen3_5_text", max_steps=1)
    fusion = trl.fuse(trainer, packing=True)
    assert_same(cases.train(plain), cases.train(trainer))
    assert fusion.report().tokens["computed"] == fusion.report().tokens["real"]
