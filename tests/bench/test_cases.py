"""The table of cases: bytes and FLOPs against hand-counted figures, inputs, and the fp64 references."""

import pytest
import torch

from tigon.bench import inputs as inputs_module
from tigon.bench.cases import OPS
from tigon.bench.inputs import DTYPES
from tigon.bench.runner import check

CPU = torch.device("cpu")
TINY = {
    "rms_norm": (7, 24),
    "swiglu": (7, 24),
    "gated_linear": (9, 24, 5),
    "geglu": (7, 24),
    "rope": (3, 5, 4, 2, 8),
    "cross_entropy": (9, 40),
    "linear_cross_entropy": (70, 16, 80),  # more than the 64 rows and 64 classes that are compared
}


# Milliseconds at 4.27 TB/s, counted by hand in bf16: tensors of the row size × passes.
@pytest.mark.parametrize(
    ("op", "shape", "floor_ms"),
    [
        ("rms_norm", (32768, 4096), 0.314),  # x, y; dy, x, dx
        ("rms_norm", (262144, 128), 0.079),
        ("swiglu", (16384, 14336), 0.881),  # gate, up, y; dy, gate, up, dgate, dup
        ("geglu", (16384, 14336), 0.881),
        ("rope", (4, 4096, 32, 8, 128), 0.157),  # q, k in and out; their gradients in and out
        ("cross_entropy", (8192, 128256), 1.477),  # logits; logits, dlogits
        ("cross_entropy", (32768, 32000), 1.474),
    ],
)
def test_bytes_are_those_counted_by_hand(op, shape, floor_ms):
    assert sum(OPS[op].nbytes(shape, 2)) / 4.27e9 == pytest.approx(floor_ms, rel=0.01)


def test_flops_are_those_of_three_products():
    assert OPS["linear_cross_entropy"].flops((2, 3, 5)) == (2 * 2 * 3 * 5, 2 * 2 * 2 * 3 * 5)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_shapes_have_as_many_numbers_as_names(op):
    assert all(len(shape) == len(op.shape_names) for shape in (*op.shapes, *op.small))


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_inputs_are_random_and_the_same_every_time(op):
    first, second = (op.make(TINY[op.name], torch.bfloat16, CPU, 0.0) for _ in range(2))
    for name in first.wrt:
        tensor = first.arguments[name]
        assert tensor.requires_grad
        assert tensor.std() > 0
        assert torch.equal(tensor, second.arguments[name])
    for gradient in first.grads or ():
        assert gradient.std() > 0


def test_clones_keep_strides_and_share_nothing():
    inputs = OPS["rope"].make(TINY["rope"], torch.float32, CPU, 0.0)
    q, clone = inputs.arguments["q"], inputs.clone().arguments["q"]
    assert clone.stride() == q.stride() != q.contiguous().stride()
    assert clone.data_ptr() != q.data_ptr()
    assert torch.equal(clone, q)


def test_ignored_is_the_fraction_of_targets():
    arguments = OPS["linear_cross_entropy"].make((80, 16, 50), torch.float32, CPU, 0.25).arguments
    assert (arguments["target"] == -100).sum() == 20
    assert arguments["num_valid"] == 60


@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
@pytest.mark.parametrize("elements", [1 << 24, 100], ids=["whole", "chunked"])
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_eager_agrees_with_the_reference(op, elements, dtype, monkeypatch):
    monkeypatch.setattr(inputs_module, "REFERENCE_ELEMENTS", elements)
    row = check(op, TINY[op.name], DTYPES[dtype], CPU, "eager")
    assert row.status == "ok", row.reason
    assert set(row.errors) >= {f"d{name}" for name in op.make(TINY[op.name], torch.float32, CPU, 0.0).wrt}


def test_ignored_targets_are_left_out_of_the_reference():
    inputs = OPS["cross_entropy"].make((8, 30), torch.float64, CPU, 0.5)
    expected = OPS["cross_entropy"].expect(inputs)
    loss = torch.nn.functional.cross_entropy(inputs.arguments["logits"], inputs.arguments["target"])
    assert expected["loss"][0][1].item() == pytest.approx(loss.item(), rel=1e-12)
