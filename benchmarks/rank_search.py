"""Blocks found by evolution beside the best of as many random ones, and beside a hand-written Residual DCN.

    python benchmarks/rank_search.py --data sets --jobs 10 --studies studies --output benchmarks/results

`studies/clicks/data.py` says what lies in --data, and how it is split, alike for all searches and seeds. Of one seed
both samplers begin with the same 20 graphs. A trial is a graph trained for one pass over a share of the rows and
measured on the validation; the best of each search are fitted on all rows, where the validation stops a fit and chooses
among them. The test chooses nothing.

Searches are bound by the host: --jobs runs so many side by side, a process each, on one GPU. --studies keeps them: a
search that --budget cut goes on there.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path

import torch
from harness import report
from rank_clicks import executor
from studies import rank_search as study
from studies.clicks.data import PARTS, read
from studies.rows import Row

# Those whose versions a result file names beside the usual ones.
PEERS = ("optuna", "lightgbm", "numpy")
Task = tuple[str, str, int]


def done(rows: list[Row]) -> set[Task]:
    return {(row.data, row.method, row.seed) for row in rows if row.part in ("trials", "hand")}


def one(
    task: Task, folder: Path, setting: study.Setting, studies: Path, device: str, ends: float
) -> list[Row]:  # fmt: skip
    """The rows of a search, or of the hand-written model."""
    data, method, seed = task
    if method == study.HAND:
        return study.hand(folder, data, seed, setting, torch.device(device))
    place = studies / f"{data}-{method}-{seed}"
    return study.searched(folder, data, method, seed, setting, place, torch.device(device), ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the sets' folders")
    parser.add_argument("--sets", default="frappe,ml-100k,adult")
    parser.add_argument("--methods", default=",".join((*study.SAMPLERS, study.HAND)))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=100, help="of a search")
    parser.add_argument("--best", type=int, default=5, help="graphs that are fitted on all rows")
    parser.add_argument("--rows", type=float, default=0.3, help="share of the rows of a trial")
    parser.add_argument("--hash-rows", type=int, default=10_000, help="most codes of a field in trials")
    parser.add_argument("--width", type=int, default=16, help="of embeddings")
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--batch-size", type=int, default=256, help="rows")
    parser.add_argument("--epochs", type=int, default=5, help="of a fit on all rows, at most")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--layers", type=int, default=3, help="of the hand-written model: cross layers")
    parser.add_argument("--rank", type=int, default=32, help="of the hand-written model: of their matrices")
    parser.add_argument("--mlp", default="256,256,256", help="of the hand-written model")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which searches stop, to go on later")
    parser.add_argument("--jobs", type=int, default=1, help="searches at a time")
    parser.add_argument("--threads", type=int, default=1, help="of each")
    parser.add_argument("--studies", type=Path, help="folder of the searches; default: one that is deleted")
    parser.add_argument("--output", type=Path, required=True, help="folder of the result file")
    parser.add_argument("--resume", type=Path, nargs="+", default=[], help="result files whose rows are kept")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    for method in options.methods.split(","):
        if method not in (*study.SAMPLERS, study.HAND):
            raise SystemExit(
                f"rank_search.py: --methods must be of {', '.join((*study.SAMPLERS, study.HAND))}, got {method!r}."
            )
    with tempfile.TemporaryDirectory() as temporary:
        run(options, options.studies or Path(temporary))


def run(options: argparse.Namespace, studies: Path) -> None:
    began = time.time()
    rows = [Row(**row) for path in options.resume for row in report.load(path)["rows"]]
    peers = {name: report.read_package_version(name) for name in PEERS}
    mlp = tuple(int(width) for width in options.mlp.split(","))
    setting = study.Setting(
        options.trials, options.best, options.rows, options.hash_rows, options.width, options.dropout,
        options.batch_size, options.epochs, options.lr, options.layers, options.rank, mlp,
    )  # fmt: skip
    about = {**setting._asdict(), "mlp": list(mlp)}

    def keep(*more: Row) -> None:
        rows.extend(more)
        content = report.result(
            "rank-search", rows, device=torch.device(options.device), peers=peers, setting=about
        )  # fmt: skip
        report.save(options.output / report.file_name(content, "rank-search"), content)

    sets = options.sets.split(",")
    for name in sets:
        data = read(options.data, name)
        counts = ", ".join(f"{int((data.part == n).sum()):,} to {word}" for n, word in enumerate(PARTS))
        print(f"{name}: rows {counts}; {len(data.fields)} fields, {len(data.number_names)} numbers", flush=True)
    # Seed by seed, so that what a budget cuts is of few seeds on all sets.
    queue = [(name, method, seed) for seed in range(options.seeds) for name in sets
             for method in options.methods.split(",") if (name, method, seed) not in done(rows)]  # fmt: skip
    ends, cut = began + options.budget, 0
    with executor(options.jobs, options.threads) as pool:
        running: dict[Future[list[Row]], Task] = {}
        while queue or running:
            while queue and len(running) < options.jobs and time.time() < ends:
                task = queue.pop(0)
                running[pool.submit(one, task, options.data, setting, studies, options.device, ends)] = task
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                cut += _took(future, running.pop(future), keep, began)
    if queue or cut:
        print(f"left out, since the budget was spent: {len(queue)} searches, and {cut} that were begun", flush=True)
    keep()
    content = [row.to_dict() for row in rows]
    for part in study.PARTS:
        if shown := study.table(part, content):
            print(f"\n{part}\n\n{shown}")
    print(f"\n{len(done(rows))} searches and models; {time.time() - began:.0f} s")


def _took(future: Future[list[Row]], task: Task, keep: object, began: float) -> bool:
    """Keep and say what a task has found; whether it was cut."""
    name = ", ".join((task[0], task[1], f"seed {task[2]}"))
    try:
        found = future.result()
    except Exception as error:  # the others go on
        print(f"failed: {name}: {type(error).__name__}: {error}", flush=True)
        return False
    assert callable(keep)
    keep(*found)
    losses = "; ".join(f"{row.part} {row.measures['log_loss']:.4f}, {row.setting['flops'] / 1e3:.0f} kFLOP"
                       for row in found)  # fmt: skip
    print(f"{time.time() - began:5.0f} s  {name}: {losses or 'cut'}", flush=True)
    return not found


if __name__ == "__main__":
    main()
