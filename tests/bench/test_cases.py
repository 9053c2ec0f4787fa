"""The table of cases: bytes and FLOPs against hand-counted figures, inputs, and the fp64 references."""

import inspect

import pytest
import torch
from cases import OPS
from cases import inputs as inputs_module
from cases.inputs import DTYPES
from harness.runner import Case, check

import tigon
from tigon.lazy import find_homes

CPU = torch.device("cpu")
# A few rows and columns more than are compared at a time.
SIZES = {"linear_cross_entropy": (70, 16, 80)}


def tiny(op):
    return SIZES.get(op.name, op.tiny)


# Milliseconds at 4.27 TB/s, counted by hand in bf16: tensors of the row size × passes.
@pytest.mark.parametrize(
    ("op", "shape", "floor_ms"),
    [
        ("rms_norm", (32768, 4096), 0.314),  # x, y; dy, x, dx
        ("rms_norm", (262144, 128), 0.079),
        ("rms_norm-heads", (4, 4096, 16, 128), 0.079),
        ("add_rms_norm", (32768, 4096), 0.503),  # x, residual, y, sum; dy, dsum, sum, dx
        ("layer_norm", (32768, 4096), 0.314),
        ("group_norm", (32, 4096, 32, 1024), 0.314),
        ("dyt", (32768, 4096), 0.314),
        ("poly_norm", (32768, 4096), 0.314),
        ("swiglu", (16384, 14336), 0.881),  # gate, up, y; dy, gate, up, dgate, dup
        ("geglu", (16384, 14336), 0.881),
        ("reglu", (16384, 14336), 0.881),
        ("relu2", (16384, 14336), 0.550),  # x, y; dy, x, dx
        ("gated_residual", (16384, 4096), 0.283),  # x, gate, f, y; dy, gate, f, dgate, df
        ("rope", (4, 4096, 32, 8, 128), 0.157),  # q, k in and out; their gradients in and out
        ("rope-interleaved", (4, 4096, 32, 8, 128), 0.157),
        ("qk_norm_rope", (4, 4096, 32, 8, 128), 0.196),  # q, k in and out; dq, dk, q, k, dq, dk
        ("softmax", (32768, 32000), 2.457),  # x, y; dy, y, dx
        ("sparsemax", (32768, 32000), 2.457),
        ("outer_softmax", (65536, 64), 0.0216),  # q, k, v, y; dy, q, k, v, dq, dk, dv
        ("quantized_embedding", (65536, 40, 1000000, 16), 0.0442),  # an id of 8 bytes and two sectors of 32
        ("kl_div", (8192, 128256), 1.969),  # input, target; target, dinput
        ("jsd", (8192, 128256), 2.461),  # input, target; input, target, dinput
        ("tvd-logits", (8192, 128256), 2.461),
        ("cross_entropy", (8192, 128256), 1.477),  # logits; logits, dlogits
        ("cross_entropy", (32768, 32000), 1.474),
    ],
)
def test_bytes_are_those_counted_by_hand(op, shape, floor_ms):
    assert sum(OPS[op].nbytes(shape, 2)) / 4.27e9 == pytest.approx(floor_ms, rel=0.01)


def test_every_public_operator_has_a_case():
    rooms = ("tigon.ops.", "tigon.losses.", "tigon.rank.kernels.", "tigon.retrieve.scan")
    public = {name for name, home in find_homes("tigon").items() if home.startswith(rooms)}
    public -= {"gated_mlp", "lora_linear"}  # whole layers, timed by models.py
    public = {name for name in public if inspect.isfunction(getattr(tigon, name))}
    public -= {"dequantize_4bit", "filtered_topk", "encode_items", "quantize_rows"}  # codes, and search.py's
    assert {op.operator for op in OPS.values()} == {*public, "gated_linear", "dpo", "orpo", "grpo", "distill"}


