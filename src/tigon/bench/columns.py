"""The columns of each kind of result, and how a cell is written."""

from __future__ import annotations

import math
import statistics
from typing import Any


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, without an exponent."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    decimals = max(0, digits - 1 - int(f"{value:e}".split("e")[1]))
    return f"{value:,.{decimals}f}"


def shape_of(row: dict[str, Any]) -> str:
    return "×".join(map(str, row["shape"]))


def model_of(row: dict[str, Any]) -> str:
    """The model's name, and how many layers were built where that is not all of them."""
    return str(row["model"]) + (f", {row['layers']} layers" if row.get("layers") else "")


def format_size(row: dict[str, Any]) -> str:
    """Batch and length of a whole model's step, and how it is taken."""
    micro_batches = f"{row['accumulation']} × " if row.get("accumulation", 1) > 1 else ""
    return f"{micro_batches}{row['batch']}×{row['seq']}" + (", checkpointing" if row["checkpointing"] else "")


def format_share(value: float) -> str:
    return f"{100 * value:.3g} %"


def _total(row: dict[str, Any]) -> str:
    """The median, and half the range of the rounds in per cent of the median; a single round has no range."""
    if row["total_ms"] is None:
        return "–"
    low, high = row["total_range_ms"]
    if low == high:
        return number(row["total_ms"])
    return f"{number(row['total_ms'])} ±{50 * (high - low) / row['total_ms']:.1f}%"


def _times_floor(row: dict[str, Any]) -> str:
    return "–" if row["times_floor"] is None else f"{row['times_floor']:.2f}×"


def _of_one_gpu(row: dict[str, Any]) -> str:
    plain = row.get("plain")
    if not plain or row["side"] == "exchange":
        return "–"
    name = "graph_ms" if plain["graph_ms"] and row["graph_ms"] else "ms"
    return f"{row[name] / plain[name]:.3f}×"


def _rate(row: dict[str, Any], unit: str) -> str:
    return number(row["rate"]) if row["rate_unit"] == unit else "–"


def _errors(row: dict[str, Any]) -> str:
    return _power(max(row["errors"].values())) if row["errors"] else "–"


