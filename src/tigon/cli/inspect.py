"""`tigon inspect`: what `tigon.fuse` would replace in a model, and a training step's memory, plain and fused.

The command reads only the configuration: model and step are on the meta device, where tensors have no memory.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tigon.cli.memory import (
    OPTIMIZERS,
    PRECISIONS,
    QUANTIZE,
    RECOMPUTE,
    Sides,
    StepOptions,
    find_capacity,
    gib,
    verdict,
)
from tigon.cli.options import argument, json_option, option
from tigon.cli.problem import Problem, check_choice, needs, one_line
from tigon.cli.screen import screen, show

if TYPE_CHECKING:
    from tigon.fusion.memory.estimate import StepMemory

MOMENTS = {
    "forward": "in the forward pass", "loss": "in the loss", "backward": "in the backward pass",
    "optimizer": "in the optimizer's step",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class InspectOptions(StepOptions):
    model: str = argument("Model or adapter directory, config.json, hub name or preset.")
    adapters: str | None = option(None, "Adapters saved by PEFT: folder, adapter_config.json or hub name.")
    gpu: str | None = option(None, "GPU the step must fit on: a name such as 'H100 80GB', or memory in GiB.")
    why: str | None = option(
        None, "Module name, such as model.layers.0.mlp: print only why that module was recognised or not."
    )
    json: bool = json_option()


def inspect(options: InspectOptions) -> None:
    """Show which layers would be replaced and why, and a training step's memory. Needs no weights and no GPU."""
    needs("tigon inspect", "train", "torch", "transformers")
    check_choice("", options, precision=PRECISIONS, optimizer=OPTIMIZERS, recompute=RECOMPUTE, quantize=QUANTIZE)
    quantize = options.quantize
    if options.lora_dropout and not options.lora:
        raise Problem("--lora-dropout requires --lora, the adapter rank")
    if quantize and options.gpus > 1:
        raise Problem(
            f"--quantize {quantize} requires --gpus 1: each GPU holds the whole quantised model, got {options.gpus}"
        )
    from tigon.cli.adapters import find_adapted
    from tigon.cli.model import quantized_to, quiet_transformers

    source, adapters = find_adapted(options.model, options.adapters, options.lora, any_head=True)
    if quantize and not (options.lora or adapters):
        raise Problem("--quantize requires --lora or --adapters: only frozen layers under adapters are quantised")
    quiet_transformers()
    capacity = find_capacity(options.gpu)
    limit = getattr(source.config.get_text_config(), "max_position_embeddings", None) or 2048
    if options.seq_len is not None and options.seq_len > limit:
        raise Problem(f"--seq-len {options.seq_len} exceeds the {limit} positions of {options.model}")
    options = dataclasses.replace(
        options, seq_len=options.seq_len or min(2048, limit), quantize=quantize or quantized_to(source.config)
    )
    built = Sides(source, options, adapters)
    if options.why is not None:
        _explain(built, options.why, options.json)
    else:
        _measure(built, source, capacity, options.json)


def _explain(built: Any, name: str, as_json: bool) -> None:
    """Print why one module was recognised, or was not."""
    built.fuse()
    try:
        explanation = built.fusion.explain(name)
    except ValueError as error:
        raise Problem(str(error).replace("explain: name", "--why", 1)) from None
    print(json.dumps(explanation.to_dict(), indent=2) if as_json else explanation)


def _measure(built: Any, source: Any, capacity: tuple[str, float] | None, as_json: bool) -> None:
    """Print the replaced layers, and the memory of a step before and after."""
    from tigon.fusion.memory.estimate import CannotEstimate

    console = screen(quiet=as_json)
    sides: dict[str, StepMemory] = {}
    obstacles: dict[str, str] = {}
    with console.status("running a step of the model's shapes"):
        for side in ("plain", "fused"):
            if side == "fused":
                built.fuse()
            try:
                sides[side] = built.memory()
            except CannotEstimate as error:
                obstacles[side] = one_line(error, 160)
        report = built.fusion.report()
    fits = {side: verdict(m.peak.total, capacity[1]) for side, m in sides.items()} if capacity else {}
    kind = type(_get_inner(built.model)).__name__
    if as_json:
        found: dict[str, Any] = {
            "model": source.name, "class": kind, "parameters": built.whole, "trained": built.trained,
            "report": report.to_dict(), "no_step": obstacles.get("fused"), "step": built.words,
            "memory": {side: m.to_dict() for side, m in sides.items()}, "no_estimate": obstacles,
            "gpu": None if capacity is None else {"name": capacity[0], "bytes": int(capacity[1]), "verdict": fits},
        }  # fmt: skip
        print(json.dumps(found, indent=2))
        return
    trained = f"{built.trained / 1e6:,.2f}M trained, " if built.trained != built.whole else ""
    console.print(
        f"{source.name}: {kind}, {built.whole / 1e6:,.1f}M parameters, {trained}{_count_layers(source.config)} layers; "
        f"a step of {built.words}"
    )
    show(report.to_rich())
    if sides:
        show(_make_table(sides))
        where = ", ".join(f"{side} {MOMENTS[m.peak.during]}" for side, m in sides.items())
        text = f"Peak: {where}. Activations kept: at the end of the forward pass. Not counted: the CUDA context."
        console.print(text, style="dim")
    for side, reason in obstacles.items():
        console.print(f"The {side} model needs data for a step: {reason}", style="dim")
    if capacity and fits:
        words = "; ".join(f"{side} {told}" for side, told in fits.items())
        console.print(f"On {capacity[0]}, {capacity[1] / 2**30:.1f} GiB: {words}")
    elif sides:
        console.print("To check whether the step fits: --gpu 'H100 80GB', or memory in GiB", style="dim")


def _get_inner(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _count_layers(config: Any) -> int:
    text = config.get_text_config()
    for names in (("num_layers", "num_decoder_layers"), ("encoder_layers", "decoder_layers")):
        both: list[Any] = [getattr(text, name, None) for name in names]
        if config.is_encoder_decoder and None not in both:
            return sum(int(number) for number in both)
    return int(text.num_hidden_layers)


def _make_table(sides: dict[str, StepMemory]) -> Any:
    from rich.table import Table
    from rich.text import Text

    from tigon.fusion.memory.estimate import PARTS

    table = Table(title="Peak GPU memory during the step", title_justify="left")
    table.add_column("")
    for side in sides:
        table.add_column(side, justify="right")
    for part in PARTS:
        table.add_row(part, *(gib(m.peak.parts[part]) for m in sides.values()), end_section=part == PARTS[-1])
    peaks = ("peak", *(gib(m.peak.total) for m in sides.values()))
    table.add_row(*(Text(cell, style="bold") for cell in peaks), end_section=True)
    table.add_row("activations kept", *(gib(m.kept.parts["activations"]) for m in sides.values()), style="dim")
    table.add_row("all gradients", *(gib(m.update.parts["gradients"]) for m in sides.values()), style="dim")
    return table
