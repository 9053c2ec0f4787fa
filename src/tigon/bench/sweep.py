"""The sweep: shapes, dtypes and options drawn from the ranges of real models, each measured beside the peers.

A record measures chosen shapes, and shows what was tuned. The sweep draws, and shows where Tigon is not first.

The draws of an operator are a function of the seed, the operator, their number and the class of memory: a list that is
the same everywhere, in any version, whatever other operators are drawn. See ranges.py for the ranges and verdicts.py
for who is first.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from tigon.bench import drawn_models, report
from tigon.bench.ahead import compile_ahead, private_cache
from tigon.bench.cases import OPS, Implementation, Op
from tigon.bench.clocks import Host
from tigon.bench.inputs import DTYPES, Shape
from tigon.bench.ranges import Dice, Drawing, small_model
from tigon.bench.runner import (
    LATE,
    Ceilings,
    Row,
    Settings,
    choose,
    measure_ceilings,
    one_line,
    run_case,
    synchronize,
)
from tigon.bench.verdicts import host_may_limit

# Weights as models have them, most of all.
DRAWN_DTYPES = ("bf16", "bf16", "bf16", "fp16", "fp32")
# A draw that does not fit is drawn anew, so many times.
ATTEMPTS = 64
# Bytes that eager code and the reference hold for each element of the largest tensor: logits, their fp32 copy, its
# softmax, and the gradients of each.
HELD = 24
# FLOPs of one forward and backward per GiB of the class: 25 ms in bf16 on the GPUs that have so much memory.
FLOPS_PER_GIB = 2e11
FP32_COST = 8  # times as long as in 16 bits
# Short rounds, and five of them: many draws say more than one draw's third digit, and the spread must be known.
SETTINGS = Settings(
    5, 1.0, 6.0, graph_ms=2.0, least=1, forward=False, start_s=20.0, case_s=2.0, far=3.0, long_ms=3.0, freeze=True
)
TINY_SETTINGS = Settings(3, 0.0, 1.0, graph_ms=0.0, least=1, forward=False)
# Of the budget: what compiling ahead may take (see ahead.py), and torch.compile afterwards; then draws go without.
AHEAD_SHARE = 0.4
AHEAD_S = 600.0  # without a budget
COMPILE_SHARE = 0.3
# What models may take, which are measured first: their process imports while others compile.
MODEL_SHARE = 0.15
QUIET_S = 10.0  # how long to wait at most until other processes leave the processors alone
PATIENCE_S = 0.5  # and before a draw until the host is as fast as it was
KEEP_S = 5.0  # between two writings of the file
HELD_BYTES = 256 << 20
NO_GPU = (
    "There is no GPU: sizes are tiny, Tigon's rows are its PyTorch reference, and which of them is first says nothing "
    "about the kernels."
)


@dataclass(frozen=True)
class Room:
    """What a draw may need: GiB of memory, a power of two, so that GPUs of one class draw alike. tiny: for a CPU."""

    gib: int
    tiny: bool = False


def room_of(device: torch.device) -> Room:
    if device.type != "cuda":
        return Room(1, tiny=True)
    free = torch.cuda.mem_get_info(device)[0] >> 30
    return Room(1 << max(0, free.bit_length() - 1))


@dataclass(frozen=True)
class Draw:
    """One case of a sweep. number: which of the operator's draws it is."""

    op: str
    number: int
    shape: Shape
    dtype: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.op}/{self.number}"

    def __str__(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.options.items() if value)
        return f"{self.op} {'×'.join(map(str, self.shape))} {self.dtype}{options}"


@dataclass(frozen=True)
class Plan:
    """The draws of a sweep in their order. redrawn, skipped: how many did not fit at first, and at all."""

    draws: tuple[Draw, ...]
    redrawn: int = 0
    skipped: int = 0


@dataclass
class SweepRow(Row):
    """One implementation on one draw. draw: the key of the draw."""

    draw: str = ""
    options: dict[str, Any] = field(default_factory=dict)


# --------------------------------------------------------------------------------------------------------------- draws


def drawable() -> list[str]:
    """What the sweep draws: rows of the table of benchmarks, and small models."""
    return [*(op.name for op in OPS.values() if not isinstance(op.drawn, str)), drawn_models.NAME]


