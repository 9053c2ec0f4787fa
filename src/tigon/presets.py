"""Shapes of real models, and of tiny models that train on a laptop, by name: one row per model.

The rows are the arguments of the `transformers` configuration class, as in the publishers' own config.json.
A preset is only a shape: weights are random, and the tokenizer is yours, or trained on your data.
"""

# ruff: noqa: C408 (the rows are keyword arguments, and read as such)

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _rope(theta: float, **scaling: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **scaling}


_LLAMA_3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

_DEEPSEEK_SCALING = {"factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}

# fmt: off
PRESETS: dict[str, dict[str, Any]] = {
    # Small enough for a CPU. `tigon train` replaces the vocabulary by the one trained on your data.
    "llama-tiny": dict(
        model_type="llama", vocab_size=2048, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, rms_norm_eps=1e-5,
        rope_parameters=_rope(1e4), tie_word_embeddings=True,
    ),
    "llama-20m": dict(
        model_type="llama", vocab_size=16384, hidden_size=384, intermediate_size=1024, num_hidden_layers=8,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=2048, rms_norm_eps=1e-5,
        rope_parameters=_rope(1e4), tie_word_embeddings=True,
    ),
    "llama-60m": dict(
        model_type="llama", vocab_size=32000, hidden_size=512, intermediate_size=1408, num_hidden_layers=12,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=2048, rms_norm_eps=1e-5,
        rope_parameters=_rope(1e4), tie_word_embeddings=True,
    ),
    "llama-3-8b": dict(
        model_type="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192, rms_norm_eps=1e-5,
        rope_parameters=_rope(5e5), tie_word_embeddings=False, bos_token_id=128000, eos_token_id=128001,
    ),
    "llama-3.1-8b": dict(
        model_type="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_parameters=_rope(5e5, factor=8.0, **_LLAMA_3_SCALING), tie_word_embeddings=False,
        bos_token_id=128000, eos_token_id=128001,
    ),
    "llama-3.2-1b": dict(
        model_type="llama", vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_parameters=_rope(5e5, factor=32.0, **_LLAMA_3_SCALING), tie_word_embeddings=True,
        bos_token_id=128000, eos_token_id=128001,
    ),
    "llama-3.2-3b": dict(
        model_type="llama", vocab_size=128256, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28,
        num_attention_heads=24, num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_parameters=_rope(5e5, factor=32.0, **_LLAMA_3_SCALING), tie_word_embeddings=True,
        bos_token_id=128000, eos_token_id=128001,
    ),
    "mistral-7b": dict(
        model_type="mistral", vocab_size=32768, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=32768, rms_norm_eps=1e-5,
        rope_parameters=_rope(1e6), tie_word_embeddings=False, sliding_window=None,
    ),
    "qwen2-7b": dict(
        model_type="qwen2", vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, max_position_embeddings=131072, rms_norm_eps=1e-6,
        rope_parameters=_rope(1e6), tie_word_embeddings=False, bos_token_id=151643, eos_token_id=151643,
    ),
    "qwen3-1.7b": dict(
        model_type="qwen3", vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, rms_norm_eps=1e-6,
        rope_parameters=_rope(1e6), tie_word_embeddings=True, bos_token_id=151643, eos_token_id=151645,
    ),
    "qwen3-8b": dict(
        model_type="qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, rms_norm_eps=1e-6,
        rope_parameters=_rope(1e6), tie_word_embeddings=False, bos_token_id=151643, eos_token_id=151645,
    ),
    "qwen3-30b-a3b": dict(
        model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
        num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
        router_aux_loss_coef=1e-3, max_position_embeddings=40960, rms_norm_eps=1e-6, rope_parameters=_rope(1e6),
        tie_word_embeddings=False, bos_token_id=151643, eos_token_id=151645,
    ),
    "qwen2.5-vl-7b": dict(
        model_type="qwen2_5_vl", tie_word_embeddings=False, image_token_id=151655, video_token_id=151656,
        vision_start_token_id=151652, vision_end_token_id=151653,
        text_config=dict(
            vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
            num_key_value_heads=4, max_position_embeddings=128000, rms_norm_eps=1e-6,
            rope_parameters=_rope(1e6, mrope_section=[16, 24, 24]), bos_token_id=151643, eos_token_id=151645,
        ),
        vision_config=dict(
            depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, patch_size=14, out_hidden_size=3584,
            window_size=112, fullatt_block_indexes=[7, 15, 23, 31],
        ),
    ),
    "gemma-7b": dict(
        model_type="gemma", vocab_size=256000, hidden_size=3072, intermediate_size=24576, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=16, head_dim=256, max_position_embeddings=8192, rms_norm_eps=1e-6,
        rope_parameters=_rope(1e4), hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True,
        bos_token_id=2, eos_token_id=1, pad_token_id=0,
    ),
    "gemma-2-2b": dict(
        model_type="gemma2", vocab_size=256000, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26,
        num_attention_heads=8, num_key_value_heads=4, head_dim=256, max_position_embeddings=8192, rms_norm_eps=1e-6,
        rope_parameters=_rope(1e4), query_pre_attn_scalar=256, sliding_window=4096, attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0, tie_word_embeddings=True, bos_token_id=2, eos_token_id=1, pad_token_id=0,
    ),
    "gemma-3-4b": dict(
        model_type="gemma3_text", vocab_size=262208, hidden_size=2560, intermediate_size=10240, num_hidden_layers=34,
        num_attention_heads=8, num_key_value_heads=4, head_dim=256, max_position_embeddings=131072, rms_norm_eps=1e-6,
        rope_parameters={
            "sliding_attention": _rope(1e4), "full_attention": {**_rope(1e6), "rope_type": "linear", "factor": 8.0},
        },
        query_pre_attn_scalar=256, sliding_window=1024, tie_word_embeddings=True, bos_token_id=2, eos_token_id=1,
        pad_token_id=0,
    ),
    "phi-4": dict(
        model_type="phi3", vocab_size=100352, hidden_size=5120, intermediate_size=17920, num_hidden_layers=40,
        num_attention_heads=40, num_key_value_heads=10, max_position_embeddings=16384,
        original_max_position_embeddings=16384, rms_norm_eps=1e-5, rope_parameters=_rope(2.5e5), sliding_window=None,
        tie_word_embeddings=False, bos_token_id=100257, eos_token_id=100265, pad_token_id=100349,
    ),
    "granite-3.1-8b": dict(
        model_type="granite", vocab_size=49155, hidden_size=4096, intermediate_size=12800, num_hidden_layers=40,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_parameters=_rope(1e7), embedding_multiplier=12.0, logits_scaling=16.0, residual_multiplier=0.22,
        attention_multiplier=0.0078125, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    ),
    "olmo-2-7b": dict(
        model_type="olmo2", vocab_size=100352, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=32, max_position_embeddings=4096, rms_norm_eps=1e-6,
        rope_parameters=_rope(5e5), tie_word_embeddings=False, eos_token_id=100257, pad_token_id=100277,
    ),
    "gpt-oss-20b": dict(
        model_type="gpt_oss", vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=24,
        num_attention_heads=64, num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
        sliding_window=128, router_aux_loss_coef=0.9, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_parameters=_rope(
            1.5e5, rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
            original_max_position_embeddings=4096,
        ),
        tie_word_embeddings=False, eos_token_id=200002, pad_token_id=199999,
    ),
    "gpt-oss-120b": dict(
        model_type="gpt_oss", vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=36,
        num_attention_heads=64, num_key_value_heads=8, head_dim=64, num_local_experts=128, num_experts_per_tok=4,
        sliding_window=128, router_aux_loss_coef=0.9, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_parameters=_rope(
            1.5e5, rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
            original_max_position_embeddings=4096,
        ),
        tie_word_embeddings=False, eos_token_id=200002, pad_token_id=199999,
    ),
    "qwen3-next-80b-a3b": dict(
        model_type="qwen3_next", vocab_size=151936, hidden_size=2048, intermediate_size=5120, num_hidden_layers=48,
        num_attention_heads=16, num_key_value_heads=2, head_dim=256, linear_conv_kernel_dim=4, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32, num_experts=512,
        num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[], max_position_embeddings=262144, rms_norm_eps=1e-6,
        rope_parameters=_rope(1e7, partial_rotary_factor=0.25), tie_word_embeddings=False, bos_token_id=151643,
        eos_token_id=151645,
    ),
    "qwen3.5-9b": dict(
        model_type="qwen3_5_text", vocab_size=248320, hidden_size=4096, intermediate_size=12288, num_hidden_layers=32,
        num_attention_heads=16, num_key_value_heads=4, head_dim=256, linear_conv_kernel_dim=4, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32, max_position_embeddings=262144,
        rms_norm_eps=1e-6, rope_parameters=_rope(1e7, partial_rotary_factor=0.25), tie_word_embeddings=False,
    ),
    "qwen3.5-35b-a3b": dict(
        model_type="qwen3_5_moe_text", vocab_size=248320, hidden_size=2048, num_hidden_layers=40,
        num_attention_heads=16, num_key_value_heads=2, head_dim=256, linear_conv_kernel_dim=4, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32, num_experts=256,
        num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        max_position_embeddings=262144, rms_norm_eps=1e-6, rope_parameters=_rope(1e7, partial_rotary_factor=0.25),
        tie_word_embeddings=False,
    ),
    "deepseek-v3": dict(
        model_type="deepseek_v3", vocab_size=129280, hidden_size=7168, intermediate_size=18432,
        moe_intermediate_size=2048, num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128,
        n_shared_experts=1, n_routed_experts=256, num_experts_per_tok=8, n_group=8, topk_group=4,
        routed_scaling_factor=2.5, first_k_dense_replace=3, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64,
        qk_nope_head_dim=128, v_head_dim=128, max_position_embeddings=163840, rms_norm_eps=1e-6,
        rope_parameters=_rope(1e4, rope_type="yarn", original_max_position_embeddings=4096, **_DEEPSEEK_SCALING),
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
    ),
    "kimi-k2": dict(
        model_type="deepseek_v3", vocab_size=163840, hidden_size=7168, intermediate_size=18432,
        moe_intermediate_size=2048, num_hidden_layers=61, num_attention_heads=64, num_key_value_heads=64,
        n_shared_experts=1, n_routed_experts=384, num_experts_per_tok=8, n_group=1, topk_group=1,
        routed_scaling_factor=2.827, first_k_dense_replace=1, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64,
        qk_nope_head_dim=128, v_head_dim=128, max_position_embeddings=131072, rms_norm_eps=1e-6,
        rope_parameters=_rope(
            5e4, rope_type="yarn", original_max_position_embeddings=4096, **{**_DEEPSEEK_SCALING, "factor": 32.0}
        ),
        tie_word_embeddings=False, bos_token_id=163584, eos_token_id=163585,
    ),
    "glm-4.5-air": dict(
        model_type="glm4_moe", vocab_size=151552, hidden_size=4096, intermediate_size=10944, moe_intermediate_size=1408,
        num_hidden_layers=46, num_attention_heads=96, num_key_value_heads=8, head_dim=128, n_shared_experts=1,
        n_routed_experts=128, num_experts_per_tok=8, n_group=1, topk_group=1, routed_scaling_factor=1.0,
        first_k_dense_replace=1, attention_bias=True, use_qk_norm=False, max_position_embeddings=131072,
        rms_norm_eps=1e-5, rope_parameters=_rope(1e6, partial_rotary_factor=0.5), tie_word_embeddings=False,
        eos_token_id=151329, pad_token_id=151329,
    ),
    "gemma-4-26b-a4b": dict(
        model_type="gemma4_text", vocab_size=262144, hidden_size=2816, intermediate_size=2112, num_hidden_layers=30,
        num_attention_heads=16, num_key_value_heads=8, head_dim=256, global_head_dim=512, num_global_key_value_heads=2,
        attention_k_eq_v=True, hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=128, top_k_experts=8,
        moe_intermediate_size=704, sliding_window=1024, final_logit_softcapping=30.0, max_position_embeddings=262144,
        rms_norm_eps=1e-6, tie_word_embeddings=True, bos_token_id=2, eos_token_id=1, pad_token_id=0,
    ),
    "llama-4-scout": dict(
        model_type="llama4_text", vocab_size=202048, hidden_size=5120, intermediate_size=8192,
        intermediate_size_mlp=16384, num_hidden_layers=48, num_attention_heads=40, num_key_value_heads=8, head_dim=128,
        num_local_experts=16, num_experts_per_tok=1, interleave_moe_layer_step=1, use_qk_norm=True,
        attention_chunk_size=8192, max_position_embeddings=10485760, rms_norm_eps=1e-5,
        rope_parameters=_rope(5e5, factor=16.0, **{**_LLAMA_3_SCALING, "high_freq_factor": 1.0}),
        tie_word_embeddings=False, bos_token_id=200000, eos_token_id=200001, pad_token_id=200018,
    ),
    "qwen3-vl-4b": dict(
        model_type="qwen3_vl", tie_word_embeddings=True, image_token_id=151655, video_token_id=151656,
        vision_start_token_id=151652, vision_end_token_id=151653,
        text_config=dict(
            vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128, max_position_embeddings=262144, rms_norm_eps=1e-6,
            rope_parameters=_rope(5e6, mrope_section=[24, 20, 20], mrope_interleaved=True), tie_word_embeddings=True,
            bos_token_id=151643, eos_token_id=151645,
        ),
        vision_config=dict(
            depth=24, hidden_size=1024, intermediate_size=4096, num_heads=16, patch_size=16, out_hidden_size=2560,
            num_position_embeddings=2304, deepstack_visual_indexes=[5, 11, 17],
        ),
    ),
    "phi-3-mini": dict(
        model_type="phi3", vocab_size=32064, hidden_size=3072, intermediate_size=8192, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=32, max_position_embeddings=4096, rms_norm_eps=1e-5,
        rope_parameters=_rope(1e4), sliding_window=2047, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=32000, pad_token_id=32000,
    ),
}
# fmt: on


def close_names(name: str) -> list[str]:
    """The presets closest to a mistyped name, best first."""
    return difflib.get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.6)


