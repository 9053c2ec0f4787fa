"""The rules for every operator (CONTRIBUTING.md), over the operator table and both implementations."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch
from numerics import check, evaluate
from ops_table import OPS, Case, Op
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

import tigon
import tigon.retrieve
from tigon.kernels import dispatch as backend_module
from tigon.lazy import find_homes

CASES = [pytest.param(op, case, id=f"{op}-{case}") for op in OPS for case in op.cases]
EVERY_OP = pytest.mark.parametrize("op", OPS, ids=str)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# In the interpreter fp16 differs from bf16 only in a rounding: fp16 runs once per operator there.
NUMBERS = [
    pytest.param(
        op, case, dtype, id=f"{op}-{case}-{str(dtype).removeprefix('torch.')}",
        marks=[pytest.mark.gpu] if dtype == torch.float16 and case is not op.typical else [],
    )
    for dtype in DTYPES for op in OPS for case in op.cases
]  # fmt: skip


# Operators that the table cannot hold, and the files that test them.
WITHOUT_A_ROW = {
    "dequantize_4bit": "takes no floats and has no gradient: ops/test_dequantize_4bit.py",
    "quantized_embedding": "takes no floats and has no gradient: ops/test_quantized_embedding.py",
    "fp8_gated_rows": "a part of FP8 layers, without a gradient: ops/test_fp8_gated.py",
    "fp8_gated_gradient": "as fp8_gated_rows",
    "fp8_fold_scales": "as fp8_gated_rows: ops/test_fp8_columns.py",
    "fp8_to_columns": "as fp8_fold_scales",
    "fp8_transpose_rows": "as fp8_fold_scales",
    "filtered_topk": "has no gradient, and its answer is exact: ops/test_filtered_topk.py",
    "coded_topk": "as filtered_topk: ops/test_filtered_topk_codes.py",
    "sign_topk": "as filtered_topk, but guessed: ops/test_sign_codes.py",
    "fp8_linear_fwd": "compiled FP8 layers, whose bits are those of eager mode: ops/test_fp8_compile.py",
    "fp8_linear_bwd": "as fp8_linear_fwd",
    "fp8_mlp_fwd": "as fp8_linear_fwd",
    "fp8_mlp_bwd": "as fp8_linear_fwd",
    "fp8_rows": "a part of FP8 layers, without a gradient: ops/test_fp8_rows.py",
    "fp8_norm_rows": "as fp8_rows",
    "fp8_blocks": "as fp8_rows: ops/test_fp8_checkpoints.py",
    "fp8_weight": "as fp8_rows: ops/test_fp8_weight.py",
    "fp8_transposed": "as fp8_weight",
    "fp8_amax": "as fp8_weight",
    "gated_lora_fwd": "a pass inside of lora_mlp: linear/test_lora_mlp.py",
    "dropped_product": "a product inside of lora_linear: ops/test_lora_dropout.py",
    "dropped_outer": "as dropped_product",
    "dropped_gradient": "as dropped_product",
    "signed_bwd": "the backward of tvd from 1024 wide rows on: ops/test_tvd_signs.py",
    "row_dot_fwd": "a head of one label, inside of a LiRank: rank/test_row_kernels.py",
    "row_dot_bwd": "as row_dot_fwd",
    "relu_gradient": "the backward of a product with a relu: rank/test_row_kernels.py",
    "crossed_sum_fwd": "the last step of a cross layer: rank/test_row_kernels.py",
    "crossed_sum_bwd": "as crossed_sum_fwd",
}
# Operators without Triton launches.
OF_TORCH = {
    "encode_items": "makes tensors for filtered_topk by torch's operators: ops/test_filtered_topk_codes.py",
    "quantize_rows": "makes tensors for quantized_embedding, as encode_items: ops/test_quantized_embedding.py",
}


def run(op: Op, inputs, options):
    return evaluate(op.public, inputs, options, grad=op.differentiable(inputs))


def compare(op: Op, public, case: Case, inputs, eager=None) -> None:
    """check() for existing inputs."""
    grad, options = op.differentiable(inputs), case.options
    check(public, op.reference, *inputs, eager=eager or op.eager, grad=grad, roundings=op.roundings, **options)


def assert_same_bits(got, expected, what: str) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert got[name] is None, f"{what}: {name}"
        else:
            assert torch.equal(got[name], value), f"{what}: {name} differs"


def assert_same_numbers(op: Op, got, expected, what: str) -> None:
    """The same bits, except for matrix products, whose algorithm a library picks by shape and strides."""
    if not op.products:
        assert_same_bits(got, expected, what)
        return
    for name, value in expected.items():
        if value is not None:
            torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5, msg=f"{what}: {name} differs")


# ---------------------------------------------------------------------------------------------------------- numbers


@contextlib.contextmanager
def fill_new_memory() -> Iterator[None]:
    """In deterministic mode torch fills new memory with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("op", "case", "dtype"), NUMBERS)
