"""What the fused loss holds at its peak, on shapes of real models, counted without a GPU: nothing here may grow."""

import pytest
import torch

import tigon
from tigon.fusion.memory.estimate import AllocationTracker
from tigon.kernels.dispatch import meta_as_gpu
from tigon.ops.linear import chunk_size

GIB = 2**30


def peak_of(N, H, V, **walk):
    """Bytes beyond the inputs, of forward and backward pass of a mean in bf16."""
    x = torch.empty(N, H, device="meta", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(V, H, device="meta", dtype=torch.bfloat16, requires_grad=True)
    target = torch.empty(N, device="meta", dtype=torch.int64)
    with meta_as_gpu(), AllocationTracker() as books:
        loss = tigon.linear_cross_entropy(x, weight, target, chunks=tigon.losses.ChunkOptions(**walk))
        grads = torch.autograd.grad(loss, (x, weight))
    assert [g.shape for g in grads] == [x.shape, weight.shape]
    return books.peak.total


@pytest.mark.parametrize(
    ("shape", "rows", "padded"),
    [
        ((10007, 2560, 151936), 3456, 151936),  # three chunks, the last of fewer rows
        ((16384, 5120, 131072), 4096, 131072),  # a result beyond the budget: half of the sum lives inside of it
        ((6000, 1152, 262144), 2048, 262144),
        ((30000, 3072, 49155), 10112, 49216),  # rows padded to cache lines
        ((32768, 4096, 128256), 4096, 128256),
        ((8192, 4096, 128256), 8192, 128256),  # one chunk, where it takes no more than four and an fp32 sum
        ((2048, 2048, 50257), 2048, 50304),
    ],
    ids=str,
)
def test_the_peak_is_a_chunk_of_logits_and_one_sum(shape, rows, padded):
    """rows: of a chunk. The logits of a chunk, dW's sum, dx, and a few numbers a row."""
    N, H, V = shape
    dw = V * H * (2 if rows == N else 4)
    logits, dx = rows * padded * 2, N * H * 2
    # In the backward pass the logits are gone, and a narrow result may stand beside the fp32 sum.
    held = dx + max(logits + dw, dw + (V * H * 2 if dw == V * H * 4 and V * H * 2 <= chunk_size.CHUNK_BYTES else 0))
    peak = peak_of(*shape)
    assert held <= peak <= held + 64 * N + 2**16
    # One chunk alone may exceed the default budget, by the fp32 sum that it spares.
    assert logits <= chunk_size.CHUNK_BYTES + (V * H * 2 if rows == N else rows * (padded - V) * 2)


def test_a_smaller_budget_holds_less():
    shape = 10007, 2560, 151936
    assert peak_of(*shape) - peak_of(*shape, chunk_bytes=GIB // 2) >= 0.45 * GIB
    # Without the fp32 sum, two bytes a weight less.
    assert peak_of(*shape) - peak_of(*shape, accumulate="weight") >= 0.99 * 2 * shape[1] * shape[2]
