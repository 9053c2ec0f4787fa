"""What a search measures: log losses of rankers, and which table a study is of."""

from __future__ import annotations

import hashlib
import math
from typing import Any

from torch import Tensor

from tigon.rank import metrics
from tigon.rank.evaluating import evaluate
from tigon.rank.fields import Text
from tigon.rank.fitting import FitOptions
from tigon.rank.ragged import Ragged
from tigon.rank.scoring import Batched, score

# Requests of the digest that tells one table from another.
DIGESTED = 4096


def log_loss(ranker: Any, data: Batched, options: FitOptions) -> float:
    """The log loss of a table's labels, the mean over them; NaN where a logit is."""
    scored = score(ranker, data, options.drawing)
    if not all(bool(z.isfinite().all()) for z in scored.logits.values()):
        return math.nan
    found = [
        metrics.log_loss(scored.logits[name].double().sigmoid(), y, weights=scored.weights)
        for name, y in scored.labels.items()
    ]
    return sum(found) / len(found)


def measured(ranker: Any, data: Batched, options: FitOptions) -> dict[str, float]:
    """Log loss and AUC of a table's labels, means over them."""
    found = evaluate(score(ranker, data, options.drawing))
    return {name: found.value(name) for name in ("log_loss", "auc")}


def digest(data: Any) -> str:
    """How many requests a table has, and a digest of its fields and of the first of them."""
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