def test_forward_and_gradients(op: Op, case: Case, dtype, backend, device):
    """In the interpreter also that memory which nobody wrote is not read."""
    interpreted = backend == "triton" and device.type == "cpu"
    draws = min(case.draws, 16) if interpreted else max(case.draws, 8 if device.type == "cuda" else 1)
    with fill_new_memory() if interpreted else contextlib.nullcontext():
        check(
            op.public,
            op.reference,
            lambda generator: op.draw(case, dtype, device, generator),
            eager=op.eager,
            grad=op.differentiable(op.draw(case, dtype, device)),
            roundings=op.roundings,
            draws=draws,
            **case.options,
        )


@pytest.mark.parametrize(("op", "case"), CASES)
def test_fp64_runs_through_the_reference(op: Op, case: Case, device):
    inputs = op.draw(case, torch.float64, device)
    inputs = [t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in inputs]
    got, eager = run(op, inputs, case.options), evaluate(op.eager, inputs, case.options, grad=op.differentiable(inputs))
    for name, value in eager.items():
        if value is not None:
            torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-12)


@EVERY_OP
def test_a_forced_backend_never_falls_back(op: Op, device, triton_backend):
    """The kernels take no fp64: with the kernels forced, the call raises instead of using the reference."""
    with pytest.raises(RuntimeError, match=r"triton backend was forced, but .*float64"):
        run(op, op.draw(op.typical, torch.float64, device), op.typical.options)


# ---------------------------------------------------------------------------------------------------------- layouts


def transposed(t: Tensor) -> Tensor:
    return t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 1 else t


def every_other(t: Tensor) -> Tensor:
    wide = t.new_zeros((*t.shape[:-1], 2 * t.shape[-1])) if t.dim() else t
    if t.dim():
        wide[..., ::2] = t
        wide[..., 1::2] = 77  # a kernel that ignores the stride would read these
        return wide[..., ::2]
    return t


def padded(t: Tensor) -> Tensor:
    if not t.dim():
        return t
    wide = t.new_full((*t.shape[:-1], t.shape[-1] + 3), 77)
    wide[..., : t.shape[-1]] = t
    return wide[..., : t.shape[-1]]


def unaligned(t: Tensor) -> Tensor:
    """Contiguous, at an address that 16 does not divide: a launch compiled for aligned tensors may not be used."""
    shifted = t.new_full((t.numel() + 1,), 77)
    shifted[1:] = t.flatten()
    return shifted[1:].view(t.shape)


@pytest.mark.parametrize("layout", [transposed, every_other, padded, unaligned], ids=lambda f: f.__name__)
@EVERY_OP
def test_strided_inputs(op: Op, layout, backend, device):
    case = op.typical
    plain = op.draw(case, torch.float32, device)
    strided = [layout(t) if isinstance(t, Tensor) else t for t in plain]
    assert any(not t.is_contiguous() or t.data_ptr() % 16 for t in strided if isinstance(t, Tensor))
    compare(op, op.public, case, strided)
    if backend == "triton" and device.type != "cuda":  # on CUDA the compiler may sum another layout in another order
        assert_same_numbers(op, run(op, strided, case.options), run(op, plain, case.options), layout.__name__)


def exchanged(t: Tensor) -> Tensor:
    """Rows in another order, each with unit stride."""
    return t.transpose(0, 1).contiguous().transpose(0, 1) if t.dim() > 2 else t


# Results keep the memory order of their input, unlike torch's operators' results: attention takes either.
IN_ORDER = {"rope", "qk_norm_rope", "causal_conv1d"}


@EVERY_OP
def test_results_have_the_strides_of_the_reference(op: Op, device, triton_backend):
    """Views of a result work with kernels and without. If eager torch code gives a contiguous result, which allows any
    view, so does the operator."""

    def strides(result: Any) -> list[tuple[int, ...]]:
        results = result if isinstance(result, tuple) else (result,)
        return [tuple(s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1) for t in results if t is not None]

    for case in op.cases:
        plain = op.draw(case, torch.float32, device)
        if case is not op.typical and sum(t.numel() for t in plain if isinstance(t, Tensor)) > 5000:
            continue
        for layout in (torch.clone, transposed, exchanged, every_other, padded):
            laid = [layout(t) if i in op.differentiable(plain) and t.dim() > 1 else t for i, t in enumerate(plain)]
            got, eager = op.public(*laid, **case.options), op.eager(*laid, **case.options)
            with tigon.use_backend("torch"):
                assert strides(got) == strides(op.public(*laid, **case.options)), f"{case}, {layout.__name__}"
            if op.name not in IN_ORDER:
                results = zip(got, eager, strict=True) if isinstance(got, tuple) else [(got, eager)]
                assert all(a.is_contiguous() or not b.is_contiguous() for a, b in results), f"{case}, {layout.__name__}"


