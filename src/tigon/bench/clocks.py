"""The clock and the power of a GPU while something runs, as nvidia-smi reports them; and how fast the host is.

Two GPUs of one model differ by some per cent in speed, and so does one GPU between cold and hot. A long step runs at
the power limit, where the GPU lowers its clock. So the clock beside a time tells whether two times can be compared.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import threading
import time
from types import TracebackType

import torch

PERIOD_MS = 200
WORK_RUNS = 15
SLOW = 1.4


class Clocks:
    """Sample a device's SM clock (MHz) and power (W) in the background. Without nvidia-smi there are no samples."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.samples: list[tuple[float, float]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Clocks:
        if self.device.type == "cuda" and torch.version.cuda:
            query = "--query-gpu=clocks.sm,power.draw"
            which = f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"
            command = ["nvidia-smi", query, "--format=csv,noheader,nounits", f"-lms={PERIOD_MS}", "-i", which]
            try:
                self._process = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1
                )
            except OSError:
                return self
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _read(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            self.add(line)

    def add(self, line: str) -> None:
        """Take note of one line of nvidia-smi, "1980, 687.51"; an unsupported value, "[N/A]", is no sample."""
        try:
            mhz, watts = map(float, line.split(","))
        except ValueError:
            return
        self.samples.append((mhz, watts))

    def medians(self, since: int = 0) -> tuple[float | None, float | None]:
        """Median clock and power of the samples from number `since` on."""
        samples = self.samples[since:]
        if not samples:
            return None, None
        mhz, watts = zip(*samples, strict=True)
        return statistics.median(mhz), statistics.median(watts)


class Host:
    """How fast the host is, and how many processors other processes keep busy, from one sample to the next.

    A call that the host limits takes as long as its Python, which takes twice as long where a neighbour on the same
    core is busy. So a piece of Python that is always the same is timed beside it.
    """

    def __init__(self) -> None:
        self.us: list[float] = []
        self.others: list[float] = []
        self._before = _busy_seconds()

    def sample(self, patience: float = 0.0) -> None:
        """Time the piece of Python, and count what others have used since the sample before.

        Where the host is slower than it was at its best, wait for it, `patience` seconds at most.
        """
        deadline = time.monotonic() + patience
        us = statistics.median(_work_us() for _ in range(WORK_RUNS))
        while us > SLOW * min(self.us, default=us) and time.monotonic() < deadline:
            time.sleep(0.1)
            us = statistics.median(_work_us() for _ in range(WORK_RUNS))
        self.us.append(us)
        now, before = _busy_seconds(), self._before
        if now is not None and before is not None and now[0] - before[0] > 0.05:
            self.others.append(max(0.0, (now[1] - before[1]) / (now[0] - before[0])))
        self._before = now

    def wait(self, seconds: float, busy: float = 0.5) -> None:
        """Wait until the processes of others keep fewer processors busy, for some seconds at most."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            before = _busy_seconds()
            time.sleep(0.3)
            now = _busy_seconds()
            if before is None or now is None or (now[1] - before[1]) / (now[0] - before[0]) < busy:
                break
        self._before = _busy_seconds()

    def summary(self) -> dict[str, float]:
        """Least, middle and largest of the samples; nothing of what could not be read."""
        found: dict[str, float] = {}
        for name, samples in (("us", self.us), ("others", self.others)):
            if samples:
                found |= {f"{name}_least": min(samples), name: statistics.median(samples), f"{name}_most": max(samples)}
        return {name: round(value, 3) for name, value in found.items()}


def _work_us() -> float:
    """Microseconds of a piece of Python that calls, allocates and looks things up, as a launch does."""
    table = {(i, str(i)): i for i in range(8)}
    start = time.perf_counter()
    total = 0
    for i in range(400):
        total += _called(table, (i & 7, str(i & 7)), [i, total])
    return 1e6 * (time.perf_counter() - start)


def _called(table: dict[tuple[int, str], int], key: tuple[int, str], pair: list[int]) -> int:
    return table[key] + len(pair)


def _busy_seconds() -> tuple[float, float] | None:
    """The time, and the seconds that processors were busy with other processes; None where Linux is not asked."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        with open("/proc/stat") as file:
            user, nice, system, _, _, irq, softirq, *rest = map(int, file.readline().split()[1:])
        ticks = user + nice + system + irq + softirq + sum(rest[:1])  # what the machine's own host has stolen
        own = os.times()
        return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK") - own.user - own.system
    return None
