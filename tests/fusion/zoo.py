"""Tiny random models of many families, with inputs: one row a family."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers as T

T.logging.set_verbosity_error()
warnings.filterwarnings("ignore", module="transformers")

VOCABULARY = 97
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MOE = {"num_experts_per_tok": 2, "output_router_logits": True}
GEMMA = {"query_pre_attn_scalar": 8, "sliding_window": 64, "final_logit_softcapping": 2.0}
QWEN_VISION = {
    "depth": 2, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 2,
    "spatial_merge_size": 1, "temporal_patch_size": 2, "in_channels": 3, "window_size": 4, "fullatt_block_indexes": [1],
}  # fmt: skip


def _of(model: Any, config: Any, **options: Any) -> Callable[[], torch.nn.Module]:
    return lambda: model(config(**{**BASE, **options}))


def _gpt2() -> torch.nn.Module:
    return T.GPT2LMHeadModel(
        T.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128, pad_token_id=0)
    )


def _deepseek_v3() -> torch.nn.Module:
    sizes = {k: v for k, v in BASE.items() if k not in ("head_dim", "num_key_value_heads")}
    return T.DeepseekV3ForCausalLM(
        T.DeepseekV3Config(
            **sizes, num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=4, n_shared_experts=1,
            num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16,
            qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        )
    )  # fmt: skip


def _llava() -> torch.nn.Module:
    vision = T.CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=4, patch_size=2,
        projection_dim=16,
    )  # fmt: skip
    return T.LlavaForConditionalGeneration(
        T.LlavaConfig(
            vision_config=vision, text_config=T.LlamaConfig(**BASE), image_token_id=90, image_token_index=90,
            vision_feature_layer=-1,
        )
    )  # fmt: skip


def _qwen2_5_vl() -> torch.nn.Module:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    text = {k: v for k, v in BASE.items() if k != "head_dim"} | {"rope_parameters": rope}
    return T.Qwen2_5_VLForConditionalGeneration(
        T.Qwen2_5_VLConfig(
            text_config=text, vision_config=QWEN_VISION, image_token_id=90, video_token_id=91,
            vision_start_token_id=92, vision_end_token_id=93,
        )
    )  # fmt: skip


FAMILIES: dict[str, Callable[[], torch.nn.Module]] = {
    "llama": _of(T.LlamaForCausalLM, T.LlamaConfig),
    "mistral": _of(T.MistralForCausalLM, T.MistralConfig, sliding_window=64),
    "qwen2": _of(T.Qwen2ForCausalLM, T.Qwen2Config),
    "qwen3": _of(T.Qwen3ForCausalLM, T.Qwen3Config),
    "gemma": _of(T.GemmaForCausalLM, T.GemmaConfig),
    "gemma2": _of(T.Gemma2ForCausalLM, T.Gemma2Config, **GEMMA),
    "gemma3": _of(T.Gemma3ForCausalLM, T.Gemma3TextConfig, **GEMMA),
    "mixtral": _of(T.MixtralForCausalLM, T.MixtralConfig, num_local_experts=4, **MOE),
    "qwen3_moe": _of(
        T.Qwen3MoeForCausalLM, T.Qwen3MoeConfig, num_experts=4, moe_intermediate_size=16, decoder_sparse_step=1,
        mlp_only_layers=[], **MOE,
    ),
    "granite": _of(T.GraniteForCausalLM, T.GraniteConfig, logits_scaling=3.0),
    "granitemoe": _of(
        T.GraniteMoeForCausalLM, T.GraniteMoeConfig, logits_scaling=3.0, num_local_experts=4, num_experts_per_tok=2
    ),  # without router losses, which transformers 5.17 cannot compute for it
    "cohere": _of(T.CohereForCausalLM, T.CohereConfig, logit_scale=0.25),
    "cohere2": _of(T.Cohere2ForCausalLM, T.Cohere2Config, logit_scale=0.25, sliding_window=64),
    "olmo2": _of(T.Olmo2ForCausalLM, T.Olmo2Config),
    "phi": _of(T.PhiForCausalLM, T.PhiConfig),  # its head has a bias, its rotation is partial
    "phi3": _of(T.Phi3ForCausalLM, T.Phi3Config),
    "gpt2": _gpt2,
    "gpt_oss": _of(T.GptOssForCausalLM, T.GptOssConfig, num_local_experts=4, sliding_window=64, **MOE),
    "deepseek_v3": _deepseek_v3,
    "llava": _llava,
    "qwen2_5_vl": _qwen2_5_vl,
}  # fmt: skip


def build(family: str, seed: int = 0) -> torch.nn.Module:
    """A model with the same weights at every call, in training mode, without dropout."""
    torch.manual_seed(seed)
    model = FAMILIES[family]().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for name, p in model.named_parameters():
            # Freshly initialised norms are all ones, under which an offset and a missing weight look alike.
            if p.dim() == 1 and "norm" in name:
                p.add_(0.2 * torch.randn_like(p))
    return model


def batch(family: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 89, (2, 19), generator=generator)
    labels = ids.clone()
    labels[:, :4] = -100
    labels[1, 15:] = -100
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    if family == "llava":
        ids[:, :4] = 90
        inputs["pixel_values"] = torch.randn(2, 3, 4, 4, generator=generator)
    if family == "qwen2_5_vl":
        ids[:, 0], ids[:, 1:5], ids[:, 5] = 92, 90, 93
        inputs["pixel_values"] = torch.randn(8, 3 * 2 * 2 * 2, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([[1, 2, 2]] * 2)
        inputs["mm_token_type_ids"] = (ids == 90).int()
    return inputs
