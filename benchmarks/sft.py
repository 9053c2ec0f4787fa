"""Fine-tune adapters through the command line, fused and plain, and record both curves: `tigon train --lora`.

    python benchmarks/sft.py --output benchmarks/results --name h100-sft.json      one GPU, in about 100 s
    python benchmarks/sft.py --output /tmp/out --tiny                              on a CPU, in less than a minute
    python benchmarks/sft.py --draw results/h100-sft.json sft.png                  the chart of a file

Nothing is downloaded. A Llama is trained from scratch by `tigon train` on sources of Python's standard library and on
this repository's documentation; it is then fine-tuned on functions of other modules of the library, whose docstrings
are the answers. Each run is a process of its own, as a user's is. The processes import side by side, and train one
after the other. The file is written after every run. After --budget seconds none is begun.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import json
import math
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from zlib import crc32

import torch
from harness import report
from studies.sft import Run, plot, sentences, table

HERE = Path(__file__).resolve().parent
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "lib2to3", "idlelib"}
QUESTION = "Write the docstring of this Python function."
START_S = 180.0


@dataclass(frozen=True)
class Size:
    """shape: of the base model. batch, seq, steps: of the two trainings. rows, held_out, characters: of data, at most.

    longest: characters of a function with its answer.
    """

    shape: dict[str, int]
    base: dict[str, int]
    tuned: dict[str, int]
    vocabulary: int
    rank: int
    held_out: int
    rows: int
    characters: int
    longest: int
    learning_rates: tuple[float, float] = (6e-4, 5e-4)
    log_every: int = 10


FULL = Size(
    {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "num_attention_heads": 16,
     "num_key_value_heads": 4},
    {"batch": 32, "seq": 512, "steps": 150}, {"batch": 16, "seq": 512, "steps": 100},
    vocabulary=8192, rank=16, held_out=256, rows=100_000, characters=20_000_000, longest=1300,
)  # fmt: skip
TINY = Size(
    {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
     "num_key_value_heads": 2},
    {"batch": 4, "seq": 64, "steps": 24}, {"batch": 2, "seq": 192, "steps": 6},
    vocabulary=512, rank=4, held_out=4, rows=24, characters=60_000, longest=220, log_every=2,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- the data


def sources() -> Iterator[tuple[int, str]]:
    """The modules of Python's standard library, each with one of ten parts, which its path alone decides."""
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        inside = file.relative_to(root)
        if not SKIPPED & set(inside.parts):
            yield crc32(inside.as_posix().encode()) % 10, file.read_text(encoding="utf-8", errors="replace")


def functions(source: str, longest: int) -> Iterator[dict[str, str]]:
    """Functions of up to so many characters with a docstring: the function without it, and its first paragraph."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or len(node.body) < 2:
            continue
        said, text = node.body[0], ast.get_docstring(node, clean=False)
        if text is None or len(text.split()) < 4:
            continue
        kept = [*lines[node.lineno - 1 : said.lineno - 1], *lines[said.end_lineno or said.lineno : node.end_lineno]]
        first = " " * node.col_offset
        asked, answer = "\n".join(line.removeprefix(first) for line in kept), inspect.cleandoc(text).split("\n\n")[0]
        if len(asked) + len(answer) <= longest:
            yield {"instruction": QUESTION, "input": asked, "output": answer}


def write_data(folder: Path, size: Size) -> dict[str, int]:
    """base.txt, train.jsonl and held_out.jsonl, each of modules that no other of them has."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((HERE.parent / "docs").rglob("*.md"))]
    rows: dict[str, list[dict[str, str]]] = {"train": [], "held_out": []}
    for part, source in sources():
        if part < 5:
            texts.append(source)
        else:
            rows["train" if part < 9 else "held_out"] += functions(source, size.longest)
    characters, kept = 0, []
    for text in texts:
        kept.append(text[: size.characters - characters])
        characters += len(kept[-1])
    (folder / "base.txt").write_text("\n".join(kept), encoding="utf-8")
    counts = {"characters": characters}
    for name, most in (("train", size.rows), ("held_out", size.held_out)):
        # Neighbours in a module are alike: what is kept comes from all modules.
        chosen = sorted(rows[name], key=lambda row: crc32(row["input"].encode()))[:most]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen), encoding="utf-8")
        counts[name] = len(chosen)
    return counts


