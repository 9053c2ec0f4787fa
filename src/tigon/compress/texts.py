"""Calibration data: texts or token ids as model batches, and the recorded feed-forward inputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tigon.compress.finding import FeedForward

Batch = dict[str, Tensor]
LENGTH, SEQUENCES = 512, 4  # tokens per window, windows per batch
MOST = 8192  # rows kept per layer input, unless more are needed
NAME = "feed_forward"


def batches_of(model: nn.Module, calibration: Any, tokenizer: Any, *, name: str = NAME) -> list[Batch]:
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
        found: list[Batch] = [{"input_ids": ids} for ids in calibration.split(SEQUENCES) if ids.numel()]
    else:
        items = list(calibration)
        if items and isinstance(items[0], str):
            found = _windows(model, items, tokenizer, name)
        elif all(isinstance(item, Mapping) for item in items):
            found = [dict(item) for item in items]
        else:
            raise ValueError(
                f"{name}: calibration must be texts, token ids or batches of the model, got a list of "
                f"{type(items[0]).__name__}."
            )
    if not found:
        raise ValueError(f"{name}: calibration must hold text, got none.")
    for batch in found:
        if isinstance(batch.get("input_ids"), Tensor):
            _check_ids(model, batch["input_ids"], name)
    return [{k: v.to(place) if isinstance(v, Tensor) else v for k, v in batch.items()} for batch in found]


def _check_ids(model: Any, ids: Tensor, name: str) -> None:
    table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    rows = getattr(table, "num_embeddings", None)
    if ids.numel() and rows is not None and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
        worst = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise ValueError(
            f"{name}: calibration must have token ids from 0 to {rows - 1:,}, the vocabulary, got {worst:,}."
        )


def _windows(model: Any, texts: list[str], tokenizer: Any, name: str) -> list[Batch]:
    """Windows over each text, grouped by length, since padding would count as text."""
    if tokenizer is None:
        raise ValueError(f"{name}: calibration of texts needs tokenizer=, the model's.")
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None) or LENGTH
    around = tokenizer("")["input_ids"]  # tokens added around every text
    before, after = around[:1], around[1:]
    room = max(1, min(LENGTH, limit) - len(around))
    by_length: dict[int, list[list[int]]] = {}
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        for start in range(0, len(ids), room):
            row = [*before, *ids[start : start + room], *after]
            by_length.setdefault(len(row), []).append(row)
    rows = (ids for length in sorted(by_length, reverse=True) for ids in _grouped(by_length[length]))
    return [{"input_ids": torch.tensor(ids)} for ids in rows]


def _grouped(rows: list[list[int]]) -> Iterable[list[list[int]]]:
    return (rows[i : i + SEQUENCES] for i in range(0, len(rows), SEQUENCES))


def tokens_of(batch: Mapping[str, Any]) -> int:
    """Token count without padding, or the row count if the model takes no tokens."""
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return int(mask.sum())
    ids = batch.get("input_ids")
    first = ids if isinstance(ids, Tensor) else next(v for v in batch.values() if isinstance(v, Tensor))
    return first.numel() if first is ids else first.shape[:-1].numel()


def first_rows(batch: Batch) -> Batch:
    """The batch's first sequence, enough to recognise layers."""
    return {k: v[:1] if isinstance(v, Tensor) and v.dim() else v for k, v in batch.items()}


