"""LoRA as `tigon train` has it: its options, and the merged model."""

import json

import pytest
import torch

pytest.importorskip("peft")


def test_options_of_adapters_and_the_merged_model(tigon, checkpoint, text, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    output = tmp_path / "run"
    arguments = (
        "--model",
        checkpoint,
        "--data",
        text,
        "--steps",
        3,
        "--batch-size",
        2,
        "--seq-len",
        32,
        "--lr",
        "1e-2",
    )
    adapters = ("--lora", 4, "--lora-alpha", 12, "--lora-targets", "q_proj,v_proj", "--lora-dropout", 0.1, "--merge")
    done = tigon("train", *arguments, *adapters, "--attention", "eager", "--output", output, "--device", "cpu").ok()
    config = json.loads((output / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 12, 0.1)
    assert sorted(config["target_modules"]) == ["q_proj", "v_proj"]
    assert "0.0M parameters, 0.0M trained" in done.out or " trained; fp32 on CPU" in done.out

    ids = torch.arange(20).reshape(1, 20)
    base = AutoModelForCausalLM.from_pretrained(checkpoint)
    before = base(ids).logits
    adapted = PeftModel.from_pretrained(base, output).eval()(ids).logits
    merged = AutoModelForCausalLM.from_pretrained(output / "merged")(ids).logits
    assert (merged - adapted).abs().max() < 1e-4
    assert (merged - before).abs().max() > 1e-3
    # It belongs to the run: --overwrite deletes it, and without --overwrite it stays.
    tigon("train", *arguments, "--output", output, "--device", "cpu").problem("holds another run")
    tigon("train", *arguments, "--output", output, "--overwrite", "--device", "cpu").ok()
    assert not (output / "merged").exists()


def test_wrong_options_of_adapters_are_one_sentence(tigon, checkpoint, text, tmp_path):
    arguments = ("train", "--model", checkpoint, "--data", text, "--output", tmp_path / "run", "--device", "cpu")
    tigon(*arguments, "--lora-alpha", 8).problem("--lora-alpha goes with --lora")
    tigon(*arguments, "--merge").problem("--merge goes with --lora")
    tigon(*arguments, "--lora", 4, "--lora-dropout", 1).problem("--lora-dropout must be at least 0 and below 1")
    tigon(*arguments, "--lora", 4, "--lora-targets", "nothing").problem("--lora-targets: Target modules {'nothing'}")
    tigon(*arguments, "--attention", "abacus").problem("abacus")
