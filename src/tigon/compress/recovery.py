"""Recovery: a short fine-tune in which each compressed layer learns the original layer's outputs.

Trains scales and offsets, low-rank factors, kept neurons and biases; codes are fixed. An update is kept only if the
error on held-out rows decreases.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from tigon.compress.builder import compute_output, measure_error
from tigon.compress.candidates import Layer
from tigon.compress.layers import Packed

ROWS, RATE = 256, 1e-3  # rows per step; Adam's learning rate relative to each tensor's magnitude


def recover(layer: Layer, layers: Mapping[str, nn.Module], steps: int) -> float:
    """Fine-tune a layer's modules on batches with 256 rows.

    Returns: the held-out error afterwards, no larger than before.
    """
    target = layer.h_fit @ layer.down.t()
    if layer.down_bias is not None:
        target = target + layer.down_bias
    modules = list(layers.values())
    dtypes = [next((p.dtype for p in module.parameters()), torch.float32) for module in modules]
    for module in modules:
        # Steps are smaller than bf16 rounding; packed codes and scales are integers.
        module.float().requires_grad_(True)
    before = measure_error(layer, layers)
    saved = [{k: v.clone() for k, v in module.state_dict().items()} for module in modules]
    parameters = [p for module in modules for p in module.parameters()]
    packed = [part for module in modules for part in module.modules() if isinstance(part, Packed)]
    for part in packed:
        part.trained = part.scales.view(torch.float16).float().requires_grad_()
        parameters.append(part.trained)  # type: ignore[arg-type]
    # Adam moves every number by about its learning rate: scaled by tensor magnitude, the same rate suits scales and
    # weights.
    groups = [{"params": [p], "lr": RATE * float(p.detach().abs().mean().clamp_min(1e-8))} for p in parameters]
    optimizer = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    draw = torch.Generator().manual_seed(0)
    size = target.square().mean()
    with torch.enable_grad():
        for _ in range(steps):
            rows = torch.randint(len(target), (min(ROWS, len(target)),), generator=draw).to(target.device)
            loss = F.mse_loss(compute_output(layer.feed_forward, layers, layer.fit[rows]), target[rows]) / size
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    for part in packed:
        assert part.trained is not None
        part.scales, part.trained = part.trained.detach().half().view(torch.int16), None
    after = measure_error(layer, layers)
    for module, state, dtype in zip(modules, saved, dtypes, strict=True):
        if not after < before:  # NaN fails too
            module.load_state_dict(state)
        module.to(dtype)
    return after if after < before else before
