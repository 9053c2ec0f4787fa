"""Read JSON, YAML, safetensors and NumPy files that may be missing, damaged or hostile.

Every reader raises `DamagedFileError`, a ValueError whose message is a sentence that names the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

LARGEST_JSON = 1 << 28
"""Bytes that `read_json` and `read_yaml` take, unless told otherwise."""
_PIECE = 1 << 24


class DamagedFileError(ValueError):
    """A file is missing, unreadable, or does not hold the content that the reader expects."""


def read_json(
    path: str | os.PathLike[str],
    *,
    kind: type | tuple[type, ...] = dict,
    required: Iterable[str] = (),
    largest: int = LARGEST_JSON,
) -> Any:
    """Read a JSON file.

    Args:
        path: the file, in UTF-8.
        kind: the type that the outermost value must have.
        required: keys that an outermost object must have.
        largest: the most bytes to read.
    Raises: DamagedFileError if the file is missing or too large, is not JSON, nests too deeply, holds text that UTF-8
        cannot encode, has another type, or lacks a key.
    """
    return parse_json(_read_bytes(path, largest), str(path), kind=kind, required=required)


def parse_json(
    text: str | bytes, name: str, *, kind: type | tuple[type, ...] = dict, required: Iterable[str] = ()
) -> Any:
    """Parse JSON text, which the messages call `name`. Arguments and errors as in `read_json`."""
    value = _parse(json.loads, text, name, "JSON")
    return _check(value, name, kind, required)


def read_yaml(
    path: str | os.PathLike[str],
    *,
    kind: type | tuple[type, ...] = dict,
    required: Iterable[str] = (),
    largest: int = 1 << 22,
) -> Any:
    """Read a YAML file by PyYAML's safe loader. Arguments and errors as in `read_json`."""
    try:
        import yaml
    except ImportError as error:
        raise DamagedFileError(f"{path} is YAML, which needs PyYAML: pip install pyyaml.") from error
    try:
        value = _parse(yaml.safe_load, _read_bytes(path, largest), str(path), "YAML")
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        raise DamagedFileError(
            f"{path} is not valid YAML{place}: {getattr(error, 'problem', None) or 'it cannot be parsed'}."
        ) from error
    return _check(value, str(path), kind, required)


def read_tensors(
    path: str | os.PathLike[str], *, required: Iterable[str] = (), sha256: str | None = None
) -> dict[str, Tensor]:
    """Read all tensors from a safetensors file, on the CPU.

    Args:
        path: the file.
        required: tensor names that must be in the file; others are allowed.
        sha256: the required checksum, in hexadecimal; None skips the check.
    Raises: DamagedFileError if the file is missing, is not a safetensors file, is shorter or longer than its header
        says, has another checksum, or lacks a tensor.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if sha256 is not None:
        check_sha256(path, sha256)
    try:
        tensors: dict[str, Tensor] = load_file(str(path))
    except FileNotFoundError as error:
        raise DamagedFileError(f"{path} is missing.") from error
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read ({error.strerror or 'input/output error'}).") from error
    # safetensors raises SafetensorError for a bad header, and KeyError, ValueError or RuntimeError for dtypes and
    # shapes that torch does not have.
    except (SafetensorError, KeyError, ValueError, RuntimeError, OverflowError) as error:
        raise DamagedFileError(f"{path} is damaged: not a complete safetensors file.") from error
    missing = sorted(set(required) - tensors.keys())
    if missing:
        raise DamagedFileError(f"{path} is damaged: the file lacks {_list(missing)}.")
    return tensors


def read_array(path: str | os.PathLike[str], *, mapped: bool = False) -> npt.NDArray[Any]:
    """Read the array in a .npy file.

    Args:
        path: the file.
        mapped: memory-map the file, so that numbers are read on access.
    Raises: DamagedFileError if the file is missing, is not a .npy file with numbers, bools or texts, or needs more
        memory than there is.
    """
    import numpy as np

    try:
        with open(path, "rb") as file:
            _check_header(file, str(path), mapped)
        found: npt.NDArray[Any] = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except OSError as error:
        raise _unreadable(path, error) from error
    except (DamagedFileError, MemoryError):
        raise
    except Exception as error:  # NumPy lets its parsers' errors through: EOFError, SyntaxError, tokenize's own, …
        raise DamagedFileError(f"{path} is not a complete .npy file.") from error
    return found


def read_arrays(path: str | os.PathLike[str], *, required: Iterable[str] = ()) -> dict[str, npt.NDArray[Any]]:
    """Read the arrays in a .npz file, by name.

    Args:
        path: the file.
        required: array names that must be in the file; others are allowed.
    Raises: DamagedFileError if the file is missing, is not a .npz file with numbers, bools or texts, lacks an array, or
        needs more memory than there is.
    """
    import numpy as np

    try:
        with zipfile.ZipFile(path) as archive:
            sizes = []
            for member in archive.infolist():
                with archive.open(member) as file:
                    sizes.append(_check_header(file, f"{path}, {member.filename}", mapped=True))
        check_memory(path, sum(sizes))
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except OSError as error:
        raise _unreadable(path, error) from error
    except (DamagedFileError, MemoryError):
        raise
    except Exception as error:  # as in `read_array`, plus errors from zipfile and zlib
        raise DamagedFileError(f"{path} is not a complete .npz file.") from error
    missing = sorted(set(required) - arrays.keys())
    if missing:
        raise DamagedFileError(f"{path} lacks {_list(missing)}.")
    return arrays


def check_memory(path: str | os.PathLike[str], needed: int) -> None:
    """Raise DamagedFileError if a file's content needs more memory, in bytes, than there is."""
    available = available_memory()
    if available is not None and needed > available:
        raise DamagedFileError(
            f"{path} needs {needed / 2**30:,.1f} GiB of memory, but {available / 2**30:,.1f} GiB are free."
        )


