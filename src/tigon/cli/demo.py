"""`tigon demo`: the same small Llama trained twice from one seed, plain and fused, on Python's own library."""

from __future__ import annotations

import contextlib
import json
import platform
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from tigon.cli.folder import located
from tigon.cli.options import SEEDS
from tigon.cli.problem import Problem, check_writable, needs, one_line

# On a CPU both sides compute in fp32, so that the losses may differ only by rounding.
CPU_TOLERANCE = 1e-3
# On a CPU training ends after this many seconds, so that a slow machine takes no more than three minutes.
CPU_SECONDS = 100.0
LEAST_STEPS = 5
WARMUP = 3  # steps that are not timed: allocations, kernel choice, compilation

# The first row that fits the free memory of the GPU, in GiB; the last is the CPU's. The models are Llamas.
_COLUMNS = ("batch_size", "seq_len", "vocab_size", "steps", "hidden", "inter", "layers", "heads", "kv")
# fmt: off
SIZES = (
    (110, (16, 2048, 32768, 60, 2048, 8192, 16, 32, 8)),
    (60,   (8, 2048, 32768, 60, 2048, 8192, 16, 32, 8)),
    (20,   (8, 1024, 32768, 60, 1024, 4096, 12, 16, 8)),
    (4,    (4,  512, 32768, 60,  512, 1408,  8,  8, 4)),
    (0,    (8,  256, 16384, 30,  192,  512,  4,  6, 2)),
)
# fmt: on


