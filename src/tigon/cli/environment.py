"""A run's hardware and versions: `tigon doctor` prints them, and every benchmark records them."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "torch", "triton", "transformers", "accelerate", "peft", "trl", "datasets", "tokenizers", "liger-kernel",
    "cut-cross-entropy", "quack-kernels",
)  # fmt: skip


def describe_environment(device: torch.device | None = None) -> dict[str, Any]:
    """Hardware and versions as JSON. Missing packages and devices are None.

    device: by default the current CUDA device, or the CPU where there is none.
    """
    from tigon import __version__

    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    environment: dict[str, Any] = {
        "device": _read_cpu_name() if device.type != "cuda" else torch.cuda.get_device_name(device),
        "device_type": device.type,
        "cpu": _read_cpu_name(),
        "memory_gib": None,
        "capability": None,
        "driver": read_driver_version(),
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "tigon": __version__,
        "packages": {name: read_package_version(name) for name in PACKAGES},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        environment["memory_gib"] = round(properties.total_memory / 2**30, 1)
        environment["capability"] = f"{properties.major}.{properties.minor}"
    return environment


def read_package_version(name: str) -> str | None:
    if name == "torch":  # torch's metadata lacks the build (+cu128), which matters as much
        return str(torch.__version__)
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_driver_version() -> str | None:
    """The NVIDIA driver's version, as reported by the kernel module."""
    try:
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    return next((word for word in line.split() if word[0].isdigit() and "." in word), None)


def _read_cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "cpu"
