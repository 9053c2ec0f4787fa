"""Any class of transformers as a tiny random model, without a file for it: its configuration, shrunk by field names.

A configuration is built again from its own defaults with every size in `SIZES` replaced, its sub-configurations
likewise, with one layer of each kind that its lists of layers name. `EXCEPTIONS` has the fields that these rules do
not reach, one row for each model type. Nothing is fetched from a hub.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 131
WORDS = range(3, 90)  # ids of ordinary words; larger ids are special tokens
WIDTH, HEADS, HEAD = 64, 4, 16
MOST_PARAMETERS = 110_000_000


NAMES = (
    (VOCABULARY, """vocab_size vocab_size_per_layer_input text_vocab_size audio_vocab_size entity_vocab_size
        src_vocab_size tgt_vocab_size decoder_vocab_size n_vocab"""),
    (WIDTH, """hidden_size d_model n_embd dim embed_dim embedding_size attention_hidden_size lru_width n_embed emb_dim
        model_dim hidden_dim projection_dim out_hidden_size dim_model embedding_dim text_hidden_size
        projector_hidden_size output_hidden_size vision_hidden_size encoder_hidden_size cross_attention_hidden_size
        text_embed_dim adapter_hidden_size hidden_size_global audio_hidden_size adapter_in_dim
        adapter_out_dim adapter_input_size adapter_output_size"""),
    (2 * WIDTH, """intermediate_size ffn_dim n_inner d_ff dim_ff ffn_hidden_size encoder_ffn_dim decoder_ffn_dim
        intermediate_size_mlp block_ff_dim mamba_intermediate_size dense_intermediate_size mlp_intermediate_size
        feed_forward_size ffn_intermediate_size"""),
    (2, """num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers num_encoder_layers depth
        num_decoder_layers vision_layers num_experts_per_tok moe_topk moe_k num_experts_per_token experts_per_token
        zero_expert_num linear_num_key_heads temporal_patch_size spatial_merge_size num_global_key_value_heads
        swa_num_key_value_heads index_n_heads"""),
    (4, """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
        num_encoder_attention_heads num_decoder_attention_heads mamba_n_heads mamba_num_heads linear_num_value_heads
        num_linear_heads attention_heads encoder_num_attention_heads num_attn_heads swa_num_attention_heads
        num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts patch_size"""),
    (HEAD, """head_dim d_kv qk_nope_head_dim qk_rope_head_dim v_head_dim attention_head_dim linear_key_head_dim
        linear_value_head_dim mamba_d_head mamba_head_dim global_head_dim rope_head_dim swa_head_dim swa_v_head_dim
        kv_channels query_pre_attn_scalar dim_head attention_head_size index_head_dim rotary_dim num_mel_bins
        chunk_size mamba_chunk_size image_size"""),
    (2 * HEAD, "q_lora_rank kv_lora_rank o_lora_rank qk_head_dim moe_intermediate_size expert_ffn_hidden_size"),
    (3 * HEAD, """shared_expert_intermediate_size moe_shared_expert_intermediate_size shared_intermediate_size
        moe_ffn_hidden_size"""),
    (256, """max_position_embeddings n_positions max_seq_len n_ctx max_sequence_length max_target_positions
        max_source_positions seq_length"""),
    (64, "sliding_window"),
    (8, "state_size mamba_d_state ssm_state_size hidden_size_per_layer_input index_topk index_topk_tokens"),
    (1, """n_group topk_group n_shared_experts num_shared_experts first_k_dense_replace moe_num_shared_experts
        num_dense_layers mamba_n_groups n_groups bos_token_id"""),
    (0, "num_nextn_predict_layers pad_token_id decoder_start_token_id"),
    (32, "base_channels"),
    (0.15, "initializer_range init_std"),
    (0.0, """dropout attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop hidden_dropout_prob
        attention_probs_dropout_prob activation_dropout dropout_rate router_jitter_noise layerdrop encoder_layerdrop
        decoder_layerdrop classifier_dropout summary_first_dropout mask_time_prob mask_feature_prob"""),
    (False, "use_cache"),
)  # fmt: skip
SIZES: dict[str, Any] = {name: value for value, names in NAMES for name in names.split()} | {"eos_token_id": 2}

# Values that field names do not tell: fields of one model type, in any configuration of that type.
_MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "bamba": {"mamba_n_heads": 8},
    "blt": {"encoder_hash_byte_group_vocab": 97, "patching_mode": "space"},
    "chameleon": {"vocabulary_map": {"<image>": 91}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "DbrxAttentionConfig": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
    "DbrxFFNConfig": {"ffn_hidden_size": 2 * WIDTH, "moe_num_experts": 4, "moe_top_k": 2},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "dots1": _MOE,
    "emu3": {"vocabulary_map": {"<image>": 91, "<|extra_200|>": 92, "<|visual token 000000|>": 93}},
    "ernie4_5_vl_moe_text": {"rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2],
    }},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_ssm": 128},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "gemma4_unified_text": {"num_kv_shared_layers": 0},
    "gemma3": {"mm_tokens_per_image": 4},
    "glm5_next_text": {"index_topk": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "spatial_target_layers": [1], "downsample_rate": "1/2"},
    **{name: {"image_grid_pinpoints": [[16, 16]]} for name in ("llava_next", "llava_next_video", "llava_onevision")},
    "granitemoehybrid": {"mamba_n_heads": 8},
    "internvl_vision": {"image_size": [16, 16], "patch_size": [4, 4]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_experts_per_tok": 2},
    "llama4_vision_model": {
        "intermediate_size": 4 * WIDTH, "vision_output_dim": WIDTH, "projector_input_dim": WIDTH,
        "projector_output_dim": WIDTH,
    },
    "mamba2": {"num_heads": 8},
    "nemotron": {"num_key_value_heads": 2},
    "qianfan_ocr_vision": {"image_size": [16, 16], "patch_size": [4, 4]},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 128, "vision_end_token_id": 129},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 128, "vision_end_token_id": 129},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": HEAD, "indexer_budget": 16,
        "indexer_compress_ratio": 4, "hc_lowrank": 16,
    },
    "reformer": {"axial_pos_embds": False, "hash_seed": 1},
    "step3p5": {"sliding_window": 64},
    "t5gemma2_encoder": {"mm_tokens_per_image": 4},
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 5, "layers_block_type": ["linear_attention"] * 2 + ["hybrid"] * 3,
        "attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * HEAD,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
}  # fmt: skip
# Inputs beside input_ids, attention_mask and labels, or in their place (None: left out).
INPUTS: dict[str, dict[str, Any]] = {
    "git": {"pixel_values": (2, 3, 16, 16)},
    "musicgen_decoder": {"input_ids": [8, 19], "labels": [2, 19, 4]},
    "musicgen_melody_decoder": {"input_ids": [8, 19], "labels": [2, 19, 4]},
    "udop": {"bbox": (2, 19, 4)},
    "vision-encoder-decoder": {"pixel_values": (2, 3, 16, 16), "input_ids": None, "attention_mask": None},
}  # shapes: of words in a list, of numbers from 0 to 1 in a tuple


class NotTiny(Exception):
    """No small model of this class can be made this way; the message says why."""


def tiny_config(config_class: type, default: Any = None) -> Any:
    """A configuration of this class, of the smallest sizes, with every kind of layer that the default has."""
    default = config_class() if default is None else default
    fields = _fields(config_class)
    sizes = {k: v for k in fields if k in SIZES and isinstance(v := _make_inputs(default, k), (int, float))}
    # A part that the default switches off by a size of zero stays off; True is no size.
    changes = {k: SIZES[k] for k, v in sizes.items() if v and v != SIZES[k] and (v is True) == (SIZES[k] is False)}
    # None is no size, except where models read what their configuration leaves open.
    changes |= {k: SIZES[k] for k in ("pad_token_id", "bos_token_id", "eos_token_id", "head_dim") if k in fields}
    _key_value_heads(default, fields, changes)
    _tokens(default, fields, changes)
    _layers(default, fields, changes)
    _rotary(default, fields, changes)
    for name in getattr(config_class, "sub_configs", {}) or {}:
        part = getattr(default, name, None)
        if part is not None and not isinstance(part, dict):
            changes[name] = tiny_config(type(part), part)
    changes |= EXCEPTIONS.get(getattr(config_class, "model_type", "") or config_class.__name__, {})
    kept = {k: v for k in fields if k not in changes and _plain(v := _make_inputs(default, k)) and v is not None}
    if _differs(config_class, kept):  # a sub-configuration that its owner has set up
        changes = kept | changes
    return config_class(**changes)


def _fields(config_class: type) -> list[str]:
    if dataclasses.is_dataclass(config_class):
        return [f.name for f in dataclasses.fields(config_class) if f.init]
    return [p for p in inspect.signature(config_class.__init__).parameters if p not in ("self", "kwargs", "args")]


def _make_inputs(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # a field with one value per layer raises; its list is in the configuration's `__dict__`
        return vars(config).get(name)


def _plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str))


def _differs(config_class: type, kept: dict[str, Any]) -> bool:
    try:
        fresh = config_class()
    except Exception:
        return True
    return any(_make_inputs(fresh, k) != v for k, v in kept.items())


def _key_value_heads(default: Any, fields: list[str], changes: dict[str, Any]) -> None:
    """Set as many key-value heads as heads if the default has as many, else half."""
    for name in fields:
        if name in ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"):
            value = _make_inputs(default, name)
            if isinstance(value, int):
                heads = next(
                    (h for n in ("num_attention_heads", "n_head", "n_heads") if (h := _make_inputs(default, n))), 0
                )
                changes[name] = HEADS if value == heads else min(value, HEADS // 2)


def _tokens(default: Any, fields: list[str], changes: dict[str, Any]) -> None:
    """Give the special tokens distinct ids inside the vocabulary, which no text has."""
    at = WORDS.stop
    for name in fields:
        value = _make_inputs(default, name)
        if name in changes or type(value) is not int or value < VOCABULARY:
            continue
        if name.endswith(("_token_id", "_token_index", "_token_indices", "_id")):
            changes[name] = at = at + 1


def _layers(default: Any, fields: list[str], changes: dict[str, Any]) -> None:
    """One layer of each kind that the lists name, at least two; lists of another length than layers stay."""
    counts = [n for n in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if n in fields]
    total = next((v for n in counts if isinstance(v := _make_inputs(default, n), int)), None)
    if total is None:
        return
    lists = {
        n: v for n in fields
        if isinstance(v := _make_inputs(default, n), (list, tuple)) and len(v) == total and total > 2 and _plain(v[0])
    }  # fmt: skip
    kinds = list(dict.fromkeys(zip(*lists.values(), strict=True))) if lists else []
    first: list[int] = []
    rows = list(zip(*lists.values(), strict=True)) if lists else []
    for kind in kinds[:6]:
        first.append(rows.index(kind))
    while len(first) < 2:
        first.append(first[-1] + 1 if first else 0)
    for name, values in lists.items():
        changes[name] = [values[i] for i in sorted(first)]
    for name in counts:
        if name in changes:
            changes[name] = len(first)


def _rotary(default: Any, fields: list[str], changes: dict[str, Any]) -> None:
    """Sections and factors that have an entry for each pair of a head."""
    rope = _make_inputs(default, "rope_parameters")
    if "rope_parameters" in fields and isinstance(rope, dict):
        changes["rope_parameters"] = _shrunk_rope(rope, sections=_reads_sections(type(default)))


def _reads_sections(config_class: type) -> bool:
    """Whether the model has sections of a default size where its configuration gives none."""
    try:
        model = importlib.import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    except ImportError:
        return False
    return "mrope_section" in inspect.getsource(model)


def _shrunk_rope(rope: dict[str, Any], sections: bool = False) -> dict[str, Any]:
    if sections and "rope_type" in rope and "mrope_section" not in rope:
        rope = {**rope, "mrope_section": []}
    pairs = int(HEAD * (rope.get("partial_rotary_factor") or 1.0)) // 2
    shrunk: dict[str, Any] = {}
    for key, value in rope.items():
        if isinstance(value, dict):
            value = _shrunk_rope(value, sections)
        elif key == "mrope_section":
            first = max(1, pairs // 4)
            value = [first, (pairs - first + 1) // 2, (pairs - first) // 2]
        elif key in ("short_factor", "long_factor"):
            value = [1.0 + i / 8 for i in range(pairs)]
        elif key == "original_max_position_embeddings":
            value = 256
        shrunk[key] = value
    return shrunk


# -------------------------------------------------------------------------------------------------- models and inputs


def tiny_model(model_class: Any, seed: int = 0) -> nn.Module:
    """A model in training mode, without dropout, whose weights are all random: also norms, gates and biases."""
    config_class = model_class.config_class
    if config_class is None:
        raise NotTiny("it has no configuration class of its own")
    config = tiny_config(config_class)
    for part in (config, config.get_text_config()):
        if getattr(part, "is_encoder_decoder", False):
            part.decoder_start_token_id = part.pad_token_id = 0
        if "is_decoder" in _fields(type(part)) and not getattr(part, "is_encoder_decoder", False):
            part.is_decoder = True
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(config).parameters())
    if size > MOST_PARAMETERS:
        raise NotTiny(f"its configuration does not shrink by field names: {size / 1e6:.0f}M parameters are left")
    torch.manual_seed(seed)
    model = model_class(config).float().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for p in model.parameters():
            if not torch.isfinite(p).all():  # allocated, never initialised
                nn.init.normal_(p, std=0.1)
            elif p.numel() > 1 and bool((p == p.flatten()[0]).all()):
                # All ones or zeros would hide an offset, a missing weight, and everything behind a gate of zero.
                p.add_(0.2 * torch.randn_like(p))
    return model


_OPTIONAL = inspect.Parameter("optional", inspect.Parameter.KEYWORD_ONLY, default=None)


def tiny_inputs(model: nn.Module, seed: int = 1) -> dict[str, Tensor]:
    """Text of 2 × 19 words; the labels of some words are ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS.start, WORDS.stop, (2, 19), generator=generator)
    labels = ids.clone()
    labels[:, :4] = -100
    labels[1, 15:] = -100
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    accepted = inspect.signature(type(model).forward).parameters
    given = {k: v for k, v in inputs.items() if k in accepted}
    size = getattr(getattr(model.config, "vision_config", None), "image_size", 16)
    if accepted.get("pixel_values", _OPTIONAL).default is inspect.Parameter.empty and isinstance(size, int):
        given["pixel_values"] = torch.randn(2, 3, size, size, generator=generator)
    for name, shape in INPUTS.get(getattr(model.config, "model_type", ""), {}).items():
        if shape is None:
            given.pop(name, None)
        elif isinstance(shape, list):
            given[name] = torch.randint(WORDS.start, WORDS.stop, shape, generator=generator)
        else:
            given[name] = torch.rand(shape, generator=generator)
    return given
