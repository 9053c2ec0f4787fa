"""`tigon compress --held`: file size, held-out loss and latency before and after compression."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

CALLS, LENGTH = 7, 128  # timed calls with a single sequence; tokens in that sequence


def measure_megabytes(folder: Path) -> float:
    """Size in 10⁶ bytes for the weights in a folder."""
    return sum(file.stat().st_size for kind in ("*.safetensors", "*.bin") for file in folder.glob(kind)) / 1e6


class Cost:
    """Cost on held-out batches. Construct before changing the model."""

    def __init__(self, model: Any, batches: list[dict[str, Any]]) -> None:
        from tigon.compress.calibration import OutputDistance

        self.model, self.batches = model, batches
        self.outputs = OutputDistance(model, batches)
        self.before = self._measure()

    def measure(self) -> dict[str, Any]:
        """Loss and latency before and after, and the output distance.

        Loss is in nats per token, None unless the model predicts next tokens; latency in ms per call.
        """
        from tigon.compress.calibration import count_tokens

        tokens = sum(map(count_tokens, self.batches))
        return {"before": self.before, "now": self._measure(), "distance": self.outputs.measure(),
                "unit": self.outputs.unit, "tokens": tokens}  # fmt: skip

    def _measure(self) -> dict[str, float | None]:
        # Masked language models also have a token head, but do not predict the next token.
        causal = self.outputs.is_nats and getattr(self.model, "can_generate", lambda: False)()
        return {"loss": self._measure_loss() if causal else None, "ms": self._measure_ms()}

    def _measure_loss(self) -> float:
        import torch
        import torch.nn.functional as F

        total, count = 0.0, 0
        with torch.no_grad():
            for batch in self.batches:
                y = self.model(**batch).logits[:, :-1].flatten(0, 1).float()
                targets = batch["input_ids"][:, 1:].flatten()
                total, count = total + float(F.cross_entropy(y, targets, reduction="sum")), count + len(targets)
        return total / max(1, count)

    def _measure_ms(self) -> float:
        """Median latency over a few single-sequence calls; the first call is a warm-up."""
        import torch

        ids = self.batches[0]["input_ids"][:1, :LENGTH]
        wait: Any = torch.cuda.synchronize if ids.is_cuda else lambda: None
        times = []
        with torch.no_grad():
            for _ in range(CALLS + 1):
                wait()
                began = time.perf_counter()
                self.model(input_ids=ids)
                wait()
                times.append(1e3 * (time.perf_counter() - began))
        return statistics.median(times[1:])


def format_cost(cost: dict[str, Any]) -> list[str]:
    """Format the cost as text lines."""
    before, now = cost["before"], cost["now"]
    if before["loss"] is None:
        loss = f"outputs changed by {cost['distance']:.4g} {cost['unit']}"
    else:
        loss = (
            f"{before['loss']:.4f} nats per token before, {now['loss']:.4f} now ({now['loss'] - before['loss']:+.4f})"
        )
    return [
        f"held-out text: {loss}, on {cost['tokens']:,} tokens",
        f"latency for one sequence: {before['ms']:.1f} ms before, {now['ms']:.1f} now",
    ]
