"""PEFT on a fused model, or fuse on one with adapters: they take part, and are merged, switched and saved as before."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")
import peft
from small_llama import CALLS, assert_same_step, batch, llama, ran, step

import tigon

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
# What an adapter leaves of the fused step. LoRA on the head: its logits are real ones.
WITHOUT_HEAD = {kind: n for kind, n in CALLS.items() if kind != "head"}
KINDS = {
    "LoRA": (peft.LoraConfig, {"target_modules": ATTENTION}, CALLS),
    "rsLoRA on every linear layer": (peft.LoraConfig, {"target_modules": "all-linear", "use_rslora": True}, CALLS),
    "DoRA": (peft.LoraConfig, {"target_modules": ATTENTION + MLP, "use_dora": True}, CALLS),
    "DoRA and the head": (peft.LoraConfig, {"target_modules": ["q_proj", "lm_head"], "use_dora": True}, WITHOUT_HEAD),
    "LoRA and a trained head": (peft.LoraConfig, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, CALLS),
    "LoRA and trained norms": (
        peft.LoraConfig, {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm", "norm"]}, CALLS,
    ),
    "LoRA and the embedding": (peft.LoraConfig, {"target_modules": ["q_proj", "embed_tokens"]}, CALLS),
    "LoRA and new tokens": (peft.LoraConfig, {"target_modules": ["q_proj"], "trainable_token_indices": [5, 6]}, CALLS),
    "IA3": (peft.IA3Config, {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
            CALLS),
    "prefix tuning": (peft.PrefixTuningConfig, {"num_virtual_tokens": 3}, CALLS),
}  # fmt: skip


def adapted(kind="LoRA", first=None):
    """The small Llama with adapters that do something, the same at every call; fused before or after them."""
    model = llama()
    if first == "fuse":
        tigon.fuse(model)
    config, options, _ = KINDS[kind]
    rank = {"r": 4, "lora_alpha": 8} if config is peft.LoraConfig else {}
    torch.manual_seed(5)
    model = peft.get_peft_model(model, config(task_type="CAUSAL_LM", **rank, **options)).train()
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad and "modules_to_save" not in name and "magnitude" not in name:
                p.add_(0.1 * torch.randn(p.shape, generator=generator))
    if first == "adapt":
        tigon.fuse(model)
    return model


@pytest.mark.parametrize("first", ["fuse", "adapt"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_the_plain_step(kind, first):
    inputs = batch()
    plain = step(adapted(kind), inputs)
    model = adapted(kind, first)
    fusion = tigon.fuse(model)
    assert_same_step(step(model, inputs), plain)
    assert ran(fusion) == KINDS[kind][2]
    assert len(plain[1]) == sum(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("kind", ["DoRA", "rsLoRA on every linear layer"])
def test_merging_and_taking_apart_again(kind):
    inputs = batch()
    plain, model = adapted(kind).eval(), adapted(kind, "adapt").eval()
    expected = plain(**inputs).loss
    model.merge_adapter()
    torch.testing.assert_close(model(**inputs).loss, expected, rtol=1e-5, atol=0)
    model.unmerge_adapter()
    torch.testing.assert_close(model(**inputs).loss, expected, rtol=1e-5, atol=0)
    fusion = tigon.fuse(model)
    assert ran(fusion) == CALLS
    merged = model.merge_and_unload()
    assert type(merged) is type(llama())
    torch.testing.assert_close(merged(**inputs).loss, expected, rtol=1e-5, atol=0)
    assert fusion.report().steps == 3, "what is left is still fused"
    assert ran(fusion) == CALLS
    fusion.remove()
    assert not any("_tigon" in vars(m) for m in merged.modules())


@pytest.mark.parametrize("kind", ["LoRA", "DoRA", "LoRA and a trained head", "DoRA and the head"])
def test_adapters_switched_off_and_on(kind):
    inputs = batch()
    model = adapted(kind, "adapt")
    loss = model(**inputs).loss
    with model.disable_adapter():
        torch.testing.assert_close(model(**inputs).loss, llama()(**inputs).loss, rtol=2e-6, atol=0)
    assert torch.equal(model(**inputs).loss, loss)


def test_an_adapter_on_the_head_that_comes_after_fuse_is_not_lost():
    inputs = batch()
    plain, model = adapted(), adapted(first="adapt")
    for m in (plain, model):
        torch.manual_seed(7)
        m.add_adapter("other", peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
        m.set_adapter("other")
    fused, expected = step(model, inputs), step(plain, inputs)
    assert_same_step(fused, expected)
    assert set(fused[1]) == {n for n, p in model.named_parameters() if p.requires_grad}
    assert tigon.fuse(model).report().logits_built_by, "the report says that logits were built"


def test_what_is_saved_loads_into_a_plain_model(tmp_path):
    inputs = batch()
    model = adapted("LoRA and a trained head", "adapt")
    step(model, inputs)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path, is_trainable=True)
    assert not any("_tigon" in vars(m) for m in loaded.modules())
    torch.testing.assert_close(loaded(**inputs).loss, model(**inputs).loss, rtol=2e-6, atol=0)


# -------------------------------------------------------------------------------------------------------------- QLoRA
