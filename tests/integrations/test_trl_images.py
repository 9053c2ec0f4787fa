"""TRL's SFT and transformers' Trainer on images: losses as without fuse, no logits, and a report of the tower."""

import pytest

pytest.importorskip("trl", minversion="1.16")
pytest.importorskip("datasets")
import datasets
import torch
import transformers
from trl import SFTConfig, SFTTrainer
from trl_cases import COMMON
from vision_made import COLOURS, make_model, make_processor, paint, talk

from tigon.integrations.trl import fuse


@pytest.fixture(scope="module")
def rows():
    """Images of several sizes, and a text without one."""
    images = [[paint(colour, 9 + 4 * i, 5)] for i, colour in enumerate(COLOURS)]
    images[2] = []
    talks = [talk(colour, len(seen)) for colour, seen in zip(COLOURS, images, strict=True)]
    return datasets.Dataset.from_dict({"images": images, "messages": talks})


def run(trainer_class, folder, rows, fused, packing=False, **options):
    processor = make_processor()
    args = {**COMMON, "max_steps": 1, **options}
    if trainer_class is SFTTrainer:
        config = SFTConfig(str(folder), max_length=None, **args)
        trainer = SFTTrainer(
            make_model(processor.tokenizer), args=config, train_dataset=rows, processing_class=processor
        )
    else:
        from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

        config = transformers.TrainingArguments(str(folder), remove_unused_columns=False, **args)
        trainer = transformers.Trainer(
            make_model(processor.tokenizer), config, train_dataset=rows,
            data_collator=DataCollatorForVisionLanguageModeling(processor),
        )  # fmt: skip
    fusion = fuse(trainer, packing=packing) if fused else None
    trainer.train()
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return [log["loss"] for log in trainer.state.log_history if "loss" in log], weights, fusion


@pytest.mark.parametrize("trainer_class", [SFTTrainer, transformers.Trainer])
def test_training_on_images_is_the_same_without_logits(trainer_class, rows, tmp_path):
    plain_losses, plain, _ = run(trainer_class, tmp_path / "plain", rows, fused=False)
    losses, weights, fusion = run(trainer_class, tmp_path / "fused", rows, fused=True)
    assert losses == pytest.approx(plain_losses, abs=2e-4)
    for name, p in plain.items():
        torch.testing.assert_close(weights[name], p, rtol=1e-3, atol=1e-5)
    report = fusion.report()
    text = str(report)
    assert "SiglipEncoderLayer" in text or "SiglipAttention" in text
    assert "patches of 2 × 2" in text
    built = [row for r in getattr(report, "models", {"": report}).values() for row in getattr(r, "logits_built_by", {})]
    assert not built


def test_batches_with_images_run_without_their_padding(rows, tmp_path):
    plain_losses, plain, _ = run(SFTTrainer, tmp_path / "plain", rows, fused=False)
    losses, weights, fusion = run(SFTTrainer, tmp_path / "packed", rows, fused=True, packing=True)
    assert losses == pytest.approx(plain_losses, abs=2e-4)
    for name, p in plain.items():
        torch.testing.assert_close(weights[name], p, rtol=1e-3, atol=1e-5)
    report = fusion.report()
    assert report.tokens["computed"] == report.tokens["real"] < report.tokens["padded"]
    assert not report.padded
