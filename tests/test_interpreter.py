"""What tests/interpreter.py adds to Triton's interpreter."""

import pytest
import torch

from tigon.kernels import HAS_TRITON, INTERPRET

pytestmark = pytest.mark.skipif(not (HAS_TRITON and INTERPRET), reason="no interpreter")
if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def copy(y_ptr, x_ptr, start, end, SIZE: tl.constexpr):
        i = tl.arange(0, SIZE)
        tl.store(y_ptr + i, tl.load(x_ptr + start + i, mask=i < end, other=0), mask=i < end)


def test_accesses_stay_within_the_arguments():
    from triton.runtime.errors import InterpreterError

    x, y = torch.randn(16)[:12], torch.zeros(16)
    copy[(1,)](y, x, 4, 12, 32)
    assert torch.equal(y[:8], x[4:])
    for start, end in ((-1, 4), (5, 12), (0, 17)):
        with pytest.raises(InterpreterError, match="4 bytes lies outside"):
            copy[(1,)](y, x, start, end, 32)
    with pytest.raises(InterpreterError, match="lies outside"):
        copy[(1,)](y[:0].clone(), x, 0, 1, 32)
