"""A small model of a drawn family as Hugging Face runs it, compiled, by Tigon and by Liger, for the sweep.

Random weights, forward and backward without an optimizer. The models have a process of their own, which imports while
the sweep compiles. Liger changes modules of transformers, so that it comes last, and what it changed is put back.

python -m tigon.bench.drawn_models      the process: reads one request on standard input, writes its rows to a file
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tigon.bench.children import end, start
from tigon.bench.inputs import DTYPES, Shape
from tigon.bench.kernels import recorded
from tigon.bench.runner import (
    LONG_MS,
    Row,
    Settings,
    fill_total,
    free,
    one_line,
    peak_mib,
    time_ms,
    within,
)
from tigon.presets import PRESETS

NAME = "model"
SHAPE_NAMES = ("batch", "tokens", "layers", "width")
SIDES = ("tigon", "hf", "compile", "liger")  # Liger last
FACTOR = 2.0  # a gradient may be this many times as far from fp32's as the plain model's is
TIMEOUT_S = 240.0  # of one draw, where there is no budget
STEPS = 5  # timed in a round, of which the median counts
# Batches of a model that chooses experts, of which the least error of each gradient counts: a token between two experts
# may go to the other after any rounding, in the plain model too, and that moves a gradient by several percent.
ROUTED = 4
# A gradient made of a few exact numbers may differ by one rounding of bf16.
ROUNDING = 2.0**-8


def overrides_of(shape: Shape, options: dict[str, Any]) -> dict[str, Any]:
    """The fields of the family's configuration that the draw replaces."""
    _, _, layers, width = shape
    family = PRESETS[options["family"]]
    inner = options["inner"]
    fields = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": options["heads"],
        "num_key_value_heads": options["keys"],
        "head_dim": options["head_width"],
        "vocab_size": options["vocabulary"],
    }
    for name in ("num_experts", "num_local_experts"):
        if name in family:
            # As many numbers as a dense model has, spread over a few times as many experts as a token chooses.
            fields |= {name: max(options["experts"], family["num_experts_per_tok"])}
            fields |= {
                "moe_intermediate_size" if "moe_intermediate_size" in family else "intermediate_size": inner // 4
            }
    return fields


def needed(shape: Shape, options: dict[str, Any], held: int) -> int:
    """Bytes for the logits, and for what each layer keeps of a token, here and in fp32."""
    batch, tokens, layers, width = shape
    kept = layers * (8 * width + 4 * int(options["inner"]))
    return held * batch * tokens * (int(options["vocabulary"]) + kept)


def build(shape: Shape, dtype: str, options: dict[str, Any], device: torch.device) -> Any:
    from tigon.bench import training

    return training.build(options["family"], device, DTYPES[dtype], **overrides_of(shape, options))


