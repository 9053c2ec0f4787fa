"""Loss against compute: LiGR of several widths on shares of the users, by the loss of the next item over all items.

    python benchmarks/rank_scaling.py --data s3rec --jobs 12 --output benchmarks/results
    python benchmarks/rank_scaling.py --data s3rec --resume results/h100-rank-scaling.json --seeds 3 --output results

Sets and protocol are those of `rank_sequences.py`: of each user the last event is a test, the one before validates, the
others train. A share of the users, drawn by the seed, is trained on; the loss is that of the event that validates, of
all users, after the events before it, among all items. So fits of all shares answer the same questions. A fit ends when
that loss has not fallen for `--patience` validations; its point is the lowest loss, and the FLOPs until there.

FLOPs are counted: 2 a parameter of the layers' matrices and a token, those of causal attention and of the product with
all items, three times that for a step, without what validation costs. `--jobs 12` runs as many fits side by side.
"""

from __future__ import annotations

import argparse
import collections
import copy
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import rank_sequences as sequences
import torch
from rank_sequences import LONGEST, LiGRSide, Row, Sequences, Task
from studies import scaling
from torch import Tensor, nn

import tigon
from tigon.bench import report

SETTINGS = ("layers", "dropout", "lr", "weight_decay", "warmup", "batch_size", "epochs", "every", "patience", "seconds")
HEAD_DIM = 32


def flops(side: LiGRSide, lengths: Tensor) -> float:
    """Floating-point operations of the forward pass of `next_item_loss` on histories of so many events.

    lengths: (B,) int64, events that are targets; the last of each is a target alone, but runs through the layers.
    """
    ranker = side.ranker
    width, tokens = ranker.tokens.width, (lengths + 1).double()
    matrices = sum(m.weight.numel() for m in ranker.layers.modules() if isinstance(m, nn.Linear))
    # q · k and p · v, 2 · width each for a pair, of which there are tokens² / 2.
    attention = 2 * width * len(ranker.layers) * tokens.square().sum()
    head = 2 * width * (len(side.table) - 1) * lengths.sum()
    return float(2 * matrices * tokens.sum() + attention + head)


@torch.no_grad()
def judged(side: LiGRSide, data: Sequences, left_out: int, size: int = 2048) -> dict[str, float]:
    """Loss in nats, fp32, and hit rate of the event before the last `left_out` of all users, among all items."""
    side.eval()
    total, places = torch.zeros((), dtype=torch.float64, device=side.table.device), []
    for users in torch.arange(data.users).split(size):
        hidden = side.hidden(users, left_out + 1).float()
        target = data.items[(data.offsets[users + 1] - 1 - left_out).to(hidden.device)]
        total += tigon.linear_cross_entropy(
            hidden, side.table[1:].float(), target - 1, config=tigon.CrossEntropy(reduction="sum")
        ).double()
        z = hidden @ side.table[1:].float().t()
        places.append((z >= z.gather(1, target[:, None] - 1)).sum(1))
    return {"loss": total.item() / data.users, "hr@10": (torch.cat(places) <= 10).double().mean().item()}