@EVERY_OP
def test_expanded_upstream_gradient(op: Op, backend, device):
    """`y.sum().backward()` passes an upstream gradient whose strides are all zero."""
    case = op.typical
    inputs = op.draw(case, torch.float32, device)

    def grads(of):
        leaves = [t.detach().requires_grad_() if i in op.differentiable(inputs) else t for i, t in enumerate(inputs)]
        results = op.public(*leaves, **case.options)
        results = results if isinstance(results, tuple) else (results,)
        leaves = [leaves[i] for i in op.differentiable(inputs)]
        return torch.autograd.grad(results, leaves, [of(r) for r in results])

    expanded = grads(lambda r: r.new_ones(()).expand(r.shape))
    dense = grads(torch.ones_like)
    for a, b in zip(expanded, dense, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert backend == "torch" or (op.products and device.type == "cuda") or torch.equal(a, b)


@pytest.mark.parametrize(
    ("op", "shape"), [pytest.param(o, s, id=f"{o}-{'x'.join(map(str, s))}") for o in OPS for s in o.empty]
)
def test_empty_inputs(op: Op, shape, backend, device):
    """Compared only with the reference: eager code's mean over no row is NaN, and Tigon's is 0."""
    case = Case("empty", shape, op.typical.options, op.typical.inputs)
    inputs = op.draw(case, torch.bfloat16, device)
    check(op.public, op.reference, *inputs, eager=op.reference, grad=op.differentiable(inputs), **case.options)


# --------------------------------------------------------------------------------- nothing a caller sees is touched


@pytest.mark.parametrize(("op", "case"), CASES)
def test_inputs_saved_tensors_and_gradients_are_unchanged(op: Op, case: Case, backend, device):
    inputs = op.draw(case, torch.float32, device)
    leaves = [t.detach().requires_grad_() if i in op.differentiable(inputs) else t for i, t in enumerate(inputs)]
    kept: list[tuple[str, Tensor, Tensor, int]] = []

    def keep(name: str, t: Tensor) -> Tensor:
        kept.append((name, t, t.detach().clone(), t._version))
        return t

    for i, t in enumerate(leaves):
        if isinstance(t, Tensor):
            keep(f"input {i}", t)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: keep("saved tensor", t), lambda t: t):
        results = op.public(*leaves, **case.options)
    results = results if isinstance(results, tuple) else (results,)
    upstream = [keep("incoming gradient", torch.randn_like(r)) for r in results]
    for i, r in enumerate(results):
        keep(f"output {i}", r)
    # The graph is kept: another backward pass may follow, and must find all saved tensors unchanged.
    torch.autograd.backward(results, upstream, retain_graph=True)
    for name, t, before, version in kept:
        # Saved tensors may have elements that are never written or read, with arbitrary contents, NaN included.
        torch.testing.assert_close(t, before, rtol=0, atol=0, equal_nan=True, msg=f"{name} was overwritten")
        assert t._version == version, f"{name} was written to in place"


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "case"), CASES)
def test_memory_that_nobody_wrote_is_not_read(op: Op, case: Case, device, triton_backend):
    inputs = op.draw(case, torch.float32, device)
    expected = run(op, inputs, case.options)
    with fill_new_memory():
        got = run(op, inputs, case.options)
    assert_same_bits(got, expected, "in memory full of NaN")


@EVERY_OP
def test_outputs_share_no_memory_with_inputs(op: Op, backend, device):
    inputs = op.draw(op.typical, torch.float32, device)
    results = op.public(*inputs, **op.typical.options)
    storages = {t.untyped_storage().data_ptr() for t in inputs if isinstance(t, Tensor)}
    for r in results if isinstance(results, tuple) else (results,):
        assert r.untyped_storage().data_ptr() not in storages


# ----------------------------------------------------------------------------------------- only what is asked for


