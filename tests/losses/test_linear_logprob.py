"""linear_logprob: every option against whole logits in fp64, and what it holds in memory and computes."""

import pytest
import torch
from flat import linear_logprob
from modes import Watch

import tigon
from tigon.losses.head.chunks import ValidCount
from tigon.losses.linear_logprob import linear_logprob_reference

# torch's word for a buffer that is too small.
pytestmark = pytest.mark.filterwarnings("error:An output with one or more elements was resized")

ROWS, H, V = 300, 16, 60
OPTIONS = [
    {},
    {"temperature": 0.7},
    {"softcap": 3.0, "scale": 0.5, "temperature": 1.5},
    {"ignore_index": 7},
]


def head(device, dtype=torch.float64, bias=True, lora=True, ignored=0.25, ignore_index=-100):
    draw = {"device": device, "dtype": torch.float64}
    tensors = [torch.randn(ROWS, H, **draw), torch.randn(V, H, **draw)]
    tensors.append(torch.randn(V, **draw) if bias else None)
    tensors += [torch.randn(4, H, **draw), torch.randn(V, 4, **draw)] if lora else [None, None]
    target = torch.randint(0, V, (ROWS,), device=device)
    target[torch.rand(ROWS, device=device) < ignored] = ignore_index
    return [None if t is None else t.to(dtype).requires_grad_() for t in tensors], target


def called(tensors, target, **options):
    x, weight, bias, a, b = tensors
    return linear_logprob(x, weight, target, bias=bias, lora=None if a is None else (a, b, 0.5), **options)


def reference(tensors, target, ignore_index=-100, temperature=1.0, softcap=None, scale=1.0):
    x, weight, bias, a, b = tensors
    lora = None if a is None else (a, b, 0.5)
    return linear_logprob_reference(x, weight, target, bias, lora, ignore_index, temperature, softcap or 0.0, scale)


def gradients(result, tensors, upstream):
    leaves = [t for t in tensors if t is not None]
    return torch.autograd.grad(result[:2], leaves, upstream)


@pytest.mark.parametrize("keep_bytes", [0, 10**9])
@pytest.mark.parametrize("chunk_bytes", [1, None])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("adapted", [False, True])
def test_same_as_whole_logits(adapted, options, chunk_bytes, keep_bytes, backend, device):
    """With an upstream gradient of its own for every token."""
    if backend == "triton" and device.type == "cpu" and adapted == (chunk_bytes is None):
        pytest.skip("time in the interpreter is dear, and chunks and adapters are the same code on either backend")
    dtype = torch.float64 if backend == "torch" else torch.float32
    close = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-3}
    tensors, target = head(device, dtype, adapted, adapted, ignore_index=options.get("ignore_index", -100))
    result = called(tensors, target, chunk_bytes=chunk_bytes, keep_bytes=keep_bytes, **options)
    exact = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    expected = reference(exact, target, **options)
    for name, got in result._asdict().items():
        torch.testing.assert_close(got.double(), getattr(expected, name).double(), msg=name, **close)
        assert got.requires_grad == (name in ("logprob", "entropy"))
    upstream = [torch.randn_like(result.logprob) for _ in range(2)]
    found = gradients(result, tensors, upstream)
    for got, right in zip(found, gradients(expected, exact, [u.double() for u in upstream]), strict=True):
        torch.testing.assert_close(got.double(), right, **close)


@pytest.mark.parametrize(("keep_bytes", "again"), [(0, 2), (128 * V * 4, 1), (10**9, 0)])
def test_what_is_kept_is_not_computed_again(keep_bytes, again, device):
    tensors, target = head(device, torch.float32, False, False, ignored=0.0)
    with Watch() as seen:
        result = called(tensors, target, chunk_bytes=1, keep_bytes=keep_bytes)
    assert seen.products == ROWS * H * V
    with Watch() as seen:
        result.logprob.sum().backward()
    assert seen.products == (128 * again + 2 * ROWS) * H * V


