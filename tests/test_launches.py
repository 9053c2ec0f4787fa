"""A launch takes the kernel that Triton would take, and asks Triton only when there is something to compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tigon.kernels import HAS_TRITON, launch_cache
from tigon.kernels.language import tl, triton

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")

TESTS = Path(__file__).parent


@cache
def made() -> dict[str, Any]:
    """What known_launches.py says of the launches of all operators."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])}
    env.pop("TRITON_INTERPRET", None)
    script = TESTS / "known_launches.py"
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_launches_are_as_triton_makes_them():
    assert made()["wrong"] == []


def test_new_sizes_do_not_go_through_triton():
    """Triton's dispatch runs once for each kernel that it compiles, and each kernel serves many sizes."""
    counts = made()["operators"]
    assert all(op["dispatched"] == op["compiled"] for op in counts.values()), counts
    assert made()["keys"] > 1.5 * made()["kernels"]


def _kernel(x_ptr, y_ptr, M, N, eps, flag, WIDE: tl.constexpr, FORM: tl.constexpr):
    pass


def _sized(x_ptr, y_ptr, M, N, eps, flag, WIDE: tl.constexpr, FORM: tl.constexpr):
    pass


# Kernels that are interpreted have no parameters: these are made for Triton's compiler in any case.
KERNELS = [None, None]
if HAS_TRITON:
    JITFunction = triton.runtime.JITFunction
    KERNELS = [JITFunction(_kernel), JITFunction(_sized, do_not_specialize=("M", "flag"))]
ROOM = torch.empty(64, dtype=torch.bfloat16), torch.empty(64), torch.empty(64, dtype=torch.bool)
TENSORS = [None, *ROOM, ROOM[0][1:], ROOM[1][4:], ROOM[2][1:], ROOM[2][16:]]
INTEGERS = [0, 1, 2, 3, 16, 48, -1, -16, 2**31 - 16, 2**31 - 1, 2**31, 2**31 + 1, -(2**31), -(2**31) - 1, 2**63 - 1,
            2**63, 2**64 - 1]  # fmt: skip
NUMBERS = [*INTEGERS, 1.0, 0.0, -0.0, 1e-6, True, False, None]
CONSTANTS = [0, 1, 16, True, False, 0.0, -0.0, 1.0, float("inf"), None, "", "silu", "None", *KERNELS]
if HAS_TRITON:
    CONSTANTS += [tl.float32, tl.bfloat16]
OPTIONS = [{"num_warps": 4}, {"num_warps": 8}, {"num_warps": 4, "num_stages": 3}]
COLUMNS = [TENSORS, TENSORS, *[NUMBERS] * 4, CONSTANTS, CONSTANTS]
CALL = list[Any]


def kind_of(kernel: Any, call: CALL) -> Any:
    """What decides the kernel, to `launch`."""
    *tensors, first, second, third, fourth, wide, form, options = call
    pointers = [t if t is None else t.data_ptr() for t in tensors]
    arguments = first, second, third, fourth, wide, form
    return launch_cache._specialization_key(kernel, 0, tuple(tensors), pointers, arguments, options)