class Work(TorchDispatchMode):
    """Counts written elements: an unneeded gradient must not show up here."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, Tensor) and not func.is_view:
                self.elements += t.numel()
        return out


def gradients_and_work(op: Op, case: Case, inputs, wanted) -> tuple[dict[int, Tensor], int]:
    leaves = [t.detach().requires_grad_(i in wanted) if isinstance(t, Tensor) else t for i, t in enumerate(inputs)]
    with Work() as work:
        results = op.public(*leaves, **case.options)
        results = results if isinstance(results, tuple) else (results,)
        active = [r for r in results if r.requires_grad]
        torch.autograd.backward(active, [torch.ones_like(r) for r in active])
    return {i: t.grad for i, t in enumerate(leaves) if isinstance(t, Tensor)}, work.elements


@EVERY_OP
def test_frozen_inputs_cost_nothing(op: Op, backend, device):
    case = op.typical
    inputs = op.draw(case, torch.float32, device)
    every = op.differentiable(inputs)
    full, full_work = gradients_and_work(op, case, inputs, every)
    for frozen in every:
        wanted = [i for i in every if i != frozen]
        grads, work = gradients_and_work(op, case, inputs, wanted)
        assert grads[frozen] is None
        for i in wanted:
            # With less to compute, the compiler may round in another order.
            exact = {} if device.type == "cuda" else {"rtol": 0.0, "atol": 0.0}
            message = f"gradient {i} depends on whether input {frozen} is frozen"
            torch.testing.assert_close(grads[i], full[i], **exact, msg=message)
        less = work < full_work or frozen in op.needed
        assert less, f"input {frozen} is frozen, yet as much is written as for its gradient"


@EVERY_OP
def test_no_grad_makes_no_graph(op: Op, backend, device):
    case = op.typical
    inputs = op.draw(case, torch.float32, device)
    leaves = [t.detach().requires_grad_() if i in op.differentiable(inputs) else t for i, t in enumerate(inputs)]

    def refuse(_):
        raise AssertionError("a tensor was saved for a backward pass that cannot come")

    for no_graph in (torch.no_grad(), torch.inference_mode()):
        with no_graph, torch.autograd.graph.saved_tensors_hooks(refuse, refuse):
            result = op.public(*leaves, **case.options)
        for r in result if isinstance(result, tuple) else (result,):
            assert not r.requires_grad
    _, with_grad = gradients_and_work(op, case, inputs, op.differentiable(inputs))
    with torch.no_grad():
        _, without = gradients_and_work(op, case, inputs, [])
    assert without < with_grad


@EVERY_OP
def test_an_output_without_a_gradient(op: Op, backend, device):
    """Zero upstream, and None upstream, which set_materialize_grads(False) passes on."""
    case = op.typical
    inputs = op.draw(case, torch.float32, device)
    leaves = [t.detach().requires_grad_() if i in op.differentiable(inputs) else t for i, t in enumerate(inputs)]
    results = op.public(*leaves, **case.options)
    results = results if isinstance(results, tuple) else (results,)
    torch.autograd.backward(results, [torch.zeros_like(r) for r in results])
    for i in op.differentiable(inputs):
        assert leaves[i].grad.abs().max() == 0


# -------------------------------------------------------------------------------------------------- graph and bits


@pytest.mark.parametrize(("op", "case"), CASES)
def test_same_bits_on_every_run(op: Op, case: Case, backend, device):
    if backend == "triton" and device.type == "cpu" and case is not op.typical:
        pytest.skip("interpreted programs run one after another; what they must not read has a test of its own")
    inputs = op.draw(case, torch.bfloat16, device)
    first = run(op, inputs, case.options)
    assert_same_bits(run(op, inputs, case.options), first, "a later run")


@EVERY_OP
def test_backward_twice_with_retain_graph(op: Op, backend, device):
    case = op.typical
    inputs = op.draw(case, torch.float32, device)
    leaves = [t.detach().requires_grad_() if i in op.differentiable(inputs) else t for i, t in enumerate(inputs)]
    results = op.public(*leaves, **case.options)
    results = results if isinstance(results, tuple) else (results,)
    upstream = [torch.randn_like(r) for r in results]
    wanted = [leaves[i] for i in op.differentiable(inputs)]
    first = [g.clone() for g in torch.autograd.grad(results, wanted, upstream, retain_graph=True)]
    second = torch.autograd.grad(results, wanted, upstream, retain_graph=True)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    # Gradients are linear in the upstream gradient: exactly so for a power of two.
    doubled = torch.autograd.grad(results, wanted, [2 * u for u in upstream])
    for a, b in zip(first, doubled, strict=True):
        assert torch.equal(2 * a, b)


@EVERY_OP
@pytest.mark.parametrize("of", [torch.square, torch.clone], ids=["squared", "plain"])
def test_double_backward_is_refused(op: Op, of, device, triton_backend):
    """For every way to differentiate a gradient, for every input, and also for the gradient of a plain sum.

    `torch.autograd.grad(…, w)` prunes all paths that do not lead to w. A gradient penalty would be lost silently.
    """
    case = op.typical
    inputs = op.draw(case, torch.float32, device)
    every = op.differentiable(inputs)
    for wanted in (every, *([i for i in every if i != frozen] for frozen in every[:2] if len(every) > 1)):
        leaves, given, loss, penalties = with_penalties(op.public, op, inputs, wanted, of)
        expected = with_penalties(op.eager, op, inputs, wanted, of)
        for penalty, true in zip(penalties, expected[-1], strict=True):
            if penalty is None:
                continue
            with pytest.raises(RuntimeError, match="trying to differentiate twice"):
                (loss + penalty).backward(retain_graph=True)
            for to, true_to in zip((*leaves, *given), (*expected[0], *expected[1]), strict=True):
                lost = true.requires_grad and torch.autograd.grad(true, true_to, retain_graph=True, allow_unused=True)
                if lost and lost[0] is not None and lost[0].any():
                    with pytest.raises(RuntimeError, match="trying to differentiate twice"):
                        torch.autograd.grad(loss + penalty, to, retain_graph=True, allow_unused=True)


def with_penalties(fn, op: Op, inputs, wanted, of):
    """A loss, and a penalty on each of its gradients. The inputs are no leaves, like activations in a model."""
    leaves = {i: inputs[i].detach().requires_grad_() for i in wanted}
    given = {i: 1.0 * t for i, t in leaves.items()}
    results = fn(*(given.get(i, t) for i, t in enumerate(inputs)), **op.typical.options)
    results = results if isinstance(results, tuple) else (results,)
    loss = sum(of(r).sum() for r in results if r.requires_grad)
    gradients = torch.autograd.grad(loss, [*given.values()], create_graph=True, allow_unused=True)
    penalties = [None if g is None else 10 * g.square().sum() for g in gradients]
    return [*leaves.values()], [*given.values()], loss, penalties


@EVERY_OP
def test_a_shared_input_gets_the_sum_of_its_gradients(op: Op, backend, device):
    """Other libraries' in-place gradients are wrong when one tensor feeds two calls."""
    case = op.typical
    inputs = op.draw(case, torch.float32, device)
    wanted = op.differentiable(inputs)
    once, _ = gradients_and_work(op, case, inputs, wanted)
    leaves = [t.detach().requires_grad_() if i in wanted else t for i, t in enumerate(inputs)]
    for _ in range(2):
        result = op.public(*leaves, **case.options)
        for r in result if isinstance(result, tuple) else (result,):
            r.backward(torch.ones_like(r), retain_graph=True)
    for i in wanted:
        # Several results have a backward pass each here, and one together above: rounded apart.
        atol = 1e-6 * max(1.0, once[i].abs().max().item())
        torch.testing.assert_close(leaves[i].grad, 2 * once[i], rtol=1e-6, atol=atol)


