"""Recovery: a short fine-tune in which each compressed layer learns the original layer's outputs.

Trains scales and offsets, low-rank factors, kept neurons and biases; codes are fixed. An update is kept only if the
error on held-out rows decreases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.compress.building import output
from tigon.compress.finding import FeedForward
from tigon.compress.layers import Packed

ROWS, RATE = 256, 1e-3  # rows per step; Adam's learning rate relative to each tensor's magnitude


def recover(
    found: FeedForward, layers: Mapping[str, nn.Module], fit: Tensor, target: Tensor, steps: int,
    held: Callable[[], float],
) -> float:  # fmt: skip
    """Fine-tune the layers on batches with 256 rows.

    Args:
        fit, target: (T, d) inputs and outputs for the original layer, fp32.
        held: computes the error on held-out rows with the layers in fp32.
    Returns: the held-out error afterwards, no larger than before.
    """
    modules = list(layers.values())
    dtypes = [next((p.dtype for p in module.parameters()), torch.float32) for module in modules]
    for module in modules:
        # Steps are smaller than bf16 rounding; packed codes and scales are integers.
        module.float().requires_grad_(True)
    before = held()
    saved = [{k: v.clone() for k, v in module.state_dict().items()} for module in modules]
    trained = _trained(modules)
    # Adam moves every number by about its learning rate: scaled by tensor magnitude, the same rate suits scales and
    # weights.
    groups = [{"params": [p], "lr": RATE * float(p.detach().abs().mean().clamp_min(1e-8))} for p in trained]
    optimizer = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    draw = torch.Generator().manual_seed(0)
    size = target.square().mean()
    with torch.enable_grad():
        for _ in range(steps):
            rows = torch.randint(len(fit), (min(ROWS, len(fit)),), generator=draw).to(fit.device)
            loss = F.mse_loss(output(found, layers, fit[rows]), target[rows]) / size
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    _settled(modules)
    after = held()
    for module, state, dtype in zip(modules, saved, dtypes, strict=True):
        if not after < before:  # NaN fails too
            module.load_state_dict(state)
        module.to(dtype)
    return after if after < before else before


def _trained(modules: list[nn.Module]) -> list[Tensor]:
    """Tensors to train; scales stay in fp32 during recovery."""
    found: list[Tensor] = []
    for module in modules:
        for inside in module.modules():
            if isinstance(inside, Packed):
                inside.trained = inside.scales.view(torch.float16).float().requires_grad_()
                found.append(inside.trained)
        found += [p for p in module.parameters() if p.requires_grad]
    return found


def _settled(modules: list[nn.Module]) -> None:
    for module in modules:
        for inside in module.modules():
            if isinstance(inside, Packed) and inside.trained is not None:
                inside.scales = inside.trained.detach().half().view(torch.int16)
                inside.trained = None
