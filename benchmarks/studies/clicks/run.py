"""Clicks from features by LiRank, FuxiCTR's DCN-V2, FinalMLP and FinalNet, and LightGBM; calibration, int8, and a step.

    python -m studies.clicks.run --data sets --fuxictr FuxiCTR/model_zoo --jobs 10 --output benchmarks/results
    python -m studies.clicks.run --part speed --fuxictr FuxiCTR/model_zoo --output benchmarks/results

`studies/clicks/data.py` says what lies in --data, and how it is split, alike for all methods and seeds. The validation
stops a fit, chooses a point of a method's grid by the first seed, and is what calibration is fitted on; the test
decides nothing. AUC, log loss and ECE are computed here, from the probabilities of each method.

Fits are bound by the host: --jobs runs so many side by side, a process each, on one GPU. FuxiCTR's layers are installed
by pip, and its models are in the sources of the same version, https://github.com/reczoo/FuxiCTR, folder model_zoo.
Methods whose package is not there are named, and left out.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from harness import report

from studies.clicks import metrics, speed
from studies.clicks.data import PARTS, TEST, VALIDATION, read
from studies.clicks.methods import METHODS, Fit, Setting, lacks
from studies.rows import Row
from tigon.cli.environment import read_package_version

# Those whose versions a result file names beside the usual ones.
PEERS = ("fuxictr", "lightgbm", "scikit-learn", "numpy")
DEFAULT_METHODS = ",".join(METHODS)


def run_fit(folder: Path, data: str, method: str, seed: int, setting: Setting, fit: Fit, device: str) -> list[Row]:
    """One fit: a row of its quality, and rows of what was done with its scores."""
    table, began = read(folder, data), time.perf_counter()
    found = METHODS[method].run(table, seed, setting, fit, torch.device(device))
    seconds = time.perf_counter() - began
    label = {part: table.labels[table.rows(part)].double().numpy() for part in (VALIDATION, TEST)}
    about = {
        **setting, "width": fit.width, "mlp": list(fit.mlp), "layers": fit.layers, "rank": fit.rank,
        "batch_size": fit.batch_size, "epochs": found.epochs, "best_epoch": found.best,
        "parameters": found.parameters,
    }  # fmt: skip
    validation = metrics.measure_all(found.validation, label[VALIDATION])
    note = "ended by --seconds" if seconds > fit.seconds else ""
    measures = metrics.measure_all(found.test, label[TEST])
    rows = [Row("quality", data, seed, method, about, measures, validation, seconds, note)]
    for part, name, measures in found.more:
        rows.append(Row(part, data, seed, name, {"of": method, **setting}, measures))
    if not all(math.isfinite(value) for row in rows for value in row.measures.values()):
        raise FloatingPointError(f"{data}, {method}, seed {seed}: a measure is not finite")
    return rows


class Inline(Executor):
    """Runs what is submitted at once, in this process."""

    def submit(self, fn: Any, /, *args: Any, **more: Any) -> Future[Any]:
        found: Future[Any] = Future()
        try:
            found.set_result(fn(*args, **more))
        except Exception as error:
            found.set_exception(error)
        return found


@contextmanager
def executor(jobs: int, threads: int) -> Iterator[Executor]:
    """jobs processes of so many threads each; one job is this process."""
    torch.set_num_threads(threads)
    if jobs == 1:
        yield Inline()
        return
    # Before the processes start: else the threads of each wait for those of the others.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    with ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), torch.set_num_threads, (threads,)
    ) as pool:  # fmt: skip
        yield pool


class Fits:
    """What is to be fitted: each method's grid by seed 0, then the other seeds at the point that it chose."""

    def __init__(self, sets: list[str], methods: list[str], seeds: int, rows: list[Row], points: int | None) -> None:
        self.seeds = seeds
        self.grids = {method: METHODS[method].grid[:points] for method in methods}
        self.tried: dict[tuple[str, str], list[list[Row]]] = {}
        self.queue: list[tuple[str, str, int, Setting]] = []
        done = {(row.data, row.method, row.seed): row for row in rows if row.part == "quality"}
        for data in sets:
            for method in methods:
                first = done.get((data, method, 0))
                if first is None:
                    self.queue += [(data, method, 0, point) for point in self.grids[method]]
                else:
                    point = {key: first.setting[key] for key in self.grids[method][0]}
                    self.queue += [(data, method, s, point) for s in range(1, seeds) if (data, method, s) not in done]

    def took(self, data: str, method: str, seed: int, rows: list[Row]) -> list[Row]:
        """What to keep of a fit that ended; the other seeds are queued where it was the grid's last. rows: [] of one
        that failed."""
        if seed:
            return rows
        tried = self.tried.setdefault((data, method), [])
        tried.append(rows)
        points = self.grids[method]
        if len(tried) < len(points):
            return []
        tried = [rows for rows in tried if rows]
        if not tried:
            return []
        # By their places in the grid, so that equal ones do not depend on which ended first.
        tried.sort(key=lambda rows: points.index({key: rows[0].setting[key] for key in points[0]}))
        best = max(tried, key=lambda rows: rows[0].validation["auc"])
        point = {key: best[0].setting[key] for key in points[0]}
        best[0].setting["tried"] = [
            {key: one[0].setting[key] for key in points[0]} | {"auc": one[0].validation["auc"]} for one in tried
        ]
        self.queue[:0] = [(data, method, other, point) for other in range(1, self.seeds)]
        return best