def test_flops_are_those_of_three_products():
    assert OPS["linear_cross_entropy"].flops((2, 3, 5)) == (2 * 2 * 3 * 5, 2 * 2 * 2 * 3 * 5)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_shapes_have_as_many_numbers_as_names(op):
    shapes = (*op.shapes, *op.extra, *op.small, op.tiny)
    assert all(len(shape) == len(op.shape_names) for shape in shapes)
    assert len({*op.shapes, *op.extra}) == len(op.shapes) + len(op.extra)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_inputs_are_random_and_the_same_every_time(op):
    first, second = (op.make(tiny(op), torch.bfloat16, CPU, 0.0) for _ in range(2))
    for name in first.wrt:
        tensor = first.arguments[name]
        assert tensor.requires_grad
        assert tensor.numel() == 1 or tensor.std() > 0
        assert torch.equal(tensor, second.arguments[name])
    for gradient in first.grads or ():
        assert gradient.std() > 0


@pytest.mark.parametrize("name", ["cross_entropy", "jsd-logits", "linear_cross_entropy"])
def test_gradients_of_losses_in_fp16_are_scaled(name):
    op = OPS[name]
    assert op.make(op.tiny, torch.float16, CPU, 0.0).loss_scale == 2**13, "of eight tokens"
    assert op.make((32, *op.tiny[1:]), torch.float16, CPU, 0.0).loss_scale == 2**15
    assert op.make(op.tiny, torch.bfloat16, CPU, 0.0).grads is None
    row = check(Case(op, tiny(op), torch.float16), CPU, "eager")
    assert row.status == "ok", row.reason


def test_clones_keep_strides_and_share_nothing():
    inputs = OPS["rope"].make(OPS["rope"].tiny, torch.float32, CPU, 0.0)
    q, clone = inputs.arguments["q"], inputs.clone().arguments["q"]
    assert clone.stride() == q.stride() != q.contiguous().stride()
    assert clone.data_ptr() != q.data_ptr()
    assert torch.equal(clone, q)


def test_ignored_is_the_fraction_of_targets():
    arguments = OPS["linear_cross_entropy"].make((80, 16, 50), torch.float32, CPU, 0.25).arguments
    assert (arguments["target"] == -100).sum() == 20
    assert arguments["num_valid"] == 60


PAIRS = [(op, name) for op in OPS.values() for name in ("eager", "tigon", "torch") if name in op.implementations]


# The reference is written in the same file as eager code; Tigon's own is another hand's.
@pytest.mark.parametrize(("dtype", "elements"), [("fp64", 1 << 24), ("bf16", 100)], ids=["fp64", "bf16 in chunks"])
@pytest.mark.parametrize(("op", "name"), PAIRS, ids=[f"{op.name}-{name}" for op, name in PAIRS])
def test_implementations_agree_with_the_reference(op, name, dtype, elements, monkeypatch):
    monkeypatch.setattr(inputs_module, "REFERENCE_ELEMENTS", elements)
    row = check(Case(op, tiny(op), DTYPES[dtype]), CPU, name)
    assert row.status == "ok", row.reason
    assert set(row.errors) >= {f"d{name}" for name in op.make(tiny(op), torch.float32, CPU, 0.0).wrt}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_no_row_of_sparsemax_has_an_element_on_the_edge_of_its_support(dtype):
    x = OPS["sparsemax"].make((64, 512), dtype, CPU, 0.0).arguments["x"].detach().double()
    steps = x * 32 / 3
    assert torch.equal(steps, steps.round())


def test_embedding_counts_the_rows_that_occur():
    tokens, _, width = shape = (4096, 2048, 8)
    input = OPS["embedding"].make(shape, torch.float32, CPU, 0.0).arguments["input"]
    moved = OPS["embedding"].nbytes(shape, 2)[0] - 8 * tokens
    assert moved / (2 * width) - tokens == pytest.approx(input.unique().numel(), rel=0.03)


def test_ignored_targets_are_left_out_of_the_reference():
    inputs = OPS["cross_entropy"].make((8, 30), torch.float64, CPU, 0.5)
    expected = OPS["cross_entropy"].expect(inputs)
    loss = torch.nn.functional.cross_entropy(inputs.arguments["logits"], inputs.arguments["target"])
    assert expected["loss"][0][1].item() == pytest.approx(loss.item(), rel=1e-12)
