"""Images and sound for a tiny model: the shapes that models of transformers take, tried one after the other.

A model counts its image tokens against the features of its tower, so the tower is run first, by the model's own
`get_image_features` or `get_audio_features`, and the text gets as many tokens of that kind as it gives features.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

IMAGE_TOKENS = ("image_token_id", "image_token_index", "media_placeholder_token_id", "boi_token_id")
AUDIO_TOKENS = ("audio_token_id", "audio_token_index")
AROUND = {
    "image": (("vision_start_token_id", "image_start_token_id"), ("vision_end_token_id", "image_end_token_id")),
    "audio": (("audio_start_token_id", "audio_bos_token_id"), ("audio_end_token_id", "audio_eos_token_id")),
}
TOKENS = {"image": IMAGE_TOKENS, "audio": AUDIO_TOKENS}
FEATURES = {"image": "get_image_features", "audio": "get_audio_features"}


def with_media(
    model: nn.Module, text: dict[str, Tensor], step: Callable[[Any, Any], Any]
) -> tuple[dict[str, Any], str]:
    """Inputs with an image or a sound for each sequence, and what they have; or the text alone, and why.

    step: makes a training step of (model, inputs) → (loss, gradients), by which a candidate is tried.
    """
    accepted = inspect.signature(type(model).forward).parameters
    kind = "image" if "pixel_values" in accepted else "audio"
    if not {"pixel_values", "input_features", "input_values"} & set(accepted):
        return text, ""
    why = "none of the shapes that are tried"
    alone = _gradients(model, text, step)
    for candidate in _candidates(model, kind, set(accepted)):
        try:
            inputs, (loss, gradients) = _with_tokens(model, kind, text, candidate, step)
        except Exception as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            continue
        if torch.isfinite(loss) and len(gradients) > len(alone):
            return inputs, "with pixels" if kind == "image" else "with sound"
        why = "the tower's weights get no gradient"
    if not alone:
        return text, ""  # it does not run by text either, and its record says why
    return text, f"text alone ({why})"


def _gradients(model: nn.Module, text: Any, step: Callable[[Any, Any], Any]) -> Any:
    try:
        return step(model, text)[1]
    except Exception:
        return {}


def _candidates(model: Any, kind: str, accepted: set[str]) -> Iterator[dict[str, Any]]:
    """Inputs of towers: what forward takes of the most usual ones."""
    generator = torch.Generator().manual_seed(3)
    rand = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    config = model.config
    if kind == "audio":
        tower = next((c for n in ("audio_config", "encoder_config") if (c := getattr(config, n, None))), config)
        mels = next((n for k in ("num_mel_bins", "input_dim", "feat_size", "input_feat_per_channel")
                     if isinstance(n := getattr(tower, k, None), int)), 16)  # fmt: skip
        positions = next((n for k in ("max_source_positions", "max_position_embeddings")
                          if isinstance(n := getattr(tower, k, None), int)), 32)  # fmt: skip
        for length in dict.fromkeys((2 * positions, 64, 200)):
            lengths, valid = torch.full((2,), length), torch.ones(2, length).bool()
            masks = {"feature_attention_mask": valid.long(), "input_features_mask": valid, "padding_mask": valid,
                     "feature_lens": lengths, "audio_feature_lengths": lengths}  # fmt: skip
            masks = {k: v for k, v in masks.items() if k in accepted}
            for shape in ((2, mels, length), (2, length, mels)):
                if "input_features" in accepted:
                    yield {"input_features": rand(*shape), **masks}
                    yield {"input_features": rand(*shape)}
        if "input_values" in accepted:
            for length in (2000, 8000):
                yield {"input_values": rand(2, length)}
                yield {"input_values": rand(2, 1, length)}
        return
    vision = next((c for n in ("vision_config", "vq_config") if (c := getattr(config, n, None)) is not None), config)
    size = next((n for k in ("image_size", "img_size") if isinstance(n := getattr(vision, k, None), int)), 16)
    patch = next((n for k in ("patch_size", "spatial_patch_size") if isinstance(n := getattr(vision, k, None), int)), 4)
    channels = next(
        (n for k in ("num_channels", "in_channels", "in_chans") if isinstance(n := getattr(vision, k, None), int)), 3
    )
    merge = getattr(vision, "spatial_merge_size", None) or getattr(config, "spatial_merge_size", None) or 2
    frames = getattr(vision, "temporal_patch_size", None) or 1
    sizes = {
        "image_sizes": torch.tensor([[size, size]] * 2),
        "pixel_attention_mask": torch.ones(2, 1, size, size).bool(),
    }
    further = {k: v for k, v in sizes.items() if k in accepted}
    for shape in ((2, channels, size, size), (2, 1, channels, size, size), (2, 2, channels, size, size)):
        for extra in ({}, further) if further else ({},):
            more = dict(extra)
            if "pixel_attention_mask" in more:
                more["pixel_attention_mask"] = torch.ones(2, shape[1] if len(shape) == 5 else 1, size, size).bool()
            yield {"pixel_values": rand(*shape), **more}
    side = 2 * merge
    grids = {"image_grid_thw": torch.tensor([[1, side, side]] * 2), "image_grid_hws": torch.tensor([[side, side]] * 2),
             "spatial_shapes": torch.tensor([[side, side]] * 2),
             "pixel_attention_mask": torch.ones(2, side * side).long()}  # fmt: skip
    taken = {k: v for k, v in grids.items() if k in accepted}
    if taken:
        for width in dict.fromkeys((channels * frames * patch**2, channels * patch**2)):
            yield {"pixel_values": rand(2 * side * side, width), **taken}
            yield {"pixel_values": rand(2, side * side, width), **taken}
        yield {"pixel_values": rand(2 * side * side, channels, patch, patch), **taken}
    if "image_position_ids" in accepted or "pixel_position_ids" in accepted:
        name = "image_position_ids" if "image_position_ids" in accepted else "pixel_position_ids"
        at = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), -1).view(1, -1, 2)
        yield {"pixel_values": rand(2, side * side, channels * patch**2), name: at.expand(2, -1, -1)}
    if "aspect_ratio_ids" in accepted:
        tiles = getattr(vision, "max_num_tiles", 4)
        yield {"pixel_values": rand(2, 1, tiles, channels, size, size), "aspect_ratio_ids": torch.ones(2, 1).long(),
               "aspect_ratio_mask": torch.ones(2, 1, tiles).long(),
               "cross_attention_mask": torch.ones(2, 19, 1, tiles).long()}  # fmt: skip


def _with_tokens(
    model: Any, kind: str, text: dict[str, Tensor], candidate: dict[str, Any], step: Callable[[Any, Any], Any]
) -> tuple[dict[str, Any], Any]:
    """Inputs with as many tokens of the kind as the tower gives features, and the step that they make."""
    parameters = inspect.signature(type(model).forward).parameters
    token = _id(model.config, TOKENS[kind])
    if "input_ids" not in text or token is None:
        inputs: dict[str, Any] = {k: v for k, v in text.items() if k != "attention_mask"} | candidate
        if "input_ids" in inputs and "decoder_input_ids" in parameters:
            inputs.pop("input_ids")
        if "labels" in inputs and "input_values" in candidate:
            inputs["labels"] = inputs["labels"][:, 4:12].clamp(min=3)  # fewer than the frames
        if "input_ids" in inputs:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        return inputs, step(model, inputs)
    start, end = (_id(model.config, names) for names in AROUND[kind])
    todo = _features(model, kind, candidate)
    while todo:
        count = todo.pop(0)
        block = [*([start] if start is not None else []), *[token] * count, *([end] if end is not None else [])]
        ids, labels = text["input_ids"], text.get("labels")
        before = torch.tensor(block).expand(len(ids), -1)
        inputs = dict(text)
        inputs["input_ids"] = torch.cat((ids[:, :1], before, ids[:, 1:]), 1)
        if labels is not None:
            inputs["labels"] = torch.cat((labels[:, :1], torch.full_like(before, -100), labels[:, 1:]), 1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        is_media = inputs["input_ids"] == token
        for name, of_kind in (("mm_token_type_ids", {"image": 1, "audio": 3}[kind]), ("token_type_ids", 1)):
            if name in parameters:
                inputs[name] = is_media.long() * of_kind
        inputs |= candidate
        try:
            return inputs, step(model, inputs)
        except Exception as error:
            told = COUNTS.search(str(error))
            wanted = 0 if told is None else round(count * int(told[2]) / max(int(told[1]), 1))
            if wanted > 0 and wanted != count and len(todo) < 4:
                todo.insert(0, wanted)
            if not todo:
                raise
    raise AssertionError("a number of tokens is tried")


# How models say that their tokens are another number than their features.
COUNTS = re.compile(r"tokens:? *(\d+),? *(?:and )?(?:\w+ )*features:? *(\d+)", re.I)


def _id(config: Any, names: tuple[str, ...]) -> int | None:
    for part in (config, config.get_text_config()):
        for name in names:
            if type(value := getattr(part, name, None)) is int:
                return value
    return None


def _features(model: Any, kind: str, candidate: dict[str, Any]) -> list[int]:
    """How many features the tower gives for one sequence: one number, or several to try without a method for that."""
    owner: Any = next((m for m in model.modules() if callable(getattr(m, FEATURES[kind], None))), None)
    if owner is None:
        length = max(max(t.shape) for t in candidate.values())
        return [length // 4, length // 2, length // 8, 1]
    method = getattr(owner, FEATURES[kind])
    parameters = inspect.signature(method).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    with torch.no_grad():
        found = method(**{k: v for k, v in candidate.items() if k in parameters or anything})
    for name in ("pooler_output", "last_hidden_state"):
        if getattr(found, name, None) is not None:
            found = getattr(found, name)
            break
    while isinstance(found, tuple) and not isinstance(found[0], Tensor):
        found = found[0]
    tensors = [found] if isinstance(found, Tensor) else [t for t in found if isinstance(t, Tensor) and t.dim() > 1]
    return [max(1, sum(t.numel() // t.shape[-1] for t in tensors) // 2)]
