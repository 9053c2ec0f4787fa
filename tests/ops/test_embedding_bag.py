"""embedding_bag: bags that are empty, tables that ids may not leave, and gradients of the rows that occur alone."""

import pytest
import torch
import torch.nn.functional as F

from tigon.kernels import use_backend
from tigon.ops.embedding import PIECE
from tigon.ops.embedding_bag import embedding_bag, embedding_bag_reference
from tigon.ops.quantized_table import quantize_rows, quantized_embedding

FIRST = [0, 10, 15, 30]
EVERY = pytest.mark.parametrize(
    ("mode", "padding_idx", "weighted"),
    [("sum", None, True), ("sum", 2, True), ("mean", None, False), ("mean", 2, False)],
)


def bags(device, ragged=True, fields=True, weighted=False, V=30, D=20):
    weight = torch.randn(V, D, device=device).requires_grad_()
    first = torch.tensor(FIRST, device=device) if fields else None
    if ragged:
        lengths = torch.tensor([3, 0, 8, 1, 5, 2, 0, 0, PIECE + 70, 4, 1, 6], device=device)
        offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
        values = torch.randint(0, 5, (int(offsets[-1]),), device=device)
    else:
        offsets, values = None, torch.randint(0, 5, (4, 3, 7) if fields else (12, 7), device=device)
    factors = torch.randn(values.shape, device=device).requires_grad_() if weighted else None
    return weight, values, offsets, {"per_sample_weights": factors, "include_last_offset": True, "field_offsets": first}


@EVERY
@pytest.mark.parametrize("fields", [False, True], ids=["one table", "fields"])
@pytest.mark.parametrize("ragged", [False, True], ids=["fixed", "ragged"])
def test_rows_are_the_dense_gradient(ragged, fields, mode, padding_idx, weighted, backend, device):
    """Sorted, each once, coalesced also in .grad: an optimizer need not sort them again."""
    weight, values, offsets, options = bags(device, ragged, fields, weighted)
    options |= {"mode": mode, "padding_idx": padding_idx}
    factors = options["per_sample_weights"]
    expected = embedding_bag_reference(values, weight, offsets, **options)
    y = embedding_bag(values, weight, offsets, grad="rows", **options)
    torch.testing.assert_close(y, expected)
    upstream = torch.randn_like(y)
    wanted = torch.autograd.grad(expected, [weight] if factors is None else [weight, factors], upstream)
    y.backward(upstream)
    assert weight.grad.is_sparse
    assert weight.grad.is_coalesced()
    rows = weight.grad.indices()[0]
    assert torch.equal(rows, rows.unique())
    assert rows.numel() < 16
    torch.testing.assert_close(weight.grad.to_dense(), wanted[0])
    if factors is not None:
        torch.testing.assert_close(factors.grad, wanted[1])


def test_more_values_than_are_sorted_at_once_have_no_rows():
    weight, values = torch.empty(3, 2, device="meta"), torch.empty(2, 2**29 + 1, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match=r"values must be at most 2³⁰ with grad='rows'.*got 1073741826; grad='dense'"):
        embedding_bag(values, weight, grad="rows")


def test_two_passes_add_up(backend, device):
    weight, values, offsets, options = bags(device)
    for _ in range(2):
        embedding_bag(values, weight, offsets, grad="rows", **options).sum().backward()
    once = torch.autograd.grad(embedding_bag(values, weight, offsets, **options).sum(), weight)[0]
    torch.testing.assert_close(weight.grad.to_dense(), 2 * once)


@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.Adagrad])
def test_optimizers_of_torch_take_rows(optimizer, backend, device):
    weight, values, offsets, options = bags(device)
    before = weight.detach().clone()
    embedding_bag(values, weight, offsets, grad="rows", **options).sum().backward()
    optimizer([weight], lr=0.1).step()
    moved = (weight != before).any(1).nonzero()[:, 0]
    assert torch.equal(moved, weight.grad.indices()[0])


def test_rows_have_the_bits_of_the_dense_gradient(device, triton_backend):
    weight, values, offsets, options = bags(device, weighted=True)
    options |= {"mode": "sum"}
    upstream = torch.randn(4, 3, 20, device=device)
    dense, rows = (
        torch.autograd.grad(embedding_bag(values, weight, offsets, grad=grad, **options), weight, upstream)[0]
        for grad in ("dense", "rows")
    )
    assert torch.equal(rows.to_dense(), dense)


def test_nothing_occurs(backend, device):
    weight, _, _, _ = bags(device)
    none = torch.zeros(4, dtype=torch.long, device=device)
    for values, offsets in ((none[:0], none), (none[None], None)):
        y = embedding_bag(values, weight, offsets, include_last_offset=True, grad="rows", padding_idx=0, mode="mean")
        assert y.abs().max() == 0
        assert torch.autograd.grad(y.sum(), weight)[0]._nnz() == 0