def fit(task: Task, data: Sequences, device: torch.device) -> Row:
    """The row of one width, share and seed. `measures` are of the test, `validation` of the best epoch."""
    setting, width = task.setting, task.setting["width"]
    torch.manual_seed(task.seed)
    draw = np.random.default_rng(task.seed)
    among = draw.permutation(data.users)[: max(1, round(setting["share"] * data.users))]
    side = LiGRSide(data, width, setting["layers"], max(1, width // HEAD_DIM), setting["dropout"]).to(device)
    decayed, plain = ([p for p in side.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": setting["weight_decay"]}, {"params": plain, "weight_decay": 0.0}],
        lr=setting["lr"], betas=(0.9, 0.98), fused=device.type == "cuda",
    )  # fmt: skip
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    start, spent, step, wait, ended = time.monotonic(), 0.0, 0, 0, "epochs"
    best: dict[str, float] = {"loss": math.inf}
    kept, curve = copy.deepcopy(side.state_dict()), []
    for epoch in range(1, setting["epochs"] + 1):
        side.train()
        for users in sequences.batches(data, setting["batch_size"], draw, among):
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = setting["lr"] * min(1.0, step / setting["warmup"])
            optimizer.zero_grad(set_to_none=True)
            with autocast:
                loss = side.loss(users)
            loss.backward()
            nn.utils.clip_grad_norm_(side.parameters(), 5.0)
            optimizer.step()
            spent += 3 * flops(side, sequences.slices(data, users, 2, LONGEST + 1).lengths)
        if epoch % setting["every"]:
            continue
        found = judged(side, data, 1)
        curve.append([spent, round(found["loss"], 5)])
        if found["loss"] < best["loss"]:
            best, wait = {**found, "flops": spent, "epoch": epoch}, 0
            kept = copy.deepcopy(side.state_dict())
        else:
            wait += 1
        late = time.monotonic() - start > setting["seconds"]
        if wait >= setting["patience"] or late:
            ended = "patience" if wait >= setting["patience"] else "seconds"
            break
    seconds = time.monotonic() - start
    side.load_state_dict(kept)
    matrices = sum(p.numel() for p in side.parameters()) - side.table.numel()
    own = {**setting, "ended": ended, "curve": curve, "all_flops": spent, "matrix_parameters": matrices,
           "users": len(among)}  # fmt: skip
    return Row("scaling", data.name, task.seed, task.method, own, judged(side, data, 0), best, seconds)


def attempt(task: Task, folder: Path, users: int | None, device: str) -> Row:
    return fit(task, sequences.on_device(folder, task.data, users, device), torch.device(device))


def numbers(text: str, kind: type) -> list[Any]:
    return [kind(part) for part in text.split(",")]


def tasks_of(rows: list[Row], options: argparse.Namespace) -> list[Task]:
    """What is to do, seed by seed, so that a budget that ends early leaves whole curves."""
    done = {(row.data, row.method, row.seed) for row in rows}
    base = {key: getattr(options, key) for key in SETTINGS}
    found = []
    names = [name for name in options.sets.split(",") if name]
    grid = itertools.product(range(options.seeds), names, numbers(options.widths, int), numbers(options.shares, float))
    for seed, name, width, share in grid:
        method = f"ligr, width {width}, {share:.0%}"
        if (name, method, seed) not in done:
            found.append(Task(name, method, seed, {**base, "width": width, "share": share}))
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the sets")
    parser.add_argument("--sets", default="Beauty,Toys_and_Games,Sports_and_Outdoors,Yelp")
    parser.add_argument("--widths", default="32,64,128,256", help=f"multiples of {HEAD_DIM}, the width of a head")
    parser.add_argument("--shares", default="0.1,0.3,1", help="of the users, each from 0 to 1")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--warmup", type=int, default=100, help="steps")
    parser.add_argument("--batch-size", type=int, default=256, help="users")
    parser.add_argument("--epochs", type=int, default=200, help="of a fit, at most")
    parser.add_argument("--every", type=int, default=1, help="epochs between validations")
    parser.add_argument("--patience", type=int, default=5, help="validations without a lower loss that end a fit")
    parser.add_argument("--seconds", type=float, default=40.0, help="of a fit, at most")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds after which no further fit is begun")
    parser.add_argument("--jobs", type=int, default=1, help="fits side by side, each a process on the one device")
    parser.add_argument("--users", type=int, help="the first users of a set alone, to try")
    parser.add_argument("--output", type=Path, required=True, help="folder of the result file, and of its chart")
    parser.add_argument("--resume", type=Path, nargs="+", default=[], help="result files whose fits are kept")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    for width in numbers(options.widths, int):
        if width < 1 or width % HEAD_DIM:
            parser.error(f"--widths must be multiples of {HEAD_DIM}, got {width}")
    for share in numbers(options.shares, float):
        if not 0 < share <= 1:
            parser.error(f"--shares must be above 0 and at most 1, got {share}")
    return options


def main() -> None:
    options = parse()
    began, device = time.monotonic(), torch.device(options.device)
    rows = [Row(**row) for path in options.resume for row in report.load(path)["rows"]]

    def keep() -> Path:
        content = report.result(scaling.KIND, rows, device=device)
        options.output.mkdir(parents=True, exist_ok=True)
        path = options.output / report.file_name(content, scaling.KIND)
        path.write_text(json.dumps(content, indent=1) + "\n")
        return path

    path = keep()
    waiting = collections.deque(tasks_of(rows, options))
    for _, row in sequences.attempts(waiting, options, began, attempt):
        rows.append(row)
        keep()
        best = row.validation
        print(
            f"{time.monotonic() - began:5.0f} s  {row.data}, {row.method}, seed {row.seed}: loss {best['loss']:.4f} "
            f"after {best['flops']:.3g} FLOPs, epoch {best['epoch']} of "
            f"{len(row.setting['curve']) * row.setting['every']}, ended by {row.setting['ended']}, {row.seconds:.1f} s",
            flush=True,
        )
    content = report.load(path)
    if content["rows"]:
        print(scaling.table(content["rows"]))
        scaling.plot(content, path.with_suffix(".png"))
    if not all(math.isfinite(row.validation["loss"]) for row in rows):
        raise SystemExit("rank_scaling.py: a loss is not finite")


if __name__ == "__main__":
    main()
