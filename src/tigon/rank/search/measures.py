"""Search measures: rankers' log losses, and table digests."""

from __future__ import annotations

import hashlib
import math
from typing import Any

from torch import Tensor

from tigon.data import metrics
from tigon.rank.data.batches import BatchSource
from tigon.rank.data.fields import Text
from tigon.rank.data.ragged import Ragged
from tigon.rank.evaluation.evaluate import evaluate
from tigon.rank.evaluation.score import score
from tigon.rank.training.fit import FitOptions

# Number of requests in the digest that identifies a table.
DIGESTED = 4096


def log_loss(ranker: Any, data: BatchSource, options: FitOptions) -> float:
    """Mean log loss over a table's labels; NaN if any logit is NaN."""
    scored = score(ranker, data, options.batch_options)
    if not all(bool(z.isfinite().all()) for z in scored.logits.values()):
        return math.nan
    found = [
        metrics.log_loss(scored.logits[name].double().sigmoid(), y, weights=scored.weights)
        for name, y in scored.labels.items()
    ]
    return sum(found) / len(found)


def measure(ranker: Any, data: BatchSource, options: FitOptions) -> dict[str, float]:
    """Mean log loss and AUC over a table's labels."""
    found = evaluate(score(ranker, data, options.batch_options))
    return {name: found.value(name) for name in ("log_loss", "auc")}


def digest_table(data: Any) -> str:
    """A table's request count, and a digest over its fields and first requests."""
    found = hashlib.blake2b(digest_size=6)
    found.update(data.schema.to_json().encode())
    names = [name for name, one in data.schema.fields.items() if not isinstance(one, Text)]
    for batch in data.batches(requests=DIGESTED):
        values = {**batch.context, **batch.items}
        for value in [*(values.get(name) for name in names), *batch.labels.values()]:
            for x in (value.values, value.offsets) if isinstance(value, Ragged) else (value,):
                if isinstance(x, Tensor):
                    found.update(x.detach().cpu().contiguous().numpy().tobytes())
        break
    return f"{len(data):,} requests, {found.hexdigest()}"