def test_logits_are_never_whole_and_masked_tokens_cost_nothing(device):
    tensors, target = head(device, torch.float32, False, False)
    valid = int((target != -100).sum())
    with Watch() as seen:
        called(tensors, target, chunk_bytes=1, num_valid=ValidCount(target)).logprob.sum().backward()
    assert seen.largest == 128 * V
    assert 3 * valid * H * V < seen.products <= 4 * valid * H * V


def test_a_second_backward_pass(backend, device):
    tensors, target = head(device, torch.float32)
    result = called(tensors, target, chunk_bytes=1, keep_bytes=10**9)
    leaves = [t for t in tensors if t is not None]
    first = torch.autograd.grad(result.logprob.sum(), leaves, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(result.logprob.sum(), leaves), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("there", "back"), [("torch", "triton"), ("triton", "torch")])
def test_a_backward_pass_goes_on_where_the_forward_pass_began(there, back, triton_backend, device):
    """Also outside the block that forced it: without kernels there are no statistics for theirs."""
    tensors, target = head(device, torch.float32, False, False)
    with tigon.use_backend(there):
        result = called(tensors, target, chunk_bytes=1)
    upstream = [torch.randn_like(result.logprob) for _ in range(2)]
    with tigon.use_backend(back):
        found = gradients(result, tensors, upstream)
    torch.testing.assert_close(found, gradients(reference(tensors, target), tensors, upstream), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_gets_no_gradient(frozen, device):
    tensors, target = head(device)
    ones = torch.ones(ROWS, dtype=torch.float64, device=device)
    expected = gradients(called(tensors, target), tensors, [ones, ones])
    kept = [t for i, t in enumerate(tensors) if i != frozen]
    tensors[frozen].requires_grad_(False)
    found = torch.autograd.grad([r.sum() for r in called(tensors, target)[:2]], kept)
    for a, b in zip(found, [g for i, g in enumerate(expected) if i != frozen], strict=True):
        torch.testing.assert_close(a, b)


def test_all_tokens_masked(backend, device):
    tensors, target = head(device, torch.float32)
    result = called(tensors, torch.full_like(target, -100))
    assert all(not r.any() for r in result)
    (result.logprob.sum() + result.entropy.sum()).backward()
    assert all(not t.grad.any() for t in tensors)


def test_too_small_a_count_is_loud(device):
    tensors, target = head(device)
    assert called(tensors, target, num_valid=10).logprob.isnan().all()


def test_nan_stays_in_its_row(backend, device):
    tensors, target = head(device, torch.float32, ignored=0.0)
    with torch.no_grad():
        tensors[0][3, 0] = float("nan")
    result = called(tensors, target)
    assert result.logprob.isnan().nonzero().flatten().tolist() == [3]
    (dx,) = torch.autograd.grad(result.logprob.sum(), tensors[0])
    assert dx.isnan().any(1).nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature must be positive, got 0"),
        ({"logits_dtype": torch.float32}, r"chunks\.logits_dtype must be left out: this loss has no use for it"),
        ({"bias": torch.ones(3)}, r"bias must have shape \(5,\), got \(3,\)"),
        ({"weight": torch.ones(5, 3)}, r"x must be \(..., H\) and weight \(V, H\) with the same H"),
        ({"weight": torch.ones(5, 4).bfloat16()}, "weight must have x's dtype torch.float32, got torch.bfloat16"),
        ({"lora": (torch.ones(2, 4), torch.ones(4, 2), 1.0)}, r"lora must be \(A, B, s\), A \(r, 4\) and B \(5, r\)"),
        ({"target": torch.zeros(3, dtype=torch.long)}, r"target must have shape \(2,\)"),
        ({"target": torch.tensor([0, 9])}, r"target must lie in \[0, 5\).*got 9"),
    ],
)
def test_bad_arguments_get_a_sentence(change, message):
    arguments = {"x": torch.ones(2, 4), "weight": torch.ones(5, 4), "target": torch.tensor([0, 1])} | change
    with pytest.raises(ValueError, match=f"linear_logprob: {message}"):
        linear_logprob(**arguments)
