"""Adapters (LoRA, QLoRA) of several libraries side by side: the rows of the record, and the table of them.

A row is one side in one case. What a case measures stands in `measure`:

    speed        the median step, tokens/s and the peak of the timed steps
    gradients    loss and adapters' gradients of a few layers, beside those of the same numbers in fp32
    memory       the peak of one step; two lengths give the bytes that a token needs
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from harness.training import MASKED

SIDES = {
    "hf": "HF + PEFT", "liger": "Liger", "unsloth": "Unsloth", "tigon": "Tigon (`cheap`)",
    "tigon-fp8": "Tigon (`cheap`, FP8)", "tigon-fp8-release": "Tigon (`cheap`, FP8, base released)",
    "tigon-offload": "Tigon (`cheap`, offload)", "tigon-mlp-offload": "Tigon (`mlp`, offload)",
}  # fmt: skip


@dataclass
class Row:
    """One side in one case.

    quantized: "" or "nf4", the form of the frozen weights. layers: 0 for all of the model's. host_ms: until the host
    has issued a step, the median. error, error_a, error_b: of all adapters' gradients, of the A's and of the B's,
    relative to fp32's in the Euclidean norm; worst names the furthest single gradient.
    """

    model: str
    side: str
    batch: int
    seq: int
    rank: int = 16
    quantized: str = ""
    checkpointing: bool = False
    measure: str = "speed"
    layers: int = 0
    status: str = "ok"  # ok | wrong | failed
    reason: str = ""
    note: str = ""
    step_ms: float | None = None
    steps_ms: list[float] = field(default_factory=list)
    host_ms: float | None = None
    tokens_per_s: float | None = None
    peak_gib: float | None = None
    reserved_gib: float | None = None
    weights_gib: float | None = None
    trained: int | None = None
    loss: float | None = None
    loss_error: float | None = None
    error: float | None = None
    error_a: float | None = None
    error_b: float | None = None
    worst: str = ""
    wall_s: float | None = None
    date: str = ""  # of the run that the row is from, and its command
    command: str = ""
    masked: float = MASKED  # share of the labels

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
