"""Memory of a training step by model, method and size, as `tigon inspect` estimates it, for the pages of docs/families.

    python benchmarks/families/memory.py                        every model; some half an hour on one core
    python benchmarks/families/memory.py --only gpt-oss         some of them

The estimate runs on the meta device. Hybrids take longest: the plain delta rule is thousands of small calls.
memory.json beside this file holds the result, from which MkDocs makes tables.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from families.page import escape_markdown

FILE = Path(__file__).parent / "memory.json"
RESULTS = Path(__file__).parents[1] / "results"
SIZES = ((1, 2048), (1, 8192))
SIDES = ("plain", "fused")
GIB = 2**30


@dataclass(frozen=True)
class Method:
    """options: of `tigon inspect`. gpus: over which weights, gradients and states are sharded."""

    title: str
    options: dict[str, Any]
    gpus: int = 1


METHODS = {
    "full": Method("full, bf16", {"precision": "bf16-pure"}),
    "full, 8 GPUs": Method("full, bf16, sharded over 8 GPUs", {"precision": "bf16-pure", "gpus": 8}),
    "lora": Method("LoRA, rank 16", {"precision": "bf16-pure", "lora": 16}),
    "qlora": Method("QLoRA, nf4, rank 16", {"precision": "bf16", "lora": 16, "quantize": "nf4"}),
}


@dataclass(frozen=True)
class Shape:
    """targets: of the adapters."""

    targets: str = "all-linear"


# Llama 4: its routers are linear layers that return two tensors, which PEFT cannot adapt.
_ATTENTION = "q_proj,k_proj,v_proj,o_proj"
MODELS = {
    "qwen3-next-80b-a3b": Shape(), "qwen3.5-9b": Shape(), "qwen3.5-35b-a3b": Shape(),
    "qwen3-30b-a3b": Shape(), "gpt-oss-20b": Shape(), "gpt-oss-120b": Shape(), "deepseek-v3": Shape(),
    "glm-4.5-air": Shape(), "gemma-3-4b": Shape(), "gemma-4-26b-a4b": Shape(),
    "llama-3.1-8b": Shape(), "llama-4-scout": Shape(targets=_ATTENTION), "qwen3-vl-4b": Shape(),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ estimates


def estimate(
    config: Any, shape: Shape, method: Method, batch: int, seq: int, layers: int
) -> tuple[dict[str, int], int, list[Any]]:
    """Peak bytes of the plain and the fused model, trained parameters, and the fused model's report.

    config: makes the configuration with a number of layers.
    """
    from tigon.cli.memory import Sides, StepOptions
    from tigon.cli.model import Source

    options = StepOptions(
        batch_size=batch, seq_len=seq, lora_targets=shape.targets, gradient_checkpointing=True, **method.options
    )
    sides = Sides(Source("", "preset", config(layers), weights=False), options)
    peaks = {"plain": sides.memory().peak.total}
    sides.fuse()
    peaks["fused"] = sides.memory().peak.total
    return peaks, sides.trained, list_parts(sides.fusion.report())


def list_parts(report: Any) -> list[list[str]]:
    """Part, class, "fused" or "left", and the formula or the reason."""
    return [[row.kind, row.name, "fused" if row.fused else "left", row.what] for row in report.rows]


def measure_model(name: str, say: Callable[[str], None] = print) -> dict[str, Any]:
    import torch

    from tigon.fusion.memory.estimate import CannotEstimate
    from tigon.presets import auto_class, preset_config

    shape, config = MODELS[name], preset_config(name)
    layers = config.get_text_config().num_hidden_layers
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    row: dict[str, Any] = {"class": type(model).__name__, "parameters": model.num_parameters(), "layers": layers,
                           "targets": shape.targets, "methods": {}}  # fmt: skip
    for key, method in METHODS.items():
        sizes: dict[str, Any] = {}
        for batch, seq in SIZES:
            try:
                peaks, trained, parts = estimate(
                    lambda depth: preset_config(name, num_hidden_layers=depth), shape, method, batch, seq, layers
                )
            except CannotEstimate as error:
                sizes[f"{batch}×{seq}"] = {"reason": str(error)[:120]}
                continue
            sizes[f"{batch}×{seq}"] = peaks
            row["methods"][key] = {"trained": trained, "sizes": sizes}
            if key == "full" and "parts" not in row:
                row["parts"] = parts
        say(f"{name} {key}: {sizes}")
    return row


# ------------------------------------------------------------------------------------------------------------- the page


def page(name: str) -> str:
    """A model's numbers: memory by method and size, what is fused, and the measured step."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    row = content["models"].get(name)
    if row is None:
        return "No estimate has been recorded yet."
    versions = ", ".join(f"{package} {version}" for package, version in content["versions"].items())
    return "\n".join([
        f"`{name}`: `{row['class']}`, {row['parameters'] / 1e9:,.1f} billion parameters in {row['layers']} layers.",
        f"Peak memory in GiB, fused (plain), with gradient checkpointing, by `tigon inspect` ({versions}):", "",
        *make_memory_table(row), "", *list_fused(row), "", *make_measured_table(name),
    ])  # fmt: skip


