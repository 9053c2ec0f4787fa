"""Activation checkpointing goes by the name that a version of transformers has for it."""

import pytest

from tigon.fusion.memory.checkpointing import checkpoint_activations

pytest.importorskip("transformers")


class Old:
    def __init__(self):
        self.asked = {}

    def gradient_checkpointing_enable(self, **options):
        self.asked["gradient_checkpointing_enable"] = options


class New(Old):
    def activation_checkpointing_enable(self, **options):
        self.asked["activation_checkpointing_enable"] = options


def test_the_newer_name_is_taken_where_there_is_one():
    old, new = Old(), New()
    checkpoint_activations(old)
    checkpoint_activations(new)
    without_reentrance = {"use_reentrant": False}
    assert old.asked == {"gradient_checkpointing_enable": {"gradient_checkpointing_kwargs": without_reentrance}}
    assert new.asked == {"activation_checkpointing_enable": {"activation_checkpointing_kwargs": without_reentrance}}


def test_the_benchmarks_switch_it_on_by_that_name(monkeypatch):
    import torch
    import transformers
    from harness.training import RunResult, Trainer

    if not hasattr(transformers.PreTrainedModel, "activation_checkpointing_enable"):
        pytest.skip("transformers before 5.20")
    deprecated = []
    monkeypatch.setattr(
        transformers.PreTrainedModel, "gradient_checkpointing_enable", lambda *_, **options: deprecated.append(options)
    )
    tiny = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 64,
    }  # fmt: skip
    trainer = Trainer(RunResult("llama-3.2-1b", "hf", 1, 8, True, "float32"), torch.device("cpu"), tiny)
    assert not deprecated
    assert trainer.model.is_gradient_checkpointing
