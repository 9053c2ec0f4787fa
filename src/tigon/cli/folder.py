"""The folder of a run: where it is, which of its files are the run's own, and who may write there."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tigon.cli.checkpoint import BROKEN, MANIFEST, NAME, RECORD, STAGING, manifest, write_json
from tigon.cli.problem import Problem
from tigon.presets import PRESETS

LOCK = ".lock"
METRICS, PICTURE, BOARD, MERGED = "metrics.jsonl", "loss.png", "tensorboard", "merged"
# What every run writes. What else a run has written, its model and tokenizer, is listed in its record.
ALWAYS = (RECORD, METRICS, PICTURE, LOCK)
# The files by which from_pretrained knows a model, adapters and a tokenizer.
PRETRAINED = (
    "*.safetensors", "*.safetensors.index.json", "*config.json", "tokenizer*", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "vocab.*", "merges.txt", "*.model",
)  # fmt: skip
# What a run could write, and so must not find in a folder where no run has written it.
POSSIBLE = (*ALWAYS, BOARD, MERGED, STAGING, "checkpoint-[0-9]*", *PRETRAINED)
_WILD = "*?["


# ------------------------------------------------------------------------------------------------------------- paths


def located(option: str, value: str) -> str:
    """What an option names as an absolute path, where it names one; a preset or a name of the hub stays as it is.

    Every command asks here, and a run's record has the answer: the run is the same one from any working directory.
    Raises: Problem for an output without a name.
    """
    if "\0" in value:
        raise Problem(f"--{option} must be a path or a name, got {value!r}")
    path = os.path.abspath(os.path.expanduser(value))
    if option == "output":
        if not value.strip():
            raise Problem("--output must be the name of a folder, got an empty one")
        return path
    if not value or (value in PRESETS and option == "model"):
        return value
    if option == "reward":
        file, colon, function = value.rpartition(":")
        is_file = file.endswith(".py") and not value.startswith("regex:")
        return os.path.abspath(os.path.expanduser(file)) + colon + function if is_file else value
    is_pattern = option == "data" and any(c in value for c in _WILD)
    return path if is_pattern or os.path.exists(path) else value


def from_here(value: Any) -> Any:
    """An absolute path below the working directory as a relative one, for comparing processes that each have their own;
    every other value as it is."""
    here = os.getcwd()
    return os.path.relpath(value, here) if isinstance(value, str) and value.startswith(here + os.sep) else value


def read_paths(options: Any) -> Iterator[tuple[str, Path]]:
    """The files and folders that a run reads, each with its option."""
    for name in ("model", "data", "tokenizer", "reward"):
        value = getattr(options, name)
        if name == "reward":
            value = (value or "").rpartition(":")[0]
        if not value or not os.path.isabs(value):
            continue
        if os.path.exists(value):
            yield name, Path(value)
        elif name == "data":
            # A pattern with ** finds what is written below its folder later; others read what they match now.
            parts = Path(value).parts
            if "**" in parts:
                yield name, Path(*parts[: next(i for i, part in enumerate(parts) if any(c in part for c in _WILD))])
            else:
                yield from ((name, Path(file)) for file in glob.glob(value))


def check_apart(output: Path, options: Any) -> None:
    """Raise a Problem where a run would write among the files that it reads, or read what it writes."""
    for name, place in read_paths(options):
        if _within(place, output):
            relation = "is" if _within(output, place) else "contains"
        elif _within(output, place):
            relation = "is inside of"
        else:
            continue
        raise Problem(
            f"--output {output} {relation} what --{name} reads, {place}; a run writes and deletes files in its "
            "--output, so give it a folder of its own"
        )


def _within(inner: Path, outer: Path) -> bool:
    """Whether a path is another or lies in it, by whatever names the two go."""
    inner = inner.resolve()
    for place in (inner, *inner.parents):
        with contextlib.suppress(OSError):  # one of them is not there
            if os.path.samefile(place, outer):
                return True
    return False


# ------------------------------------------------------------------------------------------------------------ record


def read_record(output: Path) -> dict[str, Any]:
    """The record of the run in a folder. Raises Problem where there is none that can be read."""
    file = output / RECORD
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Problem(f"there is no run in {output} to resume: it has no {RECORD}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise Problem(f"{file} cannot be read, so the run cannot be resumed ({error})") from error
    if not isinstance(value, dict) or not isinstance(value.get("options"), dict):
        raise Problem(f"{file} cannot be read, so the run cannot be resumed (it is not a record of tigon train)")
    return value


def record(output: Path, **facts: Any) -> None:
    """Add facts to the record of a run, or begin it."""
    known = read_record(output) if (output / RECORD).exists() else {}
    write_json(output / RECORD, {**known, **facts})


def is_closed(output: Path, step: int) -> bool:
    """Whether the model and the plot in a run's folder are those of this step, its last."""
    return read_record(output).get("closed") == step


