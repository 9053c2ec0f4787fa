"""A sample of the sweep over every class of transformers, and that the sweep sees what it is for."""

import pytest
import torch

pytest.importorskip("transformers")
import sweep
from sweep import classes, examine, one_line

from tigon.fusion.parts import mlp, norm

# Layers of a tower that text alone does not run, of a kind that the decoder does not have.
OF_TOWERS = {"Phi4MultimodalForCausalLM": {"linear"}}
SAMPLE = [name for i, name in enumerate(classes()) if i % 15 == 7]


@pytest.mark.parametrize("name", SAMPLE)
def test_a_class_of_the_sample_is_fused_or_says_why_not(name):
    row = examine(name)
    if row["status"] == "not run":
        pytest.skip(row["why"])
    assert row["status"] == "equal", row["why"]
    reasons = [kind for kind, *_ in row["left"] if kind == "head"] + list(row["logits_built_by"])
    assert row["calls"].get("head") or reasons, one_line(name, row)
    ran = {kind for kind, *_ in row["fused"]} - {"head"} - OF_TOWERS.get(name, set())
    assert ran <= set(row["calls"]), "parts are fused that never run"


PIXELS = [
    "Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration", "LlavaForConditionalGeneration",
    "Gemma3ForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
]  # fmt: skip
SOUND = ["WhisperForConditionalGeneration", "Wav2Vec2ForCTC", "Qwen2AudioForConditionalGeneration"]


@pytest.mark.parametrize("name", [*PIXELS, *SOUND])
def test_models_of_images_and_sound_run_with_both(name):
    row = examine(name)
    if row["status"] == "not run":
        pytest.skip(row["why"])
    assert row["media"] == ("with pixels" if name in PIXELS else "with sound")
    assert row["status"] == "equal", row["why"]
    assert row["calls"]["norm"] >= 2


def test_a_model_whose_images_no_shape_fits_says_that_it_ran_by_text_alone():
    row = examine("MllamaForConditionalGeneration")
    assert row["media"].startswith("text alone (")
    assert row["media"] in one_line("MllamaForConditionalGeneration", row)


def test_models_are_small_and_random_all_over():
    from tiny import NotTiny, tiny_model
    from transformers import LlamaForCausalLM

    assert len(SAMPLE) >= 15
    model = tiny_model(LlamaForCausalLM)
    assert model.config.vocab_size == 131
    assert not torch.all(model.model.norm.weight == 1.0), "ones would hide an offset"
    with pytest.raises(NotTiny):
        tiny_model(type("Bare", (), {"config_class": None}))


@pytest.mark.parametrize(("part", "broken"), [(norm, "rms_norm"), (mlp, "gated_linear_saved_by")])
def test_the_sweep_sees_an_operator_that_is_a_little_wrong(part, broken, monkeypatch):
    right = getattr(part, broken)
    monkeypatch.setattr(part, broken, lambda *args, **kwargs: right(*args, **kwargs) * (1 + 1e-4))
    assert examine("LlamaForCausalLM")["status"] == "wrong"


def test_the_sweep_sees_a_trace_that_stays_behind(monkeypatch):
    monkeypatch.setattr("tigon.fusion.engine.model.restore", lambda module: None)
    row = examine("LlamaForCausalLM")
    assert row["status"] == "wrong"
    assert "remove() left something" in row["why"]


def test_the_sweep_goes_on_after_a_class_that_hangs(monkeypatch):
    worker = sweep.Worker(quiet=True)
    monkeypatch.setattr(sweep, "SECONDS", 0.05)
    assert "took more than" in worker.examine("LlamaForCausalLM")["why"]
    monkeypatch.setattr(sweep, "SECONDS", 120)
    assert worker.examine("NoSuchClass")["status"] == "not run"
    assert worker.examine("GPT2LMHeadModel")["status"] == "equal"
    worker.end()
