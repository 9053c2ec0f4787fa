"""Who is first in each draw of a sweep, and the tables of where Tigon is not.

Tigon is first, or behind, if the medians differ by more than NOISE and by more than the two measurements scatter;
else it is a tie. A peer with a wrong result, or with none, does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tigon.bench.columns import number, shape_of
from tigon.bench.matrix import NOISE, By, Cells, cases_of, scatter_of, to_markdown
from tigon.bench.report import headline, source

OURS = "tigon"
# Allocations are rounded up; a smaller difference of peaks is no difference.
LEAST_MIB = 1.0
# The host may take longer than the device for a call that is shorter than this; and for one that is shorter than
# MANY_MS, if the device could be done in a fraction of that time. Such calls are timed as a CUDA graph too.
HOST_MS, MANY_MS = 3.0, 10.0
FRACTION = 0.8
WORDS = ("first", "tie", "behind", "alone", "wrong", "failed")


@dataclass(frozen=True)
class Verdict:
    """One draw. word: one of WORDS. peer: the best of the others, "" if there is none. more: ours over its, less 1."""

    word: str
    row: dict[str, Any]
    peer: str = ""
    ours: float | None = None
    theirs: float | None = None
    more: float = 0.0


def best_peer(by: By, key: str = "total_ms") -> str | None:
    """The implementation that is not Tigon's with a right result and the least value."""
    right = {
        name: row[key]
        for name, row in by.items()
        if row["status"] == "ok" and row[key] is not None and not name.startswith(OURS)
    }
    return min(right, key=lambda name: right[name]) if right else None


def verdict_of(by: By) -> Verdict:
    """Of the time of forward and backward."""
    row = by.get(OURS)
    if row is None or row["status"] != "ok" or row["total_ms"] is None:
        return Verdict("wrong" if row and row["status"] == "wrong" else "failed", row or next(iter(by.values())))
    peer = best_peer(by)
    if peer is None:
        return Verdict("alone", row, ours=row["total_ms"])
    other = by[peer]
    ours, theirs = row["total_ms"], other["total_ms"]
    margin = max(NOISE, scatter_of(row) + scatter_of(other))
    word = "first" if theirs > ours * (1 + margin) else "behind" if ours > theirs * (1 + margin) else "tie"
    return Verdict(word, row, peer, ours, theirs, ours / theirs - 1)


def device_of(by: By) -> Verdict | None:
    """Of the time of the device alone, without the host's; None where Tigon's is not known."""
    device = {name: {**row, "device_ms": _device_ms(row)} for name, row in by.items()}
    row = device.get(OURS)
    if row is None or row["status"] != "ok" or row["device_ms"] is None:
        return None
    peer = best_peer(device, "device_ms")
    if peer is None:
        return Verdict("alone", row, ours=row["device_ms"])
    ours, theirs = row["device_ms"], device[peer]["device_ms"]
    word = "first" if theirs > ours * (1 + NOISE) else "behind" if ours > theirs * (1 + NOISE) else "tie"
    return Verdict(word, row, peer, ours, theirs, ours / theirs - 1)


def host_may_limit(row: dict[str, Any]) -> bool:
    """Whether the time of a call may be the host's: many launches, each of which the device is waiting for."""
    total, floor = row["total_ms"], row["floor_ms"]
    return bool(total) and (total < HOST_MS or (total < MANY_MS and floor is not None and floor < FRACTION * total))


def host_limits(row: dict[str, Any]) -> bool:
    """Whether the device, on its own, is done in a fraction of the time that the call takes."""
    return row["device_ms"] is not None and bool(row["total_ms"]) and row["device_ms"] < FRACTION * row["total_ms"]


def _device_ms(row: dict[str, Any]) -> float | None:
    """The device's time; of a call that the host cannot limit the time of the call, None where it is not known."""
    found: float | None = row["device_ms"]
    if found is None and (row["op"] == "model" or not row["total_ms"] or host_may_limit(row)):
        return None
    # A call contains what the device does. A CUDA graph of large results can take longer, in memory of its own.
    return min(float(time) for time in (found, row["total_ms"]) if time)


