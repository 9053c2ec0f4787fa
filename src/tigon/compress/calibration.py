"""Calibration data: texts or token ids as model batches, the recorded feed-forward inputs, and the model's outputs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tigon.compress.recognition import FeedForward

Batch = dict[str, Tensor]
LENGTH, SEQUENCES = 512, 4  # tokens per window, windows per batch
MOST = 8192  # rows kept per layer input, unless more are needed
TOP = 64  # most probable tokens compared individually; the rest are pooled
NAME = "feed_forward"


def make_batches(model: nn.Module, calibration: Any, tokenizer: Any, *, name: str = NAME) -> list[Batch]:
    """Batches as model keyword arguments.

    Args:
        calibration: texts, with a tokenizer; ids (sequences, length); or an iterable of mappings, used unchanged.
    Raises: ValueError for other types and for empty calibration.
    """
    place = next(model.parameters()).device
    if isinstance(calibration, str):
        calibration = [calibration]
    if isinstance(calibration, Tensor):
        if calibration.dim() != 2 or calibration.is_floating_point():
            raise ValueError(
                f"{name}: calibration must be (sequences, length) token ids, got {tuple(calibration.shape)} "
                f"{calibration.dtype}."
            )
        batches: list[Batch] = [{"input_ids": ids} for ids in calibration.split(SEQUENCES) if ids.numel()]
    else:
        items = list(calibration)
        if items and isinstance(items[0], str):
            batches = _tokenize(model, items, tokenizer, name)
        elif all(isinstance(item, Mapping) for item in items):
            batches = [dict(item) for item in items]
        else:
            raise ValueError(
                f"{name}: calibration must be texts, token ids or model batches, got a list of "
                f"{type(items[0]).__name__}."
            )
    if not batches:
        raise ValueError(f"{name}: calibration must hold text, got none.")
    for batch in batches:
        _check_ids(model, batch.get("input_ids"), name)
    return [{k: v.to(place) if isinstance(v, Tensor) else v for k, v in batch.items()} for batch in batches]


def _check_ids(model: Any, ids: Any, name: str) -> None:
    table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    rows = getattr(table, "num_embeddings", None)
    if not isinstance(ids, Tensor) or not ids.numel() or rows is None:
        return
    least, most = int(ids.min()), int(ids.max())
    if not 0 <= least <= most < rows:
        raise ValueError(
            f"{name}: calibration must have token ids in the vocabulary, 0 to {rows - 1:,}, got "
            f"{least if least < 0 else most:,}."
        )


def _tokenize(model: Any, texts: list[str], tokenizer: Any, name: str) -> list[Batch]:
    """Windows over each text, grouped by length, since padding would count as text."""
    if tokenizer is None:
        raise ValueError(f"{name}: texts as calibration need the model's tokenizer: pass tokenizer=.")
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None) or LENGTH
    around = tokenizer("")["input_ids"]  # tokens added around every text
    room = max(1, min(LENGTH, limit) - len(around))
    windows = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        windows += [[*around[:1], *ids[i : i + room], *around[1:]] for i in range(0, len(ids), room)]
    groups = [list(group) for _, group in itertools.groupby(sorted(windows, key=len, reverse=True), len)]
    return [{"input_ids": rows} for group in groups for rows in torch.tensor(group).split(SEQUENCES)]


def count_tokens(batch: Mapping[str, Any]) -> int:
    """Token count without padding, or the row count if the model takes no tokens."""
    mask, ids = batch.get("attention_mask"), batch.get("input_ids")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return int(mask.sum())
    if isinstance(ids, Tensor):
        return ids.numel()
    return next(v for v in batch.values() if isinstance(v, Tensor)).shape[:-1].numel()


def take_batches(batches: list[Batch], tokens: int) -> list[Batch]:
    """The first batches that hold at least `tokens` tokens."""
    counts = itertools.accumulate(map(count_tokens, batches), initial=0)
    return [batch for batch, before in zip(batches, counts, strict=False) if before < tokens]


@torch.no_grad()
def record_inputs(
    model: nn.Module, layers: list[FeedForward], batches: list[Batch], *, need: int = 1
) -> dict[str, Tensor]:  # fmt: skip
    """Rows (T, d) at the input to each layer's up, keyed by down's name, sampled evenly over all batches.

    At most MOST rows; if `need` is larger, at least `need` and fewer than twice that, given enough tokens.
    Raises: ValueError for a layer with a non-finite input.
    """
    tokens = sum(map(count_tokens, batches))
    stride = max(1, min(-(-tokens // MOST), tokens // need))
    kept: dict[str, list[Tensor]] = {layer.down: [] for layer in layers}
    mask: Any = None

    def record(down: str) -> Any:
        def hook(_: Any, args: tuple[Any, ...]) -> None:
            x = args[0].detach()
            if isinstance(mask, Tensor) and mask.shape == x.shape[:-1]:
                x = x[mask.bool()]
            kept[down].append(x.reshape(-1, x.shape[-1])[::stride].clone())

        return hook

    handles = [model.get_submodule(layer.up).register_forward_pre_hook(record(layer.down)) for layer in layers]
    try:
        for batch in batches:
            mask = batch.get("attention_mask")
            model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    rows = {down: torch.cat(pieces) for down, pieces in kept.items()}
    bad = next((layer.name for layer in layers if not bool(torch.isfinite(rows[layer.down]).all())), None)
    if bad is not None:
        raise ValueError(
            f"{NAME}: the calibration produces values that are not finite (NaN or infinity) at {bad}; check the "
            "weights before this layer, and the dtype."
        )
    return rows


class OutputDistance:
    """The original model's outputs on some batches, to measure a changed model's distance.

    For token predictions the distance is KL(before ‖ after) in nats per token, over the 64 most probable tokens and the
    pooled rest. Otherwise it is the mean squared difference relative to the outputs' mean square.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, batches: list[Batch]) -> None:
        self.model, self.batches = model, batches
        head = getattr(model, "get_output_embeddings", lambda: None)()
        self.is_nats = hasattr(model, "lm_head") or head is not None
        self.before: list[Any] = []
        for batch in batches:
            y = self._compute(batch)
            top, ids = y.topk(min(TOP, y.shape[-1])) if self.is_nats else (y, None)
            self.before.append((top, ids))
            if not bool(torch.isfinite(top).all()):
                raise ValueError(
                    f"{NAME}: the model's outputs for the calibration are not finite (NaN or infinity); check the "
                    "weights and the dtype."
                )

    @property
    def unit(self) -> str:
        return "nats per token" if self.is_nats else "times the mean square output"

    def _compute(self, batch: Batch) -> Tensor:
        """The model's output in fp32: log probabilities for token predictions."""
        y: Any = self.model(**batch)
        if not isinstance(y, Tensor):
            named = (getattr(y, key, None) for key in ("logits", "last_hidden_state"))
            values = y.values() if isinstance(y, Mapping) else y
            y = next(v for v in (*named, *values) if isinstance(v, Tensor))
        return y.float().log_softmax(-1) if self.is_nats else y.float()  # type: ignore[no-any-return]

    @torch.no_grad()
    def measure(self) -> float:
        """Distance of the current model from the original."""
        error, size = 0.0, 0.0
        for batch, (before, ids) in zip(self.batches, self.before, strict=True):
            y = self._compute(batch)
            if self.is_nats:
                p, q = before, y.gather(-1, ids)
                p_rest, q_rest = ((1 - t.exp().sum(-1)).clamp_min(1e-6) for t in (p, q))
                error += float((p.exp() * (p - q)).sum() + (p_rest * (p_rest.log() - q_rest.log())).sum())
                size += p[..., 0].numel()
            else:
                error += float((y - before).square().sum())
                size += float(before.square().sum())
        return max(0.0, error / size) if size else 0.0  # rounding can make a tiny divergence negative
