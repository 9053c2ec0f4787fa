"""Runs `python -m tigon`, or a script, in a process of its own for each line of its input, without the seconds that
imports take.

    {"ranks": [arguments, …], "cwds": […], "env": {…}, "limit": …, "restarts": …, "out": …, "err": …}
    →  the processes' ids, a list, and at their end a status

A first argument that ends with .py is a script. Several ranks are one run; the status is then the first that is not 0.
With "restarts" torchrun's agent, in one process, starts them, and again so often. The processes are forked from this
one, which has imported what is large, and tigon: not for variables that are read then. Modules that are named on the
command line are imported as well; after "only" they alone, for commands that are to read the variables of tigon.
"""

import atexit
import contextlib
import functools
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
    "transformers.models.auto.tokenization_auto", "accelerate", "datasets", "peft", "trl", "typer", "typer._adapters",
    "rich.table", "matplotlib.pyplot", "matplotlib.backends.backend_agg", "tigon.cli.train.run",
    "tigon.fusion.engine.model",
)  # fmt: skip


def know_commands() -> None:
    """Typer reads the signatures of all commands anew for each process: most of the time of one that is refused."""
    import typer.main

    from tigon.cli.app import app

    make, known = typer.main.get_command, typer.main.get_command(app)
    typer.main.get_command = lambda of: known if of is app else make(of)


def become(request: dict, cwd: str | None) -> None:
    """Make this process what subprocess.run would have started, or a launcher."""
    os.chdir(cwd or ".")
    os.environ.clear()
    os.environ.update(request["env"])
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if request["limit"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["limit"],) * 2)
    # Where the tests run in the background, as under nohup, Ctrl-C would be ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.alarm(300)
    sys.path[0] = os.getcwd()
    sys.path[1:1] = filter(None, request["env"].get("PYTHONPATH", "").split(os.pathsep))


def run(request: dict, rank: int) -> int:
    become(request, request["cwds"] and request["cwds"][rank])
    world = str(len(request["ranks"]))
    if world != "1":
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    return command(request["ranks"][rank])


def command(arguments: list[str]) -> int:
    try:
        if arguments and arguments[0].endswith(".py"):
            sys.argv[:], sys.path[0] = arguments, os.path.dirname(os.path.abspath(arguments[0]))
            runpy.run_path(arguments[0], run_name="__main__")
        else:
            sys.argv[1:] = arguments
            runpy.run_module("tigon", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else ended.code is not None
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def launch(request: dict) -> int:
    """torchrun --standalone --max-restarts …, but for the imports of what it starts."""
    become(request, request["cwds"] and request["cwds"][0])
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        1, 1, len(request["ranks"]), rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork",
        max_restarts=request["restarts"],
    )  # fmt: skip
    try:
        elastic_launch(config, work)(request["ranks"])
    except ChildFailedError:
        traceback.print_exc()
        return 1
    return 0


def work(ranks: list[list[str]]) -> None:
    status = command(ranks[int(os.environ["RANK"])])
    if status:
        end(status)
    # Otherwise the agent waits for what this returns.


def end(status: int) -> None:
    """As the interpreter ends, but for taking apart what was imported, which takes longer than most commands."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    only = sys.argv[1:2] == ["only"]
    for module in sys.argv[2:] if only else (*LARGE, *sys.argv[1:]):
        with contextlib.suppress(ImportError):  # the command says what it misses
            importlib.import_module(module)
    if not only:
        with contextlib.suppress(ImportError):
            know_commands()
    gc.freeze()  # a collection would touch, and so copy, all that is shared
    for line in sys.stdin:
        request = json.loads(line)
        jobs = [functools.partial(run, request, rank) for rank in range(len(request["ranks"]))]
        if request["restarts"] is not None:
            jobs = [functools.partial(launch, request)]
        children = []
        for job in jobs:
            children.append(os.fork())
            if children[-1] == 0:
                end(job())
        print(json.dumps(children), flush=True)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(next(filter(None, statuses), 0), flush=True)
