"""Decoder layers that run as a whole: the bits of the parts, two nodes, and the parts wherever a module does more."""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import tigon

transformers = pytest.importorskip("transformers")
from graph_nodes import nodes_of
from test_families import step
from zoo import batch, build

from tigon.fusion.parts.decoder_layer import WholeLayer, read_attention
from tigon.fusion.parts.residual_norm import read_layer


@contextlib.contextmanager
def in_parts():
    """No layer runs as a whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WholeLayer, "__call__", lambda *_, **__: None)
        yield


def whole_layers(t):
    names = nodes_of(t)
    assert names.count("EnterAttentionBackward") == names.count("LeaveAttentionBackward")
    return names.count("EnterAttentionBackward")


def run(model, inputs, **options):
    with tigon.fuse(model, **options) as fusion:
        outputs, gradients = step(model, inputs)
        report = fusion.report()
    return outputs, gradients, report


def compare(model, inputs, count=2, **options):
    """The whole layers' results and gradients beside the parts', which have to be the same bits."""
    with in_parts():
        plain, plain_gradients, plain_report = run(model, inputs, **options)
    assert whole_layers(plain.loss) == 0
    fused, gradients, report = run(model, inputs, **options)
    assert whole_layers(fused.loss) == report.calls.get("layer", 0) == count
    assert torch.equal(fused.loss, plain.loss)
    assert gradients.keys() == plain_gradients.keys()
    for name, g in gradients.items():
        assert torch.equal(g, plain_gradients[name]), name
    assert {k: n for k, n in report.calls.items() if k != "layer"} == plain_report.calls
    return report, plain_report


@pytest.mark.parametrize(
    ("family", "recompute"),
    [("llama", "none"), ("llama", "cheap"), ("qwen3", "product"), ("qwen3", "cheap"), ("qwen2", "auto"), ("mistral", "auto")],
)
def test_the_bits_of_the_parts(family, recompute, device, triton_backend):
    model = build(family).to(device)
    inputs = {k: v.to(device) for k, v in batch(family).items()}
    report, plain = compare(model, inputs, recompute=recompute)
    if recompute == "cheap":
        assert (report.tensors_not_kept, report.bytes_not_kept) == (plain.tensors_not_kept, plain.bytes_not_kept)
