"""A batch over ranks: the items of other ranks are negatives, and get their gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from world import world_of

from tigon.retrieve import Negatives, in_batch_softmax

pytestmark = pytest.mark.xdist_group("distributed")
two = world_of(2)


def of_batch(part: int, parts: int, device, group=None, ruled=False):
    """Loss and gradients of a part of one batch, in which ids repeat within a part and across."""
    generator = torch.Generator().manual_seed(0)
    query, positive = (torch.randn(20, 16, generator=generator) for _ in range(2))
    ids, log_q = torch.randint(0, 9, (20,), generator=generator), torch.rand(20, generator=generator).log()
    query, positive, ids, log_q = (t.chunk(parts)[part].to(device) for t in (query, positive, ids, log_q))
    query.requires_grad_()
    positive.requires_grad_()
    if ruled:  # a line for each query of the rank, of the items of all ranks
        ids = Negatives(ids, allowed=(torch.rand(20, 20, generator=generator) < 0.7).chunk(parts)[part].to(device))
    loss = in_batch_softmax(query, positive, ids, log_q, scale=2.0, group=group)
    return loss.detach(), *torch.autograd.grad(loss, (query, positive))


def on_a_rank(rank, world, device, ruled):
    return of_batch(rank, world, device, dist.group.WORLD, ruled)


@pytest.mark.parametrize("ruled", [False, True])
def test_ranks_together_have_the_loss_of_the_whole_batch(two, ruled):
    want, found = of_batch(0, 1, "cpu", ruled=ruled), two.run(on_a_rank, ruled)
    # Each rank has the mean of its own queries: the mean over ranks, as DDP takes it, is that of all.
    torch.testing.assert_close(sum(loss for loss, *_ in found) / 2, want[0], rtol=1e-4, atol=1e-5)
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([f[i] for f in found]) / 2, want[i], rtol=1e-4, atol=1e-5)