# --------------------------------------------------------------------------------------------------------- compile


@pytest.fixture
def compiler():
    """Factory for compiler backends that count their graphs."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    yield CompileCounterWithBackend
    torch._dynamo.reset()


def compiler_of(op: Op, device) -> str:
    """Inductor pays only on a GPU. Custom backward passes are traced as well."""
    if device.type == "cuda":
        return "inductor"
    inputs = op.draw(op.typical, torch.float32, device)
    leaves = [t.detach().requires_grad_() if i in op.differentiable(inputs) else t for i, t in enumerate(inputs)]
    results = op.public(*leaves, **op.typical.options)
    nodes = [r.grad_fn for r in (results if isinstance(results, tuple) else (results,))]
    for node in nodes:
        if isinstance(node, BackwardCFunction):
            return "aot_eager"
        nodes += [before for before, _ in node.next_functions if before is not None]
    return "eager"


@EVERY_OP
def test_compiles_whole_and_dynamic(op: Op, backend, device, compiler):
    case = op.typical
    compiler = compiler(compiler_of(op, device))
    compiled = torch.compile(lambda *a: op.public(*a, **case.options), fullgraph=True, dynamic=True, backend=compiler)
    first, *rest = case.shape
    graphs = []
    # Inductor's exponential on a GPU is coarser than torch's, so torch code that Inductor compiles is measured by the
    # plain formula that Inductor compiles.
    eager = op.eager
    if backend == "torch" and device.type == "cuda":
        eager = torch.compile(lambda *a, **_: op.eager(*a, **case.options), dynamic=True)
    # In the interpreter two sizes: a kernel compiled for the first size is compiled again for the second.
    more = (1, 4, 9) if device.type == "cuda" else (1, 9)
    for rows in (first + n for n in more):
        sized = Case(case.why, (rows, *rest), case.options, case.inputs)
        inputs = op.draw(sized, torch.float32, device)
        compare(op, lambda *a, **_: compiled(*a), case, inputs, eager)
        # Only for the last size: in the interpreter this takes two more kernel runs.
        if backend == "triton" and device.type == "cpu" and rows == first + 9:
            got = evaluate(compiled, inputs, {}, grad=op.differentiable(inputs))
            assert_same_numbers(op, got, run(op, inputs, case.options), "compiled")
        graphs.append(compiler.frame_count)
    assert graphs[-1] == graphs[0], "another number of rows made it compile again"


class LibraryCalls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "tigon":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def library_calls(op: Op, case: Case, dtype, device, monkeypatch) -> list[tuple]:
    """An op's torch.ops.tigon calls under compile, recorded without compiling."""
    inputs = op.draw(case, dtype, device)
    seed = None if device.type == "meta" else 0
    with monkeypatch.context() as patched, LibraryCalls() as recorded:
        patched.setattr(torch.compiler, "is_compiling", lambda: True)
        evaluate(op.public, inputs, case.options, grad=op.differentiable(inputs), seed=seed)
    return recorded.calls


