"""`tigon bench`: operators and whole models against their peers, in one run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from tigon.cli.problem import Problem, check_writable, device_of, needs, one_line


def bench(
    ops: Annotated[
        list[str] | None, typer.Argument(metavar="[OP]...", help="Operators, such as rms_norm; default: all.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Time a training step of this preset instead of operators.")] = None,
    batch: Annotated[int, typer.Option("--batch", "--batch-size", min=1, help="Sequences per step, with --model.")] = 1,
    seq: Annotated[int, typer.Option("--seq", "--seq-len", min=8, help="Tokens per sequence, with --model.")] = 512,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps, with --model.")] = 10,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Gradient checkpointing, with --model.")
    ] = False,
    host: Annotated[
        bool,
        typer.Option(
            "--host",
            help="Time the host instead: microseconds per call, on tiny inputs; with OP layer, of a model's layer.",
        ),
    ] = False,
    peers: Annotated[
        str | None,
        typer.Option(
            help="Implementations beside Tigon's, separated by commas: eager, compile, torch, liger, cce, quack, trl. "
            "With --model: hf, compile, liger."
        ),
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="Shape in place of the recorded ones, such as 8192x4096; repeatable.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32 or fp64.")] = "bf16",
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    ignored: Annotated[float, typer.Option(min=0.0, max=0.99, help="Fraction of targets that a loss ignores.")] = 0.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all implementations.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Small shapes, one short round.")] = False,
    json: Annotated[Path | None, typer.Option(help="File for the results, written after every case.")] = None,
    plot: Annotated[Path | None, typer.Option(help="File for a chart of the results, a PNG.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for results and chart, named after device and measurement.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write charts and tables here, as one page that needs nothing beside it.")
    ] = None,
    sweep: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Measure N cases drawn from the ranges of real models.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Which cases are drawn, with --sweep.")] = 0,
    only: Annotated[
        str | None, typer.Option(metavar="OP,OP", help="The operators to draw, with --sweep; default: all.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds after which no further case begins, with --sweep.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="A result of --sweep whose cases are kept, and not measured again.")
    ] = None,
    fail_behind: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="PCT", help="Exit with 1 if --sweep finds Tigon behind by more than PCT %."),
    ] = None,
    source: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="FILE...", help="Show these result files and measure nothing."),
    ] = None,
) -> None:
    """Milliseconds, multiple of the hardware's floor, rate and peak memory, beside eager, torch.compile and peers."""
    _check_output(json, "--json")
    _check_output(plot, "--plot")
    _check_output(None if output is None else output / "results.json", "--output")
    _check_output(html, "--html")
    if plot is not None or (output is not None and sweep is None) or html is not None:
        needs(f"tigon bench {'--html' if html is not None else '--plot'}", "bench", "matplotlib")
    if source:
        if model is not None or host or json or plot or output or shape or peers or sweep:
            raise Problem("bench: --from measures nothing, and takes --html alone")
        # Without --from these arguments name operators; with --from they are further files.
        _show_files([*source, *map(Path, ops or [])], html)
        return
    if model is not None and (Path(model) / "config.json").is_file():
        raise Problem(
            f"bench: --model takes a preset, with random weights, and not the folder {model}; what compression costs, "
            "tigon compress --held says, and what fusing changes, tigon verify"
        )
    if model is not None and (ops or shape):
        raise Problem("bench: --model takes no operators and no --shape")
    if host and (model is not None or shape):
        raise Problem("bench: --host takes no --model and no --shape")
    if sweep is None and (only or resume or fail_behind is not None or budget is not None):
        raise Problem("bench: --only, --budget, --resume and --fail-behind belong to --sweep")
    if sweep is not None and (model is not None or host or shape or plot):
        raise Problem("bench: --sweep takes no --model, no --host, no --shape and no --plot")
    names = None if peers is None else _words(peers)
    where = device_of(device, "bench")

    def keep(content: dict[str, Any]) -> None:  # after every case: a run that is stopped loses only the current case
        from tigon.bench.report import save

        for path in _targets(json, output, content, ".json"):
            save(path, content)

    if sweep is not None:
        from tigon.cli.sweep import sweep as run

        chosen = [*(ops or []), *_words(only)]
        limits: dict[str, Any] = {"budget": budget, "resume": resume, "fail_behind": fail_behind}
        content, code = run(sweep, seed, chosen, names, where, keep, **limits)
        if html is not None:
            _write_page([content], html)
        if code:
            raise typer.Exit(code)
        return
    if model is not None:
        content = _bench_model(model, batch, seq, steps, checkpointing, names, dtype, where, keep)
    elif host:
        content = _bench_host(ops or [], names, dtype, where, quick, keep)
    else:
        content = _bench_ops(ops or [], shape or [], names, dtype, where, ignored, rounds, quick, keep)
    _show(content)
    if pictures := _targets(plot, output, content, ".png"):
        from tigon.bench.plots import plot as draw

        for path in pictures:
            draw(content, path)
    if html is not None:
        _write_page([content], html)
    ours = [row for row in content["rows"] if row.get("implementation", row.get("side", "")).startswith("tigon")]
    if any(row["status"] == "wrong" for row in ours):
        raise typer.Exit(1)


