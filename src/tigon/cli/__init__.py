"""The command `tigon`. Each command has its own module, which imports heavy packages only when the command runs."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

from tigon.cli.problem import Problem, count_processes, is_disk_full, is_out_of_memory, needs, one_line
from tigon.cli.signals import catch_sigterm, get_signal
from tigon.files import DamagedFileError

__all__ = ["Problem", "main", "needs"]


def main(arguments: list[str] | None = None) -> NoReturn:
    """The console entry point. Exits with 0, 1 (a check failed), 2 (a problem with your input) or 130 (Ctrl-C)."""
    try:
        needs("the tigon command", "train", "typer", "rich")
        sys.exit(_run(arguments))
    except Problem as problem:
        _say(str(problem), is_own=problem.is_own)
        sys.exit(problem.code)


def _run(arguments: list[str] | None) -> int:
    from tigon.cli.app import app

    catch_sigterm()
    try:
        status = int(app(arguments, prog_name="tigon", standalone_mode=False) or 0)
        if status == 130:  # some versions of typer turn Ctrl-C into an exit status
            _say("interrupted")
        return 128 + get_signal() if get_signal() and not status else status
    except (Problem, SystemExit):
        raise
    except BrokenPipeError:
        # The pipe's reader (`tigon … | head`) has exited; the interpreter must not complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except BaseException as error:
        return _explain(error)


def _explain(error: Any) -> int:
    """Print one sentence for a usage error, an interruption, a wrong environment, a damaged file, too little memory, a
    file that cannot be opened or a full disk; raise anything else as a bug.
    """
    if hasattr(error, "format_message"):  # typer's usage errors; the exception classes move between versions
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "tigon"
        _say(f"{error.format_message().strip().rstrip('.')} (see `{command} --help`)")
        return 2
    # Clean-up that an interruption caught halfway may fail, as a pool's whose thread has not started.
    if KeyboardInterrupt in (type(error), type(error.__context__)) or type(error).__name__ == "Abort":
        _say("interrupted")
        return 130
    # The library's errors about environment variables already address the user.
    if isinstance(error, (ValueError, RuntimeError)) and str(error).startswith(("TIGON_", "tigon: the triton backend")):
        _say(str(error).removeprefix("tigon: "))
        return 2
    if isinstance(error, DamagedFileError):
        _say(str(error).rstrip("."))
        return 2
    if is_out_of_memory(error):
        _say("out of memory; use smaller files, a smaller model or smaller batches")
        return 2
    if is_disk_full(error):
        _say(f"the disk is full or failing: {str(error).splitlines()[0]}; files written before are intact")
        return 2
    if isinstance(error, OSError) and error.filename is not None:
        _say(f"{error.filename}: {error.strerror}")
        return 2
    is_cut = isinstance(error, RuntimeError) and ("closed by peer" in str(error) or "reset by peer" in str(error))
    if is_cut and count_processes() > 1:
        _say(f"another process of this run has ended; the message of that process says why ({one_line(error)})")
        return 2
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):  # pathlib before Python 3.13
        _say(str(error))
        return 2
    raise error


def _say(sentence: str, *, is_own: bool = False) -> None:
    # Under torchrun every process has the same sentence, so that only the first prints, but for a process's own.
    rank = os.environ.get("RANK", "0")
    if rank == "0" or is_own:
        where = "tigon" if rank == "0" else f"tigon, process {rank}"
        print(f"{where}: {' '.join(sentence.split())}", file=sys.stderr, flush=True)
