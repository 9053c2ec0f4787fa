"""A `Problem` explains an error to the user in one sentence; printed as `tigon: …`, without a traceback."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tigon.install import install


class Problem(Exception):
    """A command cannot continue, for a reason that the user can fix.

    Args:
        sentence: what is wrong, and what is expected.
        code: the exit status; 2 for a wrong input, 1 for a wrong result.
        is_own: every process of the run prints this problem, since other processes may have other problems.
    """

    def __init__(self, sentence: str, code: int = 2, *, is_own: bool = False) -> None:
        super().__init__(sentence)
        self.code, self.is_own = code, is_own


def needs(command: str, extra: str | None, *modules: str) -> None:
    """Raise a Problem with the install line when a command's optional packages are missing.

    Args:
        command: the command that needs the packages, as the user wrote it.
        extra: tigon's extra that installs the packages, or None if no extra does.
        modules: the packages' import names.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        wanted = install(extra) if extra else f"pip install {' '.join(missing)}"
        raise Problem(f"{command} needs {', '.join(missing)}: {wanted}")


def count_processes() -> int:
    """The number of processes that the launcher has started for this command."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_writable(folder: Path, option: str) -> None:
    """Raise a Problem if a folder, which need not exist yet, would not be writable. Leaves no trace."""
    try:
        if folder.exists() and not folder.is_dir():
            raise Problem(f"{option} {folder}: a file with that name exists")
        place = folder
        while not place.exists():
            place = place.parent
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise Problem(f"{option} {folder}: cannot be written to ({error.strerror})") from error


def find_device(name: str, command: str | None = None) -> Any:
    """The torch.device for --device: a GPU for auto, where there is a GPU.

    Raises: Problem for another word, or for cuda without a GPU.
    """
    import torch

    said = f"{command}: --device" if command else "--device"
    if name not in ("auto", "cpu", "cuda"):
        raise Problem(f"{said} must be auto, cpu or cuda, got {name}")
    if name == "cuda" and not torch.cuda.is_available():
        raise Problem(f"{said} cuda: PyTorch finds no CUDA or ROCm device; run `tigon doctor` for details")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def parse_integers(command: str, option: str, text: str, most: int | None = None) -> list[int]:
    """Parse numbers in an option such as "1,16,256", from 1 to most.

    Raises: Problem for anything else.
    """
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [0]
    if min(values) < 1 or (most is not None and max(values) > most):
        allowed = "positive integers" if most is None else f"integers from 1 to {most:,}"
        raise Problem(f"{command}: {option} must be {allowed}, separated by commas, got {text}")
    return values


def parse_seeds(command: str, text: str) -> list[int]:
    """Parse the distinct seeds in an option such as "0,1,2".

    Raises: Problem for anything else.
    """
    try:
        seeds = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        seeds = [-1]
    if min(seeds) < 0 or max(seeds) > 10**9:
        raise Problem(f"{command}: --seed must be integers from 0 to 10**9, separated by commas, got {text}")
    return seeds


def check_choice(command: str, options: Any, **allowed: Collection[str]) -> None:
    """Raise a Problem for an option that is not among its allowed values. None, for an open option, is allowed."""
    for name, known in allowed.items():
        value = getattr(options, name)
        if value is not None and value not in known:
            said = f"--{name.replace('_', '-')} must be one of {', '.join(known)}, got {value}"
            raise Problem(f"{command}: {said}" if command else said)


def check_positive(command: str, options: Any, *names: str) -> None:
    """Raise a Problem for an option that is not a positive, finite number. None, for an open option, is allowed."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise Problem(f"{command}: --{name.replace('_', '-')} must be positive, got {value}")


@contextmanager
def sentences(command: str, options: Mapping[str, str] | Collection[str] = ()) -> Iterator[None]:
    """Convert a library's errors about user input to the command's Problems.

    options: names of library arguments that are options. A mapping gives the options' names where they differ.
    """
    try:
        yield
    except FloatingPointError as error:
        said = _name_option(one_line(error), options).replace("a lower lr", "a lower --lr")
        raise Problem(f"{command}: {said}", code=1) from error
    except (ValueError, OSError, OverflowError) as error:
        if is_disk_full(error):
            raise
        said = one_line(error)
        if isinstance(error, OSError) and error.filename is not None:
            said = f"{error.filename}: {error.strerror}"
        raise Problem(f"{command}: {_name_option(said, options)}") from error


def _name_option(said: str, options: Mapping[str, str] | Collection[str]) -> str:
    """Begin a sentence with the option for an argument, instead of with the function and the argument."""
    said = re.sub(r"^(retrieve [a-z]+|(?!where)\w+(\.\w+)?): ", "", said)  # "where: …" names an option
    name = re.match(r"([a-z_]+)(?= must | is not defined|=)", said)
    if name is None or name[1] not in options:
        return replace_arguments(said, options)
    return _spell(name[1], options) + replace_arguments(said[name.end() :], options)


def replace_arguments(said: str, options: Mapping[str, str] | Collection[str] = ()) -> str:
    """Replace `name=…` and `name='value'` in a library message with options."""
    said = re.sub(r"\b([a-z_]+)=…", lambda found: _spell(found[1], options), said)
    known = "|".join(options)
    return (
        re.sub(rf"\b({known})='(\w+)'", lambda found: f"{_spell(found[1], options)} {found[2]}", said)
        if known
        else said
    )


def _spell(name: str, options: Mapping[str, str] | Collection[str]) -> str:
    option = options.get(name, name) if isinstance(options, Mapping) else name
    return f"--{option.replace('_', '-')}"


def one_line(error: BaseException, limit: int = 300) -> str:
    """The first non-empty line in an error's message, for use inside a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return (text if len(text) <= limit else text[:limit] + "…").rstrip(".")


# torch's and safetensors' messages for a file that cannot grow; these errors are not OSErrors.
_NO_ROOM = (
    "No space left", "File too large", "quota exceeded", "PytorchStreamWriter failed", "unexpected pos",
    "basic_ios::clear", "iostream error",
)  # fmt: skip


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether too little memory, on the host or a GPU, caused this error, directly or through the error's causes."""
    while error is not None:
        # NumPy's and Arrow's errors derive from MemoryError. torch has a class only for GPUs.
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            return True
        if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_disk_full(error: BaseException | None) -> bool:
    """Whether a disk that is full, or fails, caused this error, directly or through the error's causes."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            return True
        if any(words in str(error) for words in _NO_ROOM):
            return True
        error = error.__cause__ or error.__context__
    return False