def write_config(folder: Path, size: Size) -> None:
    positions = max(size.base["seq"], size.tuned["seq"])
    config = {
        "model_type": "llama", "vocab_size": size.vocabulary, "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 0,
        "pad_token_id": None, **size.shape,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))


# --------------------------------------------------------------------------------------------------------- the commands


def base_command(size: Size, device: str) -> list[str]:
    one = size.base
    return [
        "train", "--model", "llama", "--data", "base.txt", "--output", "base", "--steps", str(one["steps"]),
        "--batch-size", str(one["batch"]), "--seq-len", str(one["seq"]), "--vocab-size", str(size.vocabulary), "--lr",
        str(size.learning_rates[0]), "--eval-fraction", "0", "--save-every", "1000000", "--log-every",
        str(size.log_every), "--device", device,
    ]  # fmt: skip


def command(run: Run, size: Size, device: str) -> list[str]:
    return [
        "train", "--model", "base", "--data", "train.jsonl", "--eval-data", "held_out.jsonl", "--output",
        f"{run.side}-{run.seed}", "--lora", str(run.rank), "--steps", str(run.steps), "--batch-size", str(run.batch),
        "--seq-len", str(run.seq), "--lr", str(size.learning_rates[1]), "--seed", str(run.seed), "--save-every",
        "1000000", "--log-every", str(size.log_every), "--device", device, *(["--plain"] if run.side == "hf" else []),
    ]  # fmt: skip


