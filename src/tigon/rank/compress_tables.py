"""Tables of embeddings in 8 bits a number, after training: what a ranker weighs then, and how its scores differ.

bytes a row      width + 4, where fp32 has 4 · width: 20 in place of 64 at width 16
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tigon.rank import metrics
from tigon.rank.scoring import Batched, Drawing, score

if TYPE_CHECKING:
    from tigon.rank.features.model import LiRank


class Compressed(NamedTuple):
    """How a compressed ranker scores a table, beside the one that it was made of.

    Attributes:
        largest, mean: differences of the labels' probabilities, absolute.
        auc: by label, (before, after), where the table has it.
    """

    largest: float
    mean: float
    auc: dict[str, tuple[float, float]]


def compressed(ranker: LiRank) -> LiRank:
    """`LiRank.compress`."""
    if ranker.options["bits"] == 8:
        raise ValueError("LiRank.compress: tables must be of 32 bits, got those of 8, which are compressed already.")
    made = type(ranker)(ranker.schema, **{**ranker.config(), "bits": 8}, weights=ranker.score_weights)
    made.to(ranker.device)
    tables = [f"{name}.weight" for name, module in ranker.named_modules() if module in ranker.tables()]
    rest = {name: value for name, value in ranker.state_dict().items() if name not in tables}
    made.load_state_dict(rest, strict=False)
    for small, large in zip(made.tables(), ranker.tables(), strict=True):
        small.take(large)
    made.explorer = ranker.explorer  # its last layer is the same
    return made.eval()


def compared(before: Any, after: Any, data: Batched, drawing: Drawing = Drawing()) -> Compressed:
    """Score a table by a ranker and by the one that `compress` made of it.

    Args:
        before, after: `rank.LiRank`. data: `rank.Impressions`. drawing: `rank.Drawing`, how it is cut into batches.
    Returns: `Compressed`.
    Raises: ValueError if there are no requests.
    """
    first, second = (score(ranker, data, drawing) for ranker in (before, after))
    off = torch.stack([(first.logits[name].sigmoid() - z.sigmoid()).abs() for name, z in second.logits.items()])
    auc = {}
    for name, y in first.labels.items():
        known = ~y.isnan()
        weights = None if first.weights is None else first.weights[known]
        both = tuple(metrics.auc(one.logits[name][known], y[known], weights=weights) for one in (first, second))
        if both[0] == both[0]:
            auc[name] = (both[0], both[1])
    return Compressed(float(off.max()), float(off.double().mean()), auc)


def sizes(ranker: Any) -> dict[str, int]:
    """Bytes of the tables, and of the rest that `save_pretrained` writes."""
    tables = sum(one.nbytes for one in ranker.tables())
    return {"tables": tables, "rest": sum(value.nbytes for value in ranker.state_dict().values()) - tables}
