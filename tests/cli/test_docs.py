"""docs/cli.md has every option of every command, and no option that there is not."""

import re
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

from tigon.cli.app import COMMANDS, GROUPS, app

EVERY = (*COMMANDS, *GROUPS)

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")


def section(command):
    found = re.search(rf"^## tigon {command}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/cli.md has no section on tigon {command}"
    return found[1]


# Typer reads the signatures of every command anew, and each section asks about all commands.
KNOWN = cache(lambda: typer.main.get_command(app).commands)


def options(command):
    if command == "train":
        pytest.importorskip("trl", minversion="1.16")
        from tigon.cli.train.options import TASKS, make_parser

        here = [name for name, task in TASKS.items() if find_spec(task.library)]
        actions = [action for task in here for action in make_parser(task)._actions]
        # Tigon's own options of the tasks whose library is missing.
        own = {f"--{field.name}" for task in TASKS.values() if task.extra for field in fields(task.extra)}
        return own | {name for action in actions for name in action.option_strings if name.startswith("--")}
    found = KNOWN()[command]
    commands = [found, *getattr(found, "commands", {}).values()]
    params = [p for one in commands for p in one.params]
    return {name for p in params for name in (*p.opts, *p.secondary_opts) if name.startswith("--")}


@pytest.mark.parametrize("command", EVERY)
def test_every_option_stands_in_the_page(command):
    text, known = section(command), options(command)
    written = set(re.findall(r"(?<![\w-])(--[a-z](?:[a-z0-9_-]*[a-z0-9])?)", text))
    # The options of `tigon train` are TRL's, which documents them.
    assert command == "train" or known <= written, f"not in docs/cli.md: {sorted(known - written)}"
    # torchrun's own options, and those of other commands, stand in examples.
    every = {name for other in EVERY for name in options(other)} | {
        "--nproc-per-node",
        "--max-restarts",
        "--config_file",
    }
    assert written <= every, f"no such option: {sorted(written - every)}"