def as_library_call(func, args) -> tuple:
    """A key shared by calls that differ only in sizes and numbers: flags, names, and the omitted tensors."""

    def flag(a):
        if isinstance(a, list):  # for a loss: its integers and flags, its floats, its strings
            return tuple(e if isinstance(e, str) or (type(e) in (int, bool) and e in (0, 1)) else type(e) for e in a)
        return a if isinstance(a, bool | str) else type(a)

    return func, *map(flag, args)


@cache
def first_calls(name: str) -> dict[tuple, Case]:
    """The first case for each library call in an operator, small ones before large ones. Meta tensors take no time."""
    found: dict[tuple, Case] = {}
    op = next(op for op in OPS if op.name == name)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(backend_module, "why_not_triton", lambda *tensors: None)
        for case in sorted(op.cases, key=is_large):
            for func, args in library_calls(op, case, torch.bfloat16, torch.device("meta"), patched):
                found.setdefault(as_library_call(func, args), case)
    return found


def is_large(case: Case) -> bool:
    return math.prod(case.shape) >= 10000


@pytest.mark.parametrize(("op", "case"), CASES)
def test_library_ops_pass_opcheck(op: Op, case: Case, device, triton_backend, monkeypatch):
    calls = library_calls(op, case, torch.bfloat16, device, monkeypatch)
    assert calls, "nothing of this call goes through a library op"
    # Statistics have elements that only some options write. opcheck compares two runs, leftovers included.
    monkeypatch.setattr(Tensor, "new_empty", Tensor.new_zeros)
    for func, args in calls:
        differentiable = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "Autograd")

        def leaf(t, differentiable=differentiable):
            return t.detach().clone().requires_grad_(differentiable and t.is_floating_point())

        args = tuple(leaf(a) if isinstance(a, Tensor) else a for a in args)
        first = device.type != "cpu" or first_calls(op.name)[as_library_call(func, args)] is case
        if not first and is_large(case):
            continue
        utils = ["test_faketensor"]
        # The other checks run the op nine times, and do not depend on sizes: written and returned arguments, and
        # whether the call can be traced.
        if first:
            utils += ["test_schema"]
        if first and not is_large(case):
            utils += ["test_aot_dispatch_dynamic", *["test_autograd_registration"] * differentiable]
        torch.library.opcheck(func, args, test_utils=utils)


def test_every_library_op_is_in_the_table(triton_backend, monkeypatch):
    monkeypatch.setattr(backend_module, "why_not_triton", lambda *tensors: None)  # for tensors without data
    called = set()
    for op in OPS:
        names = {
            func.name().removeprefix("tigon::")
            for case in op.cases
            for func, _ in library_calls(op, case, torch.float32, torch.device("meta"), monkeypatch)
        }
        assert names == set(op.launches), f"{op} calls {sorted(names)}"
        called |= names
    called |= set(WITHOUT_A_ROW)
    # Operators are registered when their file is first imported.
    for package in ("tigon.ops", "tigon.rank.kernels", "tigon.retrieve.scan"):
        for module in pkgutil.walk_packages(import_module(package).__path__, f"{package}."):
            import_module(module.name)
    registered = {n.removeprefix("tigon::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("tigon::")}
    assert called == registered


# ------------------------------------------------------------------------------------------------- never a stall


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "case"), CASES)
def test_no_host_synchronisation(op: Op, case: Case, device, triton_backend):
    inputs = op.draw(case, torch.bfloat16, device)
    options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in case.options.items()}
    gradients_and_work(op, Case(case.why, case.shape, options), inputs, op.differentiable(inputs))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients_and_work(op, Case(case.why, case.shape, options), inputs, op.differentiable(inputs))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "case"), CASES)
