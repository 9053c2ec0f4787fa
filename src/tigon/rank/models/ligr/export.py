"""Export LiGR as two `torch.export` programs, which run without Tigon.

    encode(history, context, age, lengths)           → keys, values, newest
    score(keys, values, newest, lengths, candidates) → {label: logits (B, C)}

B requests, T events and C candidates per request are dynamic, from 1; rows are padded at the end. Codes are int64,
numbers fp32.

    history     field → (B, T), with an extra dimension for `Ids`, padded with −1. Oldest event first.
    context     field → (B,), likewise.
    age         (B, T) fp64, seconds before the request.
    lengths     (B,) int64, events per request; padding after them is ignored.
    keys        (layers, B, 1 + T, heads, D), likewise values: for the context, then the events.
    newest      (B,) fp64, the newest event's age; add the elapsed seconds before scoring.
    candidates  field → (B, C), likewise; item and row fields together.
    present     (B, C) bool, mask for valid candidates, which attend to each other in `setwise_layers`.

Attention uses torch operators, with masks computed from the lengths inside the programs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.kernels import use_backend
from tigon.ops.rope import rope
from tigon.rank.data.batches import eval_mode
from tigon.rank.data.fields import Ids, Number
from tigon.rank.models.ligr.model import LiGR

ENCODE, SCORE = "encode.pt2", "score.pt2"


class Encode(nn.Module):
    """Padded contexts and histories to keys and values."""

    def __init__(self, ranker: LiGR) -> None:
        super().__init__()
        self.ranker = ranker

    def forward(
        self, history: dict[str, Tensor], context: dict[str, Tensor], age: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ranker, (B, T) = self.ranker, age.shape
        # The padded version of `tokens.event_tokens`.
        place = torch.arange(T, device=age.device)
        before = torch.where(place > 0, age[:, (place - 1).clamp(min=0)], torch.inf)
        events = ranker.tokens.events(history, before - age)
        x = torch.cat((ranker.tokens.context(context, B).unsqueeze(1), events), 1)
        last = age.gather(1, (lengths - 1).clamp(min=0).unsqueeze(1))[:, 0]
        cos, sin = ranker.rotary_angles(torch.arange(x.shape[1], device=x.device), x.dtype)
        keys, values = list[Tensor](), list[Tensor]()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = rope(q, k, cos, sin, unsqueeze_dim=2)
            keys.append(k)
            values.append(v)
            return _attention(q, k, v)

        # Attention is causal, so padding at the end does not affect valid tokens.
        for layer in ranker.layers:
            x = layer(x, attend)
        return torch.stack(keys), torch.stack(values), torch.where(lengths > 0, last, torch.inf)


class Score(nn.Module):
    """Padded candidates to logits."""

    def __init__(self, ranker: LiGR) -> None:
        super().__init__()
        self.ranker = ranker

    def forward(
        self, keys: Tensor, values: Tensor, newest: Tensor, lengths: Tensor, candidates: dict[str, Tensor],
        present: Tensor,
    ) -> dict[str, Tensor]:  # fmt: skip
        ranker, C = self.ranker, present.shape[1]
        x = ranker.tokens.candidates(candidates, newest.unsqueeze(1).expand(-1, C))
        cos, sin = ranker.rotary_angles((1 + lengths).unsqueeze(1).expand(-1, C), x.dtype)
        past = torch.arange(keys.shape[2], device=x.device) <= lengths.unsqueeze(1)
        alone = torch.eye(C, dtype=torch.bool, device=x.device)
        for number, layer in enumerate(ranker.layers):
            across = number >= ranker.setwise_from
            own = alone | present.unsqueeze(1) if across else alone.expand(lengths.shape[0], C, C)
            seen = torch.cat((past.unsqueeze(1).expand(-1, C, -1), own), -1)

            def attend(q: Tensor, k: Tensor, v: Tensor, number: int = number, seen: Tensor = seen) -> Tensor:
                q, k = rope(q, k, cos, sin, unsqueeze_dim=2)
                k, v = torch.cat((keys[number], k), 1), torch.cat((values[number], v), 1)
                return _attention(q, k, v, seen.unsqueeze(1))

            x = layer(x, attend)
        return ranker.logits(ranker.norm(x))


def _attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """(B, N, H, D); seen: (B, 1, N, K), or None for causal."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None).transpose(1, 2)


def export_ligr(ranker: LiGR, folder: Path) -> list[Path]:
    # Reference implementations trace to torch operators.
    with eval_mode(ranker), use_backend("torch"):
        programs = _trace_programs(ranker)
    for name, program in programs.items():
        torch.export.save(program, folder / name)
    return [folder / name for name in programs]


def _trace_programs(ranker: LiGR) -> dict[str, Any]:
    dim, device = torch.export.Dim, ranker.device
    B, T, C, P = dim("requests", min=1), dim("events", min=1), dim("candidates", min=1), dim("rows", min=2)
    sizes = {"B": 3, "T": 5, "C": 4}

    def examples(side: str, more: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        values, dims = {}, {}
        for name in ranker.tokens.sides[side]:
            field, shape = ranker.schema.fields[name], [sizes[letter] for letter in more]
            dims[name] = {n: {"B": B, "T": T, "C": C}[letter] for n, letter in enumerate(more)}
            if isinstance(field, Ids):
                dims[name][len(shape)] = dim(f"most_{ranker.tokens.names.index(name)}_{side}", min=1)
                shape.append(2)
            dtype = torch.float32 if isinstance(field, Number) else torch.int64
            values[name] = torch.zeros(shape, dtype=dtype, device=device)
        return values, dims

    history, history_dims = examples("events", "BT")
    context, context_dims = examples("context", "B")
    candidates, candidate_dims = examples("candidates", "BC")
    age = torch.arange(15.0, 0, -1, dtype=torch.float64, device=device).view(3, 5)
    lengths = torch.tensor([5, 0, 3], device=device)
    encode = Encode(ranker)
    given = history, context, age, lengths
    shapes = {"history": history_dims, "context": context_dims, "age": {0: B, 1: T}, "lengths": {0: B}}
    keys, values, newest = encode(*given)
    programs = {ENCODE: torch.export.export(encode, given, dynamic_shapes=shapes)}
    present = torch.ones(3, 4, dtype=torch.bool, device=device)
    shapes = {
        "keys": {1: B, 2: P}, "values": {1: B, 2: P}, "newest": {0: B}, "lengths": {0: B},
        "candidates": candidate_dims, "present": {0: B, 1: C},
    }  # fmt: skip
    encoded = keys, values, newest, lengths, candidates, present
    return programs | {SCORE: torch.export.export(Score(ranker), encoded, dynamic_shapes=shapes)}
