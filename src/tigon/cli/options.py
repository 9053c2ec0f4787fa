"""A command's options as one frozen dataclass, which Python, the command line and JSON share.

    @dataclass(frozen=True, kw_only=True)
    class ScoreOptions:
        run: Path = argument("Folder of a run.")
        data: list[str] = option(..., "Tables.")
        output: Path = option(..., "File for the scores.", "-o")

    def score(options: ScoreOptions) -> None: ...

    add_command(app, "score", score)

A False default gives only the flag that sets the option. A class's PANEL is the title above its options in --help.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

Options = TypeVar("Options")

# Options that say where and how this process works. A resumed run takes them from the command line, not its record.
UNRECORDED = ("output", "resume", "overwrite", "device")


def option(default: Any, help: str, *flags: str, **limits: Any) -> Any:
    """A field for an option. default: ... if the option is required. limits: `typer.Option`'s, such as min and max."""
    return _field(default, (typer.Option, flags, {"help": help, **limits}))


def argument(help: str, default: Any = ..., **limits: Any) -> Any:
    """A field for a positional argument."""
    return _field(default, (typer.Argument, (), {"help": help, **limits}))


def _field(default: Any, parameter: tuple[Any, ...]) -> Any:
    given = {} if default is ... else {"default": default}
    return dataclasses.field(metadata={"parameter": parameter}, **given)


def device_option() -> Any:
    return option("auto", "auto, cpu or cuda.")


def json_option() -> Any:
    return option(False, "Print JSON.")


def add_command(app: typer.Typer, name: str, run: Callable[[Any], None]) -> None:
    """Register a function of one options dataclass, with a parameter for each field."""
    kind = next(iter(typing.get_type_hints(run).values()))
    hints = typing.get_type_hints(kind)
    panels: dict[str, str | None] = {}
    for base in reversed(kind.__mro__):
        for field in vars(base).get("__annotations__", {}):
            panels.setdefault(field, vars(base).get("PANEL"))
    parameters = []
    annotated: Any = Annotated
    for field in dataclasses.fields(kind):
        make, flags, given = field.metadata["parameter"]
        if make is typer.Option:
            given = {**given, "rich_help_panel": panels[field.name]}
            is_bare = field.default is False or (flags and len(field.name) > 1)
            if is_bare and not any(flag.startswith("--") for flag in flags):
                flags = (f"--{field.name.replace('_', '-')}", *flags)
        annotation = annotated[hints[field.name], make(*flags, **given)]
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(field.name, keyword, default=default, annotation=annotation))

    def call(**given: Any) -> None:
        run(kind(**given))

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    call.__doc__ = run.__doc__
    app.command(name)(call)


def make_group(name: str, help: str, package: str, commands: dict[str, str]) -> typer.Typer:
    """A group of commands. commands: each command's name and its module in `package`, with the function so named."""
    group = typer.Typer(
        name=name, help=help, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}
    )

    def show_help(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())

    show_help.__annotations__ = {"context": typer.Context}
    group.callback()(show_help)
    for command, module in commands.items():
        add_command(group, command, getattr(importlib.import_module(f"{package}.{module}"), module))
    return group


def record_options(options: Any) -> dict[str, Any]:
    """Options as JSON, for a run's record."""
    return {name: value for name, value in dataclasses.asdict(options).items() if name not in UNRECORDED}


def restore_options(options: Options, recorded: dict[str, Any]) -> Options:
    """A run's recorded options, with this process's own. Options that the record lacks have their defaults."""
    kind: Any = type(options)
    known = {field.name for field in dataclasses.fields(kind)} - {*UNRECORDED}
    own = {name: getattr(options, name) for name in UNRECORDED}
    return kind(**{name: value for name, value in recorded.items() if name in known}, **own)  # type: ignore[no-any-return]