@torch.no_grad()
def inputs_of(
    model: nn.Module, found: list[FeedForward], batches: list[Batch], *, need: int = 1
) -> dict[str, Tensor]:  # fmt: skip
    """Rows (T, d) at the input to each layer's up, keyed by down's name, sampled evenly over all batches.

    At most MOST rows; if `need` is larger, at least `need` and fewer than twice that, given enough tokens.
    Raises: ValueError for a layer with a non-finite input.
    """
    tokens = sum(map(tokens_of, batches))
    stride = max(1, min(-(-tokens // MOST), tokens // need))
    kept: dict[str, list[Tensor]] = {one.down: [] for one in found}
    mask: list[Any] = [None]

    def record(down: str) -> Any:
        def hook(_: Any, args: tuple[Any, ...]) -> None:
            x = args[0].detach()
            own = mask[0]
            if isinstance(own, Tensor) and own.shape == x.shape[:-1]:
                x = x[own.bool()]
            kept[down].append(x.reshape(-1, x.shape[-1])[::stride].clone())

        return hook

    handles = [model.get_submodule(one.up).register_forward_pre_hook(record(one.down)) for one in found]
    try:
        for batch in batches:
            mask[0] = batch.get("attention_mask")
            model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    rows = {down: torch.cat(some) for down, some in kept.items()}
    for one in found:
        if not bool(torch.isfinite(rows[one.down]).all()):
            raise ValueError(
                f"{NAME}: the calibration gives numbers that are not finite (NaN or infinite) at {one.name}; "
                "check the weights before it, and the dtype."
            )
    return rows


# -------------------------------------------------------------------------------------------------- the whole model


TOP = 64  # most probable tokens compared individually; the rest are pooled


def _output(model: nn.Module, batch: Batch) -> Tensor:
    y: Any = model(**batch)
    if isinstance(y, Tensor):
        return y
    for key in ("logits", "last_hidden_state"):
        if isinstance(getattr(y, key, None), Tensor):
            return getattr(y, key)  # type: ignore[no-any-return]
    values = y.values() if isinstance(y, Mapping) else y
    return next(v for v in values if isinstance(v, Tensor))


class Whole:
    """The original model's outputs on some batches, to measure a changed model's distance.

    For token predictions the distance is KL(before ‖ after) in nats per token, over the 64 most probable tokens and the
    pooled rest. Otherwise it is the mean squared difference relative to the outputs' mean square.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, batches: list[Batch]) -> None:
        self.model, self.batches = model, batches
        self.nats = hasattr(model, "lm_head") or _has_head(model)
        self.before: list[Any] = [self._read(batch) for batch in batches]
        if not all(bool(torch.isfinite(y[0] if self.nats else y).all()) for y in self.before):
            raise ValueError(
                f"{NAME}: the model's answers to the calibration are not finite (NaN or infinite); check its weights, "
                "and the dtype."
            )

    @property
    def unit(self) -> str:
        """Unit for distances."""
        return "nats a token" if self.nats else "of the mean square of its answers"

    def _read(self, batch: Batch) -> Any:
        y = _output(self.model, batch).float()
        if not self.nats:
            return y
        top, ids = y.log_softmax(-1).topk(min(TOP, y.shape[-1]))
        return top, ids

    @torch.no_grad()
    def distance(self) -> float:
        """Distance of the current model from the original."""
        off, size = 0.0, 0.0
        for batch, before in zip(self.batches, self.before, strict=True):
            y = _output(self.model, batch).float()
            if self.nats:
                p, ids = before
                q = y.log_softmax(-1).gather(-1, ids)
                off += float((p.exp() * (p - q)).sum() + _rest(p, q))
                size += p[..., 0].numel()
            else:
                off += float((y - before).square().sum())
                size += float(before.square().sum())
        return max(0.0, off / size) if size else 0.0  # rounding can make a tiny divergence negative


def _rest(p: Tensor, q: Tensor) -> Tensor:
    p_rest, q_rest = ((1 - t.exp().sum(-1)).clamp_min(1e-6) for t in (p, q))
    return (p_rest * (p_rest.log() - q_rest.log())).sum()


def _has_head(model: Any) -> bool:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return head is not None


def share(batches: list[Batch], tokens: int) -> list[Batch]:
    """The first batches that hold at least `tokens` tokens."""
    counts = itertools.accumulate(map(tokens_of, batches), initial=0)
    return [batch for batch, before in zip(batches, counts, strict=False) if before < tokens]
