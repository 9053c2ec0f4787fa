"""Runs `python -m tigon` in a process of its own for each line of its input, without the seconds that imports take.

    {"ranks": [arguments, …], "cwd": …, "env": {…}, "limit": …, "out": …, "err": …}  →  the exit status

Several ranks are one run, as a launcher starts it; the status is then the first that is not 0. The processes are forked
from this one, which has imported what is large, but not tigon: that reads the environment.
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


def become(request: dict, rank: int) -> None:
    """Make this process what subprocess.run would have started, or a launcher."""
    os.chdir(request["cwd"] or ".")
    os.environ.clear()
    os.environ.update(request["env"])
    world = str(len(request["ranks"]))
    if world != "1":
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if request["limit"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["limit"],) * 2)
    signal.alarm(240)
    sys.argv[1:] = request["ranks"][rank]
    sys.path[0] = os.getcwd()


def run(request: dict, rank: int) -> int:
    become(request, rank)
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
        request = json.loads(line)
        children = []
        for rank in range(len(request["ranks"])):
            children.append(os.fork())
            if children[-1] == 0:
                end(run(request, rank))
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(next(filter(None, statuses), 0), flush=True)
