"""A layer where its weight belongs gets a sentence."""

import pytest
import torch
from torch import nn

import tigon
from tigon import losses

HEAD = nn.Linear(8, 16)
X, TARGET = torch.randn(2, 3, 8), torch.zeros(2, 3).long()
LOGPS = torch.zeros(1)
CALLS = {
    "linear_cross_entropy": lambda: tigon.linear_cross_entropy(X, HEAD, TARGET),
    "linear_logprob": lambda: tigon.linear_logprob(X, HEAD, TARGET),
    "dpo": lambda: losses.dpo(X, HEAD, TARGET, ref_chosen_logps=LOGPS, ref_rejected_logps=LOGPS),
    "orpo": lambda: losses.orpo(X, HEAD, TARGET),
    "cpo": lambda: losses.cpo(X, HEAD, TARGET),
    "simpo": lambda: losses.simpo(X, HEAD, TARGET),
    "kto": lambda: losses.kto(X, HEAD, TARGET, torch.tensor([True, False]), ref_logps=torch.zeros(2), kl=0.0),
    "grpo": lambda: losses.grpo(X, HEAD, TARGET, advantages=torch.zeros(2)),
    "rloo": lambda: losses.rloo(X, HEAD, TARGET, advantages=torch.zeros(2)),
    "distill": lambda: losses.distill(X, HEAD, X, HEAD.weight),
    "distill_topk": lambda: losses.distill_topk(X, HEAD, TARGET[..., None], -torch.ones(2, 3, 1)),
    "gated_linear": lambda: tigon.gated_linear(X, X, HEAD),
    "embedding": lambda: tigon.embedding(TARGET, nn.Embedding(4, 8)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_layer_in_place_of_its_weight(name):
    with pytest.raises(ValueError, match=rf"{name}: weight must be a tensor, got (Linear|Embedding): pass its weight"):
        CALLS[name]()


def test_other_arguments():
    with pytest.raises(
        ValueError, match=r"distill: of the teacher: weight must be a tensor, got Linear: pass its weight"
    ):
        losses.distill(X, HEAD.weight, X, HEAD)
    with pytest.raises(ValueError, match=r"linear_cross_entropy: bias must be a tensor, got Linear: pass its bias"):
        tigon.linear_cross_entropy(X, HEAD.weight, TARGET, bias=HEAD)
    with pytest.raises(ValueError, match=r"gated_mlp: down_weight must be a tensor, got Linear: pass its weight"):
        tigon.gated_mlp(X, HEAD.weight, HEAD.weight, nn.Linear(16, 8))
    with pytest.raises(ValueError, match=r"moe_mlp: down must be a tensor, got list\.$"):
        tigon.moe_mlp(X[0], TARGET[0, :, None], X[0, :, :1], torch.ones(1, 8, 8), [1.0])
