"""Every operator beyond 2³¹ elements, where offsets no longer fit 32 bits, forward and backward.

A small batch is repeated along its rows until a tensor is that large. Each repetition must give the small batch's
bits, and gradients summed over the rows must be the small batch's times the repetitions. A batch's element count does
not divide a power of two: a wrapped offset finds other numbers.

On a CPU the test runs with a limit of a few hundred elements, to test the test itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from ops_table import OPS, Case, Op
from torch import Tensor

import tigon
from tigon import retrieve

# Two such tests at once do not fit on a GPU.
pytestmark = pytest.mark.xdist_group("2**31 elements")

LIMIT = 2**31
# Tensors with LIMIT bf16 numbers that may exist at once.
TENSORS = 14
LARGE = [pytest.param(op, case, id=f"{op}-{case}") for op in OPS for case in op.large]


@pytest.fixture
def memory(device) -> Iterator[None]:
    needed = TENSORS * LIMIT * 2
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    if free < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free device memory, there are {free / 2**30:.0f}")
    # Unwritten outputs must not be right by chance: the allocated memory holds NaN.
    poison = [torch.full((LIMIT + LIMIT // 8,), torch.nan, dtype=torch.bfloat16, device=device) for _ in range(8)]
    del poison
    yield
    torch.cuda.empty_cache()


def spread(t: Tensor) -> Tensor:
    """The same numbers, with a gap as long as a row after every row, in twice the memory."""
    if t.dim() < 2:
        return t
    wide = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), 77)
    wide[..., : t.shape[-1]] = t
    return wide[..., : t.shape[-1]]


def repeat(t: Tensor, dim: int, times: int) -> Tensor:
    return t.repeat([times if d == dim else 1 for d in range(t.dim())])


def longer(large: Tensor, small: Tensor) -> int | None:
    """The dimension along which `large` repeats `small`."""
    return next((d for d in range(small.dim()) if large.shape[d] != small.shape[d]), None)


def gradients(results: tuple[Tensor, ...], leaves: list[Any], wanted: list[int], upstream: list[Tensor]):
    return torch.autograd.grad(results, [leaves[i] for i in wanted], upstream)


def check_repeated(
    op: Op,
    case: Case,
    device: torch.device,
    *,
    limit: int,
    dtype: torch.dtype = torch.bfloat16,
    gaps: bool = False,
    exact: bool = True,
    width: int = 0,
) -> None:
    """Compare a batch with enough repetitions to reach `limit` elements in a tensor.

    gaps: every row is followed by a gap as long as the row, which counts towards `limit`.
    exact: compare bits; otherwise allow the difference between two bf16 roundings.
    width: elements per row in the largest tensor, if that is no input or output.
    """
    inputs = op.draw(case, dtype, device)
    rows, wanted = op.rows(case, inputs), op.differentiable(inputs)

    def call(made: list[Any]) -> tuple[tuple[Tensor, ...], list[Any]]:
        laid = [spread(t) if gaps and dim is not None else t for t, dim in zip(made, rows, strict=True)]
        leaves = [t.detach().requires_grad_() if i in wanted else t for i, t in enumerate(laid)]
        results = op.public(*leaves, **case.options)
        return results if isinstance(results, tuple) else (results,), leaves

    small, leaves = call(list(inputs))
    upstream = [torch.randn_like(r) for r in small]
    small_grads = gradients(small, leaves, wanted, upstream)
    varying = [t for t, dim in zip(inputs, rows, strict=True) if dim is not None]
    elements = max(t.numel() * (1 + gaps) for t in (*varying, *small))
    if width:
        elements = max(elements, case.shape[0] * width)
    times = limit // elements + 3  # two more than needed, since the batch across the limit is half below

    large, leaves = call([t if dim is None else repeat(t, dim, times) for t, dim in zip(inputs, rows, strict=True)])
    dims = [longer(a, b) for a, b in zip(large, small, strict=True)]
    assert None not in dims, "an output without rows: the case should leave the loss unreduced"
    for i, pair in enumerate(zip(large, small, dims, strict=True)):
        assert_repeated(*pair, times, exact, f"output {i}")
    results, large = large, ()
    large_grads = gradients(results, leaves, wanted, [repeat(u, d, times) for u, d in zip(upstream, dims, strict=True)])
    del results
    for i, a, b in zip(wanted, large_grads, small_grads, strict=True):
        if rows[i] is None:
            assert_summed(a, b, times, f"gradient of input {i}")
        else:
            assert_repeated(a, b, rows[i], times, exact, f"gradient of input {i}")


def assert_repeated(large: Tensor, small: Tensor, dim: int, times: int, exact: bool, what: str) -> None:
    assert large.shape[dim] == times * small.shape[dim]
    parts = large.detach().unflatten(dim, (times, -1))
    if exact:
        same = parts == small.detach().unsqueeze(dim)
        if not same.all():
            wrong = [i for i in range(times) if not same.select(dim, i).all()]
            raise AssertionError(f"{what}: {len(wrong)} of {times} repetitions differ, the first is {wrong[0]}")
        return
    for i in {0, times // 2, times - 3, times - 2, times - 1}:
        torch.testing.assert_close(parts.select(dim, i), small, rtol=2**-6, atol=2**-7 * small.abs().max().item())


def assert_summed(large: Tensor, small: Tensor, times: int, what: str) -> None:
    assert large.shape == small.shape
    expected = times * small.double()
    error, size = (large.double() - expected).abs().max().item(), expected.abs().max().item()
    # Both are rounded to their dtype. They differ by fp32 sums over up to 2³¹ products, in parts.
    allowed = (2 * torch.finfo(large.dtype).eps + 1e-4) * size
    assert error <= allowed, f"{what}: error {error:.3g} > {allowed:.3g}, for sums of up to {size:.3g}"


@pytest.mark.gpu
@pytest.mark.parametrize("gaps", [False, True], ids=["dense", "gaps"])
@pytest.mark.parametrize(("op", "case"), LARGE)
def test_beyond_32_bits(op: Op, case: Case, gaps: bool, device, triton_backend, memory):
    if gaps and case is not op.large[0]:
        pytest.skip("gaps are tested once an operator")
    check_repeated(op, case, device, limit=LIMIT, gaps=gaps, exact=not op.products)


@pytest.mark.gpu
def test_logits_of_one_chunk_beyond_32_bits(device, triton_backend, memory):
    op = next(op for op in OPS if op.name == "linear_cross_entropy")
    case = Case("one chunk", (100, 64, 20000), {"reduction": "none", "chunk_bytes": 2**34})
    check_repeated(op, case, device, limit=LIMIT, exact=False, width=20000)


@pytest.mark.gpu
def test_a_vocabulary_beyond_32_bits(device, triton_backend, memory):
    """The last ids in a weight beyond 2³¹ elements give a small weight's embeddings and gradient."""
    small = torch.randn(1000, 4096, dtype=torch.bfloat16, device=device)
    before = LIMIT // small.numel() * len(small) + 500  # so that the limit lies within the looked-up rows
    weight = torch.cat((small.new_full((before, 4096), 77), small)).requires_grad_()
    small.requires_grad_()
    ids = torch.randint(0, 1000, (3000,), device=device)
    expected, got = tigon.embedding(ids, small), tigon.embedding(ids + before, weight)
    assert torch.equal(got, expected)
    dy = torch.randn_like(expected)
    expected.backward(dy)
    got.backward(dy)
    assert torch.equal(weight.grad[before:], small.grad)
    assert weight.grad[:before].count_nonzero() == 0


