"""Search for the layers of a model of clicks, stop in between, and go on.

    python examples/rank_search.py

The 2,000 rows are made up: a banner is clicked if it suits the visitor, which no field says alone. `tigon rank search`
does the same from files, with a bar, a table and a plot.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch

from tigon import rank

ROWS, BANNERS, VISITORS = 2000, 12, 10
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def shown(seed: int) -> dict[str, object]:
    draw = np.random.default_rng(seed)
    banner, visitor = draw.integers(BANNERS, size=ROWS), draw.integers(VISITORS, size=ROWS)
    suits = (banner + visitor) % 3 == 0
    return {
        "banner": [f"b{b}" for b in banner],
        "visitor": [f"v{v}" for v in visitor],
        "hour": draw.integers(24, size=ROWS),
        "click": (suits ^ (draw.random(ROWS) < 0.1)).astype(int),
    }


def said(graph: tuple[rank.Block, ...]) -> str:
    return "; ".join(f"{n}: {block}" for n, block in enumerate(graph, 1))


def main() -> None:
    train, held = rank.Impressions.read(shown(1)).split(by="request", fraction=0.25)
    test = rank.Impressions.read(shown(2), schema=train.schema)
    fit = rank.FitOptions(lr=0.01, epochs=8, batch_size=100, table_optimizer="row-adagrad", table_lr=0.1)
    options = rank.SearchOptions(trials=6, rows=0.4, best=1, fit=fit, model={"width": 8})

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "study"
        # As Ctrl-C, or a machine that goes away: after three trials. Evolution begins after 20; 100 are usual.
        half = rank.search_blocks(
            train, held, options, folder=folder, device=DEVICE, after=lambda progress: progress.trials >= 3
        )
        print(f"stopped after {len(half.trials)} trials; the best log loss is {half.best.loss:.4f}")
        found = rank.search_blocks(train, held, options, folder=folder, test=test, device=DEVICE)
        print(f"{len(found.trials)} trials; the best log loss is {found.best.loss:.4f}, of {said(found.best.graph)}")
        for one in found.refits:
            print(f"trial {one.number}, on all rows: test log loss {one.test['log_loss']:.4f}, "
                  f"AUC {one.test['auc']:.4f}; {one.flops:,} FLOPs")  # fmt: skip
        ranker = rank.Ranker.from_pretrained(found.refits[0].folder, DEVICE)
        chance = rank.score(ranker, test).logits["click"][:3].sigmoid()
        print(f"clicks of the first rows: {', '.join(f'{p:.2f}' for p in chance.tolist())}")


if __name__ == "__main__":
    main()
