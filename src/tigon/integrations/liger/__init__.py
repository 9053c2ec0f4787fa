"""Liger-Kernel's names: change `from liger_kernel.transformers import X` into `from tigon.integrations.liger import X`.

The signatures are those of Liger 0.8.5, under them are Tigon's operators and losses, and a model is fused as an
instance or not at all. `functional` and `chunked_loss` are the modules of these names; the names of
`chunked_loss.functional` are in `chunked_loss`. What differs is in docs/how-to/from-liger.md.

The names are imported on first use. Those without a counterpart raise an AttributeError that says what to use instead.
"""

import importlib
from typing import Any

_NAMES = {
    "models": """MODEL_TYPE_TO_APPLY_LIGER_FN _apply_liger_kernel _apply_liger_kernel_to_instance
        apply_liger_kernel_to_deepseek_v2
        apply_liger_kernel_to_deepseek_v3 apply_liger_kernel_to_deepseek_v4 apply_liger_kernel_to_exaone4
        apply_liger_kernel_to_falcon_h1 apply_liger_kernel_to_gemma apply_liger_kernel_to_gemma2
        apply_liger_kernel_to_gemma3 apply_liger_kernel_to_gemma3_text apply_liger_kernel_to_gemma4
        apply_liger_kernel_to_gemma4_text apply_liger_kernel_to_glm4 apply_liger_kernel_to_glm4v
        apply_liger_kernel_to_glm4v_moe apply_liger_kernel_to_gpt_oss apply_liger_kernel_to_granite
        apply_liger_kernel_to_hunyuan_v1_dense apply_liger_kernel_to_hunyuan_v1_moe apply_liger_kernel_to_internvl
        apply_liger_kernel_to_llama apply_liger_kernel_to_llama4 apply_liger_kernel_to_llava
        apply_liger_kernel_to_ministral apply_liger_kernel_to_mistral apply_liger_kernel_to_mixtral
        apply_liger_kernel_to_mllama apply_liger_kernel_to_muse_glimmer apply_liger_kernel_to_nemotron
        apply_liger_kernel_to_olmo2 apply_liger_kernel_to_olmo3 apply_liger_kernel_to_paligemma
        apply_liger_kernel_to_phi3 apply_liger_kernel_to_pixtral apply_liger_kernel_to_qwen2
        apply_liger_kernel_to_qwen2_5_vl apply_liger_kernel_to_qwen2_vl apply_liger_kernel_to_qwen3
        apply_liger_kernel_to_qwen3_5 apply_liger_kernel_to_qwen3_5_moe apply_liger_kernel_to_qwen3_moe
        apply_liger_kernel_to_qwen3_next apply_liger_kernel_to_qwen3_vl apply_liger_kernel_to_qwen3_vl_moe
        apply_liger_kernel_to_smollm3 apply_liger_kernel_to_smolvlm is_transformers_available""",
    "auto": "AutoLigerKernelForCausalLM",
    "modules": """LigerDyT LigerEmbedding LigerFusedAddRMSNorm LigerGroupNorm LigerLayerNorm LigerModulatedRMSNorm
        LigerMultiTokenAttention LigerPolyNorm LigerRMSNorm LigerRMSNormForGemma LigerRMSNormForGemma2
        LigerRMSNormForGemma3 LigerRMSNormForGemma4 LigerRMSNormForGlm4 LigerRMSNormForMuseGlimmer
        LigerRMSNormForMuseGlimmerTextCentered LigerRMSNormForOlmo2 LigerRMSNormForQwen3Next LigerReLUSquared
        LigerSoftmax LigerSparsemax""",
    "mlp": """LigerBlockSparseTop2MLP LigerExperts LigerFalconH1MLP LigerFalconH1SwiGLUMLP LigerGEGLUMLP
        LigerGEGLUMLPForGemma4 LigerHunyuanV1SwiGLUMLP LigerMLP LigerPhi3SwiGLUMLP LigerQwen3MoeSwiGLUMLP LigerSwiGLUMLP
        LigerSwiGLUMLPForMuseGlimmer LigerTiledGEGLUMLP LigerTiledSwiGLUMLP""",
    "cross_entropy": """CrossEntropyOutput LigerCrossEntropyLoss LigerFusedLinearCrossEntropyLoss liger_cross_entropy
        liger_fused_linear_cross_entropy""",
    "scaled_cross_entropy": """LigerFusedLinearScaledCrossEntropyFunction LigerFusedLinearScaledCrossEntropyTPFunction
        fused_selective_log_softmax liger_fused_linear_scaled_cross_entropy_tp""",
    "causal_lm": "LigerForCausalLMLoss fixed_fused_linear_cross_entropy unpack_cross_entropy_result",
    "divergences": """LigerFusedCETVDLoss LigerFusedLinearJSD LigerFusedLinearKLDivLoss LigerJSD LigerKLDIVLoss
        LigerTVDLoss liger_fused_linear_jsd liger_fused_linear_kl_div liger_jsd liger_kl_div liger_tvd""",
    "functional": """liger_dyt liger_fused_add_rms_norm liger_geglu liger_group_norm liger_layer_norm
        liger_modulated_rms_norm liger_multi_token_attention liger_poly_norm liger_relu_squared liger_rms_norm
        liger_softmax liger_sparsemax liger_swiglu""",
    "rotary": """liger_llama4_text_rotary_pos_emb liger_llama4_vision_rotary_pos_emb liger_multimodal_rotary_pos_emb
        liger_qwen2vl_mrope liger_rope liger_rotary_pos_emb liger_rotary_pos_emb_gpt_oss liger_rotary_pos_emb_vision""",
    "chunked_loss": """LigerFusedLinearCPOLoss LigerFusedLinearCosineSimilarityLoss LigerFusedLinearDPOLoss
        LigerFusedLinearGRPOLoss LigerFusedLinearJSDLoss LigerFusedLinearKTOLoss LigerFusedLinearORPOLoss
        LigerFusedLinearSimPOLoss""",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = ("chunked_loss", "functional")

_NO_KERNEL = "Tigon has no kernel for it"
# Names of Liger that Tigon lacks, with what you can use instead.
MISSING = {
    "LigerExpertParallelFusedMoe": _NO_KERNEL,
    "LigerFusedNeighborhoodAttention": _NO_KERNEL,
    "LigerFusedNeighborhoodAttentionConfig": _NO_KERNEL,
    "LigerFusedNeighborhoodAttentionLayer": _NO_KERNEL,
    "LigerMHC": _NO_KERNEL,
    "LigerORPOTrainer": "the loss of TRL's own trainer can be LigerFusedLinearORPOLoss, or tigon.losses.orpo",
    "LigerVocabParallelCrossEntropy": "tigon.linear_cross_entropy takes a head that is split over ranks (group=)",
    "apply_liger_llama4_rope_full": "it patches a module of transformers for all models; tigon.fuse(model) does not",
    "lce_forward": "no family needs a forward of its own, as tigon.fuse(model) does without",
    "liger_attn_res": _NO_KERNEL,
    "liger_fused_neighborhood_attention": _NO_KERNEL,
    "liger_mhc_apply": _NO_KERNEL,
    "liger_mhc_coeffs": _NO_KERNEL,
    "liger_mhc_forward": _NO_KERNEL,
    "liger_mhc_post_res": _NO_KERNEL,
    "liger_mhc_pre": _NO_KERNEL,
    "triton_grpo_loss": "LigerFusedLinearGRPOLoss and tigon.losses.grpo do without the logits that it wants; for the "
    "log-probabilities of given logits there is fused_selective_log_softmax",
}

__all__ = sorted([*_HOME, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(absent(name, __name__))
    globals()[name] = value
    return value


def absent(name: str, module: str) -> str:
    """The error's sentence about a name that Tigon lacks."""
    if name.startswith("Liger") and name.endswith("OutputWithPast"):
        return f"{module} has no {name}: a fused model returns what it returned before."
    if name in MISSING:
        return f"{module} has no {name}: {MISSING[name]}."
    return f"module {module!r} has no attribute {name!r}"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
