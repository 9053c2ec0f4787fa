"""`tigon inspect`: what `tigon.fuse` would replace in a model, and a training step's memory, plain and fused.

The command reads only the configuration: model and step are on the meta device, where tensors have no memory.
"""

from __future__ import annotations

import json as encoder
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tigon.cli.problem import Problem, needs, one_line

if TYPE_CHECKING:
    from tigon.fusion.memory.estimate import StepMemory

OPTIMIZERS = (
    "adamw",
    "adamw-fp32",
    "adamw-8bit",
    "sgd-momentum",
    "sgd",
)  # tigon.fusion.memory.estimate's, which needs torch
QUANTIZE = ("nf4", "fp4", "int8")
RECOMPUTE = ("auto", "none", "product", "cheap", "mlp")  # tigon.fusion.memory.recompute's
PRECISIONS = ("bf16", "bf16-pure", "fp16", "fp32")
BOTH = "--lora and saved adapters contradict each other: new adapters of that rank, or those of a folder"
MOMENTS = {
    "forward": "in the forward pass", "loss": "in the loss", "backward": "in the backward pass",
    "optimizer": "in the optimizer's step",
}  # fmt: skip


def inspect(
    model: Annotated[
        str,
        typer.Argument(help="A directory (of a model or of adapters), a config.json, a name on the hub, a preset."),
    ],
    batch_size: Annotated[
        int, typer.Option("--batch-size", "--batch", help="Sequences per GPU in one step.", min=1)
    ] = 1,
    seq_len: Annotated[
        int | None,
        typer.Option(
            "--seq-len", "--seq", help="Tokens per sequence; by default 2048, or what positions allow.", min=2
        ),
    ] = None,
    precision: Annotated[str, typer.Option(help=f"{', '.join(PRECISIONS)}; bf16 and fp16 are autocast.")] = "bf16",
    optimizer: Annotated[str, typer.Option(help=f"{', '.join(OPTIMIZERS)}.")] = "adamw",
    gradient_checkpointing: Annotated[
        bool,
        typer.Option("--gradient-checkpointing", "--checkpointing", help="Recompute activations in the backward pass."),
    ] = False,
    recompute: Annotated[
        str, typer.Option(help=f"{', '.join(RECOMPUTE)}: what the fused model computes again.")
    ] = "auto",
    offload: Annotated[bool, typer.Option("--offload", help="Fused: keep what is saved in host memory.")] = False,
    lora: Annotated[int | None, typer.Option(help="Rank of LoRA adapters.", min=1)] = None,
    lora_targets: Annotated[str, typer.Option(help="Layers with adapters, separated by commas.")] = "all-linear",
    lora_dropout: Annotated[float, typer.Option(help="Dropout before the adapters.", min=0, max=0.999)] = 0.0,
    adapters: Annotated[
        str | None, typer.Option(help="Adapters that PEFT has saved: a folder, its adapter_config.json, a hub name.")
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(QUANTIZE)}: the frozen linear layers under adapters in 4 bits, or 8."),
    ] = None,
    attention: Annotated[str | None, typer.Option(help="sdpa, eager, flash_attention_2, …")] = None,
    gpus: Annotated[int, typer.Option(help="GPUs that weights, gradients and states are sharded over.", min=1)] = 1,
    gpu: Annotated[str | None, typer.Option(help="GPU that the step must fit: 'H100 80GB', or GiB.")] = None,
    why: Annotated[
        str | None,
        typer.Option(help="Name of a module, as model.layers.0.mlp: only say why it was recognised, or was not."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show which layers would be replaced and why, and a training step's memory. Needs no weights and no GPU."""
    needs("tigon inspect", "train", "torch", "transformers")
    for name, value, known in (
        ("precision", precision, PRECISIONS), ("optimizer", optimizer, OPTIMIZERS), ("recompute", recompute, RECOMPUTE),
    ):  # fmt: skip
        if value not in known:
            raise Problem(f"--{name} must be one of {', '.join(known)}, got {value}")
    if quantize is not None and quantize not in QUANTIZE:
        raise Problem(f"--quantize must be one of {', '.join(QUANTIZE)}, got {quantize}")
    if lora_dropout and not lora:
        raise Problem("--lora-dropout goes with --lora, the rank of adapters")
    if quantize and gpus > 1:
        raise Problem(f"--quantize {quantize} goes with --gpus 1: each GPU has the whole quantised model, got {gpus}")
    from tigon.cli.adapters import find_adapted
    from tigon.cli.memory import Setup, Sides, find_capacity, verdict
    from tigon.cli.model import quantized_to, quiet_transformers
    from tigon.cli.screen import screen, show

    if lora and adapters:
        raise Problem(BOTH)
    source, found_adapters = find_adapted(model, adapters, any_head=True)
    if lora and found_adapters:
        raise Problem(BOTH)
    if quantize and not (lora or found_adapters):
        raise Problem("--quantize goes with --lora or --adapters: frozen layers under adapters are quantised")
    quiet_transformers()
    capacity = find_capacity(gpu)
    limit = getattr(source.config.get_text_config(), "max_position_embeddings", None) or 2048
    if seq_len is not None and seq_len > limit:
        raise Problem(f"--seq-len {seq_len} is beyond the {limit} positions of {model}")
    setup = Setup(
        batch_size, seq_len or min(2048, limit), precision, optimizer, gradient_checkpointing, recompute, offload, lora,
        lora_targets, quantize or quantized_to(source.config), attention, gpus, lora_dropout,
        found_adapters,
    )  # fmt: skip
    from tigon.fusion.memory.estimate import CannotEstimate

    console = screen(quiet=json)
    if why is not None:
        built = Sides(source, setup)
        built.fuse()
        try:
            explanation = built.fusion.explain(why)
        except ValueError as error:
            raise Problem(str(error).replace("explain: name", "--why", 1)) from None
        if json:
            print(encoder.dumps(explanation.to_dict(), indent=2))
        else:
            console.print(str(explanation), highlight=False, markup=False, soft_wrap=True)
        return
    sides: dict[str, StepMemory] = {}
    obstacles: dict[str, str] = {}
    with console.status("running a step of the model's shapes"):
        built = Sides(source, setup)
        for side in ("plain", "fused"):
            if side == "fused":
                built.fuse()
            try:
                sides[side] = built.memory()
            except CannotEstimate as error:
                obstacles[side] = one_line(error, 160)
        report = built.fusion.report()
    fits = {side: verdict(m.peak.total, capacity[1]) for side, m in sides.items()} if capacity else {}
    if json:
        found: dict[str, Any] = {
            "model": source.name,
            "class": type(_inner(built.model)).__name__,
            "parameters": built.whole,
            "trained": built.trained,
            "report": report.to_dict(),
            "no_step": obstacles.get("fused"),
            "step": setup.words(),
            "memory": {side: m.to_dict() for side, m in sides.items()},
            "no_estimate": obstacles,
            "gpu": None if capacity is None else {"name": capacity[0], "bytes": int(capacity[1]), "verdict": fits},
        }
        print(encoder.dumps(found, indent=2))
        return
    console.print(
        f"{source.name}: {type(_inner(built.model)).__name__}, {built.whole / 1e6:,.1f}M parameters, "
        + (f"{built.trained / 1e6:,.2f}M trained, " if lora or found_adapters else "")
        + f"{_layers(source.config)} layers; a step of {setup.words()}",
        highlight=False,
        soft_wrap=True,
    )
    show(console, report.to_rich())
    if sides:
        show(console, _table(sides))
        where = ", ".join(f"{side} {MOMENTS[m.peak.during]}" for side, m in sides.items())
        text = f"Peak: {where}. Activations kept: at the end of the forward pass. Not counted: the CUDA context."
        console.print(text, style="dim", highlight=False, soft_wrap=True)
    for side, reason in obstacles.items():
        console.print(
            f"No step of the {side} model without data: {reason}", style="dim", highlight=False, soft_wrap=True
        )
    if capacity and fits:
        words = "; ".join(f"{side} {told}" for side, told in fits.items())
        console.print(f"On {capacity[0]}, {capacity[1] / 2**30:.1f} GiB: {words}", highlight=False, soft_wrap=True)
    elif sides:
        console.print("Whether that fits: --gpu 'H100 80GB', or a number of GiB", style="dim", highlight=False)


def _inner(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _layers(config: Any) -> int:
    text = config.get_text_config()
    for names in (("num_layers", "num_decoder_layers"), ("encoder_layers", "decoder_layers")):
        both: list[Any] = [getattr(text, name, None) for name in names]
        if config.is_encoder_decoder and None not in both:
            return sum(int(number) for number in both)
    return int(text.num_hidden_layers)


def _table(sides: dict[str, StepMemory]) -> Any:
    from rich.table import Table
    from rich.text import Text

    from tigon.cli.memory import gib
    from tigon.fusion.memory.estimate import PARTS

    table = Table(title="Memory of a GPU at the peak of the step", title_justify="left")
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