def make_memory_table(row: dict[str, Any]) -> list[str]:
    lines = [
        "| method | trained | " + " | ".join(f"{batch} × {seq:,}" for batch, seq in SIZES) + " |",
        "| :-- | --: |" + " --: |" * len(SIZES),
    ]
    for key, found in row["methods"].items():
        cells = []
        for peaks in found["sizes"].values():
            known = "fused" in peaks
            cells.append(f"**{peaks['fused'] / GIB:,.1f}** ({peaks['plain'] / GIB:,.1f})" if known else peaks["reason"])
        lines.append("| " + " | ".join([METHODS[key].title, format_count(found["trained"]), *cells]) + " |")
    return lines


def format_count(number: int) -> str:
    return f"{number / 1e9:,.1f} B" if number >= 1e9 else f"{number / 1e6:,.1f} M"


def list_fused(row: dict[str, Any]) -> list[str]:
    lines = ["| part | class | |", "| :-- | :-- | :-- |"]
    for part, name, kind, what in row.get("parts", ()):
        text = escape_markdown(what)
        lines.append(f"| {part} | `{name}` | {'**left**: ' if kind == 'left' else ''}{text} |")
    return lines


def make_measured_table(name: str) -> list[str]:
    """The measured steps of the model in the records of studies.models_2026; a sentence without any."""
    lines = []
    for path in sorted(RESULTS.glob("*-models-2026.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        for row in content["rows"]:
            if row["model"] != name or row["measure"] != "speed":
                continue
            twin = next(
                (
                    r
                    for r in content["rows"]
                    if r["measure"] == "gradients"
                    and r["model"] == name
                    and (r["side"], r["rank"], r["quantized"]) == (row["side"], row["rank"], row["quantized"])
                ),
                {},
            )
            method = f"QLoRA, {row['quantized']}" if row["quantized"] else "LoRA" if row["rank"] else "full"
            size = f"{row['batch']} × {row['seq']:,}, {row['layers']} layers"
            environment = content["environment"]
            side = row["side"] if row["side"] == "tigon" else f"{row['side']} ({row['note'].partition(chr(10))[0]})"
            software = f"{environment['device']}, Triton {environment.get('packages', {}).get('triton', '–')}"
            cells = [software, f"{method}, {size}", side]
            if row["status"] == "ok" and row["peak_gib"]:
                error = "–" if not twin.get("error") else f"{twin['error']:.1e}"
                cells += [f"{row['tokens_per_s']:,.0f}", f"{row['peak_gib']:.1f}", error]
            else:
                cells += [row["reason"][:60] or row["status"], "–", "–"]
            lines.append("| " + " | ".join(cells) + " |")
    if not lines:
        return ["No step of this model has been measured yet."]
    return ["| GPU | step | side | tokens/s | peak GiB | gradients' error |", "| :-- | :-- | :-- | --: | --: | --: |",
            *lines]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", help="models whose names contain one of these, separated by commas; default: all")
    words = parser.parse_args(arguments).only
    before = json.loads(FILE.read_text(encoding="utf-8"))["models"] if FILE.exists() else {}
    for name in MODELS:
        if words and not any(word in name for word in words.split(",")):
            continue
        before[name] = measure_model(name)
        versions = {package: importlib.metadata.version(package) for package in ("transformers", "peft")}
        models = {known: before[known] for known in MODELS if known in before}
        FILE.write_text(json.dumps({"versions": versions, "models": models}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
