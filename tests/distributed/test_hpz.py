"""hpZ against plain FSDP2, in a world that is taken for two nodes: of two ranks each, or of one where GPUs are two."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM
from world import world_of

import tigon
from tigon.training import apply_hpz, count_traffic, hpz
from tigon.training.hpz import gather as gather_module
from tigon.training.hpz.gather import NodeGather

pytestmark = pytest.mark.xdist_group("distributed")
ranks = world_of(4, 2)

LAYERS = 2
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def llama(device):
    """A vocabulary of 97 rows does not divide among four ranks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device).train()


def shard(model, mesh, **options):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(model, rank, device, steps=3, micro_steps=3, accumulate=False, optimizer=None, **options):
    """Losses, the gradients before the last update, and the weights after it."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    draw = torch.Generator().manual_seed(rank)
    losses, gradients = [], []
    for _ in range(steps):
        for micro in range(micro_steps):
            ids = torch.randint(97, (2, 9), generator=draw).to(device)
            if accumulate:
                model.set_requires_gradient_sync(micro == micro_steps - 1)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.detach().clone())
        gradients = [p.grad.to_local().clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, [p.to_local().clone() for p in model.parameters()]


def assert_same_bits(ours, theirs):
    for what, mine, plain in zip(("losses", "gradients", "weights"), ours, theirs, strict=True):
        for i, (x, y) in enumerate(zip(mine, plain, strict=True)):
            assert torch.equal(x, y), (what, i)
    assert len(set(map(float, ours[0]))) == len(ours[0]), "the losses of different batches and steps are the same"


# ----------------------------------------------------------------------------------------------------------- training


def same_training(rank, world, device, tigons, mixed, accumulate, **options):
    mesh = init_device_mesh(device.type, (world,))
    policy = {"mp_policy": MIXED} if mixed else {}
    runs = []
    for ours in (True, False):
        model = llama(device)
        with tigon.fuse(model) if tigons else nullcontext() as fusion:
            handle = apply_hpz(model, mesh, world // 2, **policy) if ours else shard(model, mesh, **policy)
            runs.append(train(model, rank, device, accumulate=accumulate, **options))
            assert not tigons or fusion.report().calls["norm"]
        if ours:
            # Of each step the first forward pass; the root's weights stay from there to the backward pass.
            assert [(g.over_all, g.in_node) for g in handle.gathers] == [(3, 6)] + [(3, 15)] * LAYERS
            said = f"{LAYERS + 1} units, groups of {world // 2} ranks; gathered 9 times over all ranks, 36 times in the"
            assert said in str(handle)
            assert all(g.nbytes for g in handle.gathers)
            handle.release()
            assert not any(g.nbytes for g in handle.gathers)
    assert_same_bits(*runs)


@pytest.mark.parametrize(
    ("tigons", "mixed", "accumulate", "options"),
    [
        (True, False, False, {"foreach": True}),
        (False, True, True, {"fused": True}),
    ],
    ids=["fused model, fp32", "mixed, gradients unsharded"],
)
def test_training_has_the_bits_of_fsdp2(ranks, tigons, mixed, accumulate, options):
    ranks.run(same_training, tigons, mixed, accumulate, **options)


def traffic_of(rank, world, device, side, micro_steps):
    """By pass and by where from: bytes that came by gathers in one step."""
    model, mesh, node = llama(device), init_device_mesh(device.type, (world,)), world // 2
    if side == "hpZ":
        apply_hpz(model, mesh, node)
    else:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=node if side == "FSDP2, N" else True)
        fully_shard(model, mesh=mesh)
    train(model, rank, device, steps=1, micro_steps=1)  # what is done once is done before
    with count_traffic() as traffic:
        train(model, rank, device, steps=1, micro_steps=micro_steps)
    here = tuple(range(rank // node * node, rank // node * node + node))
    everyone = tuple(range(world))
    assert {call.ranks for call in traffic.calls} <= {here, everyone}
    reductions = traffic.count_bytes("reduce_scatter")
    assert traffic.count_bytes() == traffic.count_bytes("all_gather") + reductions
    assert traffic.count_bytes("reduce_scatter", ranks=everyone, backward=True) == reductions > 0
    return {
        (ranks, pass_): traffic.count_bytes("all_gather", ranks=of, backward=pass_ == "backward")
        for ranks, of in (("all", everyone), ("node", here))
        for pass_ in ("forward", "backward")
    }


@pytest.mark.parametrize("side", ["FSDP2", "FSDP2, N", "hpZ"])
def test_what_the_plan_says_is_what_comes(ranks, side):
    micro_steps, world, node = 3, ranks.size, ranks.size // 2
    planned = hpz.plan(llama("meta"), world, node, micro_steps=micro_steps)
    for counted in ranks.run(traffic_of, side, micro_steps):
        for name in ("forward", "backward"):
            # Each byte that a node lacks comes to one of its ranks from outside, and to the others from that one.
            together = planned.across[side][name] + planned.inside[side][name]
            assert counted["all", name] + counted["node", name] == together
            assert counted["all", name] * (world - node) == planned.across[side][name] * node * (world - 1)
        if side == "hpZ":
            assert counted["all", "backward"] == 0
            assert counted["node", "backward"] > 0 or node == 1


# ------------------------------------------------------------------------------------------------------ changed weights


class Odd(nn.Module):
    """Two layers of weights that four ranks cannot share equally; the last has nothing of `scale`, less of others."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])
        self.scale = nn.Parameter(torch.ones(3))
        self.shift = nn.Parameter(torch.ones(7))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x * self.scale.sum() + self.shift


