"""MicroBatchSAMCallback in the Hugging Face Trainer: what it computes, beside what, and that it goes again."""

import copy

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from test_trainer import counting, llama, losses, trainer
from transformers import Trainer

from tigon.integrations.sam import MicroBatchSAMCallback
from tigon.integrations.trainer import TigonCallback
from tigon.training import MicroBatchSAM

RHO = 0.2
# Rows in their order; no part of a batch is lost.
PLAIN = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "optim": "sgd",
         "lr_scheduler_type": "constant", "learning_rate": 0.5, "train_sampling_strategy": "sequential"}  # fmt: skip


def with_sam(folder, model=None, **options):
    made = trainer(folder, model or llama(), **{**PLAIN, **options})
    made.add_callback(MicroBatchSAMCallback(made, rho=RHO))
    return made


def by_hand(steps):
    """The same in a loop of one's own. Each micro-batch's loss is a sum over the tokens of all."""
    model, rows = llama(), torch.stack([row["input_ids"] for row in counting()])
    sam = MicroBatchSAM(torch.optim.SGD(model.parameters(), lr=0.5), model, rho=RHO)
    found = []
    for step in range(steps):
        loss = 0.0
        for part in rows[8 * step : 8 * step + 8].chunk(2):
            own = {"input_ids": part, "labels": part, "num_items_in_batch": 8 * (part.shape[1] - 1)}
            loss += sam.accumulate(lambda own=own: model(**own).loss).item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        sam.step()
        sam.zero_grad()
        found.append(loss)
    return model, found


def test_accumulation_and_clipping_are_those_of_a_loop(tmp_path):
    made = with_sam(tmp_path)
    found = losses(made)
    model, expected = by_hand(4)
    assert found == pytest.approx(expected, rel=1e-4)
    for ours, theirs in zip(made.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    plain = trainer(tmp_path, llama(), **PLAIN)
    plain.train()
    apart = [(a - b).norm() for a, b in zip(made.model.parameters(), plain.model.parameters(), strict=True)]
    assert max(apart) > 1e-3, "SAM goes elsewhere"
    assert "training_step" not in vars(made)


def test_beside_the_fused_model(tmp_path):
    made = with_sam(tmp_path)
    callback = TigonCallback(report=False)
    made.add_callback(callback)
    found = losses(made)
    assert found == pytest.approx(by_hand(4)[1], rel=1e-4)
    assert callback.report().calls["head"] == 1
    assert not callback.report().logits_built_by


def test_resuming_goes_on_where_it_was(tmp_path):
    adam = {"optim": "adamw_torch", "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 2}
    whole = with_sam(tmp_path / "whole", **adam)
    whole.train()
    again = with_sam(tmp_path / "whole", **adam)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert again.state.global_step == 4
    for ours, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_what_was_on_the_trainer_before_is_there_again(tmp_path):
    made = with_sam(tmp_path, max_steps=1)
    calls = []

    def training_step(*args, **kwargs):
        calls.append(1)
        return Trainer.training_step(made, *args, **kwargs)

    made.training_step = training_step
    made.train()
    assert made.training_step is training_step
    assert len(calls) == 4
    made.train()
    assert len(calls) == 8


def test_bad_trainers_get_a_sentence(tmp_path):
    with pytest.raises(TypeError, match="trainer must be a Trainer, got Linear"):
        MicroBatchSAMCallback(torch.nn.Linear(1, 1))
    made = trainer(tmp_path, llama())
    with pytest.raises(ValueError, match="rho must be finite"):
        MicroBatchSAMCallback(made, rho=-1.0)
    generating = copy.copy(made)
    generating._buffered_inputs = None
    with pytest.raises(TypeError, match="generates batches in its training_step"):
        MicroBatchSAMCallback(generating)