def demo(
    output: Annotated[Path, typer.Option(help="Folder for the figures and the numbers.")] = Path("tigon-demo"),
    steps: Annotated[int | None, typer.Option(help="Training steps, plain and fused each.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and data order.", min=0, max=SEEDS)] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    batch_size: Annotated[int | None, typer.Option(help="Sequences per step.", min=1)] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens per sequence.", min=2)] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Largest vocabulary of the tokenizer.", min=257)] = None,
) -> None:
    """Train the same small Llama twice from one seed, plain and fused, and compare loss, speed and memory.

    The text is the source and documentation of this Python's standard library; the tokenizer is trained on it. On a CPU
    in fp32 the losses must be equal to 1e-3 at every step, or the exit code is 1. On a GPU, in bf16, a second plain run
    shows how far two equal runs are apart.
    """
    needs("tigon demo", "train", "torch", "numpy", "transformers", "tokenizers", "matplotlib")
    if device not in ("auto", "cpu", "cuda"):
        raise Problem(f"--device must be auto, cpu or cuda, got {device}")
    output = Path(located("output", str(output)))
    check_writable(output, "--output")
    from tigon.cli.screen import screen, show

    console = screen()
    started = time.perf_counter()
    machine = _machine(device)
    size = dict(zip(_COLUMNS, next(row for least, row in SIZES if machine["free_gib"] >= least), strict=True))
    given = {"steps": steps, "batch_size": batch_size, "seq_len": seq_len, "vocab_size": vocab_size}
    size.update({name: value for name, value in given.items() if value is not None})
    cuda = machine["device"] == "cuda"
    output.mkdir(parents=True, exist_ok=True)

    with tempfile.TemporaryDirectory(prefix="tigon-demo-") as folder:
        tokens = Path(folder) / "tokens.npy"
        vocabulary = _prepare(tokens, size, 16 << 20 if cuda else 4 << 20, console)
        spec = {
            "config": _config(size, vocabulary),
            "tokens": str(tokens),
            "seed": seed,
            "steps": size["steps"],
            "warmup": max(1, size["steps"] // 10),
            "batch_size": size["batch_size"],
            "device": machine["device"],
            "dtype": "bfloat16" if cuda else "float32",
            "lr": 3e-4 if cuda else 1e-3,
        }
        names = ("plain", "plain again", "fused") if cuda else ("plain", "fused")
        seconds = CPU_SECONDS if not cuda and steps is None else None
        sides = _run_sides(names, spec, seconds, console)

    result = _result(machine, size, vocabulary, spec, sides)
    result["seconds"] = round(time.perf_counter() - started, 1)
    from tigon.cli.checkpoint import write_json
    from tigon.cli.demo_figures import plot_bars, plot_losses, table

    write_json(output / "demo.json", result)
    plot_losses(result, output / "loss.png")
    plot_bars(result, output / "bars.png")
    show(console, table(result))
    console.print(
        f"{result['seconds']:,.0f} s in all. Figures: {output / 'loss.png'}, {output / 'bars.png'}; "
        f"numbers: {output / 'demo.json'}",
        highlight=False,
        soft_wrap=True,
    )
    if not cuda and not result["difference"] <= CPU_TOLERANCE:
        raise Problem(
            f"the losses of the plain and the fused run differ by {result['difference']:.2e}, above {CPU_TOLERANCE:g}",
            code=1,
        )


def _machine(device: str) -> dict[str, Any]:
    """The device, as PyTorch in a separate process reports it: this one must not take GPU memory from the sides."""
    code = (
        "import json, torch\n"
        "cuda = torch.cuda.is_available()\n"
        "print(json.dumps({'cuda': torch.cuda.get_device_name() if cuda else None, 'torch': torch.__version__,"
        " 'free': torch.cuda.mem_get_info()[0] if cuda else 0, 'threads': torch.get_num_threads()}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Problem(f"PyTorch does not start ({done.stderr.strip().splitlines()[-1]})")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    if device == "cuda" and found["cuda"] is None:
        raise Problem("--device cuda: PyTorch finds no CUDA or ROCm device")
    cuda = found["cuda"] is not None and device != "cpu"
    return {
        "device": "cuda" if cuda else "cpu",
        "name": found["cuda"] if cuda else f"{platform.machine()} CPU, {found['threads']} threads",
        "free_gib": found["free"] / 2**30 if cuda else 0,
        "torch": found["torch"],
    }


def library_texts(limit: int) -> list[str]:
    """The sources of Python's standard library, its documentation topics among them, in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "lib2to3", "idlelib"}
    texts, total = [], 0
    # The topics of help() come first, since they are prose: the library's documentation.
    files = [root / "pydoc_data" / "topics.py", *sorted(root.rglob("*.py"))]
    for file in dict.fromkeys(files):
        if skipped & set(file.relative_to(root).parts) or not file.is_file():
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        texts.append(text)
        total += len(text)
        if total >= limit:
            break
    if not texts:
        raise Problem(f"this Python has no sources of its standard library in {root}, and the demo trains on them")
    return texts


def _prepare(file: Path, size: dict[str, Any], limit: int, console: Any) -> int:
    """Train the tokenizer, write the token blocks to a file, and return the size of the vocabulary."""
    import os

    import numpy as np
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from tigon.cli.data import Corpus
    from tigon.cli.tokens import text_blocks, train_tokenizer, trained_tokenizer

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading Python's standard library", total=None)
        corpus = Corpus("Python's standard library", library_texts(limit), [])
        text = f"training a tokenizer on {corpus.characters / 1e6:.1f} MB of Python's standard library"
        if not console.is_terminal:
            console.print(text, highlight=False)
        bar.update(task, description=text)
        tokenizer = trained_tokenizer(train_tokenizer(corpus.texts, size["vocab_size"]))
        bar.update(task, description="tokenizing", total=corpus.characters)
        blocks = text_blocks(corpus, tokenizer, size["seq_len"], lambda n: bar.advance(task, n))
    np.save(file, blocks.ids)
    return len(tokenizer)


def _config(size: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": size["hidden"],
        "intermediate_size": size["inter"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["kv"],
        "max_position_embeddings": size["seq_len"],
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
    }


class Side:
    """One side of the demo: a separate process that trains one step for each request."""

    def __init__(self, name: str, spec: dict[str, Any]) -> None:
        self.name, self.spec = name, spec
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed by __exit__)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tigon.cli.demo_side"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.log.close()

    def begin(self) -> None:
        """Build the model, and wait until it is built."""
        self._tell(json.dumps({**self.spec, "fused": self.name == "fused"}))
        self.ready = self._hear("ready")

    def step(self) -> float:
        """Train one step, and return its loss."""
        self._tell("step")
        event = self._hear("step")
        self.losses.append(event["loss"])
        self.seconds.append(event["seconds"])
        return float(event["loss"])

    def end(self) -> dict[str, Any]:
        self._tell("end")
        done = self._hear("done")
        if self.process.wait() != 0:
            raise self._problem()
        timed = self.seconds[WARMUP:] or self.seconds
        tokens = self.spec["batch_size"] * self.spec["config"]["max_position_embeddings"]
        return {
            "losses": self.losses,
            "seconds": self.seconds,
            "tokens_per_second": tokens / median(timed),
            "parameters": self.ready["parameters"],
            "resident_before_training": self.ready["before"],
            "peak_bytes": done["peak"],
            "fusion": done["report"],
        }

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        # A broken pipe means that the process has ended; its last messages are read next.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def _hear(self, kind: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        event = json.loads(line) if line else {"event": "nothing"}
        if event["event"] != kind:
            raise self._problem(event.get("message"))
        return event

    def _problem(self, said: str | None = None) -> Problem:
        status = self.process.wait()
        self.log.seek(0)
        reason = said or (self.log.read().strip().splitlines() or ["it said nothing"])[-1]
        if status < 0:
            reason = f"it was ended by signal {-status}, perhaps for want of memory"
        return Problem(f"the {self.name} side ended with status {status}: {one_line(Exception(reason))}", code=1)


def _run_sides(
    names: tuple[str, ...], spec: dict[str, Any], seconds: float | None, console: Any
) -> dict[str, dict[str, Any]]:
    """Train all sides, for at most this many seconds, and return the measurements of each.

    On a GPU the sides run one after the other, so that each has the whole memory. On a CPU they take turns step by
    step, so that other load on the machine slows all of them alike.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    groups = [(name,) for name in names] if spec["device"] == "cuda" else [names]
    columns = (TextColumn("{task.fields[side]:<12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    results = {}
    with Progress(*columns, TextColumn("{task.description}"), console=console, disable=not console.is_terminal) as bar:
        tasks = {name: bar.add_task("", total=spec["steps"], side=name, start=False) for name in names}
        for group in groups:
            if not console.is_terminal:
                console.print(f"training: {', '.join(group)}", highlight=False)
            with contextlib.ExitStack() as stack:
                sides = [stack.enter_context(Side(name, spec)) for name in group]
                for side in sides:
                    side.begin()
                    bar.start_task(tasks[side.name])
                begun = time.perf_counter()
                for step in range(spec["steps"]):
                    if seconds is not None and step >= LEAST_STEPS and time.perf_counter() - begun > seconds:
                        console.print(f"this machine is slow: {step} steps instead of {spec['steps']}", highlight=False)
                        break
                    for side in sides:
                        bar.update(tasks[side.name], advance=1, description=f"loss {side.step():.3f}")
                results.update({side.name: side.end() for side in sides})
    return results


def _result(
    machine: dict[str, Any], size: dict[str, Any], vocabulary: int, spec: dict[str, Any], sides: dict[str, Any]
) -> dict[str, Any]:
    from importlib.metadata import version

    from tigon import __version__

    def apart(a: str, b: str) -> float:
        return max(abs(float(x - y)) for x, y in zip(sides[a]["losses"], sides[b]["losses"], strict=True))

    return {
        "machine": machine,
        "versions": {
            "tigon": __version__,
            "torch": machine["torch"],
            "transformers": version("transformers"),
            "tokenizers": version("tokenizers"),
            "python": platform.python_version(),
            "system": platform.platform(),
        },
        "model": spec["config"],
        "parameters": sides["plain"]["parameters"],
        "vocabulary": vocabulary,
        "batch_size": size["batch_size"],
        "seq_len": size["seq_len"],
        "steps": len(sides["plain"]["losses"]),
        "seed": spec["seed"],
        "dtype": spec["dtype"],
        "memory": (
            "torch.cuda.max_memory_allocated" if machine["device"] == "cuda" else "peak resident size of each process"
        ),
        "difference": apart("plain", "fused"),
        "difference_of_two_plain_runs": apart("plain", "plain again") if "plain again" in sides else None,
        "sides": sides,
    }