def special_of(kernel: Any, call: CALL) -> str:
    """What decides the kernel, to Triton."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import create_function_from_signature

    binder = create_function_from_signature(kernel.signature, kernel.params, CUDABackend(GPUTarget("cuda", 90, 32)))
    *arguments, options = call
    _, specialization, rest = binder(*arguments, **options)
    return str(specialization) + str(rest)


@pytest.mark.parametrize("kernel", KERNELS, ids=["specialized", "sizes"])
def test_one_kind_is_one_kernel_to_triton(kernel):
    """Calls of one kind, and calls that differ in one argument: nothing that Triton tells apart is of one kind."""
    hypothesis = pytest.importorskip("hypothesis")
    of = hypothesis.strategies.sampled_from
    numbers = of(NUMBERS) | hypothesis.strategies.integers(-(2**40), 2**40)
    columns = [of(TENSORS)] * 2 + [numbers] * 4 + [of(CONSTANTS)] * 2 + [of(OPTIONS)]
    calls = hypothesis.strategies.tuples(*columns)

    @hypothesis.settings(max_examples=300, deadline=None, database=None, derandomize=True)
    @hypothesis.given(calls, calls, hypothesis.strategies.integers(0, len(columns) - 1))
    def compare(call, other, column):
        changed = [*call[:column], other[column], *call[column + 1 :]]
        kinds, specials = [], []
        for arguments in (list(call), changed):
            kinds.append(kind_of(kernel, arguments))
            specials.append(special_of(kernel, arguments))
        if kinds[0] is not None and kinds[0] == kinds[1]:
            assert specials[0] == specials[1]
        # Not too fine either, or a new size would be of a new kind.
        if specials[0] == specials[1]:
            assert kinds[0] == kinds[1]

    compare()


@pytest.mark.parametrize("kernel", KERNELS, ids=["specialized", "sizes"])
@pytest.mark.parametrize("column", range(8))
def test_arguments_are_told_apart_as_triton_does(kernel, column):
    """Every pair at the edges: 1 and True, 0.0 and −0.0, multiples of 16, what no longer fits into 32 or 64 bits."""
    call = [ROOM[0], ROOM[1], 5, 7, 1e-6, 3, 16, "silu", OPTIONS[0]]
    calls = [[*call[:column], value, *call[column + 1 :]] for value in COLUMNS[column]]
    pairs = [(kind_of(kernel, arguments), special_of(kernel, arguments)) for arguments in calls]
    for a, (kind, special) in zip(calls, pairs, strict=True):
        for b, (other_kind, other_special) in zip(calls, pairs, strict=True):
            assert (kind == other_kind) == (special == other_special), (a[column], b[column])


def test_new_sizes_start_a_known_kernel_with_their_own_arguments(monkeypatch):
    """On a stand-in for a kernel: of two keys of one kind Triton sees the first, and addresses may lie anywhere."""
    compiled, started = [], []

    class Kernel(JITFunction):
        def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            def run(*args: Any) -> None:
                started.append((number, args[0], args[9:]))

            number = len(compiled)
            compiled.append((grid, args[2:]))
            return SimpleNamespace(run=run, function=0, packed_metadata=())

    kernel = Kernel(_kernel, do_not_specialize=("M",))
    monkeypatch.setattr(launch_cache, "_plans", {})
    monkeypatch.setattr(launch_cache, "_kernels", {})
    monkeypatch.setattr(launch_cache, "INTERPRET", False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)

    def launch(rows: int, width: int, x: torch.Tensor) -> None:
        plan = rows, (rows, width, 1e-6, False, 64, "silu"), {"num_warps": 4}
        launch_cache.launch(kernel, (rows, width), (x, None), lambda: plan)

    launch(5, 32, ROOM[1])
    assert (len(compiled), started) == (1, [])
    launch(6, 32, ROOM[1])  # another number of rows
    launch(6, 48, ROOM[1])  # another width that 16 divides
    launch(5, 32, ROOM[1])  # known
    at = ROOM[1].data_ptr()
    rest = 1e-6, False, 64, "silu"
    assert started == [
        (0, 6, (at, None, 6, 32, *rest)),
        (0, 6, (at, None, 6, 48, *rest)),
        (0, 5, (at, None, 5, 32, *rest)),
    ]
    assert len(compiled) == 1
    launch(6, 33, ROOM[1])
    assert len(compiled) == 2, "16 does not divide the width"
    launch(6, 32, ROOM[1][1:])
    assert len(compiled) == 3, "16 does not divide the address"
    started.clear()
    launch(7, 32, ROOM[1][1:])
    launch(7, 32, ROOM[1])
    assert started == [(2, 7, (at + 4, None, 7, 32, *rest)), (0, 7, (at, None, 7, 32, *rest))]
    assert len(compiled) == 3


@pytest.mark.parametrize(("name", "value"), [("_has_launch_hook", lambda: True), ("ENABLED", False)])
def test_under_a_profilers_hooks_and_without_the_cache_triton_launches(name, value, monkeypatch):
    calls = []
    kernel = JITFunction(_kernel)
    monkeypatch.setattr(kernel, "run", lambda *args, **options: calls.append(options), raising=False)
    monkeypatch.setattr(launch_cache, name, value)
    monkeypatch.setattr(launch_cache, "_plans", {})
    for _ in range(2):
        launch_cache.launch(kernel, (1,), (ROOM[1], None), lambda: (1, (1, 2, 3.0, False, 4, "silu"), {"num_warps": 4}))
    assert len(calls) == 2


@pytest.mark.parametrize(("tokens", "launched"), [(300, 6), (16, 4)], ids=["many tokens", "few"])
def test_a_fused_layer_makes_four_launches_forward_and_six_backward(tokens, launched, monkeypatch):
    """As docs/how-it-works/host.md has it. On small batches each launch is time that the GPU waits.

    Of few tokens one program has the whole gradient of a norm's weight, and nothing is left to sum.
    """
    transformers = pytest.importorskip("transformers")
    import tigon

    launch, counts = launch_cache.launch, []
    for depth in (1, 3):
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
        config = transformers.LlamaConfig(num_hidden_layers=depth, head_dim=16, vocab_size=48, use_cache=False, **sizes)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = transformers.LlamaForCausalLM(config).to(device)
        tigon.fuse(model, recompute="product")
        ids = torch.arange(tokens, device=device)[None] % 48
        made = []

        def counted(kernel: Any, *rest: Any, made: list[Any] = made) -> None:
            made.append(kernel.fn.__name__)
            launch(kernel, *rest)

        with monkeypatch.context() as patch, tigon.use_backend("triton"):
            for name, module in list(sys.modules.items()):
                if name.startswith("tigon.") and vars(module).get("launch") is launch:
                    patch.setattr(module, "launch", counted)
            loss = model(input_ids=ids, labels=ids).loss
            forward = len(made)
            loss.backward()
        counts.append((forward, len(made) - forward))
    (forward, backward), (forward_of_3, backward_of_3) = counts
    assert (forward_of_3 - forward, backward_of_3 - backward) == (2 * 4, 2 * launched)