def labelled(shape: Shape, vocabulary: int, device: torch.device, seed: int = 1) -> dict[str, Tensor]:
    """Tokens that are the same for every side; the first eighth of each sequence is masked."""
    batch, tokens, *_ = shape
    draw = torch.Generator(device).manual_seed(seed)
    ids = torch.randint(vocabulary, (batch, tokens), generator=draw, device=device)
    labels = ids.clone()
    labels[:, : tokens // 8] = -100
    return {"input_ids": ids, "labels": labels}


def step(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    model.zero_grad(set_to_none=True)
    loss: Tensor = model(**inputs).loss
    loss.backward()
    return loss.detach()


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Put back what the modules of transformers, and the functions that they call, are set to meanwhile."""
    found = [module for name, module in sys.modules.items() if name.split(".")[0] == "transformers"]
    kept = [(vars(module), dict(vars(module))) for module in [*found, torch.nn.functional] if _is_module(module)]
    try:
        yield
    finally:
        for now, before in kept:
            now |= {name: value for name, value in before.items() if now.get(name) is not value}


def _is_module(module: Any) -> bool:
    # transformers puts objects of its own among the modules, whose attributes import on demand.
    return isinstance(module, ModuleType)


def measure(
    shape: Shape, dtype: str, options: dict[str, Any], device: torch.device, settings: Settings, sides: Sequence[str]
) -> list[Row]:
    """A row for each side: checked against fp32, timed, the peak of its step beyond the weights."""
    with contained():
        return _measure(shape, dtype, options, device, settings, sides)


def _measure(
    shape: Shape, dtype: str, options: dict[str, Any], device: torch.device, settings: Settings, sides: Sequence[str]
) -> list[Row]:
    rows = {side: Row(NAME, shape, str(DTYPES[dtype]).removeprefix("torch."), side) for side in sides}
    plain = build(shape, dtype, options, device)
    count = ROUTED if "experts" in options else 1
    batches = [labelled(shape, options["vocabulary"], device, seed) for seed in range(1, count + 1)]
    inputs = batches[0]
    wide = copy.deepcopy(plain).float()
    exact = [_gradients(wide, batch) for batch in batches]
    del wide
    bounds = _least_errors(plain, batches, exact)
    plain.zero_grad(set_to_none=True)
    free(device)
    timed: dict[str, Callable[[], Tensor]] = {}
    for side, row in rows.items():
        if side == "liger":  # it changes what the others run on
            _time(rows, timed, device, settings)
            timed.clear()
        try:
            with within(4 * settings.start_s):
                model = prepared(side, copy.deepcopy(plain))
                _check(row, _least_errors(model, batches, exact), bounds)
            model.zero_grad(set_to_none=True)
            run = functools.partial(step, model, inputs)
            row.peak_mib, _ = peak_mib(run, device)
            model.zero_grad(set_to_none=True)
            timed[side] = run
        except Exception as error:  # a peer may fail in any way; its row then says how
            row.status, row.reason = "failed", one_line(error)
        free(device)
    _time(rows, timed, device, settings)
    return list(rows.values())


def prepared(side: str, model: Any) -> Any:
    """The model as a side runs it."""
    from tigon.bench.training import SIDES as sides

    sides[side](model)
    return model


def _gradients(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Loss and gradients in fp32. The model keeps its own."""
    loss = step(model, inputs)
    found = {name: p.grad.detach().float() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.float(), **found}


def _least_errors(
    model: Any, batches: Sequence[dict[str, Tensor]], exact: Sequence[dict[str, Tensor]]
) -> dict[str, float]:
    """The least error of each gradient over the batches."""
    each = [_errors(_gradients(model, batch), found) for batch, found in zip(batches, exact, strict=True)]
    return {name: min(errors[name] for errors in each) for name in each[0]}


def _errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Of the loss and of each gradient, relative to fp32's; a gradient that is missing is all wrong."""
    return {
        name: float((found[name] - g).norm() / g.norm().clamp(min=1e-30)) if name in found else 1.0
        for name, g in exact.items()
    }


def _check(row: Row, errors: dict[str, float], bounds: dict[str, float]) -> None:
    beyond = [name for name, error in errors.items() if not error <= max(FACTOR * bounds[name], ROUNDING)]
    worst = max((name for name in errors if name != "loss"), key=lambda name: errors[name])
    row.errors = {"loss": errors["loss"], worst: errors[worst]}
    if beyond:
        row.status, row.reason = "wrong", f"more than {FACTOR:g} × the plain error in {', '.join(beyond[:3])}"


def _time(
    rows: dict[str, Row], timed: dict[str, Callable[[], Tensor]], device: torch.device, settings: Settings
) -> None:
    found: dict[str, list[float]] = {side: [] for side in timed}
    began = time.monotonic()
    for r in range(settings.rounds):
        if r > 2 and time.monotonic() - began > settings.case_s:
            break
        for side, run in list(timed.items()):
            try:
                # As a long call: a step has hundreds of kernels, and a cold cache means little to it.
                found[side].append(time_ms(run, device, replace(settings, least=STEPS), LONG_MS))
            except Exception as error:
                rows[side].status, rows[side].reason = "failed", one_line(error)
                del timed[side], found[side]
    for side, totals in found.items():
        if totals:
            fill_total(rows[side], totals)
            rows[side].device_ms = _kernels_ms(timed[side], device)


def _kernels_ms(run: Callable[[], Tensor], device: torch.device) -> float | None:
    """Milliseconds in which a step's kernels run, as the profiler records them; None on a device without kernels.

    No CUDA graph, as of operators: transformers' models look at masks and positions, and no graph can wait for that.
    """
    try:
        kinds = recorded(run, device)
    except Exception:  # the time of the call stands, whatever happens to the recording
        return None
    return sum(ms for kind, ms in kinds.items() if kind != "idle") or None


# ------------------------------------------------------------------------------------------------------------- process


Request = tuple[Shape, str, dict[str, Any]]


class Apart:
    """A process that measures models, and imports from the moment on that this is made."""

    def __enter__(self) -> Apart:
        self._folder = tempfile.TemporaryDirectory()
        self._result = Path(self._folder.name, "rows.json")
        self._process = start("tigon.bench.drawn_models", str(self._result), stderr=subprocess.STDOUT)
        return self

    def __exit__(self, *_: object) -> None:
        end(self._process)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._folder.cleanup()

    def measure(
        self,
        requests: Sequence[Request],
        device: torch.device,
        settings: Settings,
        sides: Sequence[str],
        seconds: float,
    ) -> list[list[Row] | None]:
        """The rows of each request; rows with the reason where the process died, None where the time was over."""
        message = {"requests": requests, "device": str(device), "settings": asdict(settings), "sides": sides}
        reason = ""
        try:
            said, _ = self._process.communicate(json.dumps(message), timeout=seconds)
            last = (said.strip().splitlines() or [""])[-1]
            reason = f"the process ended with code {self._process.returncode}: {last[:200]}"
        except subprocess.TimeoutExpired:
            pass
        finally:
            end(self._process)  # what it has compiled with would run on while others are timed
        done = json.loads(self._result.read_text()) if self._result.exists() else []
        found: list[list[Row] | None] = [[Row(**{**row, "shape": tuple(row["shape"])}) for row in one] for one in done]
        for shape, dtype, _ in requests[len(done) :]:
            name = str(DTYPES[dtype]).removeprefix("torch.")
            found.append([Row(NAME, shape, name, side, "failed", reason) for side in sides] if reason else None)
        return found


def _serve() -> int:
    with contextlib.suppress(ImportError):
        import liger_kernel.transformers.monkey_patch  # noqa: F401
    import transformers.modeling_utils  # noqa: F401

    import tigon.fusion.engine.model  # noqa: F401

    text = sys.stdin.read()
    if not text:  # nothing is wanted any more
        return 0
    request = json.loads(text)
    device, settings, sides = torch.device(request["device"]), Settings(**request["settings"]), request["sides"]
    result, found = Path(sys.argv[1]), []
    for shape, dtype, options in request["requests"]:
        try:
            rows = measure(tuple(shape), dtype, options, device, settings, sides)
        except Exception as error:  # the model itself: the rows say so, and the next one goes on
            name = str(DTYPES[dtype]).removeprefix("torch.")
            rows = [Row(NAME, tuple(shape), name, side, "failed", one_line(error)) for side in sides]
        found.append([row.to_dict() for row in rows])
        part = result.with_suffix(".part")
        part.write_text(json.dumps(found))
        part.replace(result)
        torch._dynamo.reset()
        free(device)
    sys.stdout.flush()
    os._exit(0)  # threads of the compilers would hold the process up


if __name__ == "__main__":
    sys.exit(_serve())
