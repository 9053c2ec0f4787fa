"""Adapters on experts, dense and in 4 bits, on two processes: what is kept, gathered, saved and refused.

Losses and gradients are those of one process: the engines "…, experts" in test_composition.py.
"""

import pytest
import torch
from engines import adamw, base_of, batch, fsdp, mixture, targets, within_adapters
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from world import world_of

import tigon

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = pytest.mark.xdist_group("distributed")
one, two = world_of(1), world_of(2)


def step(model, optimizer, rank, world, device, number):
    rows = {name: value.to(device) for name, value in batch(number).items()}
    share = {name: value[rank::world] for name, value in rows.items()}
    model(**share, num_items_in_batch=targets(rows) / world).loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def list_frozen(model):
    return {name: p for name, p in model.named_parameters() if not p.requires_grad}


def make_whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train_and_save(rank, world, device, experts, folder):
    """Two steps, saved by PEFT; what was frozen, before and after."""
    model = mixture(experts, all_chosen=False).to(device)
    before = {name: p.detach().clone() for name, p in list_frozen(model).items()}
    if world > 1:
        assert tigon.fuse(model) is not None
        model = fsdp(model, device)
        for name, p in list_frozen(model).items():
            assert isinstance(p, DTensor), name
            assert p.to_local().numel() < p.numel() or p.shape[0] == 1, name
    optimizer = adamw(model, 1e-2)
    for number in range(2):
        step(model, optimizer, rank, world, device, number)
    frozen = list_frozen(model)
    assert frozen.keys() == before.keys()
    for name, p in frozen.items():
        assert p.grad is None
        assert torch.equal(make_whole(p), before[name]), name
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options) if world > 1 else None
    if rank == 0:
        model.save_pretrained(folder, state_dict=state)


@pytest.mark.parametrize("experts", ["dense", "nf4"])
def test_saved_adapters_are_those_of_peft_on_one_process(one, two, experts, tmp_path):
    from safetensors.torch import load_file

    one.run(train_and_save, experts, tmp_path / "one")
    two.run(train_and_save, experts, tmp_path / "two")
    expected, found = (load_file(tmp_path / f / "adapter_model.safetensors") for f in ("one", "two"))
    assert expected.keys() == found.keys()
    assert sum("experts" in name for name in found) == 4
    start = {n.replace(".default", ""): p for n, p in mixture(experts, all_chosen=False).named_parameters()}
    for name, value in expected.items():
        # A step of AdamW is at most its learning rate, of which a rounding of the gradient moves little.
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-5)
        assert (value - start[name]).abs().max() > 2e-3, name


class GatheredBytes(TorchDispatchMode):
    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "c10d::_allgather_base_":
            self.total += args[0].nbytes
        return func(*args, **(kwargs or {}))


def count_gathered(rank, world, device, experts, policy):
    """The bytes that a forward pass gathers for the layer with experts; what the stacks are inside; and their bytes."""
    model = mixture(experts, all_chosen=False).to(device)
    tigon.fuse(model)
    layer = base_of(model).model.layers[1]
    stacks = [m for m in layer.modules() if isinstance(m, tigon.QuantizedExperts)]
    whole = [t.clone() for q in stacks for t in q.parameters()]
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(**policy))
    seen = []

    def look(*_):
        tensors = [t for q in stacks for t in q.parameters()]
        seen.extend((type(t), t.dtype, torch.equal(t, w)) for t, w in zip(tensors, whole, strict=True))

    layer.self_attn.register_forward_hook(look)
    with GatheredBytes() as gathered:
        model(**{name: value.to(device) for name, value in batch(0).items()})
    layer.reshard()
    own = sum(t.to_local().numel() for q in stacks for t in q.parameters())
    return gathered.total, seen, own, sum(map(torch.numel, whole))


@pytest.mark.parametrize("policy", [{}, {"param_dtype": torch.bfloat16}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("format", ["nf4", "mxfp4"])
def test_stacks_in_4_bits_are_sharded_and_gathered_as_bytes(two, format, policy):
    dense = 0
    if not policy:
        dense = two.run(count_gathered, "dense", policy)[0][0]
        narrow = two.run(count_gathered, format, policy)[0][0]
        weights = 5 * (96 * 64 + 64 * 48)
        # E = 5 is padded to 6; a block of 64 may be short.
        assert 6 / 5 * 3.3 * weights < dense - narrow < 6 / 5 * 4 * weights
    found = two.run(count_gathered, format, policy)
    for _, seen, _, _ in found:
        assert len(seen) == 4
        assert set(seen) == {(torch.nn.Parameter, torch.uint8, True)}
    assert sum(own for _, _, own, _ in found) == found[0][3]


def refuse(rank, world, device, experts, units):
    model = mixture(experts, all_chosen=False).to(device)
    tigon.fuse(model)
    for unit in units(base_of(model)):
        fully_shard(unit)
    fsdp(model, device)
    with pytest.raises(ValueError, match="must be gathered with the decoder layer") as error:
        step(model, None, rank, world, device, 0)
    return str(error.value)


def list_stacks(model):
    return [model.model.layers[1].mlp.experts.get_base_layer()]


@pytest.mark.parametrize("experts", ["dense", "nf4"])
def test_groups_that_peft_cannot_read_are_refused_before_a_step(two, experts):
    for message in two.run(refuse, experts, within_adapters):
        assert message.startswith("fuse: lora_A under PEFT's target_parameters must be gathered")
        assert "apply fully_shard, or FSDP1's wrapper, to whole decoder layers" in message
    for message in two.run(refuse, experts, list_stacks):
        assert message.startswith("fuse: the stacks of experts under PEFT's target_parameters must be gathered")


def touch(rank, world, device):
    """What is refused while the stacks are sharded; and a read of a gathered layer."""
    model = fsdp(mixture("nf4", all_chosen=False).to(device), device)
    layer = base_of(model).model.layers[1]
    experts = layer.mlp.experts.get_base_layer()
    with pytest.raises(ValueError, match=r"packed must be whole, and is sharded \(DTensor\)"):
        experts.gate_up_proj  # noqa: B018
    with pytest.raises(ValueError, match=r"dequantize_experts: .* must be whole, and is sharded"):
        tigon.dequantize_experts(model)
    layer.unshard()
    read = experts.gate_up_proj.shape
    with pytest.raises(ValueError, match="must be whole, and is sharded: dequantize before sharding"):
        tigon.dequantize_experts(model)
    layer.reshard()
    dense = fsdp(mixture("dense", all_chosen=False).to(device), device)
    for gathers in (False, True):
        if gathers:
            base_of(dense).model.layers[1].unshard()
        with pytest.raises(ValueError, match="must be whole, and is sharded: quantize before sharding"):
            tigon.quantize_experts(dense)
    return read


def test_sharded_stacks_are_neither_read_nor_undone(two):
    assert two.run(touch) == [(5, 96, 64)] * 2
