"""Export LiRank as a `torch.export` program, which runs without Tigon.

    score(features) → {label: logits (B,)}

    features    field → (B,), one row per candidate; codes and times are int64, numbers fp32. `Ids` are (B, most),
                padded with −1.

B is dynamic, from 1. Request fields are repeated for each row. Calibration is included.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tigon.kernels import use_backend
from tigon.rank.data.batches import eval_mode
from tigon.rank.data.fields import Ids, Number
from tigon.rank.models.lirank.inputs import SIDES
from tigon.rank.models.lirank.model import LiRank

SCORE = "score.pt2"


class Score(nn.Module):
    """Feature rows to logits."""

    def __init__(self, ranker: LiRank) -> None:
        super().__init__()
        self.ranker = ranker

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        ranker = self.ranker
        x = ranker.inputs(features, features, None, plain=True)
        segment = None if ranker.segment is None else features[ranker.segment]
        return ranker.apply_calibration(ranker.logits(ranker.run_layers(x)), segment)


def export_lirank(ranker: LiRank, folder: Path) -> list[Path]:
    dim = torch.export.Dim
    rows = dim("rows", min=1)
    features: dict[str, Tensor] = {}
    dims: dict[str, dict[int, Any]] = {}
    for number, name in enumerate(name for side in SIDES for name in ranker.inputs.names[side]):
        field, lists = ranker.schema.fields[name], isinstance(ranker.schema.fields[name], Ids)
        dtype = torch.float32 if isinstance(field, Number) else torch.int64
        features[name] = torch.zeros((3, 2) if lists else (3,), dtype=dtype, device=ranker.device)
        dims[name] = {0: rows, 1: dim(f"most_{number}", min=1)} if lists else {0: rows}
    # Reference implementations trace to torch operators.
    with eval_mode(ranker), use_backend("torch"):
        program = torch.export.export(Score(ranker), (features,), dynamic_shapes={"features": dims})
    torch.export.save(program, folder / SCORE)
    return [folder / SCORE]
