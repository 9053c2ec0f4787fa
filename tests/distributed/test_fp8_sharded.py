"""FP8 layers under FSDP2: the same bits as with whole weights, step after step, whatever is kept between them."""

import pytest
import torch
from world import world_of

pytest.importorskip("transformers")
pytestmark = pytest.mark.xdist_group("distributed")
world = world_of(2)


def make():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).bfloat16().train()


def train(rank, size, device, weights, sharded):
    """Losses of three steps on the same rows, and the weights after them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import tigon
    from tigon.fusion.fp8.layers import ignore_sizes

    model = make().to(device)
    with ignore_sizes():
        fusion = tigon.fuse(model, fp8=tigon.FP8(first=0, weights=weights))
        if sharded:
            mesh = init_device_mesh(device.type, (size,))
            for layer in (*model.model.layers, model):
                fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for step in range(3):
            ids = torch.randint(3, 96, (2, 20), generator=torch.Generator().manual_seed(step)).to(device)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        calls = sum(row.calls for row in fusion.report().rows if row.kind == "fp8")
    whole = [p.full_tensor() if sharded else p for p in model.parameters()]
    return losses, [p.detach().float().cpu() for p in whole], calls


@pytest.mark.parametrize("weights", ["auto", "step"])
def test_the_same_bits_as_with_whole_weights(world, weights):
    for alone, (losses, parameters, calls) in zip(
        world.run(train, weights, False), world.run(train, weights, True), strict=True
    ):
        assert calls == alone[2] == 9
        assert losses == alone[0]
        assert len(set(losses)) == 3
        assert all(torch.equal(a, b) for a, b in zip(parameters, alone[1], strict=True))
