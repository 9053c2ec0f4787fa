"""Train a LiRank on a table of clicks, put its probabilities right, and make it small.

    python examples/rank_clicks.py

The 2,000 rows are made up: an app is installed by how good it is, by whether it suits the country, and by the hour.
`tigon rank fit --model lirank` does the same from files, with checkpoints, intervals and a plot.
"""

import tempfile

import numpy as np
import torch

from tigon import rank

ROWS, APPS, USERS = 2000, 40, 200
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def shown(seed: int) -> dict[str, object]:
    """Rows of features and what happened; nothing says what is an item, a request or a time."""
    draw = np.random.default_rng(seed)
    app, user, hour = draw.integers(APPS, size=ROWS), draw.integers(USERS, size=ROWS), draw.integers(24, size=ROWS)
    age = draw.normal(40, 12, size=ROWS)
    country = user % 3
    liked = 1.5 * np.sin(app) + 1.2 * (country == app % 3) - 0.8 * (hour < 7) - 0.03 * (age - 40) - 0.5
    install = draw.random(ROWS) < 1 / (1 + np.exp(-liked))
    return {
        "app": [f"app{a}" for a in app],
        "user": [f"user{u}" for u in user],
        "country": [("de", "fr", "jp")[c] for c in country],
        "hour": hour,
        "age": np.where(draw.random(ROWS) < 0.1, np.nan, age),
        "tags": [[f"tag{a % 4}", f"tag{a % 6}"] for a in app],
        "install": install.astype(int),
        "minutes": np.where(install, draw.exponential(20, size=ROWS), 0),
    }


def report(name: str, ranker: rank.LiRank, held: rank.Impressions) -> None:
    found = rank.evaluate(rank.score(ranker, held), draws=50).labels["install"]
    auc = found["auc"]
    print(f"{name}: AUC {auc.value:.3f} ({auc.low:.3f} to {auc.high:.3f}), ECE {found['ece'].value:.3f}")


def main() -> None:
    torch.manual_seed(0)
    # Users are many: their hashes share 32 + 32 rows, whose products tell 1,024 of them apart.
    roles = rank.Roles(labels=("install", "long = minutes >= 20"))
    fields = {
        "app": rank.Id(), "user": rank.Id(hash_rows=32, hash="qr"), "country": rank.Id(), "hour": rank.Id(),
        "age": rank.Number(), "tags": rank.Ids(),
    }  # fmt: skip
    data = rank.Impressions.read(shown(1), schema=rank.Schema(roles, fields))
    train, held = data.split(by="request", fraction=0.25)
    test = rank.Impressions.read(shown(2), schema=train.schema)

    towers = {"interest": ["install"], "use": ["long"]}
    ranker = rank.LiRank(
        train.schema, rank.LiRankConfig(8, layers=2, rank=8, mlp=(32,), calibrate="country", towers=towers)
    ).to(DEVICE)
    options = rank.FitOptions(
        lr=0.005, epochs=6, batch_size=100, metric="log_loss", table_optimizer="row-adagrad", table_lr=0.05
    )
    report("before", ranker, test)
    fitted = rank.fit(ranker, train.to(DEVICE), held.to(DEVICE), options)
    print(f"{fitted.steps} steps; the best weights are those of step {fitted.best}")
    report("fitted", ranker, test)
    rank.calibrate(ranker, held.to(DEVICE))
    report("calibrated", ranker, test)

    small = rank.quantize_tables(ranker)
    before, after = (sum(tables.nbytes for tables in one.tables()) for one in (ranker, small))
    report(f"tables of {after:,} bytes in place of {before:,}", small, test)
    with tempfile.TemporaryDirectory() as folder:
        small.save_pretrained(folder)
        same = rank.Ranker.from_pretrained(folder, DEVICE)
    first = rank.score(same, test)
    for row in range(3):
        chances = ", ".join(f"{label} {float(z[row].sigmoid()):.2f}" for label, z in first.logits.items())
        app, user = (test.column(name)[row] for name in ("app", "user"))
        print(f"{app} for {user}: {chances}; score {float(first.score[row]):.2f}")


if __name__ == "__main__":
    main()
