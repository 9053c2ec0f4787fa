"""What slows the kernels that are furthest from their floors: their hardware counters.

    python benchmarks/studies/counters.py --output results
    python benchmarks/studies/counters.py --output results --only "layer_norm 8192x16384 bf16 tigon"

Each case runs under Nsight Compute (`ncu`) in a process of its own: one forward and backward pass, after one that
compiles, with cold caches and the clocks as they are. The file has a row for each kernel: the bytes that memory moved
beside those that the operator has to move, how busy memory was, and what held the multiprocessors back.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from cases import OPS
from cases.inputs import DTYPES
from harness import report
from harness.runner import parse_shape, run_once

CASES = (
    "layer_norm 8192x16384 bf16 tigon", "layer_norm 8192x16384 bf16 liger", "layer_norm 8192x12288 bf16 tigon",
    "rms_norm 8192x16384 bf16 tigon", "softmax 17x128256 bf16 tigon", "softmax 17x128256 bf16 quack",
    "tvd 8192x128256 bf16 tigon", "tvd 8192x128256 bf16 liger",
)  # fmt: skip
METRICS = {
    "us": "gpu__time_duration.sum",
    "read_mib": "dram__bytes_read.sum",
    "written_mib": "dram__bytes_write.sum",
    "memory_busy": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm_busy": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "shared_kib": "launch__shared_mem_per_block",
    "wait_memory": "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "wait_barrier": "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
}
SCALE = {"us": 1e3, "read_mib": 2**20, "written_mib": 2**20, "shared_kib": 2**10}


@dataclass
class Row:
    """One kernel. µs, MiB, KiB; per cent of what the hardware can; warps that wait for each that issues."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    implementation: str
    kernel: str
    grid: str
    block: str
    needed_mib: float
    counters: dict[str, float]
    status: str = "ok"
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def run(case: str) -> None:
    """The passes that ncu profiles."""
    name, shape, dtype, by = case.split()
    op = OPS[name]
    inputs = op.make(parse_shape(op, shape), DTYPES[dtype], torch.device("cuda"), 0.0)
    fn = op.implementations[by].load()
    run_once(fn, inputs.clone())
    inputs = inputs.clone()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    run_once(fn, inputs)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def watch(case: str, seconds: float) -> list[Row]:
    name, shape, dtype, by = case.split()
    op = OPS[name]
    sizes = parse_shape(op, shape)
    needed = sum(op.nbytes(sizes, DTYPES[dtype].itemsize)) / 2**20
    dtype_name = str(DTYPES[dtype]).removeprefix("torch.")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [
            "ncu", "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw", "--print-units",
            "base", "--log-file", str(log), "--metrics", ",".join(METRICS.values()), sys.executable, __file__,
            "--output", folder, "--run", case,
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return [Row(name, sizes, dtype_name, by, "", "", "", needed, {}, "failed", f"took over {seconds:.0f} s")]
        text = log.read_text() if log.exists() else ""
    rows = []
    for line in parse(text):
        counters = {key: float(line[metric].replace(",", "")) / SCALE.get(key, 1) for key, metric in METRICS.items()}
        kernel = line["Kernel Name"].split("(")[0].split("<")[0].split(" ")[-1]
        rows.append(Row(name, sizes, dtype_name, by, kernel, line["Grid Size"], line["Block Size"], needed, counters))
    if not rows:
        reason = " ".join((done.stderr or done.stdout or text).split())[-200:] or "no kernel was seen"
        rows.append(Row(name, sizes, dtype_name, by, "", "", "", needed, {}, "failed", reason))
    return rows


def parse(text: str) -> list[dict[str, str]]:
    """The lines of ncu's raw page; what it says besides begins with ==, and the line below the header has units."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    return list(csv.DictReader(io.StringIO("\n".join(lines[:1] + lines[2:]))))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", required=True, type=Path, help="folder for the result file")
    parser.add_argument("--only", nargs="+", default=CASES, metavar="CASE", help="'op shape dtype by'")
    parser.add_argument("--seconds", type=float, default=60.0, help="a case may take")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        run(options.run)
        return
    if shutil.which("ncu") is None:
        sys.exit("counters.py: ncu, of NVIDIA Nsight Compute, is not on the PATH.")
    rows: list[Row] = []
    for case in options.only:
        rows += watch(case, options.seconds)
        content = report.result("counters", rows)
        report.save(options.output / report.file_name(content), content)
        print(f"{case}: {rows[-1].status} {rows[-1].reason}", flush=True)
    print(report.to_text(content))


if __name__ == "__main__":
    main()