def quality(options: argparse.Namespace, rows: list[Row], keep: Any, began: float) -> None:
    methods = []
    for method in options.methods.split(","):
        if method not in METHODS:
            raise SystemExit(f"rank_clicks.py: --methods must be of {', '.join(METHODS)}, got {method!r}.")
        if why := lacks(method, options.fuxictr):
            print(f"left out: {method}, since {why}", flush=True)
        else:
            methods.append(method)
    sets = options.sets.split(",")
    for name in sets:
        table = read(options.data, name)
        counts = ", ".join(f"{int((table.part == n).sum()):,} to {word}" for n, word in enumerate(PARTS))
        print(f"{name}: rows {counts}; {len(table.fields)} fields, {sum(table.fields.values()):,} codes, "
              f"{len(table.number_names)} numbers; {table.labels.mean():.3f} are clicks", flush=True)  # fmt: skip
    mlp = tuple(int(width) for width in options.mlp.split(","))
    fit = Fit(
        options.width, mlp, options.layers, options.rank, options.batch_size, options.epochs, options.patience,
        options.seconds, options.fuxictr, options.threads,
    )  # fmt: skip
    fits = Fits(sets, methods, options.seeds, rows, options.points)
    with executor(options.jobs, options.threads) as pool:
        running: dict[Future[list[Row]], tuple[str, str, int, Setting]] = {}
        while fits.queue or running:
            while fits.queue and len(running) < options.jobs:
                if time.monotonic() - began > options.budget:
                    print(f"left out, since the budget was spent: {len(fits.queue)} fits and what follows", flush=True)
                    fits.queue.clear()
                    break
                one = fits.queue.pop(0)
                data, method, seed, point = one
                running[pool.submit(run_fit, options.data, data, method, seed, point, fit, options.device)] = one
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                data, method, seed, point = running.pop(future)
                try:
                    found = future.result()
                except Exception as error:  # the other fits go on
                    print(
                        f"failed: {data}, {method}, seed {seed}, {point}: {type(error).__name__}: {error}", flush=True
                    )
                    found = []
                keep(*fits.took(data, method, seed, found))
                if not found:
                    continue
                first = found[0]
                print(f"{time.monotonic() - began:5.0f} s  {data}, {method}, seed {seed}, {point}: "
                      f"AUC {first.measures['auc']:.4f}, log loss {first.measures['log_loss']:.4f}; validation "
                      f"{first.validation['auc']:.4f}; epoch {first.setting['best_epoch']:.0f} of "
                      f"{first.setting['epochs']:.0f}, {first.seconds:.1f} s", flush=True)  # fmt: skip


def step(options: argparse.Namespace, keep: Any) -> None:
    zoo: Path | None = options.fuxictr
    if why := lacks("fuxictr-dcnv2", zoo):
        print(f"left out: fuxictr-dcnv2, since {why}", flush=True)
        zoo = None
    sizes = speed.TINY if options.tiny else speed.Sizes()
    for name, own, measures, note in speed.sides(sizes, zoo, torch.device(options.device), 1 if options.tiny else 30):
        keep(Row("speed", f"{sizes.rows:,} rows", 0, name, own._asdict(), measures, note=note))
        print(f"{name:40}" + "  ".join(f"{key} {value:,.4g}" for key, value in measures.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--part", choices=["quality", "speed"], default="quality", help="quality: calibration and int8 too"
    )
    parser.add_argument("--data", type=Path, help="folder of the sets' folders")
    parser.add_argument("--sets", default="frappe,ml-100k,adult")
    parser.add_argument("--methods", default=DEFAULT_METHODS)
    parser.add_argument("--fuxictr", type=Path, help="folder model_zoo of FuxiCTR's sources")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--points", type=int, help="the first so many of each grid alone, to try")
    parser.add_argument("--width", type=int, default=16, help="of embeddings")
    parser.add_argument("--mlp", default="256,256,256")
    parser.add_argument("--layers", type=int, default=3, help="of cross layers")
    parser.add_argument("--rank", type=int, default=32, help="of their matrices")
    parser.add_argument("--batch-size", type=int, default=1024, help="rows")
    parser.add_argument("--epochs", type=int, default=20, help="of a fit, at most")
    parser.add_argument("--patience", type=int, default=3, help="epochs without a better one that end a fit")
    parser.add_argument("--seconds", type=float, default=120.0, help="of a fit, at most")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds after which no further fit is begun")
    parser.add_argument("--jobs", type=int, default=1, help="fits at a time")
    parser.add_argument("--threads", type=int, default=1, help="of each")
    parser.add_argument("--tiny", action="store_true", help="speed: sizes for a CPU, which say nothing")
    parser.add_argument("--output", type=Path, required=True, help="folder of the result file")
    parser.add_argument("--resume", type=Path, nargs="+", default=[], help="result files whose rows are kept")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    began = time.monotonic()
    rows = [Row(**row) for path in options.resume for row in report.load(path)["rows"]]
    peers = {name: read_package_version(name) for name in PEERS}

    def keep(*more: Row) -> None:
        rows.extend(more)
        content = report.result("rank-clicks", rows, device=torch.device(options.device), peers=peers)
        report.save(options.output / report.file_name(content, "rank-clicks"), content)

    if options.part == "speed":
        rows[:] = [row for row in rows if row.part != "speed"]
        step(options, keep)
        return
    if options.data is None:
        raise SystemExit("rank_clicks.py: --data must be given for quality.")
    quality(options, rows, keep, began)
    keep()
    taken = [row.seconds for row in rows if row.seconds is not None]
    print(f"\n{len(taken)} fits kept, {statistics.fmean(taken or [0]):.1f} s each; {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
