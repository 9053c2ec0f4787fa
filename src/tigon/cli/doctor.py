"""`tigon doctor`: installed versions, the hardware, and whether operators run their kernels here, and why."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer

from tigon.cli.options import json_option, option

VARIABLES = (
    "TIGON_BACKEND", "TIGON_CHUNK_BYTES", "TIGON_CHECKS", "TRITON_INTERPRET", "TRITON_CACHE_DIR",
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CC",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    json: bool = json_option()
    check: bool = option(False, "Run every operator and compare the results with fp64.")


def doctor(options: DoctorOptions) -> None:
    """Versions, devices, environment, and which implementation the operators use for each dtype, and why."""
    found = examine(options.check)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        _show(found)
    if any(row["status"] != "ok" for row in found.get("checks", [])):
        raise typer.Exit(1)


def examine(check: bool = False) -> dict[str, Any]:
    """Collect everything that the command prints. A part that fails holds {"error": sentence} instead."""
    found = {
        "versions": _try(_list_versions),
        "devices": _try(_list_devices),
        "environment": {name: os.environ.get(name) for name in VARIABLES},
        "compiler": _try(_find_compiler),
        "paths": _try(_list_paths),
    }
    if check:
        found["checks"] = _try(_run_checks)
        if isinstance(found["checks"], dict):
            found["checks"] = [{"op": "all", "device": "", "status": "failed", "reason": found["checks"]["error"]}]
    return found


def _try(fn: Callable[[], Any]) -> Any:
    try:
        return fn()
    except Exception as error:  # the doctor is called when something is broken, so no failure may stop it
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def _list_versions() -> dict[str, Any]:
    import platform

    from tigon import __version__
    from tigon.cli.environment import PACKAGES, read_package_version

    return {"tigon": __version__, "python": platform.python_version(), **{p: read_package_version(p) for p in PACKAGES}}


def _list_devices() -> list[dict[str, Any]]:
    import torch

    from tigon.cli.environment import describe_environment

    names = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0))]
    keys = ("device", "capability", "memory_gib", "driver", "cuda", "hip", "threads")
    devices = []
    for name in names:
        facts = describe_environment(torch.device(name))
        devices.append({"name": name, **{k: facts[k] for k in keys if facts[k] is not None}})
    return devices


def _find_compiler() -> dict[str, Any]:
    """The C compiler that Triton uses to build launchers: CC, else gcc or clang."""
    wanted = os.environ.get("CC")
    names = [wanted] if wanted else ["gcc", "clang", "cc"]
    path = next((p for p in map(shutil.which, names) if p), None)
    return {"path": path, "reason": None if path else f"no {' or '.join(names)} on PATH: Triton cannot build launchers"}


def _list_paths() -> list[dict[str, Any]]:
    """For each device and dtype, which implementation every operator uses."""
    import torch

    from tigon import kernels as runtime

    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0))]
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
    rows = []
    for device in devices:
        for name, dtype in dtypes.items():
            sample = torch.empty(1, dtype=dtype, device=device)
            reason = runtime.why_not_triton(sample)
            try:
                path = "triton" if runtime.use_triton(sample) else "torch"
            except RuntimeError as error:
                path, reason = "none", str(error)
            if reason is None and path == "torch":
                forced = os.environ.get("TIGON_BACKEND") == "torch"
                reason = "TIGON_BACKEND=torch" if forced else "the interpreter is used only if TIGON_BACKEND=triton"
            rows.append({"device": device, "dtype": name, "path": path, "reason": reason or ""})
    return rows


def _run_checks() -> list[dict[str, Any]]:
    import torch

    from tigon.cli.checks import check_operator, load_examples

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return [check_operator(name, example, device, dtype) for name, example in load_examples().items()]


def _show(found: dict[str, Any]) -> None:
    describe: dict[str, Callable[[Any], list[str]]] = {
        "versions": lambda part: [f"{k:18} {v or 'not installed'}" for k, v in part.items()],
        "devices": lambda part: [_describe_device(device) for device in part],
        "compiler": lambda part: [part["path"] or part["reason"]],
        "environment": lambda part: [f"{k}={v}" for k, v in part.items() if v is not None] or ["nothing set"],
        "paths": _describe_paths,
        "checks": lambda part: [
            f"{row['op']:22} {row['status']}, " + (row["reason"] or f"error {row['error']:.1e}") for row in part
        ],
    }
    for title in [name for name in describe if name in found]:
        part = found[title]
        failed = isinstance(part, dict) and set(part) == {"error"}
        print(title, *([part["error"]] if failed else describe[title](part)), sep="\n  ")


def _describe_device(device: dict[str, Any]) -> str:
    words = [f"{device['name']:8} {device['device']}"]
    if "capability" in device:
        words.append(f"compute capability {device['capability']}, {device['memory_gib']} GiB")
    if "driver" in device and device["name"] != "cpu":
        words.append(f"driver {device['driver']}")
    if device["name"] == "cpu":
        words.append(f"{device['threads']} threads")
    return ", ".join(words)


def _describe_paths(rows: list[dict[str, Any]]) -> list[str]:
    """One line for all dtypes that take the same path."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        groups.setdefault((row["device"], row["path"], row["reason"]), []).append(row["dtype"])
    return [
        f"{device:8} {', '.join(dtypes)}: {path}" + (f" ({reason})" if reason else "")
        for (device, path, reason), dtypes in groups.items()
    ]
