"""Clicks with and without crosses: LiRank, and a linear model, with the pairs of fields that persistence finds.

    python benchmarks/rank_crosses.py --data sets --output benchmarks/results

`studies/clicks/data.py` says what lies in --data, and how it is split. Of each seed a LiRank without crosses is fitted,
and the pairs of its fields are ranked by `rank.find_interactions`
of its MLP, on the rows to train on. The strongest become
crosses of the same LiRank, and of a linear model of embeddings, both fitted anew by the same seed. Beside them stand
pairs that are drawn at random. How many, validation chooses by the first seed; it stops the fits, too. The
test decides nothing. Seconds are of one core.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from studies import crosses
from studies.clicks import metrics
from studies.clicks.data import LABEL, PARTS, Clicks, read
from studies.rows import Row

from tigon import rank
from tigon.bench import report

# How many pairs become crosses: the choices.
COUNTS = (1, 5, 10)
HASH_ROWS = 50_000
LIRANK: dict[str, Any] = {"width": 8, "layers": 2, "rank": 16, "mlp": (64, 64), "gate": False, "dropout": 0.2}
MODELS: dict[str, dict[str, Any]] = {"lirank": LIRANK, "linear": {"width": 8, "cross": "none", "mlp": ()}}
OPTIONS = rank.FitOptions(
    lr=3e-3, table_optimizer="row-adagrad", table_lr=0.05, epochs=6, batch_size=1024, precision="fp32"
)  # fmt: skip
Crosses = dict[str, rank.Cross]


class Fit(NamedTuple):
    """A ranker, its row of the record, and the rows that it was trained on."""

    ranker: rank.LiRank
    row: Row
    train: rank.Impressions


def tables(data: Clicks, schema: rank.Schema) -> list[rank.Impressions]:
    """The parts of a table as impressions."""
    found = []
    for part in range(len(PARTS)):
        rows = data.rows(part)
        columns: dict[str, Any] = {name: data.codes[rows, n].numpy() for n, name in enumerate(data.fields)}
        columns |= {name: data.numbers[rows, n].numpy() for n, name in enumerate(data.number_names)}
        found.append(rank.Impressions.read({**columns, LABEL: data.labels[rows].numpy()}, schema=schema))
    return found


def schema_of(data: Clicks) -> rank.Schema:
    # A code is itself its value.
    fields: dict[str, Any] = {name: rank.Id(vocab=tuple(range(1, size))) for name, size in data.fields.items()}
    fields |= {name: rank.Number() for name in data.number_names}
    return rank.Schema({"labels": [LABEL]}, fields)


def fitted(data: Clicks, model: str, method: str, seed: int, pairs: Crosses) -> Fit:
    train, validation, test = tables(data, schema_of(data).replace(pairs))
    torch.manual_seed(seed)
    ranker = rank.LiRank(train.schema, rank.LiRankConfig(**MODELS[model]))
    began = time.process_time()
    options = rank.FitOptions(**{**vars(OPTIONS), "seed": seed})
    rank.fit(ranker, train, validation, options)
    seconds = time.process_time() - began
    on_test, on_validation = (measured(ranker, part) for part in (test, validation))
    setting = {
        "model": model, "crosses": list(pairs), "parameters": sum(p.numel() for p in ranker.parameters()),
        "rows": train.rows,
    }  # fmt: skip
    return Fit(ranker, Row("crosses", data.name, seed, method, setting, on_test, on_validation, seconds), train)


def measured(ranker: rank.LiRank, part: rank.Impressions) -> dict[str, float]:
    scored = rank.score(ranker, part, rank.BatchOptions(8192, precision="fp32"))
    p = scored.logits[LABEL].double().sigmoid().numpy()
    return metrics.measured(p, scored.labels[LABEL].double().numpy())


def ranked(plain: Fit, seed: int) -> dict[str, Crosses]:
    """By method, as many pairs as are ever tried: those that persistence finds, and those that are drawn."""
    strongest = rank.find_interactions(rank.extract_mlp(plain.ranker, plain.train), order=2)
    fields = list(plain.train.schema.fields)
    pairs = [*itertools.combinations(fields, 2)]
    drawn = [pairs[n] for n in np.random.default_rng(seed).permutation(len(pairs))[: max(COUNTS)]]
    return {
        crosses.FOUND: strongest.crosses(max(COUNTS), hash_rows=HASH_ROWS),
        crosses.DRAWN: {" × ".join(one): rank.Cross(one, hash_rows=HASH_ROWS) for one in drawn},
    }


def study(data: Clicks, seeds: int, keep: Any) -> None:
    counts: dict[tuple[str, str], int] = {}
    for seed in range(seeds):
        first = fitted(data, "lirank", crosses.WITHOUT, seed, {})
        own = ranked(first, seed)
        for model in MODELS:
            keep((first if model == "lirank" else fitted(data, model, crosses.WITHOUT, seed, {})).row)
            for method, pairs in own.items():
                choices = [counts[model, method]] if seed else COUNTS
                tried = {
                    count: fitted(data, model, method, seed, dict(itertools.islice(pairs.items(), count))).row
                    for count in choices
                }
                if seed:
                    keep(tried[choices[0]])
                    continue
                best = max(tried, key=lambda count: tried[count].validation["auc"])
                counts[model, method] = best
                tried[best].setting["tried"] = {str(n): row.validation["auc"] for n, row in tried.items()}
                keep(tried[best])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the sets' folders")
    parser.add_argument("--sets", default="frappe,ml-100k")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True, help="folder of the result file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []

    def keep(row: Row) -> None:
        rows.append(row)
        print(f"{row.data}, {row.setting['model']}, {row.method}, seed {row.seed}: AUC {row.measures['auc']:.4f}, "
              f"{len(row.setting['crosses'])} crosses, {row.seconds:.1f} s", flush=True)  # fmt: skip
        content = report.result("rank-crosses", rows, device=torch.device("cpu"))
        report.save(options.output / "cpu-rank-crosses.json", content)

    for name in options.sets.split(","):
        study(read(options.data, name), options.seeds, keep)
    print(f"\n{crosses.quality([row.to_dict() for row in rows])}")


if __name__ == "__main__":
    main()
