"""`tigon compress`: store a model's feed-forward layers in fewer bytes and report the cost per method."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tigon.cli.options import argument, device_option, json_option, option
from tigon.cli.outputs import PICTURES, check_output_file, check_output_folder, replace_output
from tigon.cli.problem import Problem, check_choice, find_device, needs, one_line
from tigon.cli.progress import working
from tigon.cli.screen import screen
from tigon.compress.cli.cost import Cost, format_cost, measure_megabytes
from tigon.files import DamagedFileError
from tigon.manifest import MANIFEST, read_manifest, write_manifest

if TYPE_CHECKING:
    from tigon.compress import Report

NAME = "compress"
METHODS = ("bits", "rank", "prune", "svd", "auto")
DTYPES = ("auto", "float32", "bfloat16", "float16")
HELD = 4096  # held-out tokens


@dataclass(frozen=True, kw_only=True)
class CompressOptions:
    model: str = argument("Folder with a model and its tokenizer, or a model name on the Hub.")
    data: list[Path] = option(..., "Calibration text: files, or folders with .txt and .md files.")
    output: Path = option(..., "Folder for the compressed model.", "-o")
    budget: float | None = option(None, "Target size for the layers, as a fraction of their present bytes.")
    method: str | None = option(None, f"{', '.join(METHODS)}; default: bits.")
    heavy_bits: int | None = option(None, "Bits for heavy neurons; replaces --budget.")
    rest_bits: int | None = option(None, "Bits for the other neurons, with --heavy-bits; default: 3.")
    share: float | None = option(None, "Fraction of heavy neurons, with --heavy-bits; default: 0.25.", min=0, max=1)
    recover: int = option(0, "Fine-tuning steps for each changed layer.", min=0)
    embeddings: bool = option(False, "Also store embeddings in 8 bits.")
    dense: bool = option(False, "Save dense weights, which load without Tigon.")
    tokens: int = option(8192, "Calibration tokens, drawn from the whole text.", min=256)
    dtype: str = option("auto", f"Dtype for loading the weights: {', '.join(DTYPES)}.")
    held: list[Path] | None = option(None, "Held-out text: print loss and latency before and after compression.")
    device: str = device_option()
    plot: Path | None = option(None, "Plot the report into this file.")
    overwrite: bool = option(False, "Replace an existing compressed model in --output, and --plot.")
    json: bool = json_option()


def compress(options: CompressOptions) -> None:
    """Compress feed-forward layers: keep heavy neurons at one width, store the others in fewer bits or drop them.

    Layers are recognised from activations recorded in a forward pass. Tied, quantised and adapted layers are skipped
    and listed.
    """
    needs(f"tigon {NAME}", "compress", "torch", "transformers", "safetensors")
    data, held, plot, output = options.data, options.held or [], options.plot, options.output
    if plot is not None:
        needs(f"tigon {NAME} --plot", "compress", "matplotlib")
        check_output_file(f"{NAME}: --plot", plot, PICTURES, overwrite=options.overwrite, inputs=[*data, *held])
    check_choice(NAME, options, dtype=DTYPES)
    _check_split(options)
    inputs: list[str | Path] = [options.model, *data, *held]
    check_output_folder(f"{NAME}: --output", output, overwrite=options.overwrite, is_own=_is_compressed, inputs=inputs)
    device = find_device(options.device, NAME)
    texts, others = _read_texts(data, "--data"), _read_texts(held, "--held") if held else []
    from tigon import compress as package

    method = _choose_method(options)
    console = screen(stderr=True)
    with working(console, f"reading {options.model}"):
        model, tokenizer = _load(options.model, options.dtype)
        model = model.to(device)
    try:
        with working(console, "compressing"):
            ids = _make_batches(model, tokenizer, texts, options.tokens)
            cost = Cost(model, _make_batches(model, tokenizer, others, HELD)) if others else None
            report = package.feed_forward(model, ids, method=method, budget=options.budget, recover=options.recover)
            tables = package.embeddings(model) if options.embeddings else None
    except ValueError as error:
        raise _as_problem(error) from error
    for one in (report, tables):
        if one is not None:
            one.forget()
    with replace_output(output) as staged:
        (package.dequantize(model) if options.dense else model).save_pretrained(staged)
        tokenizer.save_pretrained(staged)
        write_manifest(staged, sorted(file.name for file in staged.iterdir()))
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        report.plot(plot)
    sizes = measure_megabytes(Path(options.model).expanduser()) or None, measure_megabytes(output)
    _show(options, report, tables, {"mb": sizes, "held": cost and cost.measure()})


def _check_split(options: CompressOptions) -> None:
    """Check that the options are compatible and that the method exists."""
    method, heavy_bits = options.method, options.heavy_bits
    if method is not None and method not in METHODS:
        near = difflib.get_close_matches(method.lower(), METHODS, 1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise Problem(f"{NAME}: --method must be one of {', '.join(METHODS)}, got {method!r}{meant}")
    if options.budget is not None and heavy_bits is not None:
        raise Problem(f"{NAME}: --budget and --heavy-bits are mutually exclusive: give a size to fit, or the split")
    if options.budget is None and heavy_bits is None:
        raise Problem(f"{NAME}: --budget must be given, a fraction such as 0.25, or --heavy-bits")
    if heavy_bits is not None and method not in (None, "bits"):
        raise Problem(f"{NAME}: --heavy-bits needs --method bits, got {method}")
    for name, value in (("--rest-bits", options.rest_bits), ("--share", options.share)):
        if heavy_bits is None and value is not None:
            raise Problem(f"{NAME}: {name} needs --heavy-bits; with --budget the plan chooses the value")


def _choose_method(options: CompressOptions) -> Any:
    """The method for `feed_forward`, checked before the model is read."""
    from tigon.compress.options import Bits, check_method

    try:
        method: Any = options.method or "bits"
        if options.heavy_bits is not None:
            rest = 3 if options.rest_bits is None else options.rest_bits
            method = Bits(options.heavy_bits, rest, 0.25 if options.share is None else options.share)
        check_method(method, options.budget, options.recover)
    except ValueError as error:
        raise _as_problem(error) from error
    return method


def _as_problem(error: ValueError) -> Problem:
    """An error of the library as one of the command, without the name of the function."""
    return Problem(f"{NAME}: {one_line(error, 600).partition(': ')[2]}")


def _show(options: CompressOptions, report: Report, tables: Report | None, cost: dict[str, Any]) -> None:
    if options.json:
        print(json.dumps({"feed_forward": report.to_dict(), "embeddings": tables and tables.to_dict(), **cost}))
        return
    print(report.table())
    if tables is not None:
        print(f"embeddings: {tables.bytes_before / 2**20:.2f} MiB before, {tables.bytes / 2**20:.2f} now")
        for one in tables.skipped:
            print(f"skipped: {one.name}: {one.reason}")
    before, now = cost["mb"]
    print("file: " + ("" if before is None else f"{before:.2f} MB before, ") + f"{now:.2f} MB now")
    if cost["held"] is not None:
        print(*format_cost(cost["held"]), sep="\n")
    print(f"saved to {options.output}")


def _read_texts(paths: list[Path], option: str) -> list[str]:
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
        raise Problem(f"{NAME}: {option} must contain text, got {len(files)} files without text")
    return texts


def _make_batches(model: Any, tokenizer: Any, texts: list[str], tokens: int) -> list[dict[str, Any]]:
    """Batches with the fewest windows, spread over the whole text, that hold `tokens` tokens."""
    from tigon.compress.calibration import count_tokens, make_batches

    batches = make_batches(model, texts, tokenizer, name=NAME)
    every = max(1, sum(map(count_tokens, batches)) // tokens)
    return batches[::every]


def _load(name: str, dtype: str) -> tuple[Any, Any]:
    """Load the model, by the class in its configuration, and its tokenizer."""
    import transformers

    from tigon.cli.model import check_hub, load_tokenizer, quiet_transformers

    quiet_transformers()
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise Problem(f"{NAME}: model {name}: the folder has no config.json, so the folder is not a model")
    if not path.exists() and name.startswith((".", "/", "~")):
        raise Problem(f"{NAME}: model {name}: there is no such folder")
    if not path.exists():
        check_hub()
    try:
        config = transformers.AutoConfig.from_pretrained(str(path) if path.exists() else name)
    except Exception as error:
        where = "" if path.exists() else "there is no such folder, and for that name on the Hub "
        raise Problem(f"{NAME}: model {name}: {where}no configuration can be read ({one_line(error, 160)})") from error
    stored = getattr(config, "quantization_config", None)
    if stored is not None:
        method = stored.get("quant_method") if isinstance(stored, dict) else stored.quant_method
        raise Problem(f"{NAME}: model {name} is already quantised (by {method}); compress the original model")
    kind = getattr(transformers, (config.architectures or ["AutoModel"])[0], transformers.AutoModel)
    try:
        model = kind.from_pretrained(str(path) if path.exists() else name, dtype=dtype)
    except Exception as error:
        raise Problem(f"{NAME}: model {name}: the weights cannot be loaded ({one_line(error)})") from error
    return model, load_tokenizer(name, f"{NAME}: model")


def _is_compressed(folder: Path) -> bool:
    """Whether the folder contains only output from this command, compressed or dense."""
    names = {path.name for path in folder.iterdir()}
    try:
        return names <= {*read_manifest(folder), MANIFEST} and "config.json" in names
    except DamagedFileError:
        return False
