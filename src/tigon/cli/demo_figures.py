"""The figures of `tigon demo`: a table, the loss curves, and bars for speed and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

COLOURS = {"plain": "#7f8c8d", "plain again": "#b8c2c4", "fused": "#e67e22"}


def _title(result: dict[str, Any]) -> str:
    return (
        f"Llama, {result['parameters'] / 1e6:,.1f}M parameters, vocabulary {result['vocabulary']:,}, "
        f"{result['batch_size']} × {result['seq_len']} tokens, {result['steps']} steps, {result['dtype']}, "
        f"{result['machine']['name']}"
    )


def table(result: dict[str, Any]) -> Table:
    """Loss, speed and memory of each side, and the fused side against the plain one."""
    sides = result["sides"]
    plain, fused = sides["plain"], sides["fused"]
    body = Table(title=_title(result), caption=_caption(result))
    body.add_column("")
    for name in (*sides, "fused against plain"):
        body.add_column(name, justify="right")

    def row(label: str, values: list[str], compared: str) -> None:
        body.add_row(label, *values, compared)

    def ratio(a: float | None, b: float | None) -> str:
        return "" if not a or not b else f"{a / b - 1:+.1%}"

    row("first loss", [f"{s['losses'][0]:.4f}" for s in sides.values()], _difference(plain, fused, 0))
    row("final loss", [f"{s['losses'][-1]:.4f}" for s in sides.values()], _difference(plain, fused, -1))
    apart = [f"{result['difference']:.1e}" if name == "fused" else "" for name in sides]
    if result["difference_of_two_plain_runs"] is not None:
        apart[list(sides).index("plain again")] = f"{result['difference_of_two_plain_runs']:.1e}"
    row("largest difference of loss from plain, any step", apart, "")
    speed = [s["tokens_per_second"] for s in sides.values()]
    row("tokens/s", [f"{v:,.0f}" for v in speed], ratio(fused["tokens_per_second"], plain["tokens_per_second"]))
    peaks = [s["peak_bytes"] for s in sides.values()]
    row(
        f"peak memory, MiB ({result['memory']})",
        ["unknown" if v is None else f"{v / 2**20:,.0f}" for v in peaks],
        ratio(fused["peak_bytes"], plain["peak_bytes"]),
    )
    grown = {name: growth(side) for name, side in sides.items()}
    if all(v is not None for v in grown.values()):
        row(
            "  of it above the size before the first step",
            [f"{(v or 0) / 2**20:,.0f}" for v in grown.values()],
            ratio(grown["fused"], grown["plain"]),
        )
    return body


def growth(side: dict[str, Any]) -> int | None:
    """The bytes that training added to a process's resident size; None on a GPU, which counts memory itself."""
    before, peak = side["resident_before_training"], side["peak_bytes"]
    return None if before is None or peak is None else peak - before


def _difference(plain: dict[str, Any], fused: dict[str, Any], step: int) -> str:
    return f"{fused['losses'][step] - plain['losses'][step]:+.1e}"


def _caption(result: dict[str, Any]) -> str:
    text = "A small model with a real vocabulary: the logits are the largest part of its work and memory. "
    if result["machine"]["device"] == "cpu":
        return text + "The kernels are for GPUs; on a CPU the gain is the loss without logits and less memory."
    return text + "In bf16 equal runs drift apart; the second plain run shows by how much."


def plot_losses(result: dict[str, Any], file: Path) -> None:
    plt = _pyplot()
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, layout="constrained", height_ratios=(3, 1.2)
    )
    plain = result["sides"]["plain"]["losses"]
    for name, side in result["sides"].items():
        upper.plot(side["losses"], label=name, color=COLOURS[name], linestyle="--" if name == "fused" else "-")
        if name != "plain":
            apart = [abs(a - b) for a, b in zip(side["losses"], plain, strict=True)]
            lower.plot(apart, color=COLOURS[name], label=f"{name} − plain")
    upper.set(ylabel="loss, nats per token", title=_title(result).replace(" tokens, ", " tokens,\n", 1))
    upper.title.set_fontsize(9)
    lower.set(xlabel="step", ylabel="|difference|", yscale="symlog")
    lower.set_yscale("symlog", linthresh=1e-7)
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def plot_bars(result: dict[str, Any], file: Path) -> None:
    plt = _pyplot()
    sides = result["sides"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 4), layout="constrained")
    colours = [COLOURS[name] for name in sides]
    bars = left.bar(list(sides), [s["tokens_per_second"] for s in sides.values()], color=colours)
    left.bar_label(bars, fmt="{:,.0f}")
    left.set(title="tokens/s, median step")
    peaks = [(s["peak_bytes"] or 0) / 2**20 for s in sides.values()]
    right.bar_label(right.bar(list(sides), peaks, color=colours), fmt="{:,.0f}")
    right.set(title=f"peak memory, MiB\n({result['memory']})")
    right.title.set_fontsize(9)
    for axes in (left, right):
        axes.margins(y=0.12)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_title(result), fontsize=8)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["text.parse_math"] = False  # a dollar sign in a device's name is not a formula
    from matplotlib import pyplot

    return pyplot