def memory_of(by: By) -> Verdict | None:
    """Of the peak memory; None where it was not measured, or Tigon has no right result.

    Peers that write gradients over their inputs do not count: the memory of the inputs is not theirs.
    """
    row = by.get(OURS)
    if row is None or row["status"] != "ok" or row["peak_mib"] is None:
        return None
    kept = {name: one for name, one in by.items() if "write" not in one["note"]}
    peer = best_peer(kept, "peak_mib")
    if peer is None:
        return Verdict("alone", row, ours=row["peak_mib"])
    ours, theirs = row["peak_mib"], by[peer]["peak_mib"]
    apart = abs(ours - theirs) > max(LEAST_MIB, NOISE * min(ours, theirs))
    word = "tie" if not apart else "first" if ours < theirs else "behind"
    return Verdict(word, row, peer, ours, theirs, ours / theirs - 1 if theirs > 0 else 0.0)


def verdicts(content: dict[str, Any], of: Callable[[By], Verdict | None] = verdict_of) -> list[Verdict]:
    """Of every draw of a result of a sweep."""
    found = (of(by) for by in cases_of(content["rows"], "implementation"))
    return [one for one in found if one is not None]


def on_device(content: dict[str, Any]) -> list[Verdict]:
    """Of the device alone; nothing of a CPU, which is the host."""
    return verdicts(content, device_of) if content["environment"]["device_type"] == "cuda" else []


def count(found: Sequence[Verdict]) -> dict[str, int]:
    return {word: sum(one.word == word for one in found) for word in WORDS}


def furthest_behind(content: dict[str, Any]) -> float:
    """By how many per cent Tigon's time is more than the best peer's, in the draw where it is furthest behind."""
    return max((100 * one.more for one in verdicts(content) if one.word == "behind"), default=0.0)


# -------------------------------------------------------------------------------------------------------------- tables


def summary(content: dict[str, Any]) -> str:
    """Sentences: how many draws, and in how many of them Tigon is first."""
    found = verdicts(content)
    times = count(found)
    lines = [_sentence(f"Of {len(found)} draws (seed {content['sweep']['seed']}) Tigon is first in", times)]
    if device := on_device(content):
        lines.append(_sentence("On the device alone, without the host's time, it is first in", count(device)))
        lines += _of_the_host(found, device)
    if memory := verdicts(content, memory_of):
        lines.append(_sentence("It needs the least memory in", count(memory)))
    about = content["sweep"]
    if left := about["not_begun"]:
        lines.append(f"{left} of {about['draws']} draws were not measured; --resume goes on with them.")
    if about["skipped"]:
        lines.append(f"{about['skipped']} draws were skipped, since none of their sizes fits {about['gib']} GiB.")
    return " ".join(lines)


def _of_the_host(found: Sequence[Verdict], device: Sequence[Verdict]) -> list[str]:
    """A sentence about the draws in which Tigon is behind as called, and the host is what takes the time."""
    alone = {one.row["draw"]: one.word for one in device}
    held = [one for one in found if one.word == "behind" and host_limits(one.row)]
    if not held:
        return []
    kept = sum(alone.get(one.row["draw"]) in ("first", "tie", "alone") for one in held)
    behind = sum(one.word == "behind" for one in found)
    return [
        f"Of the {behind} in which it is behind as called, the host limits {len(held)}: the device would be done in "
        f"less than {100 * FRACTION:.0f} % of the time, and on the device Tigon is first or ties in {kept} of them."
    ]


def _sentence(opening: str, words: dict[str, int]) -> str:
    total = sum(words.values())
    share = f" ({100 * words['first'] / total:.0f} %)" if total else ""
    parts = [f"{opening} {words['first']} of {total}{share}", f"tie in {words['tie']}", f"behind in {words['behind']}"]
    parts += [f"{word} in {words[word]}" for word in ("alone", "wrong", "failed") if words[word]]
    return ", ".join(parts) + "."


def by_operator(content: dict[str, Any]) -> Cells:
    """A line for each operator: how often it is first, and its time over the best peer's, the middle and the worst.

    As called, and on the device alone.
    """
    called, device = _by_op(verdicts(content)), _by_op(on_device(content))
    lines = []
    for op in sorted(called):
        words = count(called[op])
        other = sum(words[word] for word in ("alone", "wrong", "failed"))
        alone = count(device[op]) if op in device else dict.fromkeys(WORDS, "–")
        lines.append([
            op, str(len(called[op])), *(str(words[w]) for w in WORDS[:3]), str(other), _ratios(called[op]),
            *(str(alone[w]) for w in WORDS[:3]), _ratios(device.get(op, [])),
        ])  # fmt: skip
    names = ["first", "tie", "behind"]
    return [
        "op", "draws", *names, "other", "÷ best peer", *(f"device: {name}" for name in names), "device: ÷ best peer",
    ], lines  # fmt: skip


