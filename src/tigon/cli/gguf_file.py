"""A causal language model as a GGUF file, for llama.cpp and programs built on llama.cpp.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

A family or a tokenizer that is not in the tables is refused: llama.cpp would read the file, and compute something else.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tigon.cli.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

# llama.cpp's types by the names in --dtype.
TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
SPACE = "▁"  # a space, in tokenizers made by SentencePiece


@dataclass(frozen=True)
class Family:
    """How llama.cpp computes an architecture, where the architectures differ.

    is_interleaved: rotary pairs are neighbours, and halves of a head in transformers. norm_offset: added to the weights
    of norms. has_head_size: whether the heads together may be wider or narrower than the model. window_period: one
    layer in so many attends to all tokens, the others to a window; 0: all layers.
    """

    arch: str
    is_interleaved: bool = False
    activation: str = "silu"
    norm_offset: float = 0.0
    has_head_size: bool = True
    window_period: int = 0


FAMILIES = {
    "llama": Family("llama", is_interleaved=True),
    "mistral": Family("llama", is_interleaved=True),
    "qwen2": Family("qwen2", has_head_size=False),
    "qwen3": Family("qwen3"),
    "gemma": Family("gemma", activation="gelu_pytorch_tanh", norm_offset=1.0),
    "gemma2": Family("gemma2", activation="gelu_pytorch_tanh", norm_offset=1.0, window_period=2),
    "gemma3_text": Family("gemma3", activation="gelu_pytorch_tanh", norm_offset=1.0, window_period=6),
}

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA_3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN_2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# llama.cpp's names of pre-tokenizers, by their parts and by whether a whole word in the vocabulary needs no merges.
# "bytes" is the pattern of GPT-2, inside tokenizers' ByteLevel.
PRE_TOKENIZERS = {
    (("bytes",), False): "gpt-2",
    (("digits", "bytes"), False): "smollm",
    ((_LLAMA_3,), True): "llama-bpe",
    ((_LLAMA_3,), False): "smaug-bpe",
    ((_QWEN_2,), False): "qwen2",
    ((_TEKKEN,), True): "tekken",
}


def check_family(config: Any) -> Family:
    """The row of a model's configuration. Raises Problem for a model that llama.cpp computes otherwise."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise _refuse(f"{config.model_type} models are not among {', '.join(FAMILIES)}")
    act = getattr(config, "hidden_activation", None) or config.hidden_act
    if act != family.activation:
        raise _refuse(f"the activation is {act}, and llama.cpp's {family.arch} has {family.activation}")
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # transformers gives only some families a list
        kinds = ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"]
        kinds *= config.num_hidden_layers
    period = family.window_period
    expected = [_find_kind(layer, period) for layer in range(config.num_hidden_layers)]
    if list(kinds) != expected:
        raise _refuse(f"its layers have attention windows that llama.cpp's {family.arch} does not have")
    head_dim = _find_head_size(config)
    if not family.has_head_size and head_dim * config.num_attention_heads != config.hidden_size:
        raise _refuse(f"its heads have {head_dim} columns, which llama.cpp's {family.arch} does not read")
    scale = getattr(config, "query_pre_attn_scalar", head_dim)
    if scale != head_dim:
        raise _refuse(f"query_pre_attn_scalar is {scale}, and llama.cpp scales scores by the head size")
    if getattr(config, "use_bidirectional_attention", False):
        raise _refuse("its attention is not causal")
    for kind, rope in _find_rope(config).items():
        allowed = {"default"}
        if kind != "sliding_attention":
            allowed |= {"linear"} | ({"llama3"} if family.arch == "llama" else set())
        if rope.get("rope_type", "default") not in allowed or rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise _refuse(f"its rotary embedding is {rope.get('rope_type', 'default')}, or covers part of a head")
        if kind == "sliding_attention" and rope["rope_theta"] != 10_000:
            raise _refuse(f"rope_theta is {rope['rope_theta']} in windows, and llama.cpp has 10000")
    return family


def _find_kind(layer: int, period: int) -> str:
    return "full_attention" if not period or (layer + 1) % period == 0 else "sliding_attention"


def _find_head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _refuse(reason: str, part: str = "model") -> Problem:
    return Problem(
        f"export: --to gguf cannot write this {part}: {reason}; export the model by --to hf, and try llama.cpp's own "
        "converter: python convert_hf_to_gguf.py DIR"
    )


def _find_rope(config: Any) -> dict[str, dict[str, Any]]:
    """The rotary parameters for each kind of layer."""
    found = config.rope_parameters
    return found if "full_attention" in found else {"full_attention": found}