def available_memory() -> int | None:
    """Bytes that this process can still allocate; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    group = Path("/sys/fs/cgroup")
    try:  # a container may get less memory than the machine has
        most = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        cache = next(
            int(line.split()[1])
            for line in (group / "memory.stat").read_text().splitlines()
            if line.startswith("inactive_file ")
        )
    except (OSError, StopIteration, ValueError, IndexError):
        return free
    return max(0, min(free, most - used + cache))


def _check_header(file: Any, name: str, mapped: bool) -> int:
    """The byte size of the array in an open .npy file; must be free memory, unless mapped."""
    from numpy.lib import format as npy

    version = npy.read_magic(file)
    read = {(1, 0): npy.read_array_header_1_0}.get(version, npy.read_array_header_2_0)
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise DamagedFileError(f"{name} must hold numbers, bools or texts, got Python objects.")
    size = math.prod(shape) * dtype.itemsize
    if not mapped:
        check_memory(name, size)
    return size


def load_state(
    module: Any,
    tensors: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    *,
    ignore: Callable[[str], bool] = lambda _: False,
) -> None:
    """Load tensors that were read from `path` into a module, all or none.

    Args:
        module: a torch.nn.Module.
        tensors: a state dict.
        path: the tensors' file, for the messages.
        ignore: whether a name may be missing or unknown.
    Raises: DamagedFileError if a name is missing or unknown, or a shape differs; the module is unchanged then.
    """
    check_state(module, tensors, path, ignore=ignore)
    module.load_state_dict(dict(tensors), strict=False)


def check_state(
    module: Any,
    tensors: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    *,
    ignore: Callable[[str], bool] = lambda _: False,
) -> None:
    """Check that tensors fit a module, which may be on the device "meta". Arguments and errors as in `load_state`."""
    state = module.state_dict()
    missing = sorted(name for name in state.keys() - tensors.keys() if not ignore(name))
    unknown = sorted(name for name in tensors.keys() - state.keys() if not ignore(name))
    if missing or unknown:
        parts = [f"lacks {_list(missing)}"] * bool(missing) + [
            f"has {_list(unknown)}, which the model does not have"
        ] * bool(unknown)
        raise DamagedFileError(f"{path} does not fit the model: the file {' and '.join(parts)}.")
    for name in sorted(state.keys() & tensors.keys()):
        expected, shape = tuple(state[name].shape), tuple(tensors[name].shape)
        if shape != expected:
            raise DamagedFileError(f"{path} does not fit the model: {name} must have shape {expected}, got {shape}.")


def check_sha256(path: str | os.PathLike[str], expected: str) -> None:
    """Raise DamagedFileError unless a file has this SHA-256, in hexadecimal."""
    if compute_sha256(path) != expected:
        raise DamagedFileError(f"{path} is damaged: the checksum differs from the recorded checksum.")


def compute_sha256(path: str | os.PathLike[str]) -> str:
    """Compute a file's SHA-256, in hexadecimal.

    Raises: DamagedFileError if the file is missing or cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
    except OSError as error:
        raise _unreadable(path, error) from error
    return digest.hexdigest()


def is_encodable(text: str) -> bool:
    """Whether UTF-8 can encode a text; not so for a lone surrogate, which Python's JSON reader lets pass."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_bytes(path: str | os.PathLike[str], largest: int) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read(largest + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    if len(content) > largest:
        raise DamagedFileError(f"{path} is larger than {largest:,} bytes, the limit for such a file.")
    return content


def _unreadable(path: str | os.PathLike[str], error: OSError) -> DamagedFileError:
    reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
    return DamagedFileError(f"{path} {reason}.")


def _parse(parse: Callable[[str], Any], text: str | bytes, name: str, language: str) -> Any:
    try:
        decoded = text.decode() if isinstance(text, bytes) else text
        value = parse(decoded)
        # json accepts the escape \ud800, which no file or response can be written with.
        if "\\u" in decoded or "\\U" in decoded:
            json.dumps(value, ensure_ascii=False, default=str, skipkeys=True).encode()
    except UnicodeError as error:
        raise DamagedFileError(f"{name} is not UTF-8 text.") from error
    except RecursionError as error:
        raise DamagedFileError(f"{name} nests too deeply.") from error
    except json.JSONDecodeError as error:
        raise DamagedFileError(
            f"{name} is not {language}: {error.msg}, line {error.lineno}, column {error.colno}."
        ) from error
    except ValueError as error:  # an integer with more digits than Python reads
        raise DamagedFileError(f"{name} is not {language}: {str(error).split(';')[0]}.") from error
    return value


def _check(value: Any, name: str, kind: type | tuple[type, ...], required: Iterable[str]) -> Any:
    kinds: tuple[type, ...] = kind if isinstance(kind, tuple) else (kind,)
    # A bool is an int to Python, but not to JSON.
    is_expected = isinstance(value, kinds) and (type(value) is not bool or bool in kinds)
    if not is_expected:
        expected = " or ".join(_KINDS.get(each, each.__name__) for each in kinds)
        raise DamagedFileError(f"{name} must hold {expected}, got {_KINDS.get(type(value), type(value).__name__)}.")
    missing = [key for key in required if key not in value]
    if missing:
        raise DamagedFileError(f"{name} lacks {_list(missing)}.")
    return value


_KINDS: dict[type, str] = {
    dict: "an object", list: "a list", str: "a text", int: "an integer", float: "a number", bool: "true or false",
    type(None): "nothing",
}  # fmt: skip


def _list(names: list[str], most: int = 5) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
