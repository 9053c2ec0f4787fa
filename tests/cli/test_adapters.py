"""Adapters in `tigon inspect` and `tigon verify`: new ones, and those that PEFT has saved."""

import json

import pytest
import torch

pytest.importorskip("peft")


@pytest.fixture(scope="module")
def saved(checkpoint, tmp_path_factory):
    """Adapters of a model, as PEFT saves them: LoRA, DoRA, and LoRA with a trained head and norms."""
    import peft
    from transformers import AutoModelForCausalLM

    kinds = {
        "LoRA": {},
        "DoRA": {"use_dora": True},
        "more": {"modules_to_save": ["lm_head", "norm"], "lora_dropout": 0.1},
    }
    folder = tmp_path_factory.mktemp("saved")
    for name, options in kinds.items():
        torch.manual_seed(0)
        config = peft.LoraConfig(
            r=3,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
            init_lora_weights=False,
            **options,
        )
        peft.get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), config).save_pretrained(folder / name)
        (folder / name / "config.json").write_text((checkpoint / "config.json").read_text())  # as Axolotl leaves it
    return folder


def adapters_of(found, side="fused"):
    rows = [row for row in found["report"]["rows"] if row["kind"] == "adapters" and row["fused"] == (side == "fused")]
    return {row["what"]: row["count"] for row in rows}


GROUPS = {"LoRA: q_proj, k_proj, v_proj in one": 6, "LoRA: o_proj": 2, "LoRA: gate_proj, up_proj in one": 4,
          "LoRA: down_proj": 2}  # fmt: skip


def test_inspect_shows_new_adapters_and_what_a_step_takes(tigon):
    step = ("inspect", "llama-3-8b", "--json", "--batch", 4, "--seq", 512)
    whole = json.loads(tigon(*step).ok().out)
    found = json.loads(tigon(*step, "--lora", 16).ok().out)
    assert found["trained"] == 41_943_040
    assert found["parameters"] == whole["parameters"] == whole["trained"]
    assert adapters_of(found) == {what: 16 * n for what, n in GROUPS.items()}
    assert found["report"]["calls"]["adapters"] == 224
    assert found["step"].endswith("LoRA of rank 16")
    plain, fused = (found["memory"][side] for side in ("plain", "fused"))
    assert fused["kept"]["activations"] < 0.7 * plain["kept"]["activations"]
    assert fused["update"]["gradients"] == plain["update"]["gradients"] == 4 * 41_943_040
    assert fused["update"]["bytes"] < 0.3 * whole["memory"]["fused"]["update"]["bytes"]


def test_inspect_says_why_adapters_are_left_and_prints_no_markup(tigon):
    shown = tigon("inspect", "llama-tiny", "--lora", 8, "--lora-targets", "q_proj,lm_head").ok().out
    assert "LoRA: q_proj" in shown
    assert "the head has an adapter" in " ".join(shown.replace("│", " ").split())
    assert "0.03M trained" in shown
    assert "[bold]" not in shown


def test_inspect_of_saved_adapters(tigon, saved, checkpoint):
    found = json.loads(tigon("inspect", saved / "DoRA", "--json", "--seq", 64).ok().out)
    (reason,) = adapters_of(found, "left")
    assert "DoRA" in reason
    assert found["model"] == str(checkpoint)
    assert found["step"].endswith("DoRA of rank 3")
    # Their configuration serves any model that has such layers, and needs no weights.
    other = tigon("inspect", "llama-tiny", "--adapters", saved / "more" / "adapter_config.json", "--json").ok()
    assert json.loads(other.out)["trained"] > 1000 * 128


@pytest.mark.parametrize("name", ["DoRA", "more"])
def test_verify_compares_every_gradient_that_saved_adapters_train(tigon, saved, name):
    found = json.loads(tigon("verify", saved / name, "--layers", 0, "--json").ok().out)
    rows = {row["name"]: row for row in found["rows"]}
    a = "base_model.model.model.layers.*.self_attn.k_proj.lora_A.default.weight"
    assert rows[a]["tensors"] == 2
    # The loss, A, B (and m) of seven layers, and the head and three norms that are trained whole.
    assert len(rows) == {"LoRA": 1 + 14, "DoRA": 1 + 21, "more": 1 + 14 + 4}[name]
    assert all(row["equal"] for row in rows.values())
    assert adapters_of(found) == ({} if name == "DoRA" else GROUPS)
    if name == "more":
        assert "base_model.model.lm_head.modules_to_save.default.weight" in rows


def test_what_is_wrong_with_adapters_is_one_sentence(tigon, saved, checkpoint, tmp_path):
    for command in ("inspect", "verify"):
        tigon(command, saved / "LoRA", "--lora", 4).problem("--lora and saved adapters exclude each other")
        tigon(command, checkpoint, "--adapters", checkpoint).problem("has no adapter_config.json")
        tigon(command, checkpoint, "--adapters", "./gone").problem("--adapters ./gone: there is no such directory")
        tigon(command, "llama-tiny", "--lora", 4, "--lora-targets", "nothing").problem("--lora-targets: Target modules")
    tigon("inspect", "llama-tiny", "--lora-dropout", 0.1).problem("--lora-dropout requires --lora")
    alone = tmp_path / "alone"
    alone.mkdir()
    config = json.loads((saved / "LoRA" / "adapter_config.json").read_text())
    (alone / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "./moved"}))
    said = "the base model of these adapters was not found; pass the base model, and --adapters"
    tigon("inspect", alone).problem(said, "./moved")
    (alone / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}))
    tigon("verify", alone).problem("adapter_config.json names no base model")
    (alone / "adapter_config.json").write_text("{")
    tigon("verify", alone).problem("PEFT cannot read adapter_config.json")
    # Weights that were trained on a model of other widths.
    other = tmp_path / "other"
    wide = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 448}
    from transformers import AutoModelForCausalLM

    from tigon.presets import preset_config

    AutoModelForCausalLM.from_config(preset_config("llama-tiny", **wide)).save_pretrained(other)
    tigon("verify", other, "--adapters", saved / "LoRA").problem("size mismatch")


def test_adapters_on_the_hub(tigon, saved, hub):
    """As the hub's cache keeps them; a name that is neither a model nor adapters is told as before."""
    place = hub / "models--someone--adapters"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("0" * 40)
    (place / "snapshots" / ("0" * 40)).mkdir(parents=True)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (place / "snapshots" / ("0" * 40) / file).write_bytes((saved / "LoRA" / file).read_bytes())
    found = json.loads(tigon("verify", "someone/adapters", "--json", "--layers", 1).ok().out)
    assert adapters_of(found) == {what: n // 2 for what, n in GROUPS.items()}
    tigon("verify", "someone/nothing").problem("the Hugging Face hub returned no configuration")
