"""TRL's trainers without padding: the losses, metrics and gradients of the padded trainer, which is TRL's own."""

import copy
import itertools
import re

import pytest
import torch

pytest.importorskip("trl", minversion="1.16")
pytest.importorskip("datasets")
import transformers
import trl_cases as cases
from test_trl import assert_same

import tigon
from tigon.integrations import trl

pytestmark = pytest.mark.filterwarnings("ignore")
WORDS = "the cat sat on the mat and was glad".split()
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
    assert re.search(r"\d+ % of the tokens|\d+% of the tokens", report.last_step())
    if "num_tokens" in plain[0][0]:  # TRL's own count of the tokens that are not padding
        assert report.tokens["real"] >= max(row.get("num_tokens", 0) for row in plain[0])
    fusion.remove()
    assert "forward" not in vars(trainer.model.base_model)
