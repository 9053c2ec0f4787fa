"""A layer where its weight belongs gets a sentence."""

import pytest
import torch
from torch import nn

import tigon
from tigon import losses

HEAD = nn.Linear(8, 16)
X, TARGET = torch.randn(2, 3, 8), torch.zeros(2, 3).long()
LOGPS = torch.zeros(1)
REF = torch.zeros(2)
LABEL = torch.tensor([True, False])
# Losses of a head take a torch.nn.Linear as it is.
LOSSES = {
    "linear_cross_entropy": lambda head: tigon.linear_cross_entropy(X, head, TARGET),
    "linear_logprob": lambda head: tigon.linear_logprob(X, head, TARGET).logprob,
    "dpo": lambda head: losses.dpo(X, head, TARGET, (LOGPS, LOGPS))[0],
    "orpo": lambda head: losses.orpo(X, head, TARGET)[0],
    "cpo": lambda head: losses.cpo(X, head, TARGET)[0],
    "simpo": lambda head: losses.simpo(X, head, TARGET)[0],
    "kto": lambda head: losses.kto(X, head, TARGET, losses.Unpaired(LABEL, REF, 0.0))[0],
    "grpo": lambda head: losses.grpo(X, head, TARGET, torch.ones(2))[0],
    "rloo": lambda head: losses.rloo(X, head, TARGET, torch.ones(2))[0],
    "distill": lambda head: losses.distill(X, head, losses.Hidden(2 * X, HEAD))[0],
    "distill_topk": lambda head: losses.distill_topk(X, head, losses.TopK(TARGET[..., None], -torch.ones(2, 3, 1)))[0],
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_takes_a_linear_layer_for_a_head(name):
    torch.testing.assert_close(LOSSES[name](HEAD), LOSSES[name](tigon.Head(HEAD.weight, HEAD.bias)))


@pytest.mark.parametrize("name", LOSSES)
def test_another_module_is_no_head(name):
    with pytest.raises(ValueError, match=rf"{name}: head must be a weight .V, H., .* got Embedding"):
        LOSSES[name](nn.Embedding(16, 8))


def test_other_arguments():
    with pytest.raises(ValueError, match=r"distill: teacher.head must be a weight .V, H., .* got Embedding"):
        losses.distill(X, HEAD.weight, losses.Hidden(X, nn.Embedding(16, 8)))
    with pytest.raises(ValueError, match=r"linear_cross_entropy: bias must be a tensor, got Linear: pass its bias"):
        tigon.linear_cross_entropy(X, tigon.Head(HEAD.weight, HEAD), TARGET)
    with pytest.raises(ValueError, match=r"gated_mlp: down must be a weight, a pair .* got Embedding\.$"):
        tigon.gated_mlp(X, HEAD.weight, HEAD.weight, nn.Embedding(16, 8))
    with pytest.raises(ValueError, match=r"gated_mlp: gate must be .* got tuple of Linear, Parameter\.$"):
        tigon.gated_mlp(X, (HEAD, HEAD.bias), HEAD.weight, HEAD)
    routed, experts = (X[0], TARGET[0, :, None], X[0, :, :1]), torch.ones(1, 8, 8)
    with pytest.raises(ValueError, match=r"moe_mlp: down must be a weight or a pair of weight and bias, got list\.$"):
        tigon.moe_mlp(*routed, experts, [1.0])
    with pytest.raises(ValueError, match=r"moe_mlp: gate_up must be a weight or a pair .* got Linear\.$"):
        tigon.moe_mlp(*routed, HEAD, experts)
    with pytest.raises(ValueError, match=r"moe_mlp: top_k_index must be a tensor, got list\.$"):
        tigon.moe_mlp(X[0], [[0]], X[0, :, :1], experts, experts)


def test_a_layer_of_a_gated_mlp_is_a_weight_a_pair_or_a_linear(backend, device):
    x = X.to(device)
    gate, up, down = (m.to(device) for m in (nn.Linear(8, 6), nn.Linear(8, 6, bias=False), nn.Linear(6, 8)))
    expected = tigon.gated_mlp(x, gate, up, down)
    torch.testing.assert_close(expected, down(torch.nn.functional.silu(gate(x)) * up(x)))
    pairs = (gate.weight, gate.bias), up.weight, (down.weight, down.bias)
    assert torch.equal(tigon.gated_mlp(x, *pairs), expected)
