"""A sample of the sweep over every class of transformers, and that the sweep sees what it is for."""

import pytest

pytest.importorskip("transformers")
from sweep import classes, examine, examine_packs, one_line

from tigon.fusion.parts import mlp, norm

SLOW = {"KimiLinearForCausalLM"}  # half a minute, for its recurrences in plain torch
# Layers of a tower that text alone does not run, of a kind that the decoder does not have.
OF_TOWERS = {"Phi4MultimodalForCausalLM": {"linear"}}
SAMPLE = [name for i, name in enumerate(classes()) if i % 24 == 7 and name not in SLOW]


@pytest.mark.parametrize("name", SAMPLE)
def test_a_class_of_the_sample_is_fused_or_says_why_not(name):
    row = examine(name)
    if row["status"] == "not run":
        pytest.skip(row["why"])
    assert row["status"] == "equal", row["why"]
    reasons = [kind for kind, *_ in row["left"] if kind == "head"] + list(row["logits_built_by"])
    # Classifiers of sound have a few dozen classes and the CTC loss: there is no head of words to fuse.
    assert row["calls"].get("head") or reasons or name.endswith("ForCTC"), one_line(name, row)
    idle = {"head", "documents"} if row.get("media") == "with pixels" else {"head", "documents", "images", "patches"}
    ran = {kind for kind, *_ in row["fused"]} - idle - OF_TOWERS.get(name, set())
    assert ran <= set(row["calls"]), "parts are fused that never run"


PIXELS = [
    "Idefics3ForConditionalGeneration", "Gemma3ForConditionalGeneration",
]  # fmt: skip
SOUND = ["WhisperForConditionalGeneration", "Wav2Vec2ForCTC"]


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


# Masks made in lambdas, beside ones that the model makes, for a model inside, and read by type; layers that pass no
# keyword arguments on. And whether attention runs by documents.
PACKS = {
    "Dots1ForCausalLM": ("equal", True), "BioGptForCausalLM": ("equal", True), "StableLmForCausalLM": ("equal", True),
    "Gemma3ForConditionalGeneration": ("equal", True), "GPTNeoForCausalLM": ("equal", False),
    "DeepseekV4ForCausalLM": ("leaks", False), "JambaForCausalLM": ("leaks", False),
}  # fmt: skip


@pytest.mark.parametrize("name", PACKS)
def test_documents_stay_apart_or_a_leak_is_named(name):
    row = examine_packs(name)
    if row["status"] == "not run":
        pytest.skip(row["why"])
    assert (row["status"], row["calls"]["documents"] > 0) == PACKS[name], one_line(name, row)
