"""Thompson sampling by a ranker's last layer on the Open Bandit data, by off-policy estimates from the uniform log.

    python benchmarks/open_bandit.py --data zr-obp --output benchmarks/results

The data is the reader's own copy of the folder `obd` of https://github.com/st-tech/zr-obp (CC BY 4.0; Saito et al.
2020, https://arxiv.org/abs/2008.07146): 10,000 rows each of two campaigns of a fashion shop, logged by a uniform policy
(random) and by Beta-Bernoulli Thompson sampling without contexts (bts). A row shows one item at one of three positions.

`rank.LiRank` is fitted on the first half of the uniform log, of which it sums its posterior; the second half says what
policies would have earned. Beside them stand the clicks that both logs have, and what the estimates say of bts from the
uniform log: how likely it shows an item at a position is the mean of its logged propensities there. Of a click in 200
rows there are some 25 in a half: the intervals say how much that is.
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tigon import rank
from tigon.bench import report
from tigon.rank import off_policy

CAMPAIGNS, LOGS = ("men", "women"), ("random", "bts")
EXPLORE = (0.0, 0.3, 1.0)
USER = [f"user_feature_{n}" for n in range(4)]
ITEM = [f"item_feature_{n}" for n in range(4)]


@dataclass(frozen=True)
class Row:
    """policy: "random" or "bts", the logged ones, or "thompson" with `explore`, the mean of all seeds' choices.
    estimator: "logged" for the mean click of the policy's own log, or one of `rank.off_policy`. low, high: 95 % of a
    bootstrap over rows. effective: (Σ w)² / Σ w² of the rows."""

    campaign: str
    policy: str
    explore: float | None
    estimator: str
    value: float
    low: float
    high: float
    rows: int
    clicks: int
    effective: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Log:
    """Rows in time order. item, position, click, propensity: (n,). candidates: columns of n · items rows."""

    items: int
    item: Tensor
    position: Tensor
    click: Tensor
    propensity: Tensor
    lines: list[dict[str, str]]
    features: list[dict[str, str]]

    @classmethod
    def read(cls, folder: Path, log: str, campaign: str) -> Log:
        place = folder / "obd" / log / campaign
        if not place.is_dir():
            raise SystemExit(f"open_bandit: --data must hold obd/{log}/{campaign}, which {folder} does not")
        with (place / f"{campaign}.csv").open(newline="") as file:
            lines = sorted(csv.DictReader(file), key=lambda line: line["timestamp"])
        with (place / "item_context.csv").open(newline="") as file:
            features = sorted(csv.DictReader(file), key=lambda line: int(line["item_id"]))
        items = sum(name.startswith("user-item_affinity_") for name in lines[0])

        def column(name: str) -> Tensor:
            return torch.tensor([float(line[name]) for line in lines], dtype=torch.float64)

        return cls(items, column("item_id").long(), column("position").long(), column("click"),
                   column("propensity_score"), lines, features[:items])  # fmt: skip

    def rows(self, which: range, every: bool) -> dict[str, Any]:
        """The logged item of each row, or every item that could have been shown, for each row one after another."""
        pairs = [(r, a) for r in which for a in (range(self.items) if every else (int(self.item[r]),))]
        table: dict[str, Any] = {
            "row": [r for r, _ in pairs], "item": [a for _, a in pairs],
            "position": [int(self.position[r]) for r, _ in pairs],
            "affinity": [float(self.lines[r][f"user-item_affinity_{a}"]) for r, a in pairs],
            "click": [int(self.click[r]) if int(self.item[r]) == a else 0 for r, a in pairs],
        }  # fmt: skip
        table |= {name: [self.lines[r][name] for r, _ in pairs] for name in USER}
        table |= {name: [self.features[a][name] for _, a in pairs] for name in ITEM[1:]}
        return table | {ITEM[0]: [float(self.features[a][ITEM[0]]) for _, a in pairs]}


SCHEMA = rank.Schema(
    rank.Roles(item="item", request="row", labels=("click",)),
    {
        "item": rank.Id(side="item"), "position": rank.Id(side="context"), "affinity": rank.Number(scale="log"),
        **{name: rank.Id(side="context") for name in USER}, ITEM[0]: rank.Number(side="item"),
        **{name: rank.Id(side="item") for name in ITEM[1:]},
    },
)  # fmt: skip


def fitted(data: rank.Impressions, seed: int) -> rank.LiRank:
    torch.manual_seed(seed)
    ranker = rank.LiRank(data.schema, rank.LiRankConfig(width=4, layers=1, rank=4, mlp=(16,), dropout=0.1))
    options = rank.FitOptions(lr=3e-3, epochs=60, batch_size=256, metric="log_loss", patience=6, seed=seed)
    rank.fit(ranker, *data.split(by="request", fraction=0.25, seed=seed), options)
    rank.Explorer.fit(ranker, data)
    return ranker


def study(folder: Path, campaign: str, seeds: int, draws: int) -> list[Row]:
    uniform, bts = (Log.read(folder, log, campaign) for log in LOGS)
    half, n = len(uniform.lines) // 2, len(uniform.lines)
    first = uniform.rows(range(half), False)
    # Once more with what was fitted: a split of open fields would fit them again.
    train = rank.Impressions.read(first, schema=rank.Impressions.read(first, schema=SCHEMA).schema)
    rankers = [fitted(train, seed) for seed in range(seeds)]
    # Of the half that no ranker has seen: what each item would have had, for each row.
    data = rank.Impressions.read(uniform.rows(range(half, n), True), schema=train.schema)
    reward, logged, item = uniform.click[half:], uniform.propensity[half:], uniform.item[half:, None]
    # The mean of all fits is the model of rewards of DM and DR.
    q = torch.stack([rank.score(one, data).logits["click"].sigmoid() for one in rankers]).mean(0)
    q = q.double().view(-1, uniform.items)
    rows: list[Row] = []

    def add(policy: str, explore: float | None, estimator: str, found: Any, of: Tensor, w: Tensor) -> None:
        effective = float(w.sum() ** 2 / w.square().sum())
        rows.append(Row(campaign, policy, explore, estimator, found.value, found.low, found.high, len(of),
                        int(of.sum()), effective))  # fmt: skip

    def estimates(policy: str, explore: float | None, pi: Tensor) -> None:
        """pi: (rows, items), how likely the policy shows each item."""
        target = pi.gather(1, item)[:, 0]
        given, w = (reward, logged, target), target / logged
        expected = (pi * q).sum(1)
        for estimator, found in (
            ("replay", off_policy.replay(reward, target, draws=draws)),
            ("ips", off_policy.ips(*given, draws=draws)),
            ("snips", off_policy.snips(*given, draws=draws)),
            ("direct", off_policy.direct(expected, draws=draws)),
            ("dr", off_policy.dr(*given, q.gather(1, item)[:, 0], expected, draws=draws)),
        ):
            add(policy, explore, estimator, found, reward, w)

    for policy, clicks in (("random", reward), ("bts", bts.click)):
        add(policy, None, "logged", off_policy.direct(clicks, draws=draws), clicks, torch.ones_like(clicks))
    estimates("bts", None, _table(bts, uniform.items)[uniform.position[half:]])
    for explore in EXPLORE:
        chosen = [rank.estimate_propensities(one, data, explore, draws=200, seed=n) for n, one in enumerate(rankers)]
        estimates("thompson", explore, torch.stack(chosen).mean(0).double().view(-1, uniform.items))
    return rows


def _table(log: Log, items: int) -> Tensor:
    """(4, items): by position from 1, the mean propensity of each item, brought to a sum of 1."""
    place = log.position * items + log.item
    counts = torch.bincount(place, minlength=4 * items).clamp(min=1)
    sums = torch.zeros(4 * items, dtype=torch.float64).index_add_(0, place, log.propensity)
    table = (sums / counts).view(4, items)
    return table / table.sum(1, keepdim=True).clamp(min=1e-12)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with obd/random and obd/bts")
    parser.add_argument("--output", type=Path, help="folder for the result; default: print it alone")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--draws", type=int, default=1000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for campaign in CAMPAIGNS for row in study(arguments.data, campaign, arguments.seeds, arguments.draws)]
    for row in rows:
        explore = "" if row.explore is None else f"{row.explore:g}"
        print(f"{row.campaign:6} {row.policy:9}{explore:4} {row.estimator:7} {100 * row.value:6.3f} % "
              f"({100 * row.low:6.3f} … {100 * row.high:6.3f})  effective rows {row.effective:,.0f}")  # fmt: skip
    if arguments.output is not None:
        content = report.result("open-bandit", rows, device=torch.device("cpu"))
        report.save(arguments.output / "cpu-open-bandit.json", content)


if __name__ == "__main__":
    main()
