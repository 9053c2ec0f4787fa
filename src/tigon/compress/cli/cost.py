"""`tigon compress --held`: the file, the loss of other text and the time of a call, before compression and after."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

CALLS, LENGTH = 7, 128  # timed calls of one sequence, and its tokens


def megabytes(folder: Path) -> float:
    """10⁶ bytes of the weights in a folder."""
    return sum(file.stat().st_size for kind in ("*.safetensors", "*.bin") for file in folder.glob(kind)) / 1e6


class Cost:
    """What a model costs on held-out batches. Made before the model is changed."""

    def __init__(self, model: Any, batches: list[dict[str, Any]]) -> None:
        from tigon.compress.texts import Whole

        self.model, self.batches = model, batches
        self.whole = Whole(model, batches)
        self.before = self._now()

    def table(self) -> dict[str, Any]:
        """Before and now: loss in nats a token, None where no next token is predicted, and ms of a call; and how far
        the answers moved.
        """
        from tigon.compress.texts import tokens_of

        tokens = sum(map(tokens_of, self.batches))
        return {"before": self.before, "now": self._now(), "distance": self.whole.distance(),
                "unit": self.whole.unit, "tokens": tokens}  # fmt: skip

    def _now(self) -> dict[str, float | None]:
        # Masked language models predict words too, but not the next one.
        causal = self.whole.nats and getattr(self.model, "can_generate", lambda: False)()
        return {"loss": self._loss() if causal else None, "ms": self._ms()}

    def _loss(self) -> float:
        import torch
        import torch.nn.functional as F

        total, count = 0.0, 0
        with torch.no_grad():
            for batch in self.batches:
                y = self.model(**batch).logits[:, :-1].flatten(0, 1).float()
                targets = batch["input_ids"][:, 1:].flatten()
                total, count = total + float(F.cross_entropy(y, targets, reduction="sum")), count + len(targets)
        return total / max(1, count)

    def _ms(self) -> float:
        """The median of a few calls with one sequence; the first is not counted."""
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


def told(cost: dict[str, Any]) -> list[str]:
    """The same as lines of text."""
    before, now = cost["before"], cost["now"]
    if before["loss"] is None:
        loss = f"its answers moved by {cost['distance']:.4g} {cost['unit']}"
    else:
        loss = f"{before['loss']:.4f} nats a token before, {now['loss']:.4f} now ({now['loss'] - before['loss']:+.4f})"
    return [
        f"held-out text: {loss}, on {cost['tokens']:,} tokens",
        f"a call with one sequence: {before['ms']:.1f} ms before, {now['ms']:.1f} now",
    ]