def plan(count: int, seed: int, room: Room, names: Collection[str] | None = None) -> Plan:
    """`count` draws, of all operators in turns, so that a sweep that is cut short has seen each as often.

    names: draw these alone; they get the draws that they would get among all.
    """
    order = sorted(names or drawable(), key=lambda name: Dice(seed, "order", name).share())
    draws: list[Draw] = []
    redrawn = skipped = 0
    for index in range(count):
        found, attempts = draw_one(order[index % len(order)], seed, index // len(order), room)
        redrawn += attempts > 1
        if found is None:
            skipped += 1
        else:
            draws.append(found)
    return Plan(tuple(draws), redrawn, skipped)


def draw_one(name: str, seed: int, number: int, room: Room) -> tuple[Draw | None, int]:
    """The draw of this number, None if nothing fits, and how often it was drawn."""
    for attempt in range(ATTEMPTS):
        dice = Dice(seed, name, number, attempt, tiny=room.tiny)
        if name == drawn_models.NAME:
            dtype, drawn = "bf16", small_model(dice)
            fit = room.tiny or drawn_models.needed(drawn.shape, drawn.options, HELD) <= room.gib << 29
        else:
            dtype, drawn = dice.among(*DRAWN_DTYPES), drawing_of(name)(dice)
            fit = fits(OPS[name], drawn.shape, dtype, room)
        if fit:
            return Draw(name, number, drawn.shape, dtype, drawn.options), attempt + 1
    return None, ATTEMPTS


def drawing_of(name: str) -> Drawing:
    drawing = OPS[name].drawn
    if isinstance(drawing, str):
        raise ValueError(f"sweep: {name} is not drawn: {drawing}.")
    return drawing


def fits(op: Op, shape: Shape, dtype: str, room: Room) -> bool:
    """Whether eager code and the reference have room in half of the memory, and end in a few hundredths of a second."""
    if room.tiny:
        return True
    itemsize = DTYPES[dtype].itemsize
    largest = op.largest(shape) if op.largest else 0
    needed = sum(op.nbytes(shape, itemsize)) + HELD * max(largest, op.nbytes(shape, 1)[0] // 2)
    if needed > room.gib << 29:
        return False
    cost = 0 if op.flops is None else sum(op.flops(shape)) * (FP32_COST if itemsize > 2 else 1)
    return cost <= room.gib * FLOPS_PER_GIB


# ------------------------------------------------------------------------------------------------------------- measure


def graphed(rows: list[Row]) -> Collection[str]:
    """The implementations that are timed as CUDA graphs too: the host may take longer than the device."""
    return [row.implementation for row in rows if row.status == "ok" and host_may_limit(row.to_dict())]


def _transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


class Spent:
    """Seconds by what was done in them: each `begin` ends what was begun before."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._now, self._since = "", time.monotonic()

    def begin(self, what: str) -> None:
        now = time.monotonic()
        if self._now:
            self.seconds[self._now] = self.seconds.get(self._now, 0.0) + now - self._since
        self._now, self._since = what, now

    def begin_step(self, text: str) -> None:
        """A step of `run_case`, "softmax 3×4 float32: round 1 of 5, liger"."""
        self.begin(text.rpartition(": ")[2].split(" of ")[0].rstrip("0123456789 "))


class Sweep:
    """A sweep that is measured draw by draw; `content()` is its result so far.

    Args:
        seed, names, peers: as asked for; None: all.
        budget_s: seconds after which no further draw begins.
        before: a result whose draws are kept and not measured again.
    """

    def __init__(
        self,
        count: int,
        seed: int,
        device: torch.device,
        *,
        names: Sequence[str] | None = None,
        peers: Sequence[str] | None = None,
        budget_s: float | None = None,
        before: dict[str, Any] | None = None,
    ) -> None:
        self.seed, self.device, self.peers, self.budget_s = seed, device, peers, budget_s
        self.room = room_of(device)
        self.plan = plan(count, seed, self.room, names)
        self.settings = TINY_SETTINGS if self.room.tiny else SETTINGS
        self.rows: list[Any] = []
        self.before = before
        if before is not None:
            self._check(before)
        self.done = set() if before is None else {row["draw"] for row in before["rows"]}
        self.late: list[str] = []
        self.absent: dict[str, str] = {}
        # Peers that took too long to start on an operator, which are not tried on it again.
        self.given_up: dict[str, str] = {}
        self.compile_s = 0.0
        self.ahead = 0
        self.without_compile = 0
        self.broken = ""
        self.ceilings: Ceilings | None = None
        self.spent, self.host = Spent(), Host()

    def _check(self, before: dict[str, Any]) -> None:
        mine = {"kind": "sweep", "seed": self.seed, "gib": self.room.gib}
        theirs = {"kind": before["kind"], **{k: before.get("sweep", {}).get(k) for k in ("seed", "gib")}}
        here = report.environment(self.device)
        for name in ("device", "packages"):
            mine[name], theirs[name] = here[name], before["environment"][name]
        other = [name for name in mine if mine[name] != theirs[name]]
        if other:
            raise ValueError(f"sweep: the file to resume must have the same {', '.join(other)} as this run.")

    def run(
        self,
        say: Callable[[str, int], None] = lambda text, advance: None,
        keep: Callable[[dict[str, Any]], None] = lambda content: None,
    ) -> None:
        """Measure what is missing. say(text, draws that are done now), keep(content): every few seconds."""
        began = time.monotonic()
        missing = [draw for draw in self.plan.draws if draw.key not in self.done]
        models = [draw for draw in missing if draw.op == drawn_models.NAME]
        with contextlib.ExitStack() as stack:
            if not self.room.tiny:
                stack.enter_context(private_cache())
            apart = stack.enter_context(drawn_models.Apart()) if models and _transformers() else None
            if missing and not self.room.tiny:
                self.compile_ahead(missing, say)
            self.spent.begin("ceilings")
            say("copy bandwidth and matmul rate", 0)
            self.ceilings = measure_ceilings(self.device, self.settings if self.room.tiny else None)
            if models:
                say(f"{len(models)} models", 0)
                self.spent.begin("models")
                self.measure_models(models, apart)
                keep(self.content())
            if not self.room.tiny:
                say("waiting until the processors are idle", 0)
                self.spent.begin("waiting")
                self.host.wait(QUIET_S)
            stack.callback(gc.unfreeze)
            self._run(began, say, keep)

    def _run(self, began: float, say: Callable[[str, int], None], keep: Callable[[dict[str, Any]], None]) -> None:
        kept = time.monotonic()
        for draw in self.plan.draws:
            if draw.key in self.done:
                say(str(draw), 1)
                continue
            if self.budget_s is not None and time.monotonic() - began > self.budget_s:
                self.late.append(draw.key)
            if self.late or draw.op == drawn_models.NAME:
                continue
            say(str(draw), 0)
            self.spent.begin("tidying")
            self.tidy()
            self.host.sample(0.0 if self.room.tiny else PATIENCE_S)
            self.measure(draw)
            self.spent.begin("")
            say(str(draw), 1)
            if time.monotonic() - kept >= KEEP_S:
                keep(self.content())
                kept = time.monotonic()
            if self.broken:
                break
        keep(self.content())

    def tidy(self) -> None:
        """Keep what is there before a draw out of the collections of garbage in it.

        Each of dozens would search all of torch's modules for a third of a second. Garbage among what is kept stays,
        until it holds too much of the device's memory.
        """
        gc.collect()
        if self.device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()  # one for each stream that a CUDA graph was captured on
            if torch.cuda.memory_allocated(self.device) > HELD_BYTES:
                gc.unfreeze()
                gc.collect()
        gc.freeze()

    def compile_ahead(self, missing: Sequence[Draw], say: Callable[[str, int], None]) -> None:
        """What is to be measured, for a share of the budget at most. This process imports the peers meanwhile."""
        self.spent.begin("compiling ahead")
        self.ahead = compile_ahead(
            [asdict(draw) for draw in missing],
            self.device,
            self.peers,
            start_s=self.settings.start_s,
            deadline_s=AHEAD_S if self.budget_s is None else AHEAD_SHARE * self.budget_s,
            say=lambda done: say(f"compiling ahead: {done} of {len(missing)}", 0),
            meanwhile=lambda: self.load(missing),
        )

    def load(self, draws: Sequence[Draw]) -> None:
        """Import what the draws will run: libraries of peers take seconds, which belong to no draw."""
        for name in dict.fromkeys(draw.op for draw in draws if draw.op in OPS):
            for by, implementation in choose(OPS[name], self.peers, self.device).items():
                with contextlib.suppress(Exception):  # one that is missing says so in its row
                    implementation.load()
                if by == "compile":
                    importlib.import_module("torch._inductor.compile_fx")

    def measure_models(self, models: Sequence[Draw], apart: drawn_models.Apart | None) -> None:
        if apart is None:
            self.absent["model"] = "transformers is not installed"
            return
        peers = None if self.peers is None else {"tigon", "hf", *self.peers}
        sides = [side for side in drawn_models.SIDES if peers is None or side in peers]
        if self.room.tiny and peers is None:
            sides = ["tigon", "hf"]
        seconds = drawn_models.TIMEOUT_S * len(models) if self.budget_s is None else MODEL_SHARE * self.budget_s
        requests = [(draw.shape, draw.dtype, draw.options) for draw in models]
        found = apart.measure(requests, self.device, self.settings, sides, seconds)
        for draw, rows in zip(models, found, strict=True):
            if rows is not None:
                self.add(draw, rows)

    def measure(self, draw: Draw) -> None:
        assert self.ceilings is not None
        op, options = OPS[draw.op], dict(draw.options)
        measured = run_case(
            op,
            draw.shape,
            DTYPES[draw.dtype],
            self.device,
            self.ceilings,
            implementations=self.chosen(op),
            settings=self.settings,
            ignored=options.pop("ignored", 0.0),
            options=options,
            graphed=graphed,
            say=self.spent.begin_step,
        )
        self.add(draw, measured)
        try:
            synchronize(self.device)
        except RuntimeError as error:  # an invalid access: nothing on this device works from now on
            self.broken = f"{draw}: {one_line(error)}"

    def chosen(self, op: Op) -> dict[str, Implementation]:
        chosen = choose(op, self.peers, self.device)
        if self.room.tiny and self.peers is None:  # on a CPU torch.compile takes longer than all the rest
            chosen.pop("compile", None)
        if "compile" in chosen and self.budget_s is not None and self.compile_s > COMPILE_SHARE * self.budget_s:
            self.without_compile += 1
            del chosen["compile"]
        return {name: one for name, one in chosen.items() if f"{op.name}: {name}" not in self.given_up}

    def add(self, draw: Draw, measured: Iterable[Row]) -> None:
        for row in measured:
            if row.implementation == "compile":
                self.compile_s += row.first_s or 0.0
            if row.reason.endswith("is not installed"):
                self.absent[row.implementation] = row.reason
                continue
            if LATE in row.reason:  # torch.compile wraps the error in others
                self.given_up[f"{draw.op}: {row.implementation}"] = str(draw)
            self.rows.append(SweepRow(**asdict(row), draw=draw.key, options=draw.options))
        self.done.add(draw.key)

    def content(self) -> dict[str, Any]:
        about = {
            "seed": self.seed,
            "gib": self.room.gib,
            "draws": len(self.plan.draws),
            "redrawn": self.plan.redrawn,
            "skipped": self.plan.skipped,
            "not_begun": sum(draw.key not in self.done for draw in self.plan.draws),
            "ahead": self.ahead,
            "without_compile": self.without_compile,
            "broken": self.broken,
            "seconds": {what: round(seconds, 1) for what, seconds in self.spent.seconds.items()},
            "host": self.host.summary(),
        }
        assert self.ceilings is not None
        content = report.result(
            "sweep", self.rows, device=self.device, ceilings=asdict(self.ceilings), sweep=about, notes=self.notes()
        )
        if self.before is None:
            return content
        # What a peer was not tried on, and how busy the host was, is true of the draws that an earlier run measured.
        notes = [*self.before.get("notes", ()), *content["notes"]]
        return {**report.merge([self.before, content]), "notes": list(dict.fromkeys(notes))}

    def notes(self) -> list[str]:
        notes = [NO_GPU] if self.room.tiny else []
        for why in dict.fromkeys(self.absent.values()):
            notes.append(f"Left out: {', '.join(name for name in self.absent if self.absent[name] == why)} ({why}).")
        for what, draw in self.given_up.items():
            seconds = f"{self.settings.start_s:g} s"
            notes.append(f"Not tried again: {what} had not started after {seconds} on {draw}.")
        if self.without_compile:
            notes.append(f"Without torch.compile, whose share of the budget was spent: {self.without_compile} draws.")
        host = self.host.summary()
        if "us" in host and not self.room.tiny:
            others = f", and other processes kept {host['others']:.1f} processors busy" if "others" in host else ""
            notes.append(
                f"Beside the draws one piece of Python took {host['us_least']:.0f} to {host['us_most']:.0f} µs of the "
                f"host, mostly {host['us']:.0f}{others}."
            )
        if self.broken:
            notes.append(f"Ended: the device failed after {self.broken}.")
        return notes
