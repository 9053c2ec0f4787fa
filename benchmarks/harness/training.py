"""One training step of a whole model: the sides of a comparison, how each changes the model, and the timing."""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from harness.kernels import profile_step, record_step
from torch import Tensor, nn

from tigon.fusion.memory.checkpointing import checkpoint_activations

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WARMUP_STEPS = 3
LEARNING_RATE = 1e-5
WARM_LENGTH = 64  # tokens of the warm-up step before memory is measured
LONG_STEP_MS = 10e3  # a first step this long counts, too
RECIPES = ("tensorwise", "rowwise")  # torchao's
MASKED = 0.125  # share of the labels that are masked, unless a row says otherwise


@dataclass
class RunResult:
    """One side of the comparison: a key of SIDES, or "floor", the time that no side can beat (see floor.py)."""

    model: str
    side: str
    batch: int
    seq: int
    checkpointing: bool
    dtype: str
    status: str = "ok"  # ok | failed
    reason: str = ""
    note: str = ""
    tokens_per_s: float | None = None
    step_ms: float | None = None
    steps_ms: list[float] = field(default_factory=list)
    peak_gib: float | None = None
    losses: list[float] = field(default_factory=list)
    start_s: float | None = None
    gpus: int = 1
    times_floor: float | None = None
    # Milliseconds of the device in one step by kind of kernel, "idle" among them (see kernels.py).
    profile_ms: dict[str, float] = field(default_factory=dict)
    # How many layers were built; None: all that the model has.
    layers: int | None = None
    # Of the run that measured the row; report.result fills them in.
    date: str = ""
    command: str = ""
    # The share of the labels that are masked, from the start of each sequence, and the micro-batches of one step.
    masked: float = MASKED
    accumulation: int = 1

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _hf(model: PreTrainedModel) -> None:
    pass


def _liger(model: PreTrainedModel) -> None:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance

    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise RuntimeError(f"Liger does not know the model type {model.config.model_type!r}")
    _apply_liger_kernel_to_instance(model=model)


def _tigon(model: PreTrainedModel, **options: Any) -> None:
    import tigon

    tigon.fuse(model, **options)


def _compile(model: PreTrainedModel) -> None:
    model.compile()


def drop_mask(model: PreTrainedModel) -> None:
    """Let SDPA get `is_causal=True` in place of a mask, under `torch.compile` too. Right where no token is padding.

    transformers leaves the mask out in eager mode, but builds it while it is traced, and a mask excludes the flash
    kernel. For an attention function under a name of its own transformers builds none.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("sdpa_causal", sdpa_attention_forward)
    model.set_attn_implementation("sdpa_causal")


def _compile_causal(model: PreTrainedModel) -> None:
    drop_mask(model)
    _compile(model)


def _compile_layers(model: PreTrainedModel) -> None:
    """Compile each decoder layer and the loss; the mask is decided in eager mode."""
    for layer in model.get_decoder().layers:
        layer.compile()
    model.loss_function = torch.compile(model.loss_function)


def _tigon_compile(model: PreTrainedModel) -> None:
    _tigon(model)
    _compile(model)


def _tigon_fp8(model: PreTrainedModel, **options: Any) -> None:
    from tigon import FP8

    _tigon(model, fp8=FP8(**options))


def convert_to_torchao(model: nn.Module, recipe: str, first: int = 1) -> int:
    """Let torchao's Float8Linear run the linear layers inside decoder layers; returns how many.

    Args:
        recipe: torchao's name of a recipe, "tensorwise" or "rowwise".
        first: decoder layers that stay as they are, as in `tigon.FP8`; so does the head.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # On a CPU torch does not scale rows in every version: torchao's own emulation does.
    is_emulated = next(model.parameters()).device.type == "cpu"
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=is_emulated)
    layers = list(model.get_decoder().layers)[first:]
    for layer in layers:
        convert_to_float8_training(layer, config=config)
    return sum(type(module).__name__ == "Float8Linear" for layer in layers for module in layer.modules())


def _torchao(model: PreTrainedModel, recipe: str, is_fused: bool = False, is_compiled: bool = False) -> str:
    from importlib.metadata import version

    count = convert_to_torchao(model, recipe)
    if is_fused:
        _tigon(model)
    if is_compiled:
        _compile_layers(model)
    return f"torchao {version('torchao')}, {count} layers"


def why_missing(side: str) -> str:
    """Why a side cannot run here, as a clause; "" where its library is installed."""
    is_there = "torchao" not in side or importlib.util.find_spec("torchao") is not None
    return "" if is_there else "torchao is not installed"