@pytest.mark.parametrize("wrong", [5, -1, 2**40])
def test_the_kernels_answer_an_id_of_another_table_with_nan(wrong, device, triton_backend):
    """Its bag is NaN, its gradient goes nowhere: not to the first row of the next field's table."""
    weight = torch.randn(30, 8, device=device)
    values = torch.tensor([[1], [wrong], [3], [2], [4], [14]], device=device)
    first = torch.tensor(FIRST, device=device)
    y = torch.ops.tigon.embedding_bag_fwd(weight, values, None, first, None, False, -1)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2, 3, 4, 5]], weight[[1, 18, 2, 14, 29]])
    dy = torch.ones_like(y)
    dw = torch.ops.tigon.embedding_bag_bwd(dy, values, None, first, None, 30, False, -1)
    assert dw.sum(1).nonzero()[:, 0].tolist() == [1, 2, 14, 18, 29]
    factors = torch.ones(6, 1, device=device)
    df = torch.ops.tigon.embedding_bag_factors(dy, weight, factors, values, None, first, -1)
    assert (df[:, 0] != 0).tolist() == [True, False, True, True, True, True]


def test_the_kernels_read_nothing_outside_for_wrong_offsets(device, triton_backend):
    weight, values = torch.randn(5, 8, device=device), torch.tensor([1, 2, 3], device=device)
    offsets = torch.tensor([-7, 2, 1, 90], device=device)
    y = torch.ops.tigon.embedding_bag_fwd(weight, values, offsets, None, None, False, -1)
    torch.testing.assert_close(
        y, torch.stack((weight[1] + weight[2], torch.zeros(8, device=device), weight[2] + weight[3]))
    )
    dw = torch.ops.tigon.embedding_bag_bwd(torch.ones_like(y), values, offsets, None, None, 5, False, -1)
    assert torch.equal(dw[:, 0], torch.tensor([0.0, 1, 1, 1, 0], device=device))


def test_a_bag_is_summed_in_fp32(backend, device):
    """A sum of 1000 ones in bf16 stays at 256, forward and backward."""
    weight = torch.ones(3, 8, device=device, dtype=torch.bfloat16, requires_grad=True)
    y = embedding_bag(torch.ones(1, 1000, dtype=torch.long, device=device), weight, mode="sum")
    assert y.eq(1000).all()
    y.sum().backward()
    assert weight.grad[1].eq(1000).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_narrow_ids(dtype, backend, device):
    weight = torch.randn(300, 8, device=device)
    values = torch.tensor([[3, 100, 3]], dtype=dtype, device=device)
    torch.testing.assert_close(embedding_bag(values, weight), F.embedding_bag(values.long(), weight))


def test_rows_are_not_for_compiled_code(device):
    with pytest.raises(Exception, match=r"grad must be 'dense' under torch.compile, got 'rows'"):
        torch.compile(lambda w, v: embedding_bag(v, w, grad="rows"), backend="eager", fullgraph=True)(
            torch.ones(3, 4, device=device), torch.zeros(2, 2, dtype=torch.long, device=device)
        )


@pytest.mark.parametrize("grad", ["dense", "rows"])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_result_of_another_dtype_is_rounded_once(mode, grad, backend, device):
    """Of 16 bits from a table of fp32: its sums rounded; the gradient stays fp32, of what came back in 16 bits."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(30, 6, generator=draw).to(device).requires_grad_()
    values = torch.randint(0, 30, (7, 4), generator=draw).to(device)
    dy = torch.randn(7, 6, generator=draw).bfloat16().to(device)

    def found(dtype):
        y = embedding_bag(values, weight, mode=mode, grad=grad, dtype=dtype)
        (dw,) = torch.autograd.grad(y, weight, dy.to(y.dtype))
        return y, dw.to_dense()

    (wide, want), (narrow, got) = found(None), found(torch.bfloat16)
    assert torch.equal(narrow, wide.bfloat16())
    assert got.dtype == torch.float32
    assert torch.equal(got, want)
    # The other way round: the sum of 16-bit rows is not rounded to 16 bits before.
    rows = weight.detach().bfloat16()
    y = embedding_bag(values, rows, mode=mode, dtype=torch.float32)
    assert torch.allclose(y, embedding_bag(values, rows.float(), mode=mode), rtol=1e-6)
    assert not torch.equal(y, y.bfloat16().float())
    with pytest.raises(ValueError, match=r"embedding_bag: dtype must be a float dtype, got torch\.int8"):
        embedding_bag(values, rows, dtype=torch.int8)


def test_kernels_that_are_forced_write_no_fp64(triton_backend, device):
    weight, values = torch.ones(3, 4, device=device), torch.zeros(2, 2, dtype=torch.long, device=device)
    with pytest.raises(RuntimeError, match="the triton backend was forced, but"):
        embedding_bag(values, weight, dtype=torch.float64)
    codes, scales = quantize_rows(weight)
    with pytest.raises(RuntimeError, match="the triton backend was forced, but"):
        quantized_embedding(codes, scales, values, dtype=torch.float64)
    with use_backend("torch"):
        assert embedding_bag(values, weight, dtype=torch.float64).dtype == torch.float64


def test_a_result_of_another_dtype_compiles(device):
    weight = torch.randn(9, 8, device=device, requires_grad=True)
    values = torch.arange(12, device=device).view(4, 3) % 9
    step = torch.compile(lambda w: embedding_bag(values, w, dtype=torch.bfloat16), fullgraph=True, backend="aot_eager")
    y = step(weight)
    assert torch.equal(y, embedding_bag(values, weight, dtype=torch.bfloat16))
    y.float().square().sum().backward()
    assert weight.grad.dtype == torch.float32