def write_gguf(model: Any, tokenizer: Any, file: Path, dtype: str, *, pre: str | None = None, name: str = "") -> None:
    """Write a model and a tokenizer into a GGUF file.

    Args:
        model: a causal language model of transformers, of a family in FAMILIES.
        tokenizer: its tokenizer, by the library tokenizers: BPE over bytes, or a SentencePiece model.
        file: the file to write.
        dtype: a name in TYPES for the matrices. Norms and biases are stored in fp32.
        pre: llama.cpp's name of the pre-tokenizer; None: recognised.
        name: the model's name in the file.
    Raises: Problem for a family or a tokenizer that llama.cpp computes otherwise.
    """
    import gguf
    import numpy as np

    config = model.config
    family = check_family(config)
    vocabulary = read_vocabulary(tokenizer, model.get_input_embeddings().weight.shape[0], pre)
    writer = gguf.GGUFWriter(file, family.arch)
    try:
        kind = gguf.GGMLQuantizationType[TYPES[dtype]]
        writer.add_name(name or config.model_type)
        writer.add_file_type(gguf.LlamaFileType[{"F32": "ALL_F32"}.get(kind.name, f"MOSTLY_{kind.name}")])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_sizes(writer, config, family)
        _add_vocabulary(writer, vocabulary)
        tensors = list(_name_tensors(model, family))
        for tensor_name, tensor, _ in tensors:
            stored = _choose_type(tensor, kind)
            shape = gguf.quant_shape_to_byte_shape(tuple(tensor.shape), stored)
            block, size = gguf.GGML_QUANT_SIZES[stored]
            writer.add_tensor_info(tensor_name, shape, np.dtype("uint8"), tensor.numel() // block * size, stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, tensor, convert in tensors:
            values = convert(tensor.detach().float().cpu()).contiguous().numpy()
            stored = gguf.quantize(values, _choose_type(tensor, kind))
            try:
                writer.write_tensor_data(stored)
            except OSError as error:  # NumPy counts the bytes that it could not write, and gives no number
                raise OSError(error.errno or errno.ENOSPC, str(error)) from error
    finally:
        writer.close()


def _choose_type(tensor: Tensor, kind: Any) -> Any:
    import gguf

    if tensor.dim() == 1:
        return gguf.GGMLQuantizationType.F32
    if tensor.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        return gguf.GGMLQuantizationType.F16  # as llama.cpp does where a row is no whole number of blocks
    return kind


def _add_sizes(writer: Any, config: Any, family: Family) -> None:
    import gguf

    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = _find_head_size(config)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    rope = _find_rope(config)["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if family.window_period:
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _name_tensors(model: Any, family: Family) -> Iterator[tuple[str, Tensor, Callable[[Tensor], Tensor]]]:
    """Each tensor with the name in the file, and the function that computes the stored values in fp32."""
    import gguf

    config = model.config
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family.arch)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    head = model.get_output_embeddings().weight
    is_tied = head is model.get_input_embeddings().weight
    for name, tensor in model.state_dict().items():
        if is_tied and name == "lm_head.weight":
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is None:
            raise _refuse(f"llama.cpp's {family.arch} has no tensor for {name}")
        layer = name.split(".")[-2]
        convert: Callable[[Tensor], Tensor] = _keep
        if family.norm_offset and layer.endswith("norm"):
            convert = _Offset(family.norm_offset)
        elif family.is_interleaved and layer in ("q_proj", "k_proj"):
            convert = _Interleave(config.num_attention_heads if layer == "q_proj" else config.num_key_value_heads)
        yield stored, tensor, convert
    rope = _find_rope(config)["full_attention"]
    if rope.get("rope_type") == "llama3":
        import torch
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        slowed, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        head_dim = _find_head_size(config)
        pairs = torch.arange(0, head_dim, 2).float() / head_dim
        yield "rope_freqs.weight", rope["rope_theta"] ** -pairs / slowed, _keep


def _keep(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class _Offset:
    value: float

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor + self.value


@dataclass(frozen=True)
class _Interleave:
    """Reorder the rows of each head, so that the two numbers of a rotary pair are neighbours."""

    heads: int

    def __call__(self, tensor: Tensor) -> Tensor:
        rows = tensor.shape[0] // self.heads // 2
        return tensor.view(self.heads, 2, rows, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer's part of a GGUF file. model: "gpt2" for BPE over bytes, "llama" for SentencePiece."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str] | None
    scores: list[float] | None
    special: dict[str, int]
    adds_bos: bool
    adds_eos: bool
    adds_space: bool
    template: str | None


def read_vocabulary(tokenizer: Any, rows: int, pre: str | None = None) -> Vocabulary:
    """Read a tokenizer of transformers.

    Args:
        tokenizer: the tokenizer.
        rows: the model's embeddings; the rows without a token get placeholders.
        pre: llama.cpp's name of the pre-tokenizer; None: recognised.
    Raises: Problem for a tokenizer by which llama.cpp would cut texts otherwise.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _refuse("the library tokenizers does not run it", "tokenizer")
    stored = json.loads(backend.to_str())
    model = stored["model"]
    if model["type"] != "BPE":
        raise _refuse(f"its model is {model['type']}, not BPE", "tokenizer")
    if len(tokenizer) > rows:
        raise Problem(f"export: the tokenizer has {len(tokenizer):,} tokens, and the model {rows:,} embeddings")
    by_bytes = not model.get("byte_fallback")
    if pre is None:
        pre = _find_pre_tokenizer(stored) if by_bytes else _check_sentence_piece(stored)
    tokens = [f"[PAD{row}]" for row in range(rows)]
    types = [5] * rows  # GGUF's numbers: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte
    for token, row in model["vocab"].items():
        tokens[row], types[row] = token, 1
        if not by_bytes and token.startswith("<0x") and len(token) == 6:
            types[row] = 6
    for added in stored["added_tokens"]:
        if added["lstrip"] or added["rstrip"] or added["single_word"]:
            raise _refuse(f"its token {added['content']} takes the spaces around it", "tokenizer")
        row, text = added["id"], added["content"]
        # A run of spaces is text to tokenizers, which find the run by merges, and never find the token itself.
        if added["special"] or by_bytes or SPACE not in text or text not in model["vocab"]:
            tokens[row], types[row] = text, 3 if added["special"] else 4
    if not by_bytes and model.get("unk_token") is not None:
        types[model["vocab"][model["unk_token"]]] = 2
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    special = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk", "pad")}
    template = tokenizer.chat_template  # a dict where there are several
    ids = tokenizer("a").input_ids
    text = tokenizer.convert_ids_to_tokens(tokenizer("a", add_special_tokens=False).input_ids)
    return Vocabulary(
        model="gpt2" if by_bytes else "llama",
        pre=pre,
        tokens=tokens,
        types=types,
        merges=merges if by_bytes else None,
        scores=None if by_bytes else _find_scores(tokens, model["vocab"], merges),
        special={name: row for name, row in special.items() if row is not None},
        adds_bos=tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id,
        adds_eos=tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id,
        adds_space=text[0].startswith(SPACE),
        template=template.get("default") if isinstance(template, dict) else template,
    )


def _list_parts(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """The parts of a tokenizer's component, which may be a sequence."""
    if part is None:
        return []
    return [one for each in part[key] for one in _list_parts(each, key)] if part["type"] == "Sequence" else [part]


def _find_pre_tokenizer(stored: dict[str, Any]) -> str:
    parts = []
    for part in _list_parts(stored["pre_tokenizer"], "pretokenizers"):
        if part["type"] == "Split" and part["behavior"] == "Isolated" and not part["invert"]:
            parts.append(part["pattern"].get("Regex", ""))
        elif part["type"] == "Digits" and part["individual_digits"]:
            parts.append("digits")
        elif part["type"] == "ByteLevel" and not part["add_prefix_space"]:
            parts += ["bytes"] if part["use_regex"] else []
        else:
            parts.append(part["type"])
    normalizers = {part["type"] for part in _list_parts(stored["normalizer"], "normalizers")}
    found = PRE_TOKENIZERS.get((tuple(parts), bool(stored["model"].get("ignore_merges"))))
    if found is None or normalizers - {"NFC"}:  # llama.cpp reads texts as they are, and expects NFC
        raise Problem(
            "export: the tokenizer cuts texts in a way that llama.cpp has no known name for (known: "
            f"{', '.join(PRE_TOKENIZERS.values())}), and a wrong name would give wrong tokens; name llama.cpp's "
            "pre-tokenizer by --pre, or convert the folder of --to hf: python convert_hf_to_gguf.py DIR"
        )
    return found


def _check_sentence_piece(stored: dict[str, Any]) -> str:
    for part in _list_parts(stored["normalizer"], "normalizers"):
        is_space = part["type"] == "Replace" and part["pattern"] == {"String": " "} and part["content"] == SPACE
        if not is_space and part != {"type": "Prepend", "prepend": SPACE}:
            raise _refuse(f"it changes texts by {part['type']} first", "tokenizer")
    for part in _list_parts(stored["pre_tokenizer"], "pretokenizers"):
        if part["type"] == "Metaspace" and not part["split"]:
            if part["prepend_scheme"] != "never":
                raise Problem(
                    "export: before a text that begins with a space, and after special tokens, llama.cpp adds a space "
                    f"that this tokenizer ({part['prepend_scheme']} in Metaspace) does not add; --pre default writes "
                    "the file nevertheless"
                )
        elif part["type"] != "Split" or part["pattern"] != {"String": " "}:
            raise _refuse(f"it cuts texts by {part['type']} first", "tokenizer")
    return "default"


def _find_scores(tokens: list[str], vocab: dict[str, int], merges: list[str]) -> list[float]:
    """Scores in the order of the merges: llama.cpp joins the pair whose token has the highest score."""
    scores = [0.0] * len(tokens)
    rank: dict[int, int] = {}
    for merge in merges:
        rank.setdefault(vocab[merge.replace(" ", "", 1)], len(rank))
    for token, row in vocab.items():
        if len(token) > 1:  # a token that no merge gives is never joined
            scores[row] = -float(rank[row]) if row in rank else -1e9
    return scores


def _add_vocabulary(writer: Any, vocabulary: Vocabulary) -> None:
    writer.add_vocab_size(len(vocabulary.tokens))
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.merges is not None:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.adds_space)
    for name, row in vocabulary.special.items():
        getattr(writer, f"add_{name}_token_id")(row)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(vocabulary.adds_eos)
    if vocabulary.template is not None:
        writer.add_chat_template(vocabulary.template)