# How each side changes the plain model; a text that a side returns is the row's note.
SIDES: dict[str, Callable[[Any], str | None]] = {
    "hf": _hf,
    "compile": _compile,
    "compile-causal": _compile_causal,
    "compile-layers": _compile_layers,
    "liger": _liger,
    "tigon": _tigon,
    "tigon-compile": _tigon_compile,
    # Fused models at levels of recompute that do not look at the batch.
    **{f"tigon-{level}": functools.partial(_tigon, recompute=level) for level in ("none", "product", "cheap", "mlp")},
    "tigon-offload": functools.partial(_tigon, recompute="mlp", offload=True),
    "tigon-fp8": _tigon_fp8,
    "tigon-fp8-keep": functools.partial(_tigon_fp8, keep="fp8"),
    "tigon-fp8-head": functools.partial(_tigon_fp8, head=True),
    # torchao's recipes in the same layers: eager, compiled as in compile-layers, and inside a fused model.
    **{f"torchao-{recipe}": functools.partial(_torchao, recipe=recipe) for recipe in RECIPES},
    **{f"torchao-{recipe}-compile": functools.partial(_torchao, recipe=recipe, is_compiled=True) for recipe in RECIPES},
    "tigon-torchao": functools.partial(_torchao, recipe="tensorwise", is_fused=True),
    "tigon-torchao-compile": functools.partial(_torchao, recipe="tensorwise", is_fused=True, is_compiled=True),
}
DEFAULT_SIDES = ("hf", "liger", "tigon")


