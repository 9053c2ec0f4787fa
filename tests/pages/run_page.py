"""Runs the code of a page of the documentation as a reader does who pastes block after block: run_page.py PAGE

Python blocks share one namespace. In shell blocks, commands that begin with tigon or python run in a forked child, so
that what is imported is imported once, and with a GPU in a new process; bash runs the others. The working directory is
the reader's. At the end the page's function of checks.py gets the namespace, and the text that the page printed.

A comment before a block says how the test treats the block:

    <!-- not run: REASON -->                              the block is not run
    <!-- needs: PACKAGE, … -->                            the block is run where these packages are installed
    <!-- tested with: tigon train --max_steps 3 -->       these options are added to commands that begin with the words
    <!-- tested with: torchrun --nproc-per-node 1 -->     the block is run as a process of torchrun

A Python block whose first line is a comment with a file name, as `# rewards.py`, is that file as well. With a path of
the repository, as `# src/tigon/ops/relu2.py`, it is a quotation, and not run.
"""

import importlib.util
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARKERS = re.compile(r"(?:<!-- [^\n]* -->\n)*\Z")
MARKER = re.compile(r"<!-- (not run|needs|tested with): (.+?) -->")
SHELLS = ("bash", "sh")


@dataclass
class Block:
    """A block of code. line: its first line in the page, counted from 0."""

    language: str
    code: str
    line: int
    not_run: str = ""
    needs: str = ""
    options: str = ""

    @property
    def file(self) -> str:
        """The file that the first line names, or ""."""
        named = re.match(r"# ([\w./-]+\.py)\n", self.code)
        return named[1] if named else ""

    def is_quotation(self) -> bool:
        return "/" in self.file

    def is_installed(self) -> bool:
        return all(importlib.util.find_spec(package) for package in self.needs.split(", ") if package)


def parse_blocks(text: str) -> list[Block]:
    blocks = []
    for fence in FENCE.finditer(text):
        before = MARKERS.search(text[: fence.start()])
        markers = dict(MARKER.findall(before[0])) if before else {}
        line = text[: fence.start(2)].count("\n")
        values = (markers.get(name, "") for name in ("not run", "needs", "tested with"))
        blocks.append(Block(fence[1], fence[2], line, *values))
    return blocks


def split_commands(code: str) -> Iterator[str]:
    """The commands of a shell block. Lines that end with a backslash, and a here-document, are one command."""
    lines = iter(code.replace("\\\n", " ").splitlines())
    for line in lines:
        delimiter = re.search(r"<<'?(\w+)'?", line)
        while delimiter and not line.endswith(f"\n{delimiter[1]}"):
            line += "\n" + next(lines)
        if line.strip() and not line.lstrip().startswith(("#", "pip install")):
            yield line


def print_as_terminal(columns: int) -> None:
    """Fold the tables of commands, which a pipe would get at their full width."""
    from tigon.cli import screen as module

    original = module.screen
    module.screen = lambda **options: original(**{**options, "width": columns})


def run_command(command: str, options: str) -> None:
    print(f"$ {command}", flush=True)
    words = [] if "\n" in command else shlex.split(command, comments=True)
    prefix, _, more = options.partition(" --")
    if options and words[: len(prefix.split())] == prefix.split():
        words += shlex.split("--" + more)
    if words[:1] not in (["tigon"], ["python"]):
        subprocess.run(["bash", "-ec", command], check=True)
        return
    if torch.cuda.is_available():  # a process that has asked for a GPU cannot be forked
        script = ["-m", *words] if words[0] == "tigon" else words[1:]
        subprocess.run([sys.executable, *script], check=True)
        return
    child = os.fork()
    if child == 0:
        status = 1
        try:
            print_as_terminal(80)
            if words[0] == "tigon":
                sys.argv[:] = words
                runpy.run_module("tigon", run_name="__main__")
            else:
                sys.argv[:] = words[1:]
                runpy.run_path(words[1], run_name="__main__")
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        raise SystemExit(f"{command}: status {status}")


def run_block(block: Block, page: Path, names: dict) -> None:
    if block.options.startswith("torchrun"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    if block.language == "python":
        if block.file:
            Path(block.file).write_text(block.code, encoding="utf-8")
        # Compiled at its lines of the page: tracebacks and inspect.getsource read the page itself.
        exec(compile("\n" * block.line + block.code, str(page), "exec"), names)
    elif block.language in SHELLS:
        for command in split_commands(block.code):
            run_command(command, block.options)


def main(page: str) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    from checks import BEFORE, CHECKS, DOCS

    torch.manual_seed(0)
    BEFORE.get(page, lambda: None)()
    main_module = sys.modules["__main__"] = ModuleType("__main__")
    main_module.__file__ = str(DOCS / page)
    names = vars(main_module)
    stdout = os.dup(1)
    with tempfile.TemporaryFile() as record:
        os.dup2(record.fileno(), 1)
        try:
            for block in parse_blocks((DOCS / page).read_text(encoding="utf-8")):
                if not block.not_run and not block.is_quotation() and block.is_installed():
                    run_block(block, DOCS / page, names)
        finally:
            sys.stdout.flush()
            os.dup2(stdout, 1)
            record.seek(0)
            output = record.read().decode()
            print(output)
    if page in CHECKS:
        CHECKS[page](SimpleNamespace(**names), output)


if __name__ == "__main__":
    main(sys.argv[1])
