"""Liger-Kernel's names: change `from liger_kernel.transformers import X` into `from tigon.integrations.liger import X`.

The signatures match Liger 0.8.5, implemented by Tigon's operators and losses; models are fused only as instances.
`functional` and `chunked_loss` mirror Liger's modules; the names in `chunked_loss.functional` are in `chunked_loss`.
docs/how-to/from-liger.md lists the differences.

The names are imported on first use. Names without a counterpart raise an AttributeError that names a replacement.
"""

import importlib
from typing import Any

_NAMES = {
    "models": """MODEL_TYPE_TO_APPLY_LIGER_FN _apply_liger_kernel _apply_liger_kernel_to_instance
        is_transformers_available""",
    "auto": "AutoLigerKernelForCausalLM",
    "modules": """LigerDyT LigerEmbedding LigerFusedAddRMSNorm LigerGEGLUMLP LigerGroupNorm LigerLayerNorm LigerPolyNorm
        LigerRMSNorm LigerRMSNormForGemma LigerRMSNormForGemma2 LigerRMSNormForGemma3 LigerRMSNormForGemma4
        LigerRMSNormForGlm4 LigerRMSNormForOlmo2 LigerRMSNormForQwen3Next LigerReLUSquared LigerSoftmax LigerSparsemax
        LigerSwiGLUMLP""",
    "cross_entropy": """CrossEntropyOutput LigerForCausalLMLoss fixed_fused_linear_cross_entropy
        unpack_cross_entropy_result""",
    "divergences": """LigerFusedLinearJSD LigerJSD LigerKLDIVLoss LigerTVDLoss liger_fused_linear_jsd liger_jsd
        liger_kl_div liger_tvd""",
    "functional": """liger_dyt liger_fused_add_rms_norm liger_geglu liger_group_norm liger_layer_norm
        liger_multimodal_rotary_pos_emb liger_poly_norm liger_qwen2vl_mrope liger_relu_squared liger_rms_norm liger_rope
        liger_rotary_pos_emb liger_softmax liger_sparsemax liger_swiglu""",
    "chunked_loss": """LigerCrossEntropyLoss LigerFusedLinearCPOLoss LigerFusedLinearCosineSimilarityLoss
        LigerFusedLinearCrossEntropyLoss LigerFusedLinearDPOLoss LigerFusedLinearGRPOLoss LigerFusedLinearJSDLoss
        LigerFusedLinearKTOLoss LigerFusedLinearORPOLoss LigerFusedLinearSimPOLoss liger_cross_entropy
        liger_fused_linear_cross_entropy""",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = ("chunked_loss", "functional")

_NO_KERNEL = "Tigon has no kernel for it"
_MODULES_OF_FAMILIES = """LigerBlockSparseTop2MLP LigerExperts LigerFalconH1MLP LigerFalconH1SwiGLUMLP
    LigerGEGLUMLPForGemma4 LigerHunyuanV1SwiGLUMLP LigerMLP LigerPhi3SwiGLUMLP LigerQwen3MoeSwiGLUMLP
    LigerSwiGLUMLPForMuseGlimmer LigerRMSNormForMuseGlimmer LigerRMSNormForMuseGlimmerTextCentered
    liger_llama4_text_rotary_pos_emb liger_llama4_vision_rotary_pos_emb liger_rotary_pos_emb_gpt_oss
    liger_rotary_pos_emb_vision"""
# Liger names that Tigon lacks, with replacements.
MISSING = {
    **dict.fromkeys(_MODULES_OF_FAMILIES.split(), "tigon.fuse(model) fuses the model's own module"),
    "liger_fused_linear_scaled_cross_entropy_tp": "tigon.linear_logprob takes a head that is split over ranks (group=)",
    "LigerFusedCETVDLoss": "tigon.cross_entropy and tigon.tvd give both terms",
    "LigerFusedLinearKLDivLoss": "tigon.losses.distill takes the teacher's head, tigon.kl_div its probabilities",
    "LigerModulatedRMSNorm": "tigon.rms_norm gives the norm, and the modulation is one line of PyTorch",
    "LigerMultiTokenAttention": _NO_KERNEL,
    "LigerTiledGEGLUMLP": "tigon.gated_mlp keeps neither gate nor up",
    "LigerTiledSwiGLUMLP": "tigon.gated_mlp keeps neither gate nor up",
    "liger_fused_linear_kl_div": "tigon.losses.distill takes the teacher's head, tigon.kl_div its probabilities",
    "liger_modulated_rms_norm": "tigon.rms_norm gives the norm, and the modulation is one line of PyTorch",
    "liger_multi_token_attention": _NO_KERNEL,
    "LigerExpertParallelFusedMoe": _NO_KERNEL,
    "LigerFusedNeighborhoodAttention": _NO_KERNEL,
    "LigerFusedNeighborhoodAttentionConfig": _NO_KERNEL,
    "LigerFusedNeighborhoodAttentionLayer": _NO_KERNEL,
    "LigerMHC": _NO_KERNEL,
    "LigerORPOTrainer": "the loss of TRL's own trainer can be LigerFusedLinearORPOLoss, or tigon.losses.orpo",
    "LigerVocabParallelCrossEntropy": "tigon.linear_cross_entropy takes a head that is split over ranks (group=)",
    "apply_liger_llama4_rope_full": "it patches a transformers module for all models, unlike tigon.fuse(model)",
    "lce_forward": "tigon.fuse(model) needs no model-specific forward",
    "liger_attn_res": _NO_KERNEL,
    "liger_fused_neighborhood_attention": _NO_KERNEL,
    "liger_mhc_apply": _NO_KERNEL,
    "liger_mhc_coeffs": _NO_KERNEL,
    "liger_mhc_forward": _NO_KERNEL,
    "liger_mhc_post_res": _NO_KERNEL,
    "liger_mhc_pre": _NO_KERNEL,
    "triton_grpo_loss": "LigerFusedLinearGRPOLoss and tigon.losses.grpo need no logits, and tigon.logprob computes the "
    "log-probabilities of given logits",
}

# The functions apply_liger_kernel_to_* are in `models`, one per family.
_FAMILIES = """deepseek_v2 deepseek_v3 deepseek_v4 exaone4 falcon_h1 gemma gemma2 gemma3 gemma3_text gemma4
    gemma4_text glm4 glm4v glm4v_moe gpt_oss granite hunyuan_v1_dense hunyuan_v1_moe internvl llama llama4
    llava ministral mistral mixtral mllama muse_glimmer nemotron olmo2 olmo3 paligemma phi3 pixtral qwen2
    qwen2_5_vl qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe smollm3 smolvlm"""
_HOME |= {f"apply_liger_kernel_to_{family}": "models" for family in _FAMILIES.split()}

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
    """The error message for a name that Tigon lacks."""
    if name.startswith("Liger") and name.endswith("OutputWithPast"):
        return f"{module} has no {name}: a fused model keeps its output class."
    if name in MISSING:
        return f"{module} has no {name}: {MISSING[name]}."
    return f"module {module!r} has no attribute {name!r}"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
