"""The clock and the power of a GPU while something runs, as nvidia-smi reports them.

Two GPUs of one model differ by some per cent in speed, and so does one GPU between cold and hot. A long step runs at
the power limit, where the GPU lowers its clock. So the clock beside a time tells whether two times can be compared.
"""

from __future__ import annotations

import statistics
import subprocess
import threading
from types import TracebackType

import torch

PERIOD_MS = 200


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
