"""Which features act together in ten known functions: persistence of prefixes beside NID, on the same networks.

    python benchmarks/interactions.py --output benchmarks/results           networks
    python benchmarks/interactions.py --output benchmarks/results --fast    FAST, if the package interpret is there

All networks, one for each function and seed, are trained at once in batched products, on a CPU or a GPU. A run that
was killed goes on from the last epoch that `--state` has, and one that has all of them only reads the networks again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from studies.interaction_networks import Inputs, Networks, Training
from studies.interactions import FEATURES, FUNCTIONS, MEASURES, Row, ahead, drawn, groups, mean, true_sets

from tigon.bench import report
from tigon.rank.interactions.strengths import Network, SetStrength, rank_order, rank_prefixes

READINGS = (("nid", 1.0), ("persistence", 0.5), ("persistence", 1.0), ("persistence", 2.0), ("persistence", 3.0))
Sets = list[tuple[int, ...]]


def data_of(cases: list[tuple[str, int]], rows: int) -> tuple[Inputs, Inputs]:
    """Rows to train on, and as many that are held out, of each function and seed; features and values of variance 1."""
    numbers, targets = [], []
    for function, seed in cases:
        x, y = drawn(function, 2 * rows, seed)
        numbers.append((x - x[:rows].mean(0)) / x[:rows].std(0))
        targets.append((y - y[:rows].mean()) / y[:rows].std())
    x, y = (torch.tensor(np.stack(side), dtype=torch.float32) for side in (numbers, targets))
    return Inputs(x[:, :rows], None, y[:, :rows]), Inputs(x[:, rows:], None, y[:, rows:])


# ------------------------------------------------------------------------------------------------------------ measures


def ranked(found: dict[tuple[int, ...], SetStrength]) -> Sets:
    return sorted(found, key=lambda one: (-found[one].strength, one))


def auc(found: dict[tuple[int, ...], SetStrength], true: Sets) -> float:
    """How often a pair that acts together is stronger than one that does not, ties half."""
    right = [found[pair].strength for pair in found if any(set(pair) <= set(one) for one in true)]
    wrong = [found[pair].strength for pair in found if not any(set(pair) <= set(one) for one in true)]
    differ = np.array(right)[:, None] - np.array(wrong)
    return float(((differ > 0) + 0.5 * (differ == 0)).mean())


def precision(order: Sets, true: Sets) -> float:
    """Of the first so many as there are true ones, the share that is true."""
    return sum(one in true for one in order[: len(true)]) / len(true)


def maximal(order: Sets, count: int) -> Sets:
    """The first so many, without the sets that lie in a stronger one."""
    kept: Sets = []
    for one in order:
        if len(kept) >= count:
            break
        if not any(set(one) < set(other) for other in kept):
            kept.append(one)
    return kept


def largest(order: Sets, count: int) -> Sets:
    """The ranking down to where so many sets remain that lie in no other."""
    kept: Sets = []
    for one in order:
        if len(kept) >= count:
            break
        if not any(set(one) < set(other) for other in kept):
            kept = [other for other in kept if not set(other) < set(one)] + [one]
    return kept


def of_pairs(pairs: dict[tuple[int, ...], SetStrength], function: str) -> dict[str, float]:
    true = true_sets(function)
    right = [pair for pair in pairs if any(set(pair) <= set(one) for one in true)]
    return {"auc": auc(pairs, true), "top_pairs": precision(ranked(pairs), right)}


def measured(network: Network, function: str, method: Any, power: float) -> dict[str, float]:
    whole = [one for one in true_sets(function) if len(one) > 2]
    order = [one for one in ranked(rank_prefixes([network], method, power)) if len(one) > 2]
    return {
        **of_pairs(rank_order([network], 2, method, power), function),
        "sets": precision(order, whole),
        "sets_pruned": precision(maximal(order, len(whole)), whole),
        "sets_largest": precision(largest(order, len(whole)), whole),
    }


def networks_of(networks: Networks) -> list[Network]:
    """Of each network what is read of its weights."""
    first, *later = (weight.detach().abs().double().cpu() for weight in networks.weights)
    reach = later[-1]
    for weight in reversed(later[:-1]):
        reach = weight @ reach
    return [Network(w.T.numpy(), z[:, 0].numpy()) for w, z in zip(first, reach, strict=True)]


def fast(cases: list[tuple[str, int]], count: int) -> Iterator[Row]:
    """The pairs that FAST finds in what an EBM of main effects leaves, as EBMs choose their pairs."""
    from interpret.glassbox import ExplainableBoostingRegressor
    from interpret.utils import measure_interactions

    train, held = data_of(cases, count)
    for place, (function, seed) in enumerate(cases):
        x, y = train.numbers[place].double().numpy(), train.target[place].double().numpy()
        began = time.monotonic()
        alone = ExplainableBoostingRegressor(interactions=0, outer_bags=1, n_jobs=1, random_state=seed).fit(x, y)
        strengths = dict(measure_interactions(x, y, init_score=alone))
        seconds = time.monotonic() - began
        pairs = {tuple(sorted(map(int, pair))): SetStrength(float(value), 1) for pair, value in strengths.items()}
        error = alone.predict(held.numbers[place].double().numpy()) - held.target[place].double().numpy()
        measures = {**of_pairs(pairs, function), "seconds": round(seconds, 2)}
        print(function, seed, measures, flush=True)
        yield Row(function, seed, 0.0, "fast", 1.0, float((error**2).mean()), measures)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", required=True, type=Path, help="folder of the result file")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rows", type=int, default=10_000, help="to train on, of a function; as many are held out")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument(
        "--l1", type=float, nargs="+", default=[5e-5, 2e-4, 5e-4, 1e-3, 2e-3], help="penalties of weights"
    )
    parser.add_argument("--fast", action="store_true", help="measure FAST, and no networks")
    parser.add_argument("--state", type=Path, help="a file that keeps where training stands, and then the networks")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    began, device = time.monotonic(), torch.device(options.device)
    cases = [(function, seed) for seed in range(options.seeds) for function in FUNCTIONS]
    if options.fast:
        content = report.result("interactions", fast(cases, options.rows), device=torch.device("cpu"))
        report.save(options.output / report.file_name(content, "fast-interactions"), content)
        return
    # The same rows and first weights for each penalty.
    many = len(options.l1)
    train, held = (
        Inputs(part.numbers.repeat(many, 1, 1), None, part.target.repeat(many, 1)).to(device)
        for part in data_of(cases, options.rows)
    )
    l1 = torch.tensor(options.l1).repeat_interleave(len(cases)).to(device)
    networks = Networks(len(cases), FEATURES).repeated(many).to(device)
    training = Training(networks, train, held, l1=l1, slower=max(1, options.epochs // 4))
    before = 0.0
    if options.state and options.state.is_file():
        state = torch.load(options.state, map_location=device)
        training.load(state["training"])
        before = state["seconds"]
        print(f"goes on after epoch {training.epoch}")
    if training.epoch >= options.epochs:
        began = time.monotonic()
    while training.epoch < options.epochs:
        found = training.run_epoch()
        at = time.monotonic() - began
        print(
            f"{at:5.0f} s  epoch {training.epoch}: median loss {float(found.median()):.4f}",
            flush=True,
        )
        if options.state:
            state = {"training": training.state(), "seconds": before + at}
            torch.save(state, options.state.with_suffix(".part"))
            options.state.with_suffix(".part").replace(options.state)
    seconds = before + time.monotonic() - began
    rows = []
    found = zip(networks_of(training.finish()), training.best.tolist(), l1.tolist(), many * cases, strict=True)
    for network, loss, penalty, (function, seed) in found:
        for method, power in READINGS:
            measures = measured(network, function, method, power)
            rows.append(Row(function, seed, float(f"{penalty:g}"), method, power, loss, measures))
    setting = {"rows": options.rows, "epochs": options.epochs, "batch_size": training.batch_size,
               "lr": training.lr, "seconds": round(seconds, 1)}  # fmt: skip
    content = report.result("interactions", rows, device=device, setting=setting)
    report.save(options.output / report.file_name(content, "interactions"), content)
    show(content["rows"])


def show(rows: list[dict[str, Any]]) -> None:
    by = groups(rows)
    for (penalty, name), some in by.items():
        said = "  ".join(f"{measure} {mean(some, measure):.3f}" for measure in MEASURES)
        loss = np.mean([row["loss"] for row in some.values()])
        print(f"l1 {penalty:g}, {name:20} loss {loss:.4f}  {said}")
    for (penalty, name), some in by.items():
        if name != "NID" and len({seed for _, seed in some}) > 1:
            nid = by[penalty, "NID"]
            said = "  ".join("{} {:+.3f} ± {:.3f}".format(measure, *ahead(some, nid, measure)) for measure in MEASURES)
            print(f"l1 {penalty:g}, {name} against NID: {said}")


if __name__ == "__main__":
    main()
