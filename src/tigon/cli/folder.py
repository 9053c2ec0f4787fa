"""The folder of a run: its path, the files in it that the run wrote, and which process may write there."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tigon.cli.checkpoint import BROKEN, CRC_LIMIT, MANIFEST, NAME, RECORD, STAGING, manifest, write_json
from tigon.cli.problem import Problem, one_line
from tigon.files import DamagedFileError, read_json
from tigon.manifest import write_manifest
from tigon.presets import PRESETS

LOCK = ".lock"
METRICS, PICTURE, BOARD, MERGED = "metrics.jsonl", "loss.png", "tensorboard", "merged"
# The files that every run writes. The run's record lists its other files: the model and the tokenizer.
ALWAYS = (RECORD, METRICS, PICTURE, LOCK)
# The files by which from_pretrained recognises a model, adapters and a tokenizer.
PRETRAINED = (
    "*.safetensors", "*.safetensors.index.json", "*config.json", "tokenizer*", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "vocab.*", "merges.txt", "*.model", "prompt.yaml", "ranker.json",
)  # fmt: skip
# The files that a run could write, and so must not find in a folder where no run wrote them.
POSSIBLE = (*ALWAYS, MANIFEST, BOARD, MERGED, STAGING, "checkpoint-[0-9]*", *PRETRAINED)
_WILD = "*?["


# ------------------------------------------------------------------------------------------------------------- paths


def located(option: str, value: str) -> str:
    """An option's path made absolute; the name of a preset or of a model on the hub stays as it is.

    Every command uses this function, and a run's record has its result, so that the working directory does not matter.
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
    """An absolute path below the working directory as a relative path; every other value unchanged.

    Processes of one run may have different working directories, so they compare relative paths.
    """
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
            # A pattern with ** also finds files written below its folder later; other patterns read the files of now.
            parts = Path(value).parts
            if "**" in parts:
                yield name, Path(*parts[: next(i for i, part in enumerate(parts) if any(c in part for c in _WILD))])
            else:
                yield from ((name, Path(file)) for file in glob.glob(value))


def check_apart(output: Path, options: Any) -> None:
    """Raise a Problem where a run would write among the files that it reads, or read what it writes."""
    for name, place in read_paths(options):
        if is_within(place, output):
            relation = "is" if is_within(output, place) else "contains"
        elif is_within(output, place):
            relation = "is inside of"
        else:
            continue
        raise Problem(
            f"--output {output} {relation} what --{name} reads, {place}; a run writes and deletes files in its "
            "--output, so give it a folder of its own"
        )


def is_within(inner: Path, outer: Path) -> bool:
    """Whether `inner` is `outer` or lies in it, also through links."""
    inner = inner.resolve()
    for place in (inner, *inner.parents):
        with contextlib.suppress(OSError):  # one of the two does not exist
            if os.path.samefile(place, outer):
                return True
    return False


# ------------------------------------------------------------------------------------------------------------ record


def read_record(output: Path) -> dict[str, Any]:
    """The record of the run in a folder. Raises Problem if there is no readable record."""
    file = output / RECORD
    if not file.exists():
        raise Problem(f"there is no run in {output} to resume: it has no {RECORD}")
    try:
        value: dict[str, Any] = read_json(file)
    except DamagedFileError as error:
        raise Problem(f"{file} cannot be read, so the run cannot be resumed ({one_line(error)})") from error
    if not isinstance(value.get("options"), dict):
        raise Problem(f"{file} cannot be read, so the run cannot be resumed (it is not a record of tigon train)")
    return value


def record(output: Path, **facts: Any) -> None:
    """Add facts to the record of a run, or begin the record."""
    known = read_record(output) if (output / RECORD).exists() else {}
    write_json(output / RECORD, {**known, **facts})


def is_closed(output: Path, step: int) -> bool:
    """Whether the model and the plot in a run's folder are from this step, the run's last."""
    return read_record(output).get("closed") == step


def recorded_files(output: Path) -> set[str]:
    """The names of the files in a folder that the run's record lists; empty without a record."""
    try:
        found = read_record(output).get("files", [])
    except Problem:
        return set()
    names = {name for name in found if isinstance(name, str)} if isinstance(found, list) else set()
    # A manipulated record must not lead out of the folder.
    return {name for name in names if name not in ("", ".", "..") and Path(name).name == name} | set(ALWAYS)


def move_in(output: Path, staged: Path) -> None:
    """Move finished files into a run's folder. The record lists the files before the first one is moved."""
    names = recorded_files(output)
    card = staged / "README.md"
    if card.name not in names and (output / card.name).exists():  # PEFT's README must not replace the user's
        card.unlink(missing_ok=True)
    files = list(staged.iterdir())
    record(output, files=sorted((names | {MANIFEST} | {file.name for file in files}) - set(ALWAYS)))
    pretrained = sorted({file.name for pattern in PRETRAINED for file in staged.glob(pattern)})
    for file in files:
        file.replace(output / file.name)
    write_manifest(output, pretrained, largest=CRC_LIMIT)
    shutil.rmtree(staged)
    with contextlib.suppress(OSError):  # not empty
        staged.parent.rmdir()


# --------------------------------------------------------------------------------------------------------- overwrite


def check_room(output: Path, overwrite: bool) -> None:
    """Raise a Problem if a new run would overwrite a file that it must keep.

    With --overwrite the files of a recorded run may be deleted. Files that no run wrote are never deleted.
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
    """The entries of a folder that a run could write, in two lists: a recorded run's, and all others."""
    recorded = recorded_files(output)
    own, foreign = [], []
    found = {path for pattern in POSSIBLE for path in output.glob(pattern)}
    for path in sorted(found | {output / name for name in recorded if (output / name).exists()}):
        if path.name == LOCK:  # this process holds the lock, or a killed process left the file
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
    """A lock of a run's folder for one process: `with Claim() as claim: claim.take(output)`.

    The system releases the lock when the process ends, however it ends, so a killed run never blocks the next. On a
    system or file system without such locks, nothing is locked.
    """

    def __init__(self) -> None:
        self.file: Path | None = None
        self.handle = -1

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.unlink(missing_ok=True)  # while locked: who waits then sees the file gone
            os.close(self.handle)
            self.file = None

    def take(self, output: Path) -> None:
        """Lock an existing folder; taking it again is no error. Raises Problem if another process has locked it."""
        try:
            import fcntl
        except ImportError:  # Windows
            return
        while self.file is None:
            try:
                handle = os.open(output / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError:  # there is no folder yet, or it is not writable, which other checks report
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
            # The previous holder may have deleted the file when it ended: then this lock guards nothing.
            if not _same(handle, output / LOCK):
                os.close(handle)
                continue
            self.file, self.handle = output / LOCK, handle
            with contextlib.suppress(OSError):  # a full disk
                os.ftruncate(handle, 0)
                os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Drop the lock in a child process: the lock belongs to the parent, and must end with the parent."""
        if self.file is not None:
            os.close(self.handle)
            self.file = None


def _same(handle: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(file))
    except FileNotFoundError:
        return False
