"""The planner's numbers, by hand."""

import pytest
import torch
from torch import nn

from tigon.training import hpz


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)])
        self.norm = nn.LayerNorm(4, bias=False)


def test_memory_and_bytes_by_hand():
    with torch.device("meta"):
        model = Two()
    model.embed.weight.requires_grad_(False)
    # Padded to rows for 8 ranks: embedding 16·4, layers 8·4 and 8·8, norm 8.
    found = hpz.plan(model, world_size=8, group_size=2, micro_steps=3, dtype=torch.bfloat16, optimizer_bytes=12)
    root, layers = 64 + 8, 32 + 64
    both = root + layers
    assert found.parameters == 40 + 32 + 32 + 4
    expected = {
        "weights": 4 * both // 8, "gradients": 4 * (both - 64) // 8, "optimizer": 12 * (both - 64) // 8,
        "gathered": 2 * both,
    }  # fmt: skip
    for side, second in {"FSDP2": 0, "FSDP2, N": 2 * layers // 2, "hpZ": 2 * both // 2 + 2 * both // 8}.items():
        assert found.memory[side] == expected | {"second shard": second}, side

    once, behind = 2 * both * 6 // 16, 2 * layers * 6 // 16  # of 6 of 8 ranks, for two ranks together
    assert found.across == {
        "FSDP2": {"forward": 3 * once, "backward": 3 * behind, "one reduction": once},
        "FSDP2, N": {"forward": 3 * once, "backward": 0, "one reduction": once},
        "hpZ": {"forward": once, "backward": 0, "one reduction": once},
    }
    over_all, over_all_behind = 2 * both * 7 // 8 - once, 2 * layers * 7 // 8 - behind
    assert found.inside == {
        "FSDP2": {"forward": 3 * over_all, "backward": 3 * over_all_behind, "one reduction": over_all},
        "FSDP2, N": {"forward": 3 * over_all, "backward": 3 * layers, "one reduction": over_all},
        "hpZ": {"forward": over_all + 2 * both, "backward": 3 * layers, "one reduction": over_all},
    }


def test_a_node_of_one_rank_gets_all_from_others_and_keeps_it():
    """FSDP2 takes a group of one for a layer that stays gathered until the backward pass."""
    model = nn.Sequential(nn.ModuleList([nn.Linear(8, 8, bias=False)]), nn.Linear(4, 4, bias=False))
    found = hpz.plan(model, world_size=2, group_size=1, micro_steps=3)
    layer, root = 4 * 64, 4 * 16
    assert found.memory["hpZ"]["second shard"] == (layer + root) + (layer + root) // 2
    assert found.across["FSDP2"] == {
        "forward": 3 * (layer + root) // 2, "backward": 3 * layer // 2, "one reduction": (layer + root) // 2,
    }  # fmt: skip
    assert found.across["hpZ"] == {"forward": (layer + root) // 2, "backward": 0, "one reduction": (layer + root) // 2}
    assert all(value == 0 for side in found.inside.values() for value in side.values())


@pytest.mark.parametrize("group_size", [0, 3, 4])
def test_groups_that_do_not_divide(group_size):
    with pytest.raises(ValueError, match=r"^plan: group_size must divide world_size, 4, .* got"):
        hpz.plan(nn.Linear(2, 2), 4, group_size)