def preset_config(name: str, **overrides: Any) -> PretrainedConfig:
    """A preset's configuration, with some fields replaced.

    Args:
        name: a key of PRESETS.
        overrides: configuration fields, such as num_hidden_layers=2 or vocab_size=4096; the text model's, where there
            is also a vision model. Token ids beyond an overridden vocabulary are dropped, unless they are overridden
            too.
    Raises: ValueError for an unknown name.
    """
    if name not in PRESETS:
        close = close_names(name)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(PRESETS)}."
        raise ValueError(f"preset_config: name must be a preset, got {name!r}; {hint}")
    from transformers import AutoConfig

    fields = {**PRESETS[name]}
    if "text_config" in fields:
        text = fields["text_config"] = {**fields["text_config"], **overrides}
    else:
        text = fields = {**fields, **overrides}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        # The configuration classes' default token ids belong to the original vocabularies.
        if key not in overrides and (text.get(key) is None or text[key] >= text["vocab_size"]):
            text[key] = None
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def auto_class(config: PretrainedConfig) -> Any:
    """The transformers class that builds a model with a language head for this configuration, or None."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto

    for names, auto in (
        (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, AutoModelForCausalLM),
        (modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, AutoModelForImageTextToText),
    ):
        if config.model_type in names:
            return auto
    return None