class Worker:
    """A process that imports what the command needs, and then runs it once."""

    def __init__(self, folder: Path, name: str) -> None:
        self.log = folder / f"{name}.log"
        environment = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "300", **os.environ}
        paths = [str(Path(p).resolve()) for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p]
        environment["PYTHONPATH"] = os.pathsep.join([*paths, str(HERE)])
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "sft.py"), "--worker"], stdin=subprocess.PIPE, stdout=log,
                stderr=subprocess.STDOUT, text=True, cwd=folder, env=environment,
            )  # fmt: skip

    def await_ready(self) -> None:
        begun = time.monotonic()
        while "ready" not in self.said() and self.process.poll() is None and time.monotonic() - begun < START_S:
            time.sleep(0.05)

    def run(self, arguments: list[str], limit_s: float) -> str:
        """What the command said. Raises RuntimeError if it failed."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; its last line says why
            self.process.stdin.write(json.dumps(arguments) + "\n")
            self.process.stdin.close()
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise RuntimeError(f"took longer than {limit_s:.0f} s") from None
        if code:
            raise RuntimeError(f"ended with status {code}: {' '.join(self.said().strip().splitlines()[-2:])[-400:]}")
        return self.said()

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def worker() -> None:
    import accelerate  # noqa: F401
    import peft  # noqa: F401
    import tokenizers  # noqa: F401

    import tigon.cli.run  # noqa: F401
    from tigon.cli import main as tigon_main

    print("ready", flush=True)
    line = sys.stdin.readline()
    if line:
        tigon_main(json.loads(line))


def finish(run: Run, folder: Path, said: str) -> None:
    """Take over what the run has written, and what it has said."""
    rows = [json.loads(line) for line in (folder / f"{run.side}-{run.seed}" / "metrics.jsonl").open()]
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    run.losses = " ".join(f"{losses[step]:.6g}" for step in sorted(losses))
    run.held_out = next(row["eval_loss"] for row in reversed(rows) if "eval_loss" in row)
    speeds = [row["tokens_per_second"] for row in rows if row.get("tokens_per_second")]
    run.tokens_per_s = median(speeds[1:] or speeds)
    peak = re.search(r"peak GPU memory ([\d.]+) GiB", said)
    run.peak_gib = None if peak is None else float(peak[1])
    fused = re.search(r"Ran in the last step:.*?adapters (\d+)", said, re.DOTALL)
    run.adapters = int(fused[1]) if fused else 0
    if run.side == "tigon" and not run.adapters:
        run.status, run.reason = "failed", "no layer with adapters ran fused"


# ----------------------------------------------------------------------------------------------------------------- main


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, help="folder for the result file")
    parser.add_argument("--name", help="name of the result file; default: by the device")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each side")
    parser.add_argument("--base-steps", type=int, help="steps of the base model's training")
    parser.add_argument("--steps", type=int, help="steps of each run")
    parser.add_argument(
        "--budget", type=float, help="seconds after which no further run is begun; default: 100, or none"
    )
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a run is given up")
    parser.add_argument("--tiny", action="store_true", help="a few steps of a tiny model, on the CPU")
    parser.add_argument("--keep", type=Path, help="folder for data, models and logs; default: none is kept")
    parser.add_argument("--draw", nargs=2, type=Path, metavar=("FILE", "PNG"), help="draw a result file, and end")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.output is None and not options.draw and not options.worker:
        parser.error("--output must be a folder for the result file")
    if options.budget is None:
        options.budget = math.inf if options.tiny else 100.0
    if options.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {options.seeds}")
    return options


def planned(options: argparse.Namespace, size: Size) -> list[Run]:
    """Both sides of a seed stand together, so that a budget that is too small leaves out whole seeds."""
    one = size.tuned
    steps = options.steps or one["steps"]
    return [
        Run(side, seed, one["batch"], one["seq"], size.rank, steps)
        for seed in range(options.seeds)
        for side in (("tigon", "hf") if seed % 2 else ("hf", "tigon"))  # neither side has the warmer machine
    ]


def record(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    begun = time.monotonic()
    size = TINY if options.tiny else FULL
    size = replace(size, base={**size.base, "steps": options.base_steps or size.base["steps"]})
    device = torch.device("cpu" if options.tiny or not torch.cuda.is_available() else "cuda")
    runs = planned(options, size)
    workers = {name: Worker(folder, name) for name in ("base", *(f"{r.side}-{r.seed}" for r in runs))}
    try:
        counts = write_data(folder, size)
        write_config(folder / "llama", size)
        for one in workers.values():
            one.await_ready()
        started = time.monotonic()
        said = workers["base"].run(base_command(size, device.type), options.limit)
        content = begin(folder, size, device, runs, counts, said, time.monotonic() - started)
        print(f"{time.monotonic() - begun:6.1f} s  base: {said.strip().splitlines()[-2]}", flush=True)
        for run in runs:
            if time.monotonic() - begun > options.budget:
                content["notes"] = [
                    f"the budget of {options.budget:.0f} s was spent before {run.side}, seed {run.seed}"
                ]
                print(content["notes"][0])
                break
            started = time.monotonic()
            try:
                said = workers[f"{run.side}-{run.seed}"].run(command(run, size, device.type), options.limit)
                finish(run, folder, said)
            except (RuntimeError, StopIteration, OSError) as error:
                run.status, run.reason = "failed", str(error) or type(error).__name__
            run.seconds = round(time.monotonic() - started, 1)
            content["rows"].append(run.to_dict())
            report.save(options.output / (options.name or report.file_name(content)), content)
            what = run.reason or f"held out {run.held_out:.4f}, {run.tokens_per_s:,.0f} tokens/s, {run.peak_gib} GiB"
            print(f"{time.monotonic() - begun:6.1f} s  {run.side}, seed {run.seed}: {what}", flush=True)
    finally:
        for one in workers.values():
            one.end()
    return content


def begin(
    folder: Path, size: Size, device: torch.device, runs: list[Run], counts: dict[str, int], said: str, seconds: float
) -> dict[str, Any]:
    from safetensors import safe_open

    losses = [json.loads(line) for line in (folder / "base" / "metrics.jsonl").open()]
    curve = [row["loss"] for row in losses if "loss" in row]
    with safe_open(folder / "base" / "model.safetensors", "pt") as weights:
        shapes = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118
    base = {
        "parameters": sum(int(torch.Size(shape).numel()) for shape in shapes),
        "shape": json.loads((folder / "base" / "config.json").read_text()),
        "steps": size.base["steps"], "batch": size.base["batch"], "seq": size.base["seq"],
        "loss": [round(curve[0], 4), round(curve[-1], 4)], "characters": counts["characters"],
        "seconds": round(seconds, 1),
    }  # fmt: skip
    sides = {run.side: run for run in reversed(runs)}
    commands = [base_command(size, device.type), *(command(sides[side], size, device.type) for side in sides)]
    return report.result(
        "sft", [], device=device, base=base, train=counts["train"], held_out=counts["held_out"],
        commands=[" ".join(["tigon", *one]) for one in commands],
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.worker:
        worker()
        return 0
    if options.draw:
        plot(report.load(options.draw[0]), options.draw[1])
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    options.output = options.output.resolve()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        content = record(options, folder.resolve())
    if any(row["status"] == "ok" for row in content["rows"]):
        print(table(content))
        print(sentences(content))
    return 0 if content["rows"] and all(row["status"] == "ok" for row in content["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
