"""`tigon verify --fp8`: how far FP8 moves the gradients of a model on a batch, and what more layers in bf16 change."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tigon.cli.problem import Problem
from tigon.cli.screen import show

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

FIRST = (0, 1, 2)  # decoder layers that stay in bf16


@dataclass(frozen=True)
class Noise:
    """The gradients of one decoder layer, or of all.

    bf16, fp8: distances from the fp32 gradients, relative to those; fp8 by the number of first layers left in bf16.
    """

    layer: str
    bf16: float
    fp8: dict[int, float]


def measure_noise(model: nn.Module, ids: Tensor, labels: Tensor) -> tuple[list[Noise], list[str]]:
    """A row for each decoder layer and one for all, and why layers stayed in bf16.

    model: in fp32, on the device. Raises Problem for a model without layers that can run in FP8.
    """
    from tigon import FP8, fuse
    from tigon.fusion.fp8.layers import ignore_sizes
    from tigon.fusion.parts.fp8 import list_decoder_layers

    groups = _name_layers(model)
    exact = _compute_gradients(model, ids, labels)
    narrow = copy.deepcopy(model).bfloat16()
    plain = _measure(_compute_gradients(narrow, ids, labels), exact, groups)
    found: dict[int, dict[str, float]] = {}
    left: list[str] = []
    deepest = max((len(layers) for layers in list_decoder_layers(model)), default=1)
    for first in FIRST[: max(deepest - 1, 1)]:
        with ignore_sizes(), fuse(narrow, fp8=FP8(first=first)) as fusion:
            found[first] = _measure(_compute_gradients(narrow, ids, labels), exact, groups)
            rows = [row for row in fusion.report().rows if row.kind == "fp8"]
        if not any(row.calls for row in rows):
            reasons = sorted({row.idle or row.what for row in rows}) or ["no list of layers has a torch.nn.Linear"]
            raise Problem(f"verify --fp8: no layer ran in FP8: {'; '.join(reasons)}")
        left = left or sorted({f"{row.name}: {row.what}" for row in rows if not row.fused and "first" not in row.what})
    return [Noise(name, plain[name], {first: of[name] for first, of in found.items()}) for name in plain], left


def _name_layers(model: nn.Module) -> dict[str, list[str]]:
    """The names of the parameters in each decoder layer."""
    from tigon.fusion.parts.fp8 import list_decoder_layers

    names = {id(m): name for name, m in model.named_modules()}
    layers = [names[id(layer)] for found in list_decoder_layers(model) for layer in found]
    return {layer: [n for n, _ in model.named_parameters() if n.startswith(f"{layer}.")] for layer in layers}


def _compute_gradients(model: nn.Module, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
    found = {name: p.grad.detach().float() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def _measure(gradients: dict[str, Tensor], exact: dict[str, Tensor], groups: dict[str, list[str]]) -> dict[str, float]:
    squares: dict[str, tuple[float, float]] = {}
    for layer, names in groups.items():
        pairs = [(gradients.get(n, 0.0 * exact[n]), exact[n]) for n in names if n in exact]
        errors = sum(float((a - b).square().sum()) for a, b in pairs)
        squares[layer] = errors, sum(float(b.square().sum()) for _, b in pairs)
    squares["all layers"] = sum(e for e, _ in squares.values()), sum(size for _, size in squares.values())
    return {name: (error / size) ** 0.5 if size else 0.0 for name, (error, size) in squares.items()}


def read_batch(path: Path, tokenizer: Any, batch_size: int, seq_len: int, device: torch.device) -> Tensor:
    """The first tokens of a text file, as (batch_size, seq_len) ids. Raises Problem for too short a file."""
    import torch

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Problem(f"verify --data {path}: {error}") from None
    ids = tokenizer(text[: 16 * batch_size * seq_len])["input_ids"]
    if len(ids) < batch_size * seq_len:
        raise Problem(
            f"verify --data {path}: the file has {len(ids):,} tokens, and --batch-size {batch_size} "
            f"--seq-len {seq_len} need {batch_size * seq_len:,}"
        )
    return torch.tensor(ids[: batch_size * seq_len], device=device).view(batch_size, seq_len)


def print_noise(rows: list[Noise], left: list[str], title: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "left": left}, indent=2))
        return
    from rich.table import Table

    table = Table(title=title, caption="distance of the gradients from those in fp32, relative to those")
    table.add_column("gradients of")
    for column in ("bf16", *(f"FP8, first={first}" for first in rows[0].fp8)):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(row.layer.removeprefix("model."), *(f"{v:.4f}" for v in (row.bf16, *row.fp8.values())))
    show(table)
    for sentence in left:
        print(f"stays in bf16: {sentence}")
