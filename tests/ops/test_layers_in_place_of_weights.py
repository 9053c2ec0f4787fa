"""A layer that is passed where an operator takes the layer's weight gets a sentence, which says what to pass."""

import inspect

import pytest
import torch
from ops_table import OPS
from torch import nn

PARAMETERS = ("bias", "alpha", "gate_up", "down")


def places():
    """Each operator of the table, with each of its arguments that is a parameter of a layer."""
    found = []
    for op in OPS:
        signature = inspect.signature(op.public)
        inputs = op.draw(op.typical, torch.float32, torch.device("cpu"))
        for at, name in enumerate(list(signature.parameters)[: len(inputs)]):
            if "weight" in name or name in PARAMETERS:
                found.append(pytest.param(op, at, name, id=f"{op.name}-{name}"))
    return found


@pytest.mark.parametrize(("op", "at", "name"), places())
def test_a_layer_in_place_of_its_weight(op, at, name, device):
    inputs = list(op.draw(op.typical, torch.float32, device))
    inputs[at] = nn.Linear(8, 8)
    attribute = name.rpartition("_")[2]
    if op.name in ("gated_mlp", "moe_mlp") and name in (
        "gate_weight",
        "up_weight",
        "down_weight",
        "gate_up",
        "down",
    ):  # a layer of theirs may be a pair
        with pytest.raises(ValueError, match=rf"^{op.name}: .* must be a weight.*, got tuple of .*Linear"):
            op.public(*inputs, **op.typical.options)
        return
    with pytest.raises(ValueError, match=rf"^{op.name}: .*{attribute} must be a tensor.*, got Linear") as raised:
        op.public(*inputs, **op.typical.options)
    advised = f"got Linear: pass its {attribute}." in str(raised.value)
    assert advised == (attribute in ("weight", "bias")), raised.value


def test_the_norms_are_among_them():
    norms = {"rms_norm", "add_rms_norm", "layer_norm", "group_norm", "dyt", "poly_norm", "qk_norm_rope"}
    assert norms <= {place.values[0].name for place in places()}