def test_captured_in_a_cuda_graph(op: Op, case: Case, device, triton_backend):
    """Captured with some inputs, replayed with others."""
    options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in case.options.items()}
    inputs, others = (op.draw(case, torch.bfloat16, device, seed) for seed in (0, 1))
    wanted = op.differentiable(inputs)
    leaves = [t.detach().requires_grad_() if i in wanted else t for i, t in enumerate(inputs)]

    def step():
        results = op.public(*leaves, **options)
        results = results if isinstance(results, tuple) else (results,)
        return results, torch.autograd.grad(results, [leaves[i] for i in wanted], [torch.ones_like(r) for r in results])

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results, grads = step()
    with torch.no_grad():
        pairs = [(t, other) for t, other in zip(leaves, others, strict=True) if isinstance(t, Tensor)]
        # Ragged draws differ in their sizes: then the layout stays, and tensors with its shape change.
        ragged = any(t.shape != other.shape for t, other in pairs)
        for t, other in pairs:
            if t.shape == other.shape and (t.is_floating_point() or not ragged):
                t.copy_(other)
    graph.replay()
    replayed = [t.clone() for t in (*results, *grads)]
    results, grads = step()
    for got, expected in zip(replayed, (*results, *grads), strict=True):
        assert torch.equal(got, expected)


# --------------------------------------------------------------------------------------------------- around the op


@EVERY_OP
def test_autocast(op: Op, backend, device):
    """Autocast casts only matrix-product inputs; gradients have the inputs' dtypes."""
    case = op.typical
    inputs = op.draw(case, torch.float32, device)

    def under_autocast(fn):
        def call(*args, **options):
            with torch.autocast(device.type, torch.bfloat16):
                return fn(*args, **options)

        return call

    if not op.products:
        got = evaluate(under_autocast(op.public), inputs, case.options, grad=op.differentiable(inputs))
        assert_same_bits(got, run(op, inputs, case.options), "autocast")
        return
    check(
        under_autocast(op.public),
        op.reference,
        *inputs,
        eager=under_autocast(op.eager),
        grad=op.differentiable(inputs),
        **case.options,
    )


@EVERY_OP
def test_functional_call(op: Op, backend, device):
    """torch.func.functional_call swaps parameters: nothing may be cached from an earlier call."""
    case = op.typical
    inputs, others = op.draw(case, torch.float32, device, 0), op.draw(case, torch.float32, device, 1)
    learned = op.differentiable(inputs)

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for i in learned:
                self.register_parameter(f"p{i}", torch.nn.Parameter(inputs[i]))

        def forward(self):
            return op.public(*[getattr(self, f"p{i}", t) for i, t in enumerate(inputs)], **case.options)

    with torch.no_grad():
        module = Module()
        module()
        got = torch.func.functional_call(module, {f"p{i}": others[i] for i in learned}, ())
        want = op.public(*[others[i] if i in learned else t for i, t in enumerate(inputs)], **case.options)
    for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want)), strict=True):
        assert torch.equal(a, b)


@EVERY_OP
def test_under_activation_checkpointing(op: Op, backend, device):
    """Saved tensors are discarded, recomputed, and unpacked once."""
    case = op.typical
    inputs = op.draw(case, torch.float32, device)

    def recomputed(*tensors, **options):
        return torch.utils.checkpoint.checkpoint(op.public, *tensors, use_reentrant=False, **options)

    learned = op.differentiable(inputs)
    plain = evaluate(op.public, inputs, case.options, learned)
    assert_same_bits(evaluate(recomputed, inputs, case.options, learned), plain, "checkpointing")


@EVERY_OP
def test_anomaly_mode(op: Op, backend, device):
    """Anomaly mode changes no bit, and names the backward pass that produced a NaN."""
    case = op.typical
    inputs = op.draw(case, torch.float32, device)
    plain = run(op, inputs, case.options)
    leaves = [t.detach().requires_grad_() if i in op.differentiable(inputs) else t for i, t in enumerate(inputs)]
    with torch.autograd.set_detect_anomaly(True):
        assert_same_bits(run(op, inputs, case.options), plain, "anomaly mode")
        results = op.public(*leaves, **case.options)
        result = results[0] if isinstance(results, tuple) else results
        with (
            pytest.raises(RuntimeError, match=r"Function '\w+Backward\w*' returned nan values in its \d+th output"),
            pytest.warns(UserWarning, match="Traceback of forward call that caused the error"),
        ):
            result.backward(torch.full_like(result, torch.nan))


