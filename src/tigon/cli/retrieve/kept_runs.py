"""Checkpoints of `tigon retrieve train`: whole or absent, tensors as safetensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tigon.cli.checkpoint import STAGING, checkpoints, newest_whole, prune, publish, seal, step_of, write_json


def save(output: Path, stage: str, state: dict[str, Any]) -> None:
    """Write a state of `fit` in place of the checkpoints before it, which go once it is whole."""
    from safetensors.torch import save_file

    number = 1 + max((step_of(folder) for folder in checkpoints(output)), default=0)
    staged = output / STAGING / f"checkpoint-{number}"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    tensors = {f"towers.{name}": value for name, value in state["towers"].items()}
    for p, values in state["optimizer"]["state"].items():
        tensors |= {f"optimizer.{p}.{name}": value for name, value in values.items()}
    save_file(
        {name: value.detach().contiguous().cpu() for name, value in tensors.items()}, staged / "state.safetensors"
    )
    facts = {"stage": stage, **{name: state[name] for name in ("history", "epoch", "seconds")}}
    write_json(staged / "state.json", {**facts, "groups": state["optimizer"]["param_groups"]})
    seal(staged)
    publish(staged, output / staged.name)
    prune(output, 1)


def load(output: Path, stage: str) -> dict[str, Any] | None:
    """The state of the newest whole checkpoint; None if there is none, or one of another stage.

    Raises: Problem if there are checkpoints, and none is whole.
    """
    from safetensors.torch import load_file

    if not checkpoints(output):
        return None
    folder, _ = newest_whole(output)
    facts = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    if facts["stage"] != stage:
        return None
    towers: dict[str, Any] = {}
    values: dict[int, dict[str, Any]] = {}
    for name, tensor in load_file(folder / "state.safetensors").items():
        kind, _, rest = name.partition(".")
        if kind == "towers":
            towers[rest] = tensor
        else:
            p, _, of = rest.partition(".")
            values.setdefault(int(p), {})[of] = tensor
    optimizer = {"state": values, "param_groups": facts["groups"]}
    return {**{name: facts[name] for name in ("history", "epoch", "seconds")}, "towers": towers, "optimizer": optimizer}
