"""Stacked experts in 4 bits: how `tigon train --load_in_4bit` loads them, and what `tigon inspect` counts."""

import json
from types import SimpleNamespace

import pytest
import torch
from command import write_model

pytest.importorskip("trl")
pytest.importorskip("transformers")
import transformers
from safetensors.torch import load_file, save_file

import tigon
from tigon.cli.memory import Sides, StepOptions, four_bit_bytes
from tigon.cli.model import find_model
from tigon.cli.train import four_bit

SIZES = {
    "vocab_size": 448, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    """A checkpoint as gpt-oss's: experts in blocks and scales. The model's folder, and the experts' dense weights."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**SIZES, num_local_experts=4, layer_types=["full_attention"])
    transformers.GptOssForCausalLM(config).bfloat16().save_pretrained(folder)
    weights, dense = load_file(folder / "model.safetensors"), {}
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj")) and "experts" in name]:
        stack = tigon.QuantizedExperts.quantize(weights.pop(name).mT, "mxfp4", by_columns=True)
        weights[f"{name}_blocks"] = stack.packed.data.view(*stack.scales.shape, 16)
        weights[f"{name}_scales"] = stack.scales.data
        dense[name] = stack(torch.empty(0, dtype=torch.bfloat16))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    stored = {"quantization_config": {"quant_method": "mxfp4"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | stored))
    return folder, dense


def options_for(task="sft", **changes):
    model = {"load_in_4bit": True, **changes}
    trainer = SimpleNamespace(device=torch.device("cpu"), model_init_kwargs={"dtype": "bfloat16"})
    return SimpleNamespace(task=task, model=SimpleNamespace(**model), trainer=trainer)


def test_a_checkpoint_in_mxfp4_keeps_its_numbers(gpt_oss, monkeypatch):
    monkeypatch.setattr(four_bit, "_quantize_linears", lambda *_: None)  # bitsandbytes' part
    monkeypatch.setattr(four_bit, "trl", SimpleNamespace(get_quantization_config=lambda _: None))
    folder, dense = gpt_oss
    source = find_model(str(folder))
    assert four_bit.load_linears(source, options_for(load_in_4bit=False)) is None
    assert four_bit.load_linears(source, options_for("reward")) is None  # TRL gives it a head
    model = four_bit.load_linears(source, options_for())
    four_bit.place_experts(model, source, torch.device("cpu"))
    experts = model.model.layers[0].mlp.experts
    assert all(experts.parametrizations[name][0].format == "mxfp4" for name in ("gate_up_proj", "down_proj"))
    assert dense
    for name, weight in dense.items():
        assert torch.equal(getattr(experts, name.rpartition(".")[2]), weight)
    assert not any(p.requires_grad for p in model.parameters())
    with tigon.fuse(model) as fusion:
        model(input_ids=torch.arange(8)[None])
        assert fusion.report().calls["experts"] == 1


def test_a_model_keeps_its_tower(monkeypatch, tmp_path):
    """Qwen 3.5 has a class for its language model alone, which would pass over images."""
    monkeypatch.setattr(four_bit, "_quantize_linears", lambda *_: None)
    monkeypatch.setattr(four_bit, "trl", SimpleNamespace(get_quantization_config=lambda _: None))
    text = {**SIZES, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4,
            "num_experts_per_tok": 2, "layer_types": ["full_attention"]}  # fmt: skip
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=vision)
    transformers.Qwen3_5MoeForConditionalGeneration(config).save_pretrained(tmp_path)
    model = four_bit.load_linears(find_model(str(tmp_path)), options_for())
    assert type(model) is transformers.Qwen3_5MoeForConditionalGeneration


def test_models_without_stacked_experts_are_loaded_by_transformers(checkpoint):
    assert four_bit.load_linears(find_model(str(checkpoint)), options_for()) is None


def test_inspect_counts_the_experts_in_their_format(gpt_oss):
    pytest.importorskip("peft")
    source = find_model(str(gpt_oss[0]))
    counted = {}
    for word in (None, "nf4"):
        sides = Sides(source, StepOptions(seq_len=16, lora=4, precision="bf16-pure", quantize=word))
        counted[word] = sides.memory().peak.parts["weights"]
    stacks = [dense.numel() for dense in gpt_oss[1].values()]
    linears = [m for n, m in sides.model.named_modules() if n.endswith("base_layer")]
    narrow = sum(four_bit_bytes(m.weight.numel()) - 2 * m.weight.numel() for m in linears)
    assert counted["nf4"] - counted[None] == narrow + sum(n * 17 // 32 - 2 * n for n in stacks)


def test_train_on_experts_in_4_bits(tigon, text, tmp_path):
    """The whole command; the adapters on the experts learn, and merge into the full-precision model."""
    pytest.importorskip("bitsandbytes")
    folder = write_model(tmp_path / "base", text)
    config = transformers.Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        eos_token_id=transformers.AutoConfig.from_pretrained(folder).eos_token_id,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    run = tmp_path / "run"
    tigon(
        "train", "--model_name_or_path", folder, "--dataset_name", text, "--max_length", 32, "--output_dir", run,
        "--max_steps", 2, "--per_device_train_batch_size", 2, "--report_to", "none", "--use_peft", "--lora_r", 4,
        "--lora_target_modules", "q_proj", "--lora_target_parameters", "experts.gate_up_proj", "experts.down_proj",
        "--lora_dropout", 0, "--load_in_4bit", "--bnb_4bit_quant_type", "nf4", "--learning_rate", 0.01,
    ).ok()  # fmt: skip
    weights = load_file(run / "adapter_model.safetensors")
    assert {str(t.dtype) for t in weights.values()} == {"torch.float32"}
    assert all(t.any() for name, t in weights.items() if "experts" in name)
    tigon("export", run, "--output", tmp_path / "merged").ok()
