"""`tigon export`: a run or checkpoint as a folder for from_pretrained, or as a GGUF file for llama.cpp."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tigon.cli.adapters import Adapters
from tigon.cli.checkpoint import seal
from tigon.cli.model import Source, load_tokenizer, quiet_transformers
from tigon.cli.options import argument, option
from tigon.cli.outputs import check_output_file, check_output_folder, replace_output
from tigon.cli.problem import Problem, check_choice, needs
from tigon.cli.screen import screen
from tigon.manifest import MANIFEST, read_manifest

TARGETS = ("hf", "gguf")
DTYPES = ("float32", "bfloat16", "float16", "q8_0")
# Files beside a model that save_pretrained does not write again: SentencePiece's model, settings of images and sounds.
BESIDE = ("*.model", "*processor_config.json")


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    model: str = argument("Run, checkpoint, model or adapter directory, or hub name.")
    to: str = option("hf", "hf: a folder for from_pretrained; gguf: a file for llama.cpp.")
    output: Path = option(..., "Folder for hf, file that ends in .gguf for gguf.", "-o")
    dtype: str | None = option(None, f"{', '.join(DTYPES)}; q8_0 for gguf. Default: the base model's.")
    adapters: str | None = option(None, "Adapters saved by PEFT, if the model is the base: folder or hub name.")
    pre: str | None = option(None, "With --to gguf: llama.cpp's name of the pre-tokenizer; default: recognised.")
    overwrite: bool = option(False, "Replace an earlier export in --output.")


def export(options: ExportOptions) -> None:
    """Export a run: merge the adapters, and write a model folder or a GGUF file.

    Adapters are merged in fp32, and each weight is rounded once, to the base model's dtype. A quantised base is
    dequantised.
    """
    needs("tigon export", "train", "torch", "transformers", "peft", "safetensors")
    check_choice("export", options, to=TARGETS, dtype=DTYPES)
    if options.to == "hf" and options.dtype == "q8_0":
        raise Problem("export: --dtype q8_0 requires --to gguf")
    if options.pre is not None and options.to != "gguf":
        raise Problem("export: --pre requires --to gguf")
    output = options.output.expanduser()
    inputs = [Path(name).expanduser() for name in (options.model, options.adapters) if name]
    if options.to == "gguf":
        needs("tigon export --to gguf", "export", "gguf")
        check_output_file("export: --output", output, (".gguf",), overwrite=options.overwrite, inputs=inputs)
    else:
        folders = [path for path in inputs if path.is_dir()]
        check_output_folder("export: --output", output, overwrite=options.overwrite, is_own=_is_export, inputs=folders)
    quiet_transformers()
    import torch

    from tigon.cli.gguf_file import check_family, read_vocabulary, write_gguf
    from tigon.cli.merge import find_tokenizer_place, find_trained, load_trained, merge_adapters

    console = screen(stderr=True)
    source, adapters = find_trained("export", options.model, options.adapters)
    place = find_tokenizer_place(source, adapters)
    tokenizer = load_tokenizer(place, "export: model")
    if options.to == "gguf":  # before the weights are read
        check_family(source.config)
        read_vocabulary(tokenizer, max(len(tokenizer), source.config.vocab_size), options.pre)
    dtype = None if options.dtype in (None, "q8_0") else getattr(torch, options.dtype)
    with console.status(f"reading {source.name}"):
        trained = load_trained("export", source, adapters)
    with console.status("merging the adapters"):
        model = merge_adapters("export", trained, dtype)
    _add_end_of_text(model, tokenizer)
    own = str(model.get_input_embeddings().weight.dtype).removeprefix("torch.")
    output.parent.mkdir(parents=True, exist_ok=True)
    with console.status(f"writing {output}"), replace_output(output) as staged:
        if options.to == "gguf":
            name = Path(options.adapters or options.model).expanduser().resolve().name
            write_gguf(model, tokenizer, staged, options.dtype or own, pre=options.pre, name=name)
            _flush(staged)
        else:
            _save_folder(model, tokenizer, staged, [source.name, place])
    print(_describe(options, source, adapters, trained.form, options.dtype or own, output))


def _is_export(folder: Path) -> bool:
    """Whether a folder holds a model, and only files of the manifest: another export, which --overwrite may replace."""
    names = {path.name for path in folder.iterdir()}
    return {MANIFEST, "config.json"} <= names and names - {MANIFEST} <= read_manifest(folder).keys()


def _add_end_of_text(model: Any, tokenizer: Any) -> None:
    """Let generation end at the tokenizer's end-of-text token, with which the model was trained."""
    config = model.generation_config
    if config is None or tokenizer.eos_token_id is None:
        return
    known = config.eos_token_id
    ends = known if isinstance(known, list) else [] if known is None else [known]
    if tokenizer.eos_token_id not in ends:
        config.eos_token_id = [*ends, tokenizer.eos_token_id] if ends else tokenizer.eos_token_id


def _save_folder(model: Any, tokenizer: Any, folder: Path, places: list[str]) -> None:
    model.config.use_cache = True
    model.save_pretrained(folder)
    for place in places:
        for pattern in BESIDE if Path(place).is_dir() else ():
            for file in Path(place).glob(pattern):
                shutil.copy(file, folder / file.name)
    tokenizer.save_pretrained(folder)
    seal(folder)


def _flush(file: Path) -> None:
    with open(file, "rb+") as handle:
        os.fsync(handle.fileno())


def _describe(
    options: ExportOptions, source: Source, adapters: Adapters | None, form: str | None, dtype: str, output: Path
) -> str:
    words = f"{adapters} merged into {source.name}" if adapters else source.name
    if form:
        words += f", dequantised from {form}"
    check = f"; check it: tigon verify {output} --against {options.adapters or options.model}"
    return f"{output}: {words}, in {dtype}{check if options.to == 'hf' else ''}"
