"""What run.py measures: one row per operator in OPS, and one per use of it that has kernels of its own.

A row knows how to draw random inputs, how many bytes and FLOPs the operator needs at least, what the right answer is in
fp64, and who implements it. Peers are imported when they are first asked for; one that is missing becomes a line in the
report, not an error.
"""

from __future__ import annotations

from cases import attention, embedding, experts, gated, head_losses, losses, norms, rotary, softmax
from cases.row import Implementation, Op

# As the documentation groups them.
KINDS: dict[str, tuple[Op, ...]] = {
    "Norms": norms.OPS,
    "Gated units": gated.OPS,
    "Experts": experts.OPS,
    "Rotary embeddings": rotary.OPS,
    "Softmax": softmax.OPS,
    "Attention": attention.OPS,
    "Losses": losses.OPS,
    "Losses of a linear head": head_losses.OPS,
    "Embedding": embedding.OPS,
}
OPS: dict[str, Op] = {op.name: op for ops in KINDS.values() for op in ops}

__all__ = ["KINDS", "OPS", "Implementation", "Op"]