def _power(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-")


def _against_plain(row: dict[str, Any], key: str, digits: int = 0) -> str:
    """The number, and its difference to Hugging Face's in the same case."""
    if row[key] is None:
        return "–"
    plain = row.get("plain") or {}
    more = "" if not plain.get(key) else f" ({100 * (row[key] / plain[key] - 1):+.1f}%)"
    return f"{row[key]:,.{digits}f}{more}"


def _step(row: dict[str, Any]) -> str:
    """The median step, and half the range of the timed steps in per cent of the median."""
    if row["step_ms"] is None or len(row.get("steps_ms", ())) < 2:
        return number(row["step_ms"])
    low, high = min(row["steps_ms"]), max(row["steps_ms"])
    return f"{number(row['step_ms'])} ±{50 * (high - low) / row['step_ms']:.1f}%"


def remark(row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return f"{row['status'].upper()}: {row['reason']}"
    note: str = row.get("note", "")
    return note


COLUMNS: dict[str, dict[str, Any]] = {
    "ops": {
        "op": lambda r: r["op"],
        "shape": shape_of,
        "dtype": lambda r: r["dtype"],
        "by": lambda r: r["implementation"],
        "fwd ms": lambda r: number(r["forward_ms"]),
        "bwd ms": lambda r: number(r["backward_ms"]),
        "fwd+bwd ms": _total,
        "device ms": lambda r: number(r.get("device_ms")),
        "× floor": _times_floor,
        "GB/s": lambda r: _rate(r, "GB/s"),
        "TFLOP/s": lambda r: _rate(r, "TFLOP/s"),
        "peak MiB": lambda r: "–" if r["peak_mib"] is None else f"{r['peak_mib']:,.0f}",
        "error": _errors,
        "remark": remark,
    },
    "host": {
        "op": lambda r: r["op"],
        "dtype": lambda r: r["dtype"],
        "by": lambda r: r["implementation"],
        "fwd µs": lambda r: number(r["forward_us"]),
        "fwd+bwd µs": lambda r: number(r["total_us"]),
        "× eager": lambda r: "–" if r["times_eager"] is None else f"{r['times_eager']:.2f}×",
        "remark": remark,
    },
    "model": {
        "model": model_of,
        "batch×seq": format_size,
        "masked": lambda r: format_share(r["masked"]),
        "GPUs": lambda r: "–" if r.get("gpus", 1) == 1 else str(r["gpus"]),
        "by": lambda r: r["side"],
        "tokens/s": lambda r: _against_plain(r, "tokens_per_s"),
        "step ms": _step,
        "× floor": lambda r: "–" if r["side"] == "floor" or not r.get("times_floor") else f"{r['times_floor']:.2f}×",
        "peak GiB": lambda r: _against_plain(r, "peak_gib", 1),
        "first loss": lambda r: f"{r['losses'][0]:.5f}" if r["losses"] else "–",
        "last loss": lambda r: f"{r['losses'][-1]:.5f}" if r["losses"] else "–",
        "remark": remark,
    },
    "sequence": {
        "model": lambda r: r["model"] + (", checkpointing" if r["checkpointing"] else ""),
        "sequence": lambda r: f"{r['seq']:,}",
        "by": lambda r: r["side"],
        "tokens/s": lambda r: _against_plain(r, "tokens_per_s"),
        "peak GiB": lambda r: _against_plain(r, "peak_gib", 1),
        "step ms": _step,
        "SM MHz": lambda r: number(r.get("sm_mhz"), 4),
        "W": lambda r: number(r.get("watts")),
        "loss": lambda r: f"{r['losses'][0]:.5f}" if r["losses"] else "–",
        "remark": remark,
    },
    "architecture": {
        "model": lambda r: f"{r['model']}, {r['layers']} layers",
        "batch×seq": lambda r: f"{r['batch']}×{r['seq']}",
        "by": lambda r: r["side"],
        "tokens/s": lambda r: "–" if r["tokens_per_s"] is None else f"{r['tokens_per_s']:,.0f}",
        "fwd+bwd ms": lambda r: number(r["step_ms"]),
        "peak GiB": lambda r: "–" if r["peak_gib"] is None else f"{r['peak_gib']:.1f}",
        "loss − fp32's": lambda r: "–" if r["loss"] is None else f"{r['loss'] - r['loss_fp32']:+.1e}",
        "worst gradient": lambda r: "–" if r["error"] is None else f"{r['error']:.1e}",
        "remark": remark,
    },
}
COLUMNS["sweep"] = {
    **{title: COLUMNS["ops"][title] for title in ("op", "shape", "dtype")},
    "options": lambda r: ", ".join(f"{name} {value}" for name, value in r["options"].items() if value) or "–",
    **{title: column for title, column in COLUMNS["ops"].items() if title not in ("op", "shape", "dtype")},
}
COLUMNS["counters"] = {
    "op": lambda r: r["op"],
    "shape": shape_of,
    "dtype": lambda r: r["dtype"],
    "by": lambda r: r["implementation"],
    "kernel": lambda r: r["kernel"][:40],  # a template's name is a page long
    "needed MiB": lambda r: number(r["needed_mib"]),
    **{
        title: lambda r, key=key: number(r["counters"].get(key))
        for title, key in (
            ("µs", "us"), ("read MiB", "read_mib"), ("written MiB", "written_mib"), ("memory %", "memory_busy"),
            ("SM %", "sm_busy"), ("occupancy %", "occupancy"), ("registers", "registers"),
            ("shared KiB", "shared_kib"), ("wait: memory", "wait_memory"), ("wait: barrier", "wait_barrier"),
        )
    },
    "remark": remark,
}  # fmt: skip


def _quartiles(values: list[float]) -> str:
    """Half of the distance between the quartiles, in per cent of the median."""
    if len(values) < 4:
        return "–"
    low, middle, high = statistics.quantiles(values)
    return f"±{50 * (high - low) / middle:.1f}%"


COLUMNS["hpz"] = {
    "nodes": lambda r: f"{r['gpus'] // r['group_size']} × {r['group_size']} GPU{'s' * (r['group_size'] > 1)}",
    "link between them": lambda r: "own" if r["link_gbps"] is None else f"{r['link_gbps']:g} GB/s, emulated",
    "by": lambda r: r["side"],
    "step ms": lambda r: number(r["step_ms"]),
    "spread": lambda r: _quartiles(r["steps_ms"]),
    "of FSDP2's speed": lambda r: "–" if r["side"] == "fsdp2" else f"{r['plain_ms'] / r['step_ms']:.1%}",
    "of the unordered": lambda r: "–" if r["side"] in ("fsdp2", "none") else f"{r['none_ms'] / r['step_ms']:.1%}",
    "over all, forward MiB": lambda r: number(r["forward_all_mib"]),
    "over all, backward MiB": lambda r: number(r["backward_all_mib"]),
    "in the node MiB": lambda r: number(r["node_mib"]),
    "second shards MiB": lambda r: number(r["shards_mib"]),
    "FSDP2's bits": lambda r: (
        "–" if r["same_bits"] is None else f"{'yes' if r['same_bits'] else 'NO'}, {r['bits_steps']} steps"
    ),
    "remark": lambda r: "" if r["status"] == "ok" else remark(r),
}
COLUMNS["composition"] = {
    "engine": lambda r: r["engine"],
    "processes": lambda r: str(r["world"]),
    "by": lambda r: r["side"],
    "logits": lambda r: r["logits"],
    "loss, error": lambda r: _power(r["loss_error"]),
    "plain": lambda r: _power(r["eager"]["loss_error"]),
    "gradients, error": lambda r: _power(r["gradient_error"]),
    "plain's": lambda r: _power(r["eager"]["gradient_error"]),
    "remark": lambda r: "" if r["status"] == "ok" else "FAILED",
}
COLUMNS["vocabulary-parallel"] = {
    "op": lambda r: r.get("op", ""),  # rows of cross entropy have no "op"
    "shape": shape_of,
    "by": lambda r: r["side"],
    "fwd+bwd ms": lambda r: number(r["ms"]),
    "× one GPU": lambda r: f"{r['plain']['ms'] / r['ms']:.2f}×" if r.get("plain") and r["errors"] else "–",
    "peak GiB": lambda r: "–" if r["peak_gib"] is None else f"{r['peak_gib']:.2f}",
    "error of dX ÷ eager's": lambda r: number(r["errors"].get("dx")),
    "of dW": lambda r: number(r["errors"].get("dw")),
    "remark": remark,
}
COLUMNS["search"] = {
    "rows": lambda r: "–" if r.get("vectors", "random") == "random" else f"{r['items'] / 1e6:,.1f} M {r['vectors']}",
    "queries": lambda r: f"{r['queries']:,}",
    "k": lambda r: f"{r['k']:,}",
    "filter": lambda r: {"none": "none", "one": f"{r['share']:.3g} pass"}.get(r["filters"], "one each, 1/8 pass"),
    "by": lambda r: r["implementation"],
    "called ms": lambda r: number(r["ms"]),
    "p99 ms": lambda r: number(r.get("p99_ms")),
    "graph ms": lambda r: number(r["graph_ms"]),
    "floor ms": lambda r: number(r["floor_ms"]),
    "× floor": _times_floor,
    "peak MiB": lambda r: "–" if r["peak_mib"] is None else f"{r['peak_mib']:,.0f}",
    "ids right": lambda r: "–" if r["equal"] is None else f"{r['equal']:.4f}",
    "candidates": lambda r: "–" if r.get("candidates") is None else f"{r['candidates']:,}",
    "certified": lambda r: "–" if r.get("certified") is None else f"{r['certified']:.1%}",
    "recall": lambda r: "–" if r.get("recall") is None else f"{r['recall']:.4f}",
    "remark": remark,
}
COLUMNS["sharded-search"] = {
    "queries": lambda r: f"{r['queries']:,}",
    "filter": lambda r: "none" if r["filters"] == "none" else f"{r['share']:.3g} pass",
    "by": lambda r: r["side"],
    "called ms": lambda r: number(r["ms"]),
    "graph ms": lambda r: number(r["graph_ms"]),
    "of one GPU": _of_one_gpu,
    "same ids and bits": lambda r: "–" if r["same"] is None else "yes" if r["same"] else "NO",
    "remark": remark,
}
COLUMNS["serve"] = {
    "items": lambda r: f"{r['items']:,}",
    "pass": lambda r: f"{r['share']:.3g}",
    "fronts": lambda r: f"{r['workers']}",
    "clients": lambda r: f"{r['clients']:,}" + (f" × {r['queries']:,}" if r["queries"] > 1 else ""),
    "form": lambda r: r["form"],
    "asked/s": lambda r: f"{r['asked']:,.0f}" if r["asked"] else "–",
    "searches/s": lambda r: f"{r['searches_s']:,.0f}",
    "p50 ms": lambda r: number(r["p50_ms"]),
    "p99 ms": lambda r: number(r["p99_ms"]),
    "refused": lambda r: f"{r['refused']:,}" if r["refused"] else "–",
    "batch": lambda r: f"{r['batch']:.0f}",
    "index µs": lambda r: number(r["index_us"]),
    "fronts µs": lambda r: number(r["fronts_us"]) if r["workers"] else "–",
    "remark": remark,
}
COLUMNS["row-adagrad"] = {
    "table": lambda r: f"{r['rows']:,} × {r['width']}",
    "rows touched": lambda r: f"{r['touched']:,}",
    "by": lambda r: r["side"],
    "step ms": lambda r: number(r["total_ms"]),
    "in a graph ms": lambda r: number(r["graph_ms"]),
    "× floor": lambda r: "–" if r["total_ms"] is None else f"{r['total_ms'] / r['floor_ms']:.2f}×",
    "state MB": lambda r: number(r["state_mb"]),
    "peak MiB": lambda r: "–" if r["peak_mib"] is None else f"{r['peak_mib']:,.0f}",
    "error": lambda r: "–" if r["error"] is None else _power(r["error"]),
    "remark": remark,
}
# The sides that the others are compared with, in the kinds that have such columns.
PLAIN = ("hf", "tigon, one GPU")
CASE_COLUMNS = ("op", "shape", "dtype", "options", "model", "batch×seq", "GPUs", "sequence", "engine", "processes")
TEXT_COLUMNS = (
    *CASE_COLUMNS, "rows", "filter", "nodes", "link between them", "method", "by", "kernel", "logits", "form",
    "remark",
)  # fmt: skip
