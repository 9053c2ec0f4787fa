"""What every test shares: the environment, set before anything imports Triton, and the device.

On a machine without CUDA the Triton kernels run in Triton's interpreter. The switch is read when a kernel is decorated,
so it is set here, before the first import of a kernel file.
"""

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import tigon.backend as backend_module
from tigon import use_backend

HAS_TRITON = backend_module.HAS_TRITON


def _round_to_bf16_as_gpus_do() -> None:
    """Triton's interpreter drops the low bits when it casts fp32 to bf16; hardware rounds to nearest, ties to even.

    With twice the rounding error, no kernel would pass the comparison with eager, and a kernel that really truncates
    could not be told from one that rounds.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_float(data, source, target, rounding_mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, rounding_mode)
        bits = np.ascontiguousarray(data).view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(data), np.uint16(0x7FC0), rounded)

    interpreter._convert_float = convert_float


def _call_functions_cheaply() -> None:
    """The interpreter goes through all of triton.language at each call of a function by a kernel: once is enough."""
    from triton.language import core
    from triton.runtime import interpreter

    def call(self, *args, **kwargs):
        if core.is_builtin(core.load):  # a function of triton.language.standard looks there for its builtins
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


def _multiply_bf16() -> None:
    """The interpreter holds bf16 as the integers that its bits make, and multiplies matrices of these."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    create_dot = builder.create_dot

    def wide(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = np.ascontiguousarray(handle.data).view(np.uint16).astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    builder.create_dot = lambda self, a, b, *rest: create_dot(self, wide(a), wide(b), *rest)


if backend_module.INTERPRET and HAS_TRITON:
    _round_to_bf16_as_gpus_do()
    _multiply_bf16()
    _call_functions_cheaply()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest):
    """Each implementation in turn, forced: the Triton kernels are interpreted where there is no CUDA device."""
    if request.param == "triton" and not HAS_TRITON:
        pytest.skip("Triton is not installed")
    with use_backend(request.param):
        yield request.param


@pytest.fixture
def triton_backend():
    if not HAS_TRITON:
        pytest.skip("Triton is not installed")
    with use_backend("triton"):
        yield


@pytest.fixture(autouse=True)
def _same_state_after_every_test():
    """A test that leaves a backend forced would make the later ones compare the library with itself."""
    forced = backend_module._forced
    torch.manual_seed(0)
    yield
    assert backend_module._forced == forced, "the test left a backend forced"