@pytest.fixture
def mesh(device):
    """A single-process mesh, which needs no network."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    backends = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh(device.type, (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "rows-sharded"])
@EVERY_OP
def test_dtensors_are_right_or_refused(op: Op, sharded: bool, device, mesh):
    """DTensors use torch's own operations: a kernel would treat the local part as the whole."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    case = op.typical
    inputs = op.draw(case, torch.float32, device)
    rows = op.rows(case, inputs) if sharded else [None] * len(inputs)
    wanted = op.differentiable(inputs)

    def distribute(t: Tensor, dim: int | None = None) -> DTensor:
        return distribute_tensor(t, mesh, [Replicate() if dim is None else Shard(dim)])

    def outputs(distributed: bool) -> list[Tensor]:
        leaves = [
            distribute(t, dim) if distributed and isinstance(t, Tensor) else t
            for t, dim in zip(inputs, rows, strict=True)
        ]
        leaves = [t.detach().requires_grad_() if i in wanted else t for i, t in enumerate(leaves)]
        results = op.public(*leaves, **case.options)
        results = results if isinstance(results, tuple) else (results,)
        upstream = [torch.linspace(-1, 1, r.numel(), device=device).view(r.shape) for r in results]
        grads = torch.autograd.grad(
            results, [leaves[i] for i in wanted], [distribute(u) for u in upstream] if distributed else upstream
        )
        assert all(isinstance(t, DTensor) == distributed for t in (*results, *grads))
        return [t.full_tensor() if distributed else t for t in (*results, *grads)]

    if op.dtensor == "refused":
        with pytest.raises(ValueError, match=rf"{op}: \w+ must be (a plain tensor, got a DTensor|Shard\(0\))"):
            outputs(True)
        return
    for got, expected in zip(outputs(True), outputs(False), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    if backend_module.HAS_TRITON:
        with (
            tigon.use_backend("triton"),
            pytest.raises(RuntimeError, match=r"triton backend was forced, but .*not DTensor"),
        ):
            outputs(True)


@pytest.mark.parametrize(("op", "bad"), [pytest.param(o, b, id=f"{o}-{i}") for o in OPS for i, b in enumerate(o.bad)])
def test_bad_input_gets_a_sentence(op: Op, bad, device):
    if bad.looks and device.type == "cuda":
        pytest.skip("on a GPU a bad value gives NaN instead")
    inputs = [t.to(device) if hasattr(t, "to") else t for t in bad.inputs()]
    with pytest.raises(ValueError, match=bad.message) as refused:
        op.public(*inputs, **bad.options)
    assert not wrong_with(str(refused.value), op.name)


def arguments_of(name: str) -> set[str]:
    """The parameter names of a public function, with field names for parameters that are objects."""
    private = (import_module(f"tigon.{name}") for name in ("ops.gated_linear", "rank.kernels.batch_norm_relu"))
    homes = tigon, tigon.losses, tigon.retrieve, *private
    home = next(m for m in homes if name in dir(m))
    parameters = inspect.signature(getattr(home, name)).parameters
    words = set(parameters)
    if dataclasses.is_dataclass(config := parameters["config"].default if "config" in parameters else None):
        words |= {field.name for field in dataclasses.fields(config)}
    if "head" in words:
        values = (
            tigon.Head,
            *(getattr(tigon.losses, n) for n in ("Hidden", "MainGrad", "Rollout", "Sampler", "TopK", "ChunkOptions")),
        )
        options = (getattr(tigon.losses, n) for n in ("GRPO", "Distill", "DistillTopK"))
        words |= {field for value in (*values, *options) for field in inspect.signature(value).parameters}
    return words


def wrong_with(sentence: str, name: str) -> str | None:
    """The missing part in an error for bad input: the operation, the argument, or the actual value."""
    # Options objects check their numbers on construction.
    found = re.fullmatch(
        rf"({name}|ChunkOptions|CrossEntropy): (.+?) (?:must|goes with) .*\bgot .+\.", sentence, re.DOTALL
    )
    if found is None:
        return f"not 'op: argument must …, got ….': {sentence}"
    # The argument in `swiglu(gate_up)` is named gate.
    named = found[2].replace("a packed gate_up", "gate")
    subjects = {subject.rpartition(".")[2] for subject in re.split(", | and ", named)}
    unknown = subjects - arguments_of(name)
    return f"{unknown} are no arguments of {name}: {sentence}" if unknown else None


def test_sentences_that_say_too_little_are_found():
    right = "rms_norm: weight must have shape (8,), got (7,)."
    assert not wrong_with(right, "rms_norm")
    for wrong in (
        "weight must have shape (8,), got (7,).", "rms_norm: weight must have shape (8,).", "rms_norm: got (7,).",
        "rms_norm: it must have shape (8,), got (7,).", "layer_norm: weight must have shape (8,), got (7,).",
    ):  # fmt: skip
        assert wrong_with(wrong, "rms_norm"), wrong


def test_every_public_operator_is_in_the_table():
    homes = ("tigon.ops.", "tigon.losses.", "tigon.rank.kernels.")
    public = {name for name, home in find_homes("tigon").items() if home.startswith(homes)}
    public -= {"lora_linear"}  # a group of layers: ops/test_lora_linear.py
    functions = {name for name in public if inspect.isfunction(getattr(tigon, name))}
    assert functions <= {op.name for op in OPS} | set(WITHOUT_A_ROW) | set(OF_TORCH)
