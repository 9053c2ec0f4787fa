"""Which files commands may overwrite: none without --overwrite, and never their inputs."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tigon.cli.problem import Problem, check_writable

PICTURES = (".png", ".svg", ".pdf")


def is_within(inner: Path, outer: Path) -> bool:
    """Whether `inner` is `outer` or inside `outer`, also through links."""
    inner = inner.resolve()
    for place in (inner, *inner.parents):
        with contextlib.suppress(OSError):  # one of the paths does not exist
            if os.path.samefile(place, outer):
                return True
    return False


def check_output_file(
    option: str, file: Path, suffixes: tuple[str, ...], *, overwrite: bool, inputs: Iterable[str | Path] = ()
) -> None:
    """Raise a Problem unless a command may write a file. Writes nothing.

    Args:
        option: the command and its option, such as "rank score: --output".
        file: the file to write, which may be missing.
        suffixes: the allowed name endings.
        overwrite: whether an existing file may be replaced.
        inputs: files and folders that the command reads. They are never replaced, whatever `overwrite` says.
    """
    if file.is_dir():
        raise Problem(f"{option} must be a file, got the folder {file}")
    if file.suffix.lower() not in suffixes:
        raise Problem(f"{option} must end in {', '.join(suffixes)}, got {file}")
    check_writable(file.parent, option)
    if not file.exists():
        return
    for path in map(Path, inputs):
        if path.exists() and is_within(file, path):
            raise Problem(f"{option} {file} is an input file; choose another file")
    if not overwrite:
        raise Problem(f"{option} {file} already exists; --overwrite replaces it")


def check_output_folder(
    option: str, folder: Path, *, overwrite: bool, is_own: Callable[[Path], bool], inputs: Iterable[str | Path] = ()
) -> None:
    """Raise a Problem unless a command may write files into a folder. Writes nothing.

    Args:
        option: the command and its option.
        folder: the folder, which may be missing.
        overwrite: whether the command's earlier files may be replaced.
        is_own: whether the command has written a folder that is not empty.
        inputs: files and folders that the command reads; they must not be in the folder.
    """
    check_writable(folder, option)
    for path in map(Path, inputs):
        if path.exists() and is_within(path, folder):
            raise Problem(f"{option} {folder} contains the input {path}; choose another folder")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not is_own(folder):
        raise Problem(f"{option} {folder} contains unrelated files; choose another folder")
    if not overwrite:
        raise Problem(f"{option} {folder} already exists; --overwrite replaces its contents")


@contextlib.contextmanager
def replace_output(output: Path) -> Iterator[Path]:
    """`with replace_output(path) as partial`: write a file or folder, which takes the place of `path` at the end.

    After an error, `path` is unchanged.
    """
    partial = output.with_name(output.name + ".partial")
    delete(partial)
    try:
        yield partial
    except BaseException:
        delete(partial)
        raise
    if output.is_dir():
        delete(output)
    partial.replace(output)


def delete(path: Path) -> None:
    """Delete a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
