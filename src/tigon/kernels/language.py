"""The kernel language: Triton's, and the decorators for its functions.

    @jit
    @do_not_specialize("M")
    def _scale_kernel(x_ptr, y_ptr, M, N, BLOCK: tl.constexpr):

A kernel body is written in Triton's language, where parameters have no Python type: a pointer may be None, and a number
may be a constant. For type checkers `jit` is therefore `typing.no_type_check`. All other functions are fully typed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["HAS_TRITON", "TensorDescriptor", "do_not_specialize", "jit", "tl", "triton"]

Function = TypeVar("Function", bound=Callable[..., Any])

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # macOS, Windows and CPU-only installs: the torch reference serves every call

    class _NoTriton:
        """Lets a kernel file be imported without Triton. Such kernels are never launched."""

        @staticmethod
        def jit(fn: Any, **_: Any) -> Any:
            return fn

        @staticmethod
        def constexpr(value: Any) -> Any:
            return value

    triton = tl = _NoTriton()
    TensorDescriptor = None
    HAS_TRITON = False
else:
    HAS_TRITON = True


def do_not_specialize(*names: str) -> Callable[[Function], Function]:
    """Under `@jit`: sizes that vary between steps; the values 1 and multiples of 16 compile no separate kernel."""

    def mark(fn: Function) -> Function:
        fn.__do_not_specialize__ = names  # type: ignore[attr-defined]
        return fn

    return mark


if TYPE_CHECKING:
    from typing import no_type_check as jit
else:

    def jit(fn):
        """`triton.jit`, with the names that `do_not_specialize` has marked."""
        return triton.jit(fn, do_not_specialize=getattr(fn, "__do_not_specialize__", ()))
