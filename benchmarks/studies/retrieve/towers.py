"""Two towers on a reader's own pairs, by each loss, in at most the same time: recall and NDCG of full rankings.

    python -m studies.retrieve.towers --data gowalla --name Gowalla --output benchmarks/results

The loop, its defaults and its files of pairs are those of `tigon retrieve train`. Each side fits once on the training
pairs without runs of neighbours (`--val-split block`), which say how many epochs are best, and then on all training
pairs for each seed. The test pairs are read last, and decide nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from harness import report

from studies.retrieve.rows import Row
from tigon.retrieve.cli.loop import evaluate_towers, fit
from tigon.retrieve.cli.pairs import SPLITS, read_pairs
from tigon.retrieve.cli.train_options import TrainOptions, choose_settings

Array = npt.NDArray[Any]
# Settings that a row names.
SHOWN = ("loss", "dim", "hops", "own", "bias", "leave_out", "lr", "batch_size", "scale")
SHARE = 0.2  # of the training pairs, which validates
# LightGCN's recipe: the sum of own and pooled embeddings, no number of an item, pairs pooled that are trained on.
PLAIN = {"own": 1.0, "bias": False, "leave_out": False}
# What differs from the defaults of `tigon retrieve train`.
SIDES: dict[str, dict[str, Any]] = {
    "item_softmax": {},
    "item_softmax, dim 64": {"dim": 64},
    "in_batch": {"loss": "in_batch"},
    "in_batch_logq": {"loss": "in_batch_logq"},
    "sampled": {"loss": "sampled"},
    "hard": {"loss": "hard", "hard_after": 4, "hard_skip": 20},
    "item_softmax, LightGCN's towers": PLAIN,
    "item_softmax, epochs by random pairs": {"val_split": "random"},
    "item_softmax, pooling what it trains on": {"leave_out": False},
    "item_softmax, no number of an item": {"bias": False},
    "item_softmax, own embeddings too": {"own": 1.0},
}


def unevenness(train: Array, test: Array) -> float | None:
    """How much more items differ in their share of test pairs than a draw at random would make them.

    The standard deviation, over items of 30 pairs or more, of the number of their test pairs, in the unit of that of a
    binomial draw: about 1 where the test pairs are a random share of all.
    """
    both = np.concatenate((train[:, 1], test[:, 1]))
    count, drawn = (np.bincount(column, minlength=both.max() + 1) for column in (both, test[:, 1]))
    share, enough = len(test) / len(both), count >= 30
    if not enough.any():
        return None
    expected = share * count
    return float(((drawn - expected) / np.sqrt(np.maximum(expected, 1e-9) * (1 - share)))[enough].std())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--data", required=True, type=Path, help="pairs as `tigon retrieve train` takes them, with test.txt"
    )
    parser.add_argument("--name", required=True, help="what the data are called")
    parser.add_argument("--output", required=True, type=Path, help="folder of the result file")
    parser.add_argument("--sides", help=f"separated by semicolons: {'; '.join(SIDES)}; default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a fit, at most")
    parser.add_argument("--epochs", type=int, default=60, help="of a fit, at most")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds after which no further side is begun")
    parser.add_argument("--resume", type=Path, help="a result file whose sides are kept, and not fitted again")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    start, device = time.monotonic(), torch.device(options.device)
    pairs = read_pairs(options.data, None, None, None)
    if pairs.test is None:
        raise SystemExit(f"two_towers.py: {options.data} must hold test pairs, too")
    train, test = torch.from_numpy(pairs.train), torch.from_numpy(pairs.test).to(device)
    users, items = len(pairs.users), len(pairs.items)
    spread = unevenness(pairs.train, pairs.test)
    print(f"{users:,} users, {items:,} items, {len(train):,} training pairs, {len(test):,} test pairs", flush=True)
    rows = [Row(**row) for row in report.load(options.resume)["rows"]] if options.resume else []
    done = {row.method for row in rows}
    for side in options.sides.split(";") if options.sides else SIDES:
        side = side.strip()
        if side in done:
            continue
        if time.monotonic() - start > options.budget:
            print(f"left out, the budget was spent: {side}")
            continue
        given = dict(SIDES[side])
        how = given.pop("val_split", "block")
        kept, held = map(torch.from_numpy, SPLITS[how](pairs.train, SHARE, 0))
        settings = TrainOptions(epochs=options.epochs, max_minutes=options.seconds / 60, **given)
        settings = dataclasses.replace(settings, **choose_settings(settings, len(train)))
        chosen = fit(kept, (users, items), settings, 0, held, device=device)
        validation = {
            name: max(chosen.history, key=lambda row: row["ndcg@20"])[name] for name in ("recall@20", "ndcg@20")
        }
        own = {name: getattr(settings, name) for name in SHOWN}
        final = dataclasses.replace(settings, epochs=chosen.best)
        for seed in range(options.seeds):
            fitted = fit(train, (users, items), final, seed, device=device)
            found = evaluate_towers(fitted.towers, test, train.to(device))
            measures = {name: found[name] for name in ("recall@20", "ndcg@20", "coverage@20")}
            setting = {**own, "val_split": how, "epochs": fitted.epochs}
            rows.append(Row("towers", options.name, seed, side, setting, measures, validation, [], fitted.seconds))
            shown = ", ".join(f"{name} {measures[name]:.4f} ({validation[name]:.4f})" for name in validation)
            at = time.monotonic() - start
            print(
                f"{at:5.0f} s  {side}, seed {seed}: {fitted.epochs} epochs, {fitted.seconds:.1f} s, {shown}", flush=True
            )
        content = report.result("retrieve-study", rows, device=device, unevenness=spread)
        options.output.mkdir(parents=True, exist_ok=True)
        path = options.output / report.file_name(content, "retrieve-towers")
        path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
