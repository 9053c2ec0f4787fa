"""Runs of Tigon's own training loops: their folder, record, atomic checkpoints, and Ctrl-C.

Shared by `tigon retrieve train` and `tigon rank fit`; runs with the Hugging Face `Trainer` use `tigon.cli.folder`.
"""

from __future__ import annotations

import platform
import shutil
import signal
from pathlib import Path
from typing import Any

from tigon.cli.checkpoint import (
    RECORD,
    STAGING,
    checkpoints,
    newest_whole,
    prune,
    publish,
    seal,
    step_of,
    write_json,
)
from tigon.cli.folder import LOCK
from tigon.cli.problem import Problem, check_writable
from tigon.cli.signals import received
from tigon.files import read_json, read_tensors

# File names in a checkpoint.
TENSORS, FACTS = "state.safetensors", "state.json"


def read_record(command: str, output: Path) -> dict[str, Any]:
    """Read this command's run record in a folder.

    Raises: Problem if there is none, or if the record is from another command.
    """
    if not (output / RECORD).exists():
        raise Problem(f"{command}: there is no run in {output} to resume: it has no {RECORD}")
    found: dict[str, Any] = read_json(output / RECORD)
    if found.get("kind") != command or not isinstance(found.get("options"), dict):
        raise Problem(f"{command}: {output / RECORD} is not the record of a run of tigon {command}")
    return found


def check_room(command: str, output: Path, overwrite: bool) -> None:
    """Raise a Problem unless a folder is free for a run, without writing anything."""
    check_writable(output, "--output")
    if output.exists() and any(path.name != LOCK for path in output.iterdir()):
        if not (output / RECORD).exists():
            raise Problem(f"{command}: --output {output} holds files that no run wrote; give another --output")
        read_record(command, output)
        if not overwrite:
            raise Problem(
                f"{command}: --output {output} holds a run: --resume goes on with it, --overwrite replaces it"
            )


def make_room(command: str, output: Path, written: tuple[str, ...], overwrite: bool) -> None:
    """Prepare a folder for a run. Files that no run wrote are never deleted or overwritten.

    written: names of files that a run writes beside checkpoints and record.
    """
    check_room(command, output, overwrite)
    for path in [*output.glob("checkpoint-*"), *(output / name for name in (*written, STAGING, RECORD))]:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    output.mkdir(parents=True, exist_ok=True)


def save(
    output: Path, modules: dict[str, dict[str, Any]], optimizer: dict[str, Any], facts: dict[str, Any], *, keep: int = 1
) -> None:
    """Write a checkpoint, then delete older checkpoints.

    modules: state dicts by name; a name has no dot. optimizer: a state dict, whose numbers are tensors. facts: JSON.
    """
    from safetensors.torch import save_file

    number = 1 + max((step_of(folder) for folder in checkpoints(output)), default=0)
    staged = output / STAGING / f"checkpoint-{number}"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    tensors = {f"{module}.{name}": value for module, state in modules.items() for name, value in state.items()}
    for p, values in optimizer["state"].items():
        tensors |= {f"optimizer.{p}.{name}": value for name, value in values.items()}
    save_file({name: value.detach().contiguous().cpu() for name, value in tensors.items()}, staged / TENSORS)
    write_json(staged / FACTS, {**facts, "groups": optimizer["param_groups"]})
    seal(staged, largest=None)
    publish(staged, output / staged.name)
    prune(output, keep)


def load(output: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any], dict[str, Any]] | None:
    """Load the newest complete checkpoint as passed to `save`: (modules, optimizer, facts); None if there is none.

    Raises: Problem if there are checkpoints, but none is complete.
    """
    if not checkpoints(output):
        return None
    folder, _ = newest_whole(output)
    facts = read_json(folder / FACTS, required=["groups"])
    modules: dict[str, dict[str, Any]] = {}
    values: dict[int, dict[str, Any]] = {}
    for name, tensor in read_tensors(folder / TENSORS).items():
        module, _, rest = name.partition(".")
        if module == "optimizer":
            p, _, of = rest.partition(".")
            values.setdefault(int(p), {})[of] = tensor
        else:
            modules.setdefault(module, {})[rest] = tensor
    return modules, {"state": values, "param_groups": facts.pop("groups")}, facts


class Interrupts:
    """`with Interrupts() as interrupts`: the first Ctrl-C or SIGTERM is stored in `.signal`, for the loop to check.

    The second raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        self.signal = self.signal or received()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: Any) -> None:
        if self.signal:
            raise KeyboardInterrupt
        self.signal = number


def circumstances(device: Any) -> dict[str, Any]:
    """The hardware and versions that produced the results."""
    import torch

    from tigon import __version__

    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return {
        "hardware": hardware or platform.machine(),
        "versions": {"tigon": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
