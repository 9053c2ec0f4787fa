"""How a training step spends the device's time: milliseconds by kind of kernel, told by the kernels' names.

A name says which kernel was launched, not for which operator. A norm that eager code runs as six elementwise kernels
counts as elementwise. A fused kernel of torch.compile counts under the first kind whose operators its name has.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

# The first pattern that matches counts. Names of Triton kernels (Tigon, Liger), Inductor, cuBLAS and PyTorch.
_PATTERNS = {
    "attention": r"flash|fmha|sdpa|attention|attn|efficient_attention",
    "communication": r"nccl",
    "optimizer": r"adam|multi_tensor_apply",
    "loss": r"cross_entropy|nll_loss|softmax|logprob|divergence|element_mul|^_(reduce|narrow|scale)_kernel",
    "matmul": r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitk|wgmma|triton_tem_|^_(logits|rows|weight_bwd)_kernel",
    "rotary": r"rope|rotary|triton_.*_fused_.*(cos|sin_|cat)",
    "norms": r"rms_?norm|layer_?norm|group_norm|_norm_|rsqrt|_sum_rows_kernel",
    "gated unit": r"swiglu|geglu|gated|silu|gelu|_unit_(fwd|bwd)",
    "embedding": r"embedding|gather|index|radixsort|compute_grad_weight|krn_partial|sum_and_scatter",
}
KINDS = (*(kind for kind in _PATTERNS), "elementwise and copies", "idle")
_COMPILED = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in _PATTERNS.items()}
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def classify_kernel(kernel: str) -> str:
    """One of KINDS for a kernel's name."""
    return next((kind for kind, pattern in _COMPILED.items() if pattern.search(kernel)), "elementwise and copies")


def sum_by_kind(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds by kind, in the order of KINDS, of the events of a Chrome trace (microseconds).

    "idle" is the time between the first kernel's start and the last one's end in which none ran.
    """
    kernels = sorted((e["ts"], e["dur"], e["name"]) for e in events if e.get("cat") in _ON_DEVICE)
    found: dict[str, float] = {}
    idle, end = 0.0, None
    for start, duration, name in kernels:
        kind = classify_kernel(name)
        found[kind] = found.get(kind, 0.0) + duration / 1e3
        if end is not None and start > end:
            idle += (start - end) / 1e3
        end = start + duration if end is None else max(end, start + duration)
    if kernels:
        found["idle"] = idle
    return {kind: round(found[kind], 4) for kind in KINDS if kind in found}


def profile_step(step: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Milliseconds by kind: of two recordings that with less idle time. Empty on a device without kernels.

    Emptying the profiler's buffers can halt the device for a tenth of a second in one of the recordings.
    """
    return min((record_step(step, device) for _ in range(2)), key=lambda ms: ms.get("idle", 0.0))


def record_step(step: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Run a step twice and record the second. Empty on a device without kernels."""
    if device.type != "cuda":
        return {}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA],
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(trace)),
        ) as profiler:
            for _ in range(2):
                step()
                torch.cuda.synchronize(device)
                profiler.step()
        return sum_by_kind(json.loads(trace.read_text())["traceEvents"])
