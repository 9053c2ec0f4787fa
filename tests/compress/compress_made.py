"""Tiny models with random weights, whose neurons differ in weight as those of trained models do."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

VOCABULARY = 97
SIZES = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}
WIDTHS = {"hidden_size": 32, "intermediate_size": 128}
IDS = torch.randint(VOCABULARY, (12, 64), generator=torch.Generator().manual_seed(1))

FAMILIES = {  # class and sizes; formula; the first layer's name
    "llama": ("Llama", {**SIZES, **WIDTHS, "num_key_value_heads": 2, "pad_token_id": 0}, "down(silu(gate) · up)",
              "model.layers.0.mlp"),
    "phi3": ("Phi3", {**SIZES, **WIDTHS, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1},
             "down(silu(gate) · up)", "model.layers.0.mlp"),
    "bert": ("Bert", {**SIZES, **WIDTHS}, "down(gelu(up))", "encoder.layer.0"),
    "opt": ("OPT", {**SIZES, "hidden_size": 32, "ffn_dim": 128, "word_embed_proj_dim": 32}, "down(relu(up))",
            "model.decoder.layers.0"),
    "gpt2": ("GPT2", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128,
                      "eos_token_id": 1, "bos_token_id": 1}, "down(gelu_tanh(up))", "transformer.h.0.mlp"),
}  # fmt: skip


def make_model(family, **changes):
    name, sizes, _, _ = FAMILIES[family]
    kind = getattr(transformers, name + {"Bert": "Model", "GPT2": "LMHeadModel"}.get(name, "ForCausalLM"))
    torch.manual_seed(0)
    model = kind(getattr(transformers, f"{name}Config")(**{**sizes, **changes})).eval()
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # biases of zero hide a bias that got lost
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
            elif (
                any(word in name for word in ("down_proj", "fc2", "output.dense", "mlp.c_proj"))
                and "attention" not in name
            ):
                # A few neurons are heavy. Conv1D has its weight transposed.
                inner = 0 if "c_proj" in name else 1
                size = torch.rand(parameter.shape[inner], generator=draw).pow(4) * 4
                parameter.mul_(size[:, None] if inner == 0 else size)
    return model


def llama(**changes):
    return make_model("llama", **changes)


@torch.no_grad()
def answer(model, ids=IDS[:2]):
    return model(ids)[0]
