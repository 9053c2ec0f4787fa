"""Tiny models with random weights, whose neurons differ in weight as those of trained models do."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

VOCABULARY = 97
SIZES = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}
IDS = torch.randint(VOCABULARY, (12, 64), generator=torch.Generator().manual_seed(1))


def llama(**changes):
    sizes = {**SIZES, "hidden_size": 32, "intermediate_size": 128, "num_key_value_heads": 2, "pad_token_id": 0}
    return made(transformers.LlamaForCausalLM, transformers.LlamaConfig(**{**sizes, **changes}))


def phi3():
    sizes = {
        **SIZES,
        "hidden_size": 32,
        "intermediate_size": 128,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 1,
    }
    return made(transformers.Phi3ForCausalLM, transformers.Phi3Config(**sizes))


def bert():
    return made(transformers.BertModel, transformers.BertConfig(**SIZES, hidden_size=32, intermediate_size=128))


def opt():
    sizes = {**SIZES, "hidden_size": 32, "ffn_dim": 128, "word_embed_proj_dim": 32}
    return made(transformers.OPTForCausalLM, transformers.OPTConfig(**sizes))


def gpt2():
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "eos_token_id": 1}
    return made(transformers.GPT2LMHeadModel, transformers.GPT2Config(**sizes, bos_token_id=1))


def made(kind, config):
    torch.manual_seed(0)
    model = kind(config).eval()
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


FAMILIES = {
    "llama": (llama, "down(silu(gate) · up)", "model.layers.0.mlp"),
    "phi3": (phi3, "down(silu(gate) · up)", "model.layers.0.mlp"),
    "bert": (bert, "down(gelu(up))", "encoder.layer.0"),
    "opt": (opt, "down(relu(up))", "model.decoder.layers.0"),
    "gpt2": (gpt2, "down(gelu_tanh(up))", "transformer.h.0.mlp"),
}


@torch.no_grad()
def answer(model, ids=IDS[:2]):
    y = model(ids)
    return y[0]
