"""The graph of autograd behind a batch of shared prefixes."""

import pytest
import torch

import tigon

pytest.importorskip("transformers")
from graph_nodes import nodes_of
from zoo import build


def test_no_gradient_is_copied_into_zeros(device):
    """As those of t[0] are, once a layer each for queries, keys and values."""
    model = build("qwen3").to(device)
    tigon.fuse(model, shared_prefix=True)
    batch = tigon.SharedPrefixBatch([torch.arange(5, device=device)], [[torch.arange(3, device=device)] * 2])
    nodes = nodes_of(batch.loss(model))
    assert "SqueezeBackward1" in nodes
    assert "SelectBackward0" not in nodes