def write_through_data(p):
    p.data.mul_(2)


def write_locally(p):
    p.to_local().mul_(2)


def write_in_place(p):
    p.mul_(2)


def change(model, how):
    """Change all weights in one of the ways in which weights are changed."""
    model.reshard()  # FSDP2 leaves the root's unsharded after a forward pass
    with torch.no_grad():
        if how in ("foreach", "fused", "loop"):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            kinds = {"foreach": how == "foreach", "fused": how == "fused"}
            torch.optim.AdamW(model.parameters(), lr=0.1, **kinds).step()
        elif how in ("load", "assign"):
            state = {name: 2 * x for name, x in model.state_dict().items()}
            model.load_state_dict(state, assign=how == "assign")
        else:
            write = {"in place": write_in_place, "locally": write_locally, "data": write_through_data}[how]
            for p in model.parameters():
                write(p)


def changes(rank, world, device):
    mesh = init_device_mesh(device.type, (world,))
    x = torch.randn(2, 7, device=device)
    for how in ("foreach", "fused", "loop", "in place", "locally", "load", "assign", "data"):
        torch.manual_seed(1)
        plain = Odd().to(device)
        ours = copy.deepcopy(plain)
        for layer in plain.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(plain, mesh=mesh)
        handle = apply_hpz(ours, mesh, world // 2)
        outputs = []
        for model in (plain, ours):
            with torch.no_grad():
                before = model(x).clone()
                assert torch.equal(model(x), before)
            change(model, how)
            if how == "data" and model is ours:
                handle.refresh()
            with torch.no_grad():
                outputs.append(model(x).clone())
            assert not torch.equal(outputs[-1], before), how
            F.mse_loss(model(x), x).backward()
        assert torch.equal(*outputs), how
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad.to_local(), q.grad.to_local()), how
        assert [(g.over_all, g.in_node) for g in handle.gathers[1:]] == [(2, 3)] * 2, how


def test_changed_weights_are_gathered_from_all(ranks):
    ranks.run(changes)


