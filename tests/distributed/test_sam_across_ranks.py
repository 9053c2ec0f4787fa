"""MicroBatchSAM on several ranks against the same shards one after another in one process."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from world import world_of

from tigon.training import MicroBatchSAM

pytestmark = pytest.mark.xdist_group("distributed")
ranks = world_of(4, 2)

RHO, ROWS = 0.5, 16
# fp64 is right to roundings of fp64; fp32 runs the kernels on a GPU.
TOLERANCE = {torch.float64: {"rtol": 1e-9, "atol": 1e-11}, torch.float32: {"rtol": 2e-4, "atol": 2e-6}}


def data(device, dtype):
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, n, generator=draw, dtype=torch.float64).to(device, dtype) for n in (6, 1)]


def net(device, dtype):
    torch.manual_seed(0)  # odd sizes: shards of unequal length, and one rank without part of the last weight
    layers = [nn.Sequential(nn.Linear(6, 10), nn.Tanh()), nn.Sequential(nn.Linear(10, 7), nn.Tanh()), nn.Linear(7, 1)]
    return nn.Sequential(*layers).to(device, dtype)


def one_after_another(device, dtype, m, steps, **options):
    """Weights after some steps of m shards, neighbouring rows in one."""
    model = net(device, dtype)
    sam = optimizer(model, **options)
    x, y = data(device, dtype)
    for _ in range(steps):
        parts = zip(x.chunk(m), y.chunk(m), strict=True)
        sam.step([lambda a=a, b=b: F.mse_loss(model(a), b) for a, b in parts])
        sam.zero_grad()
    return [p.detach() for p in model.parameters()]


def optimizer(model, **options):
    return MicroBatchSAM(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), model, rho=RHO, **options)


def whole(model):
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def compare(model, expected, dtype):
    torch.testing.assert_close(whole(model), expected, **TOLERANCE[dtype])
    return True


def local(model):
    return [p.to_local().detach().clone() if hasattr(p, "to_local") else p.detach().clone() for p in model.parameters()]


def train(model, sam, parts, device, dtype, during):
    """Three steps; parts: the rows that this rank sees in each call."""
    x, y = data(device, dtype)
    for _ in range(3):
        for i, rows in enumerate(parts):
            before = local(model)
            with during(i):
                sam.accumulate(lambda rows=rows: F.mse_loss(model(x[rows]), y[rows]), weight=1 / len(parts))
            for p, old in zip(local(model), before, strict=True):
                assert torch.equal(p, old), "the weights have other bits"
        sam.step()
        sam.zero_grad()


def rows_of(shard, shards):
    return slice(shard * ROWS // shards, (shard + 1) * ROWS // shards)


def data_parallel(rank, world, device, dtype, calls, views, adaptive):
    bare = net(device, dtype)
    model = nn.parallel.DistributedDataParallel(
        bare, device_ids=[rank] if device.type == "cuda" else None, gradient_as_bucket_view=views
    )
    reduced = []

    def counted(state, bucket):
        reduced.append(bucket.index())
        work = dist.all_reduce(bucket.buffer().div_(world), async_op=True).get_future()
        return work.then(lambda done: done.value()[0])

    model.register_comm_hook(None, counted)
    sam = optimizer(model, adaptive=adaptive)
    parts = [rows_of(rank * calls + i, world * calls) for i in range(calls)]
    train(model, sam, parts, device, dtype, lambda i: contextlib.nullcontext() if i == calls - 1 else model.no_sync())
    assert reduced == [0] * 3, "one reduction a step, of one bucket"
    return compare(bare, one_after_another(device, dtype, world * calls, 3, adaptive=adaptive), dtype)


@pytest.mark.parametrize(("dtype", "calls", "views", "adaptive"), [
    (torch.float64, 1, False, False), (torch.float64, 2, True, True), (torch.float32, 2, False, False),
])  # fmt: skip
def test_a_rank_is_a_shard_under_ddp(ranks, dtype, calls, views, adaptive):
    assert all(ranks.run(data_parallel, dtype, calls, views, adaptive))


def sharded(rank, world, device, dtype, replicas, calls, reshard, adaptive):
    from torch.distributed.fsdp import fully_shard

    shape = (replicas, world // replicas) if replicas else (world,)
    names = ("replicate", "shard") if replicas else ("shard",)
    mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=names)
    model = net(device, dtype)
    for part in model[:2]:
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    if not reshard:
        model.set_reshard_after_backward(False)  # gathered weights outlive a pass: the second one must not see them
    sam = optimizer(model, adaptive=adaptive)

    # As Accelerate does for all but the last micro-batch; gradients are reduced in each nevertheless.
    @contextlib.contextmanager
    def during(i):
        model.set_requires_gradient_sync(i == calls - 1)
        yield
        told = {part._get_fsdp_state()._fsdp_param_group.reduce_grads for part in (model, *model[:2])}
        assert told == {i == calls - 1}
        model.set_requires_gradient_sync(True)

    groups = max(replicas, 1)
    size = world // groups
    group, within = divmod(rank, size)
    # What all ranks of a replica group see in one call is one shard, each a part of it.
    parts = [rows_of((group * calls + i) * size + within, world * calls) for i in range(calls)]
    train(model, sam, parts, device, dtype, during)
    return compare(model, one_after_another(device, dtype, groups * calls, 3, adaptive=adaptive), dtype)


@pytest.mark.parametrize(("dtype", "replicas", "calls", "reshard", "adaptive"), [
    (torch.float64, 0, 1, True, False),  # SAM: one shard, of all ranks
    (torch.float64, 0, 2, False, True),
    (torch.float64, 2, 1, True, True),  # two replica groups, of two ranks each; of one where GPUs are two
    (torch.float64, 2, 2, False, False),
    (torch.float32, 2, 1, True, False),
])  # fmt: skip
def test_a_replica_group_is_a_shard_under_fsdp2(ranks, dtype, replicas, calls, reshard, adaptive):
    assert all(ranks.run(sharded, dtype, replicas, calls, reshard, adaptive))


def reductions(rank, world, device):
    """The sizes of all-reduces in the two passes under HSDP: of the norm, and of gradients."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh(device.type, (2, world // 2), mesh_dim_names=("replicate", "shard"))
    model = net(device, torch.float32)
    fully_shard(model, mesh=mesh)
    sam = optimizer(model)
    x, y = data(device, torch.float32)
    real, seen = dist.all_reduce, []

    def counted(t, *args, **kwargs):
        seen.append(t.numel())
        return real(t, *args, **kwargs)

    calls = []

    def closure():
        calls.append(len(seen))
        return F.mse_loss(model(x), y)

    dist.all_reduce = counted
    try:
        sam.accumulate(closure)
    finally:
        dist.all_reduce = real
    return calls, seen


def test_gradients_go_between_replicas_once(ranks):
    for calls, seen in ranks.run(reductions):
        assert calls == [0, 1], "in the first pass nothing, then the norm"
        assert seen[0] == 1
        assert len(seen) == 2
        assert seen[1] > 50
