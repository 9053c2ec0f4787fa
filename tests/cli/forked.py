"""Runs `python -m tigon` in a process of its own for each line of its input, without the seconds that imports take.

    {"arguments": […], "cwd": …, "env": {…}, "limit": …, "out": …, "err": …}  →  the exit status

The processes are forked from this one, which has imported what is large, but not tigon: that reads the environment.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import resource
import runpy
import signal
import sys
import threading
import traceback

LARGE = (
    "torch._dynamo", "torch.distributed.tensor", "transformers.trainer", "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto", "accelerate", "datasets", "peft", "trl", "typer", "pydantic",
    "rich.table",
)  # fmt: skip


def become(request: dict) -> None:
    """Make this process what subprocess.run would have started."""
    os.chdir(request["cwd"] or ".")
    os.environ.clear()
    os.environ.update(request["env"])
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(request[name], os.O_WRONLY), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if request["limit"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["limit"],) * 2)
    signal.alarm(240)
    sys.argv[1:] = request["arguments"]
    sys.path[0] = os.getcwd()


def run(request: dict) -> int:
    become(request)
    try:
        runpy.run_module("tigon", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else ended.code is not None
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def end(status: int) -> None:
    """As the interpreter ends, but for taking apart what was imported, which takes longer than most commands."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    for module in LARGE:
        with contextlib.suppress(ImportError):  # the command says what it misses
            importlib.import_module(module)
    gc.freeze()  # a collection would touch, and so copy, all that is shared
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            end(run(json.loads(line)))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