def unnoticed(rank, world, device, check):
    model = Odd().to(device)
    handle = apply_hpz(model, init_device_mesh(device.type, (world,)), world // 2, check=check)
    x = torch.randn(2, 7, device=device)
    with torch.no_grad():
        before = model(x).clone()
        change(model, "data")
        if check:
            with pytest.raises(RuntimeError, match="weights have changed without notice"):
                model(x)
            return
        assert torch.equal(model(x), before), "the second shard was not stale: the check is for nothing"
        handle.refresh()
        model.reshard()
        assert not torch.equal(model(x), before)


def test_a_write_through_data_goes_unnoticed_without_the_check(ranks):
    ranks.run(unnoticed, check=False)
    if ranks.device_type == "cpu":  # on a GPU the error ends all use of it
        ranks.run(unnoticed, check=True)


# -------------------------------------------------------------------------------------------------------- the real path


def late_and_spoiled(rank, world, device):
    """The copies come late, into memory that is NaN: right with the wait, wrong without it."""
    mesh = init_device_mesh(device.type, (world,))

    def late(target, x):
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        target.copy_(x)

    def losses(ours):
        model = llama(device)
        if ours:
            apply_hpz(model, mesh, world // 2, check=False)
        else:
            shard(model, mesh)
        return train(model, rank, device, steps=2, micro_steps=2)

    plain = losses(False)
    spoiled = mock.patch.object(
        gather_module, "_empty", lambda n, like: torch.full((n,), float("nan"), dtype=like.dtype, device=like.device)
    )
    with mock.patch.object(gather_module, "_copy", late), spoiled:
        assert_same_bits(losses(True), plain)
        with mock.patch.object(NodeGather, "_after_copy"):
            _, _, weights = losses(True)
    # Whatever has been gathered instead: NaN, or the weights of the step before.
    return not all(torch.equal(x, y) for x, y in zip(weights, plain[2], strict=True))


def order_of(rank, world, device, wait):
    """Whether each gather in the node has waited, on its stream, for the copy that it gathers."""
    log = []

    class Logged(torch.cpu.Stream):
        def wait_event(self, event):
            log.append(("wait", event))

    here = Logged()

    model = llama(device)
    handle = apply_hpz(model, init_device_mesh("cpu", (world,)), world // 2)
    for gather in handle.gathers:
        gather.handle = SimpleNamespace(current_stream=lambda: here, stream=torch.cpu.stream)

    def recorded(output, x, group, async_op, run=gather_module._all_gather):
        log.extend(("gather", g.copied) for g in handle.gathers if x is g.shard and x is not None)
        return run(output, x, group, async_op)

    skipped = nullcontext() if wait else mock.patch.object(NodeGather, "_after_copy")
    with mock.patch.object(gather_module, "_all_gather", recorded), skipped:
        train(model, rank, device, steps=2, micro_steps=2)
    gathers = [i for i, (what, _) in enumerate(log) if what == "gather"]
    assert len(gathers) == sum(g.in_node for g in handle.gathers) > 0
    return all(i > 0 and log[i - 1] == ("wait", log[i][1]) for i in gathers)


def test_a_gather_in_the_node_waits_for_the_copy(ranks):
    if ranks.device_type == "cuda":
        assert all(ranks.run(late_and_spoiled)), "without the wait the weights should be wrong"
    else:
        assert all(ranks.run(order_of, wait=True))
        assert not any(ranks.run(order_of, wait=False))


# ------------------------------------------------------------------------------------------------- other ways to shard


def sharded_before(rank, world, device):
    """A model that has its units already: the head with the norm, layers that FSDP2 keeps a smaller shard of itself."""
    mesh = init_device_mesh(device.type, (world,))
    runs = []
    for ours in (True, False):
        model = llama(device)
        first, second = model.model.layers
        fully_shard(first, mesh=mesh, reshard_after_forward=world // 2)
        fully_shard(second, mesh=mesh)
        fully_shard([model.model.norm, model.lm_head], mesh=mesh)
        fully_shard(model, mesh=mesh)
        if ours:
            handle = apply_hpz(model, mesh, world // 2)
            assert [len(g.parameters) for g in handle.gathers] == [1, 9, 9, 2]
        runs.append(train(model, rank, device, steps=2, micro_steps=2))
    assert all(g.in_node >= 2 for g in handle.gathers)
    assert_same_bits(*runs)


def asynchronous(rank, world, device):
    """Units that are gathered ahead by hand, on the current stream."""
    mesh = init_device_mesh(device.type, (world,))
    runs = []
    for ours in (True, False):
        model = llama(device)
        if ours:
            apply_hpz(model, mesh, world // 2)
        else:
            shard(model, mesh)
        hook = model.register_forward_pre_hook(
            lambda model, _: [layer.unshard(async_op=True) for layer in model.model.layers] and None
        )
        runs.append(train(model, rank, device, steps=2, micro_steps=2))
        hook.remove()
    assert_same_bits(*runs)


@pytest.mark.parametrize("function", [sharded_before, asynchronous])
def test_the_bits_are_the_same(ranks, function):
    ranks.run(function)


# -------------------------------------------------------------------------------------------------------------- errors


class Scaled(torch.Tensor):
    def fsdp_pre_all_gather(self, mesh):
        raise NotImplementedError


def sentences(rank, world, device):
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    two = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard"))

    def said(model, *args, **options):
        with pytest.raises(ValueError, match=r"^apply_hpz: ") as error:
            apply_hpz(model, *args, **options)
        return str(error.value)

    def linear(weight=None):
        model = nn.Linear(8, 8, device=device)
        if weight is not None:
            model.weight = nn.Parameter(weight)
        return model

    found = {
        "3": said(linear(), mesh, 3),
        "4": said(linear(), mesh, 4),
        "True": said(linear(), mesh, True),
        "node": said(linear(), mesh),
        "mesh": said(linear(), two, 2),
        "DTensor": said(linear(distribute_tensor(torch.ones(8, 8), two, [Replicate(), Shard(0)])), mesh, 2),
        "float8": said(linear(torch.ones(8, 8).as_subclass(Scaled)), mesh, 2),
        "twice": said(fully_shard(linear(), mesh=mesh), mesh, 2, units=[], mp_policy=MIXED),
    }
    with mock.patch("socket.gethostname", return_value=f"host {min(rank, 1)}"):
        found["uneven"] = said(linear(), mesh)
    for size in (1, 2):
        with mock.patch("socket.gethostname", return_value=f"host {rank // size}"):
            assert apply_hpz(linear(), mesh).group_size == size
    with mock.patch("socket.gethostname", return_value=f"host {rank % 2}"):
        found["apart"] = said(linear(), mesh)
    with (
        mock.patch.object(hpz, "FSDPModule", object),
        pytest.raises(RuntimeError, match="set_custom_all_gather") as error,
    ):
        apply_hpz(linear(), mesh, 2)
    assert torch.__version__ in str(error.value)
    return found


def test_errors_say_what_is_wrong(ranks):
    if ranks.size != 4:
        pytest.skip("the sentences are those of a world of 4")
    found = ranks.run(sentences)[0]
    for name, words in {
        "3": "group_size must divide the 4 ranks of the mesh into several equal groups, got 3.",
        "4": "got 4.",
        "True": 'group_size must be "node" or a number of ranks, got True.',
        "node": "all 4 ranks are on one host",
        "mesh": "mesh must have one dimension, the ranks that weights are sharded over, got 2.",
        "DTensor": "weight is a DTensor over",
        "float8": "weight is a Scaled, which recomputes the gathered data (for example float8)",
        "twice": "already sharded by fully_shard, with its own units and options; got units, mp_policy besides.",
        "uneven": "got [1, 3] ranks in mesh order",
        "apart": "got [1, 1, 1, 1] ranks in mesh order",
    }.items():
        assert words in found[name], found[name]