def build(name: str, device: torch.device, dtype: torch.dtype, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A preset with random weights, drawn on the device, where eight billion weights take a second."""
    from tigon.presets import auto_class, preset_config

    config = preset_config(name, **overrides)
    config.use_cache = False
    torch.manual_seed(seed)
    with device:
        model: PreTrainedModel = auto_class(config).from_config(config, dtype=dtype)
    model.train()
    return model


class Trainer:
    """The model of a side with its optimizer; a step runs on tokens that are the same for every side."""

    def __init__(
        self,
        side: RunResult,
        device: torch.device,
        overrides: dict[str, Any],
        prepare: Callable[[Any], None] = lambda model: None,
    ) -> None:
        """prepare: what happens to the model between the side's own doing and the optimizer."""
        self.device = device
        self.model = build(side.model, device, getattr(torch, side.dtype), **overrides)
        if side.checkpointing:
            checkpoint_activations(self.model)
        attention = self.model.config._attn_implementation
        side.note = "" if attention == "sdpa" else f"{attention} attention"
        own = SIDES[side.side](self.model)
        side.note = "; ".join(filter(None, (side.note, own)))
        prepare(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=device.type == "cuda")
        self.draw = torch.Generator(device).manual_seed(1)

    def batch(self, batch: int, seq: int, masked: float = MASKED) -> dict[str, Tensor]:
        vocabulary = self.model.config.get_text_config().vocab_size
        ids = torch.randint(vocabulary, (batch, seq), generator=self.draw, device=self.device)
        labels = ids.clone()
        labels[:, : int(seq * masked)] = -100
        return {"input_ids": ids, "labels": labels}

    def step(self, *micro_batches: dict[str, Tensor]) -> Tensor:
        """One step of the optimizer on the mean of the micro-batches' losses."""
        losses = []
        for inputs in micro_batches:
            loss: Tensor = self.model(**inputs).loss
            (loss if len(micro_batches) == 1 else loss / len(micro_batches)).backward()
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean()

    def timed_step(self, *micro_batches: dict[str, Tensor]) -> tuple[float, float]:
        """Loss and milliseconds, from an idle device to an idle device."""
        synchronize(self.device)
        start = time.perf_counter()
        loss = self.step(*micro_batches)
        synchronize(self.device)
        return loss.item(), 1e3 * (time.perf_counter() - start)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_gib(device: torch.device) -> float | None:
    """Most memory allocated since the counter was reset; None where nobody counts."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def train_side(
    side: RunResult,
    device: torch.device,
    steps: int,
    overrides: dict[str, Any],
    say: Callable[[str], None] = print,
    profile: bool = False,
    settings: Sequence[tuple[int, float]] = (),
    done: Callable[[list[RunResult]], None] = lambda rows: None,
) -> list[RunResult]:
    """A row for each setting of a side, by training on after WARMUP_STEPS. Runs in the process that it is called in.

    Args:
        steps: timed in each setting.
        profile: of further steps one is recorded by kind of kernel, in each setting without accumulation.
        settings: micro-batches of a step and share of masked labels, one after another; without any, the side's own.
        done: gets the rows so far after each setting.
    """
    start = time.perf_counter()
    trainer = Trainer(side, device, overrides)
    synchronize(device)
    start_s = time.perf_counter() - start
    rows: list[RunResult] = []
    for accumulation, masked in settings or [(side.accumulation, side.masked)]:
        row = replace(side, accumulation=accumulation, masked=masked, start_s=start_s, losses=[], steps_ms=[])

        def draw(row: RunResult = row) -> list[dict[str, Tensor]]:
            return [trainer.batch(row.batch, row.seq, row.masked) for _ in range(row.accumulation)]

        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        rows.append(row)
        try:
            for step in range(WARMUP_STEPS + steps):
                loss, ms = trainer.timed_step(*draw())
                row.losses.append(loss)
                row.steps_ms.append(ms)
                say(f"{side.side}: step {step + 1} of {WARMUP_STEPS + steps}, loss {loss:.5f}, {ms:.0f} ms")
            row.peak_gib = peak_gib(device)
            if "compile" in side.side:
                graphs = f"{torch._dynamo.utils.counters['stats']['unique_graphs']} graphs compiled"
                row.note = "; ".join(filter(None, (side.note, graphs)))
            if profile and accumulation == 1:
                inputs = draw()
                row.profile_ms = profile_step(lambda inputs=inputs: trainer.step(*inputs), device)
        except torch.OutOfMemoryError:
            row.status, row.reason = "failed", "out of memory"
            break
        row.steps_ms = row.steps_ms[WARMUP_STEPS:]
        row.step_ms = statistics.median(row.steps_ms)
        row.tokens_per_s = 1e3 * accumulation * side.batch * side.seq / row.step_ms
        done(rows)
    return rows


def measure_lengths(
    side: RunResult,
    device: torch.device,
    longest: int,
    overrides: dict[str, Any],
    say: Callable[[str], None] = print,
    done: Callable[[list[RunResult]], None] = lambda rows: None,
    steps: int = 1,
    profile_at: int | None = None,
) -> list[RunResult]:
    """Time and peak memory of a training step over the length of the sequences: side.seq doubled until it does not fit.

    Between the last length that fits and the first that does not, the one in the middle is tried as well. The
    optimizer's states are there before the first length is measured. `done` gets the rows so far after each length.

    The first step of a length is not counted, unless it is longer than LONG_STEP_MS or the only one that is wanted.

    Args:
        longest: no length beyond it is tried, in tokens.
        steps: timed at each length, at most; once they have taken LONG_STEP_MS together, no further one is begun.
        profile_at: the length of which one further step is recorded by kind of kernel.
    """
    trainer = Trainer(side, device, overrides)
    trainer.step(trainer.batch(side.batch, WARM_LENGTH))
    rows: list[RunResult] = []

    def time_steps(row: RunResult) -> None:
        for step in range(steps + 1):
            loss, ms = trainer.timed_step(trainer.batch(side.batch, row.seq))
            row.losses.append(loss)
            say(f"{side.side}: step of {row.seq} tokens, {ms:.0f} ms")
            if step == 0 and steps > 1 and ms < LONG_STEP_MS:
                continue
            row.steps_ms.append(ms)
            if len(row.steps_ms) == steps or sum(row.steps_ms) >= LONG_STEP_MS:
                break

    def fits(seq: int) -> bool:
        row = replace(side, seq=seq, losses=[], steps_ms=[])
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        try:
            time_steps(row)
            row.step_ms = statistics.median(row.steps_ms)
            row.tokens_per_s = 1e3 * side.batch * seq / row.step_ms
            row.peak_gib = peak_gib(device)
            if seq == profile_at:
                inputs = trainer.batch(side.batch, seq)
                row.profile_ms = record_step(lambda: trainer.step(inputs), device)
        except torch.OutOfMemoryError:
            row.status, row.reason = "failed", "out of memory"
        trainer.optimizer.zero_grad(set_to_none=True)
        rows.append(row)
        done(rows)
        return row.status == "ok"

    seq = side.seq
    while seq <= longest and fits(seq):
        seq *= 2
    if len(rows) > 1 and rows[-1].status == "failed":
        fits(seq // 4 * 3)
    return sorted(rows, key=lambda row: row.seq)