def check_items(before: int, D: int, device: torch.device) -> None:
    """A softmax over items where only the last count: loss and gradients equal those for the last items alone."""
    query = torch.randn(70, D, dtype=torch.bfloat16, device=device).requires_grad_()
    items = torch.randn(1000, D, dtype=torch.bfloat16, device=device)
    table = torch.cat((items.new_full((before, D), 0.5), items)).requires_grad_()
    items.requires_grad_()
    bias = torch.cat((torch.full((before,), -1e4, device=device), torch.zeros(1000, device=device)))
    target = torch.randint(0, 1000, (70,), device=device)
    expected = retrieve.item_softmax(query, items, target, scale=0.3)
    got = retrieve.item_softmax(query, table, target + before, bias, scale=0.3)
    torch.testing.assert_close(got, expected)
    dq, dx = torch.autograd.grad(expected, (query, items))
    dq_of_table, dtable = torch.autograd.grad(got, (query, table))
    for one, other in ((dq_of_table, dq), (dtable[before:], dx)):
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-7 * other.abs().max().item())
    assert dtable[:before].count_nonzero() == 0


@pytest.mark.gpu
def test_items_beyond_32_bits(device, triton_backend, memory):
    check_items(LIMIT // 128 - 500, 128, device)  # so that the limit lies within the items that count


def check_requests(heads: tuple[int, int, int], limit: int, device: torch.device) -> None:
    """prefix_attention, with rows [all prefixes | all suffixes]: many equal requests each get a lone request's bits."""
    H, G, D = heads
    prefix, suffixes = 30, [3, 1, 30]
    halves = prefix, sum(suffixes)
    times = limit // (sum(halves) * (H + 2 * G) * D) + 3
    packed, up = (torch.randn(sum(halves), n, D, device=device).bfloat16() for n in (H + 2 * G, H))

    def results(requests: int) -> list[Tensor]:
        layout = tigon.PrefixLayout([prefix] * requests, [suffixes] * requests, device=device)
        many, do = (torch.cat([half.repeat(requests, 1, 1) for half in t.split(halves)]) for t in (packed, up))
        leaves = [t.requires_grad_() for t in many.split([H, G, G], 1)]  # read in place from the packed rows
        o = tigon.prefix_attention(*leaves, layout)
        return [o.detach(), *torch.autograd.grad(o, leaves, do)]

    names = "output", "gradient of q", "gradient of k", "gradient of v"
    for name, many, one in zip(names, results(times), results(1), strict=True):
        for got, expected in zip(many.split([n * times for n in halves]), one.split(halves), strict=True):
            assert_repeated(got, expected, 0, times, True, name)


@pytest.mark.gpu
def test_requests_beyond_32_bits(device, triton_backend, memory):
    check_requests((32, 8, 128), LIMIT, device)


# ------------------------------------------------------------------------------------------------- the test itself


def test_a_few_items(device, backend):
    check_items(3000, 16, device)


def check_tokens(tokens: int, channels: int, device: torch.device, around: int = 16) -> None:
    """Few tokens, with the three before and behind that they depend on, have the bits that they have among many."""
    generator = torch.Generator(device).manual_seed(0)
    x, weight = (
        torch.randn(shape, generator=generator, device=device).bfloat16()
        for shape in ((1, tokens, channels), (channels, 4))
    )

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.detach().requires_grad_()
        y = tigon.causal_conv1d(leaf, weight, activation="silu")
        return y.detach(), torch.autograd.grad(y, leaf, x)[0]

    y, dx = run(x)
    for first in (0, tokens // 2, tokens - around):
        begin, end = max(0, first - 3), min(tokens, first + around + 3)
        few = slice(first - begin, first - begin + around)
        for got, expected in zip((y, dx), run(x[:, begin:end]), strict=True):
            assert torch.equal(got[:, first : first + around], expected[:, few]), first


@pytest.mark.gpu
def test_many_tokens(device, memory, triton_backend):
    check_tokens(LIMIT // 4104 + 100, 4104, device)


def test_a_few_tokens(device, triton_backend):
    check_tokens(40, 8, device)


def check_chunks(tokens: int, heads: int, width: int, device: torch.device) -> None:
    """Three documents of very different places in a row: the bits are those of each document alone."""
    generator = torch.Generator(device).manual_seed(0)
    few = 70
    starts = [0, few, tokens - few, tokens]

    def draw(*shape: int) -> Tensor:
        return torch.randn(1, tokens, *shape, generator=generator, device=device, dtype=torch.bfloat16)

    whole = draw(1, 16), draw(1, 16), draw(heads, width), -draw(heads).abs(), draw(heads).sigmoid()

    def run(first: int, end: int, offsets: list[int]) -> list[Tensor]:
        leaves = [t[:, first:end].detach().requires_grad_() for t in whole]
        o = tigon.gated_delta_rule(*leaves, normalize=True, offsets=torch.tensor(offsets, device=device))
        return [o.detach(), *torch.autograd.grad(o, leaves, whole[2][:, first:end])]

    results = run(0, tokens, starts)
    for first, end in ((0, few), (tokens - few, tokens)):
        for got, expected in zip(results, run(first, end, [0, end - first]), strict=True):
            assert torch.equal(got[:, first:end], expected), first


@pytest.mark.gpu
def test_many_chunks(device, memory, triton_backend):
    check_chunks(LIMIT // 4096 + 100, 32, 128, device)


def test_a_few_chunks(device, triton_backend):
    check_chunks(150, 2, 16, device)


def test_a_few_requests(device, triton_backend):
    check_requests((4, 2, 16), 30000, device)


def scaled_down(case: Case) -> Case:
    return Case(case.why, tuple(min(n, 8) for n in case.shape), case.options, case.inputs)


@pytest.mark.parametrize("gaps", [False, True], ids=["dense", "gaps"])
@pytest.mark.parametrize(("op", "case"), LARGE)
def test_repetitions_of_a_small_batch(op: Op, case: Case, gaps: bool, backend, device):
    case = scaled_down(case)
    # torch's bits, unlike the kernels', depend on a vector's alignment; in bf16 torch also sums in bf16.
    kernels = backend == "triton"
    dtype, exact = torch.bfloat16 if kernels else torch.float32, kernels and not op.products
    check_repeated(op, case, device, limit=2 * math.prod(case.shape), dtype=dtype, gaps=gaps, exact=exact)


def _stops_writing(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    y = tigon.rms_norm(x, weight, **options)
    return torch.where(_below(y), y, 0.0)


def _stops_writing_the_gradient(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return tigon.rms_norm(torch.where(_below(x), x, x.detach()), weight, **options)


def _stops_summing(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    y = tigon.rms_norm(x, weight, **options)
    return torch.where(_below(y), y, tigon.rms_norm(x, weight.detach(), **options))


def _below(t: Tensor) -> Tensor:
    """The first 2³¹ elements, as if this test's limit were 2³¹."""
    return (torch.arange(t.numel(), device=t.device) < 1000).view(t.shape)


@pytest.mark.parametrize("broken", [_stops_writing, _stops_writing_the_gradient, _stops_summing])
def test_an_operator_that_stops_at_the_limit_fails(broken: Callable[..., Tensor], device, triton_backend):
    op = next(op for op in OPS if op.name == "rms_norm")
    case = Case("small", (7, 24), {"cast": "gemma"}, {"weight_dtype": torch.float32})
    check_repeated(op, case, device, limit=1000)
    with pytest.raises(AssertionError, match=r"repetitions differ, the first is|error"):
        check_repeated(replace(op, public=broken), case, device, limit=1000)


# Sums over the batch, whose kernels see a single chunk of logits: linear_cross_entropy covers this loop.
REDUCED = {"grpo", "distill", "distill_topk"}
# Kernels see a single tile of tokens at a time, like gated_linear's.
TILED = {"gated_mlp"}
# Rows do not repeat a small batch; separate tests are above. Prefixes run through varlen_attention's kernels.
OF_REQUESTS = {"prefix_attention", "varlen_attention", "causal_conv1d", "gated_delta_rule", "mamba2_scan"}
# A repeated batch's statistics differ in bits from the small batch's; its own tests have a large batch.
OF_COLUMNS = {"batch_norm_relu"}


def test_every_operator_is_here():
    assert {op.name for op in OPS if not op.large} == REDUCED | TILED | OF_REQUESTS | OF_COLUMNS
