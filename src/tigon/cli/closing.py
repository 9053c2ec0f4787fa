"""The end of a run: saving the model, plotting the losses and printing the last lines.

A run that was killed after its last checkpoint is closed by the same code.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tigon.cli.checkpoint import STAGING, publish, seal, write_json
from tigon.cli.folder import MERGED, METRICS, PICTURE, PRETRAINED, move_in, record
from tigon.cli.metrics import Metrics
from tigon.cli.metrics_file import plot_loss, read_metrics
from tigon.cli.model import is_quantized
from tigon.files import read_json


def save(model: Any, tokenizer: Any, output: Path, weights: dict[str, Any] | None) -> None:
    """Write the trained model to a temporary folder, and then move its files into the run's folder one by one."""
    staged = _staged(output)
    model.config.use_cache = True
    model.save_pretrained(staged, state_dict=weights)
    tokenizer.save_pretrained(staged)
    move_in(output, staged)


def save_merged(model: Any, tokenizer: Any, output: Path) -> None:
    """Write the model with its adapters merged into its weights, as a separate model in a folder of the run.

    `save` has written the adapters to `output` before.
    """
    if is_quantized(model):
        # Merged into 4-bit weights, the adapters would be rounded to 4 bits as well. So the weights become whole again,
        # with the values that the adapters were trained on.
        from peft import PeftModel

        model = PeftModel.from_pretrained(model.unload().dequantize(model.dtype), str(output))
    merged = model.merge_and_unload()
    merged.config.use_cache = True
    staged = output / STAGING / MERGED
    merged.save_pretrained(staged)
    tokenizer.save_pretrained(staged)
    seal(staged)
    publish(staged, output / MERGED)


def save_from(checkpoint: Path, output: Path) -> None:
    """Write the files of `save` from the last checkpoint of the run."""
    staged = _staged(output)
    staged.mkdir(parents=True)
    for file in {file for pattern in PRETRAINED for file in checkpoint.glob(pattern)}:
        shutil.copyfile(file, staged / file.name)
    config = staged / "config.json"
    if config.exists():  # adapters have no config.json
        fields = read_json(config)
        write_json(config, {**fields, "use_cache": True})
    move_in(output, staged)


def conclude(
    console: Console, output: Path, step: int, seconds: float, *, label: str, metrics: Metrics | None = None
) -> None:
    """Plot the losses, record that the run is closed at this step, and print its result.

    metrics: the metrics of a run that has just trained; None for a run that is only closed.
    """
    plot_loss(output / METRICS, output / PICTURE, label)
    record(output, closed=step)
    train, evaluation = read_metrics(output / METRICS)
    parts = [f"final loss {train[max(train)]:.4f} at step {max(train)}" if train else f"no losses in {METRICS}"]
    if metrics is not None:
        parts += [f"{name} {metrics.last[name]:.4f}" for name in metrics.further if name in metrics.last]
    if evaluation:
        parts.append(f"evaluation loss {evaluation[max(evaluation)]:.4f}")
    if metrics is not None:
        if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
            parts.append(f"peak GPU memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
        if metrics.speeds:
            parts.append(f"{sorted(metrics.speeds)[len(metrics.speeds) // 2]:,.0f} {metrics.unit}/s")
    console.print(f"{', '.join(parts)}, {seconds:,.0f} s in all", soft_wrap=True)
    console.print(f"the model is in {output}, its losses in {output / METRICS} and {output / PICTURE}", soft_wrap=True)


def _staged(output: Path) -> Path:
    staged = output / STAGING / "model"
    shutil.rmtree(staged, ignore_errors=True)
    return staged
