"""The second shard is gathered after it has been copied: by events, by waiting on the host, or by nothing.

The same code as in training, on two nodes of two ranks, all in one process. Copies into the second shard are late, and
its memory is NaN before. On a CPU the streams are a model of them (streams.py), on a GPU its own.
"""

from types import SimpleNamespace

import pytest
import torch
from streams import Machine, Ranks

from tigon.training.hpz import gather as module
from tigon.training.hpz.gather import NodeGather

WORLD, NODE, NUMEL = 4, 2, 6
LATE = 100  # units of the model's clock, in which other work takes one
LATE_CYCLES = 200_000_000  # a tenth of a second
LATES = ("copy", "over all", "in node")
ORDERS = {
    "none": lambda self, stream: None,
    "host": lambda self, stream: self.copied.synchronize(),
    "event": NodeGather._after_copy,
}


def bits(x):
    return x.view(torch.int32)


def gathered_in_nodes(order, monkeypatch, device, steps=1, late="copy"):
    """What every gather inside of the nodes gave, and what it should have given. late: which of LATES."""
    if device.type == "cuda":
        handle, finish = torch.cuda, torch.cuda.synchronize

        def launch(function, takes=1):
            if takes == LATE:
                torch.cuda._sleep(LATE_CYCLES)
            function()
    else:
        handle = Machine()
        launch, finish = handle.launch, handle.run

    def launch_late(what):
        return lambda function: launch(function, LATE if late == what else 1)

    def spoiled(numel, like):
        memory = torch.full((numel,), float("nan"), device=device)
        if device.type == "cuda":  # so that what overtakes the copy does not overtake this
            torch.cuda.current_stream().synchronize()
        return memory

    copy, over_all, in_node = (launch_late(what) for what in LATES)
    monkeypatch.setattr(NodeGather, "_after_copy", ORDERS[order])
    monkeypatch.setattr(module, "_copy", lambda target, x: copy(lambda: target.copy_(x)))
    monkeypatch.setattr(module, "_empty", spoiled)
    monkeypatch.setattr(module, "_all_gather", lambda output, x, group, async_op: group.all_gather(output, x))

    def gather_over_all(output, x):
        """What it takes does not change, so it need not wait for the other ranks, which one host calls in turn."""
        now = weights[-1].flatten()
        over_all(lambda: output.copy_(now))

    everyone = SimpleNamespace(group_name="world", all_gather=gather_over_all)
    nodes = [Ranks(f"node {i}", NODE, handle, in_node) for i in range(WORLD // NODE)]
    gathers, streams = [], []
    for rank in range(WORLD):
        node = nodes[rank // NODE].member(rank % NODE)
        gathers.append(NodeGather([], everyone, node, handle, handle.Stream(), check=False))
        streams.append([handle.Stream() for _ in range(3)])

    def gather_all(of):
        """On two streams, as before a layer's forward, or on one of the others, as by unshard(async_op=True)."""
        outputs = []
        for gather, own, x in zip(gathers, streams, weights[-1], strict=True):
            copy_in, all_gather = (own[i] for i in of)
            with handle.stream(copy_in):
                output = gather.allocate((WORLD * NUMEL,), dtype=torch.float32, device=device)
                launch(lambda output=output: output.fill_(-1))  # whatever the memory was used for before
            all_gather.wait_stream(copy_in)
            with handle.stream(all_gather):
                gather(output, x, gather.world)
            outputs.append(output)
        return outputs

    weights, first, second = [], [], []
    for _ in range(steps):
        weights.append(torch.randn(WORLD, NUMEL, device=device))
        if device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        for gather in gathers:
            gather.refresh()
        first.append(gather_all((0, 1)))
        # FSDP2 copies the result out, and its memory is another unit's.
        for output, (copy_in, all_gather, compute) in zip(first[-1], streams, strict=True):
            compute.wait_stream(all_gather)
            copy_in.wait_stream(all_gather)
            with handle.stream(copy_in):
                launch(lambda output=output: output.fill_(-2))
        second.append(gather_all((2, 2) if device.type == "cpu" else (0, 1)))
    finish()
    assert [(g.over_all, g.in_node) for g in gathers] == [(steps, steps)] * WORLD
    return [(result, x.flatten()) for results, x in zip(second, weights, strict=True) for result in results]


@pytest.mark.parametrize("late", LATES)
@pytest.mark.parametrize("order", ["host", "event"])
def test_gathers_of_the_second_shard_have_the_bits_of_the_first(order, late, monkeypatch, device):
    for result, weights in gathered_in_nodes(order, monkeypatch, device, steps=3, late=late):
        assert torch.equal(bits(result), bits(weights))


def test_without_an_order_the_gather_overtakes_the_copy(monkeypatch, device):
    for result, _ in gathered_in_nodes("none", monkeypatch, device):
        assert result.isnan().all()


@pytest.mark.parametrize("late", ["over all", "in node"])
def test_the_copy_follows_the_gathers_before_it(late, monkeypatch):
    """ZeRO++ has these two. That the streams have to be told shows that the tests above would miss them."""
    monkeypatch.setattr(NodeGather, "_side_follows", lambda *_: None)
    results = gathered_in_nodes("event", monkeypatch, torch.device("cpu"), steps=2, late=late)
    assert not all(torch.equal(bits(result), bits(weights)) for result, weights in results)


def test_the_host_does_not_wait_for_events(monkeypatch):
    machines = []

    class Watched(Machine):
        def __init__(self):
            super().__init__()
            machines.append(self)

    monkeypatch.setitem(globals(), "Machine", Watched)
    for order in ("event", "host"):
        with monkeypatch.context() as patch:
            gathered_in_nodes(order, patch, torch.device("cpu"))
    assert machines[0].now == 0 < LATE <= machines[1].now