def recorded_files(output: Path) -> set[str]:
    """The names of the files in a folder that the record of its run lists; empty where there is no record."""
    try:
        found = read_record(output).get("files", [])
    except Problem:
        return set()
    names = {name for name in found if isinstance(name, str)} if isinstance(found, list) else set()
    # A record that was tampered with must not lead out of the folder.
    return {name for name in names if name not in ("", ".", "..") and Path(name).name == name} | set(ALWAYS)


def move_in(output: Path, staged: Path) -> None:
    """Move finished files into a run's folder. The record lists them before the first is there."""
    names = recorded_files(output)
    card = staged / "README.md"
    if card.name not in names and (output / card.name).exists():  # PEFT's must not take the place of the user's own
        card.unlink(missing_ok=True)
    files = list(staged.iterdir())
    record(output, files=sorted((names | {file.name for file in files}) - set(ALWAYS)))
    for file in files:
        file.replace(output / file.name)
    shutil.rmtree(staged)
    with contextlib.suppress(OSError):  # not empty
        staged.parent.rmdir()


# --------------------------------------------------------------------------------------------------------- overwrite


def check_room(output: Path, overwrite: bool) -> None:
    """Raise a Problem where a new run would write over a file that is there, and may not.

    Files of a recorded run may be deleted with --overwrite; files that no run wrote never are.
    """
    own, foreign = _divide(output)
    if foreign:
        raise Problem(
            f"--output {output} has {foreign[0].relative_to(output)}, which no run of tigon train wrote there, and a "
            "new run could write over it; give another --output"
        )
    if own and not overwrite:
        raise Problem(
            f"--output {output} holds another run ({own[0].name}): --resume goes on with it, "
            "--overwrite replaces it, and another --output leaves it alone"
        )


def clear(output: Path) -> None:
    """Delete a run from its folder, the record last. Raises Problem, before it deletes, for files that no run wrote."""
    check_room(output, overwrite=True)
    for path in sorted(_divide(output)[0], key=lambda path: path.name == RECORD):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _divide(output: Path) -> tuple[list[Path], list[Path]]:
    """Of what a run could write, what is in a folder: files and folders of a recorded run, and those of others."""
    recorded = recorded_files(output)
    own, foreign = [], []
    found = {path for pattern in POSSIBLE for path in output.glob(pattern)}
    for path in sorted(found | {output / name for name in recorded if (output / name).exists()}):
        if path.name == LOCK:  # held by this process, or left by one that was killed
            continue
        if path.is_file() and path.name in recorded:
            own.append(path)
        elif not recorded or path.is_symlink() or not path.is_dir() or not _writes(path):
            foreign.append(path)
        else:
            others = _others(path)
            foreign += others
            own += [] if others else [path]
    return own, foreign


def _writes(folder: Path) -> bool:
    return folder.name in (BOARD, MERGED, STAGING) or NAME.fullmatch(folder.name.removesuffix(BROKEN)) is not None


def _others(folder: Path) -> list[Path]:
    """The files in a folder of a run that the run did not write there."""
    if folder.name == STAGING:
        return []
    files = sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    if folder.name == BOARD:
        return [file for file in files if not file.name.startswith("events.out.tfevents.")]
    known = manifest(folder)
    if known is None:
        return files[:1] or [folder]
    return [file for file in files if file.relative_to(folder).as_posix() not in {*known, MANIFEST}]


# -------------------------------------------------------------------------------------------------------------- lock


class Claim:
    """A run's folder, held for one process: `with Claim() as claim: claim.take(output)`.

    The system lets go of the lock when its process ends, however it ends: a killed run never blocks the next. Where
    the system or the file system has no such locks, nothing is held.
    """

    def __init__(self) -> None:
        self.file: Path | None = None
        self.handle = -1

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.unlink(missing_ok=True)  # while it is locked: whoever waits for it sees that it is gone
            os.close(self.handle)
            self.file = None

    def take(self, output: Path) -> None:
        """Hold a folder that is there; once held, it stays so. Raises Problem where another process holds it."""
        try:
            import fcntl
        except ImportError:  # Windows
            return
        while self.file is None:
            try:
                handle = os.open(output / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError:  # there is no folder yet, or nothing can be written there, which is said elsewhere
                return
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(handle, 200).decode(errors="replace").strip() or "another process"
                os.close(handle)
                raise Problem(
                    f"another run is at work in {output} ({holder}); wait for its end, or give another --output"
                ) from None
            except OSError:
                os.close(handle)
                return
            # A holder that has ended since may have deleted the file: then this lock guards nothing.
            if not _same(handle, output / LOCK):
                os.close(handle)
                continue
            self.file, self.handle = output / LOCK, handle
            with contextlib.suppress(OSError):  # a full disk
                os.ftruncate(handle, 0)
                os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """In a child process: the lock is its parent's, and must end with the parent."""
        if self.file is not None:
            os.close(self.handle)
            self.file = None


def _same(handle: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(file))
    except FileNotFoundError:
        return False