def _show_files(paths: list[Path], html: Path | None) -> None:
    from tigon.bench.page import page
    from tigon.bench.report import MALFORMED, load

    try:
        contents = [load(path) for path in paths]
    except OSError as error:
        raise Problem(f"bench: --from {error.filename}: {error.strerror}") from None
    except ValueError as error:
        raise Problem(f"bench: --from {error}".rstrip(".")) from None
    if html is not None:
        try:
            _write_page(contents, html)
        except MALFORMED:
            for path, content in zip(paths, contents, strict=True):  # one by one, to name the file
                _shown(path, content, lambda one: page([one]))
            raise
        return
    for path, content in zip(paths, contents, strict=True):
        _shown(path, content, _show)


def _shown(path: Path, content: dict[str, Any], how: Callable[[dict[str, Any]], object]) -> None:
    from tigon.bench.report import MALFORMED

    try:
        how(content)
    except MALFORMED as error:
        raise Problem(f"bench: --from {path} cannot be shown ({one_line(error)})") from error


def _write_page(contents: list[dict[str, Any]], path: Path) -> None:
    from tigon.bench.page import page

    path.write_text(page(contents), encoding="utf-8")


def _bench_ops(
    names: list[str],
    shapes: list[str],
    peers: list[str] | None,
    dtype: str,
    device: Any,
    ignored: float,
    rounds: int,
    quick: bool,
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    from dataclasses import asdict

    from tigon.bench import report
    from tigon.bench.inputs import DTYPES
    from tigon.bench.runner import Settings, choose, left_out, measure_ceilings, parse_shape, run_case

    chosen = _chosen(names, peers, dtype)
    if shapes and len(chosen) != 1:
        raise Problem("bench: --shape needs exactly one OP")
    # The shapes of real models would take a CPU hours.
    small = quick or device.type != "cuda"
    try:
        cases = [
            (op, one)
            for op in chosen
            for one in ([parse_shape(op, text) for text in shapes] or (op.small if small else op.shapes))
        ]
    except ValueError as error:
        raise Problem(str(error)) from None
    settings = Settings(1, 5.0, 20.0, least=2) if quick else Settings(rounds)
    plan = [choose(op, peers, device) for op, _ in cases]
    if quick and peers is None and device.type != "cuda":  # on a CPU torch.compile takes longer than all the rest
        plan = [{name: one for name, one in chosen.items() if name != "compile"} for chosen in plan]
    rows: list[Any] = []
    absent: dict[str, str] = {}
    with _progress(sum(1 + (1 + settings.rounds) * len(chosen) for chosen in plan)) as step:
        step("copy bandwidth and matmul rate", 0)
        ceilings = measure_ceilings(device, settings)
        expected = 0
        for (op, one), implementations in zip(cases, plan, strict=True):
            rows += run_case(
                op,
                one,
                DTYPES[dtype],
                device,
                ceilings,
                implementations=implementations,
                settings=settings,
                ignored=ignored,
                say=lambda text: step(text, 1),
            )
            expected += 1 + (1 + settings.rounds) * len(implementations)
            step("", 0, expected)
            absent |= left_out(op, implementations, rows, device) if peers is None else {}
            notes = _notes(absent, rows)
            content = report.result("ops", rows, device=device, ceilings=asdict(ceilings), notes=notes)
            keep(content)
    return content


def _notes(absent: dict[str, str], rows: list[Any]) -> list[str]:
    """Sentences below the table, about Tigon's rows and about peers without rows."""
    from tigon.bench.runner import REFERENCE

    notes = []
    if any(row.note.startswith(REFERENCE) for row in rows):
        notes.append("Tigon's rows are its PyTorch reference: the kernels do not run on this device.")
    for why in dict.fromkeys(absent.values()):
        notes.append(f"Left out: {', '.join(name for name in absent if absent[name] == why)} ({why}).")
    return notes


def _chosen(names: list[str], peers: list[str] | None, dtype: str) -> list[Any]:
    from tigon.bench.cases import OPS
    from tigon.bench.inputs import DTYPES

    unknown = [name for name in names if name not in OPS]
    if unknown:
        raise Problem(f"bench: OP must be one of {', '.join(OPS)}, got {', '.join(map(repr, unknown))}")
    if dtype not in DTYPES:
        raise Problem(f"bench: --dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    _check_names(peers, {name for op in OPS.values() for name in op.implementations})
    return [OPS[name] for name in names or OPS]


def _bench_host(
    names: list[str],
    peers: list[str] | None,
    dtype: str,
    device: Any,
    quick: bool,
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    from tigon.bench import report
    from tigon.bench.host import HostSettings, run_floor, run_host
    from tigon.bench.inputs import DTYPES
    from tigon.bench.runner import choose

    layer = "layer" in names or (not names and find_spec("transformers") is not None)
    if layer:
        needs("tigon bench --host layer", "hf", "transformers")
    operators = [name for name in names if name != "layer"]
    chosen = _chosen(operators, peers, dtype)
    if names and not operators:
        chosen = []
    settings = HostSettings(10, 5, 3) if quick else HostSettings()
    plan = [choose(op, peers, device) for op in chosen]
    with _progress(1 + sum(1 + len(implementations) for implementations in plan) + (6 if layer else 0)) as step:
        step("floor", 0)
        rows = run_floor(device, settings)
        for op, implementations in zip(chosen, plan, strict=True):
            rows += run_host(
                op,
                DTYPES[dtype],
                device,
                implementations=implementations,
                settings=settings,
                say=lambda text: step(text, 1),
            )
            keep(report.result("host", rows, device=device))
        if layer:
            from tigon.bench.host_layer import run_layer

            wanted = None if peers is None else ["tigon", *peers]
            rows += run_layer(DTYPES[dtype], device, names=wanted, settings=settings, say=lambda text: step(text, 1))
        content = report.result("host", rows, device=device)
        keep(content)
    return content


def _bench_model(
    model: str,
    batch: int,
    seq: int,
    steps: int,
    checkpointing: bool,
    peers: list[str] | None,
    dtype: str,
    device: Any,
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    needs("tigon bench --model", "hf", "transformers")
    from tigon.bench import report
    from tigon.bench.inputs import DTYPES
    from tigon.bench.models import run_model
    from tigon.bench.training import DEFAULT_SIDES, SIDES, WARMUP_STEPS
    from tigon.presets import PRESETS

    if dtype not in DTYPES:
        raise Problem(f"bench: --dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    _check_names(peers, set(SIDES))
    if model not in PRESETS:
        raise Problem(f"bench: --model must be one of {', '.join(PRESETS)}, got {model!r}")
    default = [side for side in DEFAULT_SIDES if side != "liger" or device.type == "cuda"]
    sides = default if peers is None else [side for side in SIDES if side in {*peers, "tigon"}]

    with _progress((WARMUP_STEPS + steps) * len(sides)) as step:
        step(f"{model}: starting", 0)
        rows = run_model(
            model,
            batch=batch,
            seq=seq,
            checkpointing=checkpointing,
            steps=steps,
            sides=sides,
            dtype=str(DTYPES[dtype]).removeprefix("torch."),
            device=str(device),
            say=lambda text: step(text, 1),
            done=lambda rows: keep(report.result("model", rows, device=device)),
        )
    return report.result("model", rows, device=device)


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _targets(path: Path | None, folder: Path | None, content: dict[str, Any], suffix: str) -> list[Path]:
    from tigon.bench.report import file_name

    named = None if folder is None else (folder / file_name(content)).with_suffix(suffix)
    return [p for p in (path, named) if p is not None]


def _check_names(peers: list[str] | None, known: set[str]) -> None:
    unknown = [name for name in peers or [] if name not in known]
    if unknown:
        raise Problem(f"bench: --peers must be among {', '.join(sorted(known))}, got {', '.join(map(repr, unknown))}")


def _check_output(path: Path | None, option: str) -> None:
    # Checked before measuring: a typing error must not lose an hour's results.
    if path is None:
        return
    if path.is_dir():
        raise Problem(f"bench: {option} must be a file, {path} is a directory")
    check_writable(path.parent, f"bench: {option}")
    path.parent.mkdir(parents=True, exist_ok=True)


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)

        def step(text: str, advance: int, completed: int | None = None) -> None:
            progress.update(task, advance=advance, completed=completed, description=text)

        yield step


def _show(content: dict[str, Any]) -> None:
    from tigon.bench import report

    if content["kind"] == "sweep":
        from tigon.cli.sweep import show_sweep

        show_sweep(content)
        return
    if not sys.stdout.isatty():  # a pipe has no width, and rich would fold the table to 80 columns
        print(report.to_text(content))
        return
    from rich.table import Table

    from tigon.cli.screen import screen, show

    console = screen()
    for part in report.to_rich(content).renderables:
        if isinstance(part, Table):
            show(console, part)
        else:
            console.print(part, soft_wrap=True)