def _by_op(found: Sequence[Verdict]) -> dict[str, list[Verdict]]:
    ops: dict[str, list[Verdict]] = {}
    for one in found:
        ops.setdefault(one.row["op"], []).append(one)
    return ops


def _ratios(found: Sequence[Verdict]) -> str:
    """The middle one, and the worst."""
    ratios = sorted(1 + one.more for one in found if one.peer)
    return f"{ratios[(len(ratios) - 1) // 2]:.2f}×, {ratios[-1]:.2f}×" if ratios else "–"


def behind(content: dict[str, Any]) -> Cells:
    """The draws in which Tigon is behind, as called or on the device, the worst first; then results that are wrong."""
    found = verdicts(content)
    device = {one.row["draw"]: one for one in on_device(content)}
    slow = []
    for one in found:
        both = [v for v in (one, device.get(one.row["draw"])) if v is not None and v.word == "behind"]
        if both and one.word not in ("wrong", "failed"):
            slow.append((max(v.more for v in both), one))
    lines = [
        [*_case(one.row), *_times(one), _limit(one.row), *_times(device.get(one.row["draw"]))]
        for _, one in sorted(slow, key=lambda pair: -pair[0])
    ]
    bad = [one for one in found if one.word in ("wrong", "failed")]
    lines += [[*_case(one.row), one.word, "–", one.row["reason"] or "–", *["–"] * 6] for one in bad]
    times = ["tigon ms", "best ms", "by", "behind"]
    return [*_CASE, *times, "limit", *(f"device: {name}" for name in times)], lines


def _limit(row: dict[str, Any]) -> str:
    """What Tigon's call waits for."""
    if row["device_ms"] is None and (row["op"] == "model" or host_may_limit(row)):
        return "–"  # not known
    return "host" if host_limits(row) else "device"


def _times(one: Verdict | None) -> list[str]:
    if one is None or not one.peer:
        return ["–"] * 4
    word = _percent(one.more) if one.word == "behind" else one.word
    return [number(one.ours), number(one.theirs), one.peer, word]


def behind_in_memory(content: dict[str, Any]) -> Cells:
    found = (one for one in verdicts(content, memory_of) if one.word == "behind")
    lines = [
        [*_case(one.row), f"{one.ours:,.1f}", f"{one.theirs:,.1f}", one.peer, _percent(one.more)]
        for one in sorted(found, key=lambda one: -one.more)
    ]
    return [*_CASE, "tigon MiB", "least MiB", "by", "more"], lines


_CASE = ("op", "shape", "dtype", "options")
LEFT = (*_CASE, "by", "limit", "device: by")


def _case(row: dict[str, Any]) -> list[str]:
    options = ", ".join(f"{name} {value}" for name, value in row["options"].items() if value)
    return [row["op"], shape_of(row), row["dtype"], options or "–"]


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %".replace("-", "−")


TABLES: dict[str, Callable[[dict[str, Any]], Cells]] = {
    "Not first in time": behind,
    "Not least in memory": behind_in_memory,
    "By operator": by_operator,
}


def tables(content: dict[str, Any]) -> dict[str, Cells]:
    """The tables of a sweep by title, without those that are empty, and without columns that are."""
    return {title: _filled(cells) for title, make in TABLES.items() if (cells := make(content))[1]}


def _filled(cells: Cells) -> Cells:
    header, rows = cells
    kept = [i for i in range(len(header)) if any(row[i] != "–" for row in rows)]
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]


def to_text(content: dict[str, Any]) -> str:
    parts = [headline(content)]
    for title, (header, rows) in tables(content).items():
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)
        ]
        parts += ["", title, *(line.rstrip() for line in lines)]
    return "\n".join([*parts, "", summary(content), *content.get("notes", ())])


def to_page(content: dict[str, Any]) -> str:
    """Markdown of the summary, the tables and their origin."""
    parts = [summary(content)]
    parts += [f"{title}:\n\n{to_markdown(cells)}" for title, cells in tables(content).items()]
    return "\n\n".join([*parts, " ".join([*content.get("notes", ()), source(content)])]) + "\n"
