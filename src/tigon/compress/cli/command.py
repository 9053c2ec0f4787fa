"""`tigon compress`: store a model's feed-forward layers in fewer bytes and report the cost per method."""

from __future__ import annotations

import difflib
import json as encoder
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tigon.cli.outputs import PICTURES, check_output_file, check_output_folder
from tigon.cli.problem import Problem, device_of, needs, one_line
from tigon.cli.progress import working
from tigon.compress.cli.cost import Cost, format_cost, megabytes
from tigon.files import DamagedFileError
from tigon.manifest import MANIFEST, read_manifest, write_manifest

if TYPE_CHECKING:
    from tigon.compress import Report

NAME = "compress"
METHODS = ("bits", "rank", "prune", "svd", "auto")
DTYPES = ("auto", "float32", "bfloat16", "float16")
HELD = 4096  # held-out tokens
TAKEN = "only one of --budget and --heavy-bits can be given: a size to fit, or the split itself"


def compress(
    model: Annotated[str, typer.Argument(help="A folder of a model with its tokenizer, or a name on the hub.")],
    data: Annotated[list[Path], typer.Option(help="Text to calibrate on: files, or folders of .txt and .md files.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the compressed model.")],
    budget: Annotated[
        float | None, typer.Option(help="Bytes that the layers may take, as a share of those they take now.")
    ] = None,
    method: Annotated[str | None, typer.Option(help=f"{', '.join(METHODS)}; default: bits.")] = None,
    heavy_bits: Annotated[int | None, typer.Option(help="Bits of heavy neurons, in the place of --budget.")] = None,
    rest_bits: Annotated[
        int | None, typer.Option(help="Bits of the other neurons, with --heavy-bits; default: 3.")
    ] = None,
    share: Annotated[
        float | None, typer.Option(help="Share of heavy neurons, with --heavy-bits; default: 0.25.", min=0, max=1)
    ] = None,
    recover: Annotated[int, typer.Option(help="Steps of fine-tuning each changed layer.", min=0)] = 0,
    embeddings: Annotated[bool, typer.Option("--embeddings", help="Store embeddings in 8 bits too.")] = False,
    dense: Annotated[bool, typer.Option("--dense", help="Save dense weights, which open without Tigon.")] = False,
    tokens: Annotated[int, typer.Option(help="Tokens of calibration, from all of the text.", min=256)] = 8192,
    dtype: Annotated[str, typer.Option(help=f"Of the loaded weights: {', '.join(DTYPES)}.")] = "auto",
    held: Annotated[
        list[Path] | None,
        typer.Option(help="Other text: print its loss and the time of a call, before and after."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    plot: Annotated[Path | None, typer.Option(help="Draw the report into this file.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a compressed model that is in --output, and --plot.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compress feed-forward layers: keep heavy neurons at one width, store the others in fewer bits or drop them.

    Layers are recognised from activations recorded in a forward pass. Tied, quantised and adapted layers are skipped
    and listed.
    """
    needs(f"tigon {NAME}", "compress", "torch", "transformers", "safetensors")
    if plot is not None:
        needs(f"tigon {NAME} --plot", "compress", "matplotlib")
        check_output_file(f"{NAME}: --plot", plot, PICTURES, overwrite=overwrite, inputs=[*data, *(held or [])])
    if dtype not in DTYPES:
        raise Problem(f"{NAME}: --dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    _check_split(budget, method, heavy_bits, rest_bits, share)
    inputs: list[str | Path] = [model, *data, *(held or [])]
    check_output_folder(f"{NAME}: --output", output, overwrite=overwrite, is_own=_is_compressed, inputs=inputs)
    place = device_of(device, NAME)
    texts, others = _texts(data), _texts(held, "--held") if held else []
    from tigon import compress as package
    from tigon.cli.screen import screen

    console = screen(stderr=True, soft_wrap=True)
    with working(console, f"reading {model}"):
        loaded, tokenizer = _load_model(model, dtype)
        loaded = loaded.to(place)
    try:
        chosen: Any = method or "bits"
        if heavy_bits is not None:
            chosen = package.Bits(heavy_bits, 3 if rest_bits is None else rest_bits, 0.25 if share is None else share)
        with working(console, "compressing"):
            ids = _windows(loaded, tokenizer, texts, tokens)
            cost = Cost(loaded, _windows(loaded, tokenizer, others, HELD)) if others else None
            report = package.feed_forward(loaded, ids, method=chosen, budget=budget, recover=recover)
            tables = package.embeddings(loaded) if embeddings else None
    except ValueError as error:
        raise Problem(f"{NAME}: {one_line(error, 600).partition(': ')[2]}") from error
    for one in (report, tables):
        if one is not None:
            one.forget()
    _save(package.dequantize(loaded) if dense else loaded, output, tokenizer)
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        report.plot(plot)
    sizes = megabytes(Path(model).expanduser()) or None, megabytes(output)
    _tell(report, tables, {"mb": sizes, "held": cost and cost.table()}, output, json)


def _check_split(
    budget: float | None, method: str | None, heavy_bits: int | None, rest_bits: int | None, share: float | None
) -> None:
    """Check that the options are compatible and that the method exists."""
    if method is not None and method not in METHODS:
        near = difflib.get_close_matches(method.lower(), METHODS, 1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise Problem(f"{NAME}: --method must be one of {', '.join(METHODS)}, got {method!r}{meant}")
    if budget is not None and heavy_bits is not None:
        raise Problem(f"{NAME}: {TAKEN}")
    if budget is None and heavy_bits is None:
        raise Problem(f"{NAME}: --budget must be given, a share such as 0.25, or --heavy-bits")
    if heavy_bits is not None and method not in (None, "bits"):
        raise Problem(f"{NAME}: --heavy-bits is a split by bits, so that it takes no --method {method}")
    for option, value in (("--rest-bits", rest_bits), ("--share", share)):
        if heavy_bits is None and value is not None:
            raise Problem(f"{NAME}: {option} goes with --heavy-bits; within --budget the plan chooses it")


def _tell(report: Report, tables: Report | None, cost: dict[str, Any], output: Path, json: bool) -> None:
    if json:
        print(encoder.dumps({"feed_forward": report.to_dict(), "embeddings": tables and tables.to_dict(), **cost}))
        return
    print(report.table())
    if tables is not None:
        print(f"embeddings: {tables.bytes_before / 2**20:.2f} MiB before, {tables.bytes / 2**20:.2f} now")
        for one in tables.skipped:
            print(f"skipped: {one.name}: {one.reason}")
    before, now = cost["mb"]
    print("file: " + ("" if before is None else f"{before:.2f} MB before, ") + f"{now:.2f} MB now")
    if cost["held"] is not None:
        print("\n".join(format_cost(cost["held"])))
    print(f"saved to {output}")


def _texts(paths: list[Path], option: str = "--data") -> list[str]:
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(p for kind in ("*.txt", "*.md") for p in path.rglob(kind))
        elif path.is_file():
            files.append(path)
        else:
            raise Problem(f"{NAME}: {option} {path}: there is no such file or folder")
    try:
        texts = [path.read_text(encoding="utf-8") for path in files]
    except UnicodeDecodeError as error:
        raise Problem(f"{NAME}: {option} must be text in UTF-8 ({one_line(error)})") from error
    if not any(text.strip() for text in texts):
        raise Problem(f"{NAME}: {option} must hold text, got {len(files)} files without any")
    return texts


def _windows(model: Any, tokenizer: Any, texts: list[str], tokens: int) -> list[dict[str, Any]]:
    """Batches with the fewest windows, spread over the whole text, that hold `tokens` tokens."""
    from tigon.compress.calibration import count_tokens, make_batches

    batches = make_batches(model, texts, tokenizer, name=NAME)
    every = max(1, sum(map(count_tokens, batches)) // tokens)
    return batches[::every]


def _load_model(name: str, dtype: str) -> tuple[Any, Any]:
    """Load the model, by the class in its configuration, and its tokenizer."""
    import transformers

    from tigon.cli.model import check_hub, load_tokenizer, quiet_transformers

    quiet_transformers()
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise Problem(f"{NAME}: model {name}: the directory has no config.json, so it is not a model")
    if not path.exists() and name.startswith((".", "/", "~")):
        raise Problem(f"{NAME}: model {name}: there is no such folder")
    if not path.exists():
        check_hub()
    try:
        config = transformers.AutoConfig.from_pretrained(str(path) if path.exists() else name)
    except Exception as error:
        where = "" if path.exists() else "there is no such folder, and of that name on the hub "
        raise Problem(f"{NAME}: model {name}: {where}no configuration can be read ({one_line(error, 160)})") from error
    stored = getattr(config, "quantization_config", None)
    if stored is not None:
        method = stored.get("quant_method") if isinstance(stored, dict) else stored.quant_method
        raise Problem(f"{NAME}: model {name} is quantised already (by {method}); compress the model it was made from")
    kind = getattr(transformers, (config.architectures or ["AutoModel"])[0], transformers.AutoModel)
    try:
        model = kind.from_pretrained(str(path) if path.exists() else name, dtype=dtype)
    except Exception as error:
        raise Problem(f"{NAME}: model {name}: its weights cannot be loaded ({one_line(error)})") from error
    return model, load_tokenizer(name, f"{NAME}: model")


def _save(model: Any, output: Path, tokenizer: Any) -> None:
    """Save via `save_pretrained`, which also writes the layout of compressed layers."""
    staged = output.with_name(output.name + ".partial")
    shutil.rmtree(staged, ignore_errors=True)
    model.save_pretrained(staged)
    tokenizer.save_pretrained(staged)
    write_manifest(staged, sorted(file.name for file in staged.iterdir()))
    shutil.rmtree(output, ignore_errors=True)
    staged.replace(output)


def _is_compressed(folder: Path) -> bool:
    """Whether the folder contains only output from this command, compressed or dense."""
    names = {path.name for path in folder.iterdir()}
    try:
        return names <= {*read_manifest(folder), MANIFEST} and "config.json" in names
    except DamagedFileError:
        return False
