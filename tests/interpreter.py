"""Patch Triton's interpreter to compute as a GPU does, and to spend less time per operation.

Without a CUDA device, kernels run in the interpreter. A tile costs little and an operation much, nearly all for the
frontend's types and shapes: repeated results for the same few types and shapes are cached.
"""

from __future__ import annotations

import bisect
import dataclasses
from typing import Any

import numpy as np
import torch
import triton.language as tl
from interpreter_operators import OPERATORS, at_once, widened
from triton.language import core
from triton.runtime import interpreter


def mend() -> None:
    _round_to_bf16_as_gpus_do()
    _round_to_e4m3_as_gpus_do()
    _multiply_bf16()
    _read_nan_in_e4m3()
    _round_once_in_fma()
    _call_functions_cheaply()
    _launch_cheaply()
    _count_by_arrays_of_one_element()
    _overflow_in_silence()
    _calculate_nothing_that_nobody_sees()
    _reduce_by_halves()
    _remember_types()
    _stay_within_arguments()


def _round_to_bf16_as_gpus_do() -> None:
    """Triton's interpreter drops the low bits when casting fp32 to bf16; hardware rounds to nearest, ties to even.

    With twice the rounding error, no kernel would pass the comparison with eager, and a kernel that really truncates
    could not be told from one that rounds.
    """
    convert = interpreter._convert_float

    def convert_float(data, source, target, rounding_mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, rounding_mode)
        bits = np.ascontiguousarray(data).view(np.uint32)  # only NaN overflows
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        rounded[np.isnan(data)] = 0x7FC0
        return rounded

    interpreter._convert_float = convert_float


def _round_to_e4m3_as_gpus_do() -> None:
    """Triton's interpreter drops bits here too, and wraps beyond 448; hardware rounds and saturates, and keeps NaN."""
    convert = interpreter._convert_float

    def convert_float(data, source, target, rounding_mode):
        if (source, target) != (tl.float32, tl.float8e4nv):
            return convert(data, source, target, rounding_mode)
        x = torch.from_numpy(np.array(data, np.float32)).clamp(-448, 448)
        return x.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = convert_float


def _multiply_bf16() -> None:
    """The interpreter stores bf16 bits as integers, and would multiply matrices of these integers."""
    builder = interpreter.InterpreterBuilder
    create_dot = builder.create_dot

    def wide(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = np.ascontiguousarray(handle.data).view(np.uint16).astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    builder.create_dot = lambda self, a, b, *rest: create_dot(self, wide(a), wide(b), *rest)


def _read_nan_in_e4m3() -> None:
    """The interpreter reads e4m3's two NaN as 480 and −480."""
    convert = interpreter._convert_float

    def convert_float(data, source, target, rounding_mode):
        found = convert(data, source, target, rounding_mode)
        if (source, target) != (tl.float8e4nv, tl.float32):
            return found
        return np.where(np.asarray(data) & 0x7F == 0x7F, np.float32(np.nan).view(np.uint32), found)

    interpreter._convert_float = convert_float


def _round_once_in_fma() -> None:
    """The interpreter rounds the product before the addition; hardware rounds only the sum, so no product overflows."""

    def create_fma(self, x, y, z):
        if z.dtype.scalar != tl.float32:
            return interpreter.TensorHandle(x.data * y.data + z.data, z.dtype.scalar)
        exact = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(exact.astype(np.float32), tl.float32)

    interpreter.InterpreterBuilder.create_fma = create_fma


def _call_functions_cheaply() -> None:
    """The interpreter walks all of triton.language whenever a kernel calls a function: once is enough."""

    def call(self, *args, **kwargs):
        if core.is_builtin(core.load):  # functions in triton.language.standard look up builtins here
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call

    def patch_attr(owner, name, member, builder, scope):
        function = getattr(member, "__wrapped__", member)

        def builtin(*args, **kwargs):
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        if owner is core.tensor and name in OPERATORS:
            builtin = at_once(name, builtin)
        scope.set_attr(owner, name, builtin)

    interpreter._patch_attr = patch_attr


def _launch_cheaply() -> None:
    """The same at each launch: attributes replaced at the first launch are replaced again without a search."""
    patch = interpreter._patch_lang
    replaced: dict[tuple[bool, ...], list[tuple[Any, str, Any]]] = {}

    def patch_lang(fn):
        seen = list(fn.__globals__.values())
        key = (any(v is tl for v in seen), any(v is core for v in seen), core.is_builtin(core.load))
        if key not in replaced:
            scope = patch(fn)
            replaced[key] = [(owner, name, vars(owner)[name]) for owner, name, _ in scope._changes]
            return scope
        scope = interpreter._LangPatchScope()
        for owner, name, value in replaced[key]:
            scope.set_attr(owner, name, value)
        return scope

    interpreter._patch_lang = patch_lang


def _count_by_arrays_of_one_element() -> None:
    """NumPy 2.5 converts no array with dimensions to a number, which Triton's interpreter before 3.7 needs."""
    set_attr = interpreter._LangPatchScope.set_attr

    def set_method(self, owner, name, value):
        set_attr(self, owner, name, (lambda x: int(x.handle.data.item())) if name == "__index__" else value)

    interpreter._LangPatchScope.set_attr = set_method


def _overflow_in_silence() -> None:
    """Lanes that are masked later may hold anything: a GPU ignores infinities and NaN, NumPy warns about each."""
    run = interpreter.GridExecutor.__call__

    def silent(self, *args, **kwargs):
        with np.errstate(all="ignore"):
            return run(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = silent


def _calculate_nothing_that_nobody_sees() -> None:
    """The interpreter repeats integer sums and products in int64, for an assertion that only debugging enables."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _reduce_by_halves() -> None:
    """A reduction by a custom function is one call per number in Triton; halving handles half the numbers per call."""
    one_by_one = interpreter.ReduceOps.generic_reduce

    def generic_reduce(self, input):
        n = None if self.axis is None else input[0].handle.data.shape[self.axis]
        if not n or n & (n - 1):
            return one_by_one(self, input)
        dtypes, values = [t.dtype for t in input], list(input)
        while n > 1:
            n //= 2
            halves = [np.split(t.handle.data, 2, self.axis) for t in values]
            first, second = (
                [self.to_tensor(h[i], d) for h, d in zip(halves, dtypes, strict=True)] for i in (0, 1)
            )  # fmt: skip
            values = self.combine_fn.fn(*first, *second)
            values = values if isinstance(values, (tuple, core.tuple)) else (values,)
        data = [t.handle.data if self.keep_dims else t.handle.data.squeeze(self.axis) for t in values]
        return [self.to_tensor(t, d) for t, d in zip(data, dtypes, strict=True)]

    interpreter.ReduceOps.generic_reduce = generic_reduce


def _remember_types() -> None:
    _numpy_dtypes_by_name()
    _block_types_by_shape()
    _broadcast_what_differs()
    _operands_of_one_type()
    _sizes_of_types_by_name()
    _plain_values_unwrapped_at_once()


def _numpy_dtypes_by_name() -> None:
    get, known = interpreter._get_np_dtype, {}

    def get_np_dtype(dtype):
        found = known.get(dtype.name)
        if found is None:
            found = known[dtype.name] = get(dtype)
        return found

    interpreter._get_np_dtype = get_np_dtype


def _block_types_by_shape() -> None:
    """Types and tensors never change their shape: equal shapes share one object."""
    make_type = core.block_type.__init__
    types: dict[tuple, dict[str, Any]] = {}
    shapes: dict[tuple, tuple[Any, Any]] = {}

    def block_type_init(self, element_ty, shape):
        sizes = tuple(s.value if isinstance(s, core.constexpr) else s for s in shape)
        found = types.get((element_ty.name, sizes))
        if found is None:
            make_type(self, element_ty, shape)
            types[element_ty.name, sizes] = dict(vars(self))
        else:
            vars(self).update(found)
            self.element_ty = element_ty

    def tensor_init(self, handle, type):
        sizes = tuple(type.shape.values) if type.is_block() else ()
        found = shapes.get(sizes)
        if found is None:
            found = core.tuple([core.constexpr(s) for s in sizes]), core.constexpr(int(np.prod(sizes)))
            shapes[sizes] = found
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = found

    core.block_type.__init__ = block_type_init
    core.tensor.__init__ = tensor_init


def _broadcast_what_differs() -> None:
    """Most operands have the same shape, or are a tile and a number."""
    semantic = interpreter.TritonSemantic
    broadcast = semantic.broadcast_impl_value

    def spread(scalar, like):
        data, shape = scalar.handle.data, like.handle.data.shape
        # Like np.broadcast_to, which takes twenty times as long.
        data = np.ndarray(shape, data.dtype, data, 0, (0,) * len(shape))
        return core.tensor(interpreter.TensorHandle(data, scalar.dtype), like.type.with_element_ty(scalar.dtype))

    def broadcast_impl_value(self, lhs, rhs):
        if lhs.shape is rhs.shape:  # shared, as above
            return lhs, rhs
        if not rhs.type.is_block():
            return lhs, spread(rhs, lhs)
        if not lhs.type.is_block():
            return spread(lhs, rhs), rhs
        return broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_impl_value


def _operands_of_one_type() -> None:
    """Most operands have the same type already, or are a tile and a Python number. Most casts keep the type.

    These operands only need a broadcast. Numbers are cached, since the same few recur.
    """
    semantic = interpreter.TritonSemantic
    check, cast = semantic.binary_op_type_checking_impl, semantic.cast
    same = frozenset(("fp32", "int32", "int64"))
    integers = {"int32": range(-(2**31), 2**31), "int64": range(-(2**63), 2**63)}
    constants: dict[tuple, Any] = {}

    def constant(self, value, like):
        """The number as a tensor with the dtype of `like`, or None if the types must be checked."""
        kind, name = type(value), like.dtype.name
        if not (name == "fp32" if kind is float else kind is int and value in integers.get(name, ())):
            return None
        found = constants.get((kind, value, name))
        if found is None:
            if len(constants) > 4096:
                constants.clear()
            found = constants[kind, value, name] = self.scalar_constant(value, like.dtype)
        return found

    def binary_op_type_checking_impl(self, lhs, rhs, *options, **named):
        if type(lhs) is core.tensor and type(rhs) is core.tensor:
            name = lhs.dtype.name
            if name in same and name == rhs.dtype.name:
                return self.broadcast_impl_value(lhs, rhs)
        elif type(lhs) is core.tensor:
            number = constant(self, rhs, lhs)
            if number is not None:
                return self.broadcast_impl_value(lhs, number)
        elif type(rhs) is core.tensor:
            number = constant(self, lhs, rhs)
            if number is not None:
                return self.broadcast_impl_value(number, rhs)
        return check(self, lhs, rhs, *options, **named)

    def cast_unless_there(self, input, dst_ty, *options, **named):
        if input.dtype is dst_ty.scalar:
            return input
        found = widened(input, dst_ty.scalar) if not any(options) and not any(named.values()) else None
        return cast(self, input, dst_ty, *options, **named) if found is None else found

    semantic.binary_op_type_checking_impl = binary_op_type_checking_impl
    semantic.cast = cast_unless_there


def _sizes_of_types_by_name() -> None:
    """The interpreter checks each result for numbers wider than the result's type."""
    fits, sizes = interpreter._validate_np_data_size, {}

    def validate_np_data_size(array, dtype):
        size = sizes.get(dtype.name)
        if size is None:
            widths = (np.empty(0, f"u{n}") for n in (1, 2, 4, 8))
            size = sizes[dtype.name] = max(a.itemsize for a in widths if fits(a, dtype))
        return array.itemsize <= size

    def handle_init(self, data, dtype, attr=None):
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize > sizes.get(dtype.name, 0) and not validate_np_data_size(data, dtype):
            raise ValueError(f"{data.dtype} of numpy is wider than Triton's {dtype}")

    interpreter._validate_np_data_size = validate_np_data_size
    interpreter.TensorHandle.__init__ = handle_init


def _plain_values_unwrapped_at_once() -> None:
    unwrap = core._unwrap_if_constexpr
    plain = frozenset((int, float, bool, str, type(None), core.tensor, core.dtype, core.block_type, core.pointer_type))
    core._unwrap_if_constexpr = lambda o: o if type(o) in plain else unwrap(o)


def _stay_within_arguments() -> None:
    """Refuse a load or store outside the storages of the launch's arguments, as compute-sanitizer does on a GPU.

    NumPy would read or write whatever lies there: a test passes, or the process dies at some later allocation.
    A launch is not checked after it has made a number a pointer, as kernels do with tables of addresses.
    """
    begin, builder = interpreter.GridExecutor._init_args_hst, interpreter.InterpreterBuilder
    point = builder.create_int_to_ptr
    ranges: list[tuple[int, int]] | None = None

    def init_args_hst(self, args_dev, kwargs):
        nonlocal ranges
        found = begin(self, args_dev, kwargs)
        values = [getattr(a, "base", a) for a in (*found[0], *found[1].values())]  # of a tensor's descriptor
        tensors = [a for a in values if hasattr(a, "data_ptr")]
        storages = [interpreter._unwrap_tensor(t).untyped_storage() for t in tensors]
        ranges = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages})
        return found

    def int_to_ptr(self, *args):
        nonlocal ranges
        ranges = None
        return point(self, *args)

    def check(ptrs, size, mask=None):
        if ranges is None:
            return
        seen = ptrs.data if mask is None else ptrs.data[np.asarray(mask.data, bool)]
        if not seen.size:
            return
        first, last = int(seen.min()), int(seen.max()) + size
        place = bisect.bisect_right(ranges, (first, 1 << 64)) - 1
        if place >= 0 and last <= ranges[place][1]:
            return
        starts, ends = np.array(ranges or [(0, 0)], np.uint64).T
        places = np.searchsorted(starts, seen, "right").astype(np.int64) - 1
        if places.min() < 0 or (seen + np.uint64(size) > ends[places]).any():
            raise IndexError(f"an access of {size} bytes lies outside the arguments of the launch")

    def check_calls(name, mask_at):
        access = getattr(builder, name)

        def run(self, *args, **options):
            ptrs = args[0] if name != "create_atomic_rmw" else args[1]
            size = np.dtype(interpreter._get_np_dtype(ptrs.get_element_ty())).itemsize
            check(ptrs, size, args[mask_at] if mask_at else None)
            if name == "create_masked_store" and args[1].data.itemsize != size:
                raise IndexError(f"a store of {args[1].data.itemsize} bytes into elements of {size}")
            return access(self, *args, **options)

        setattr(builder, name, run)

    interpreter.GridExecutor._init_args_hst = init_args_hst
    builder.create_int_to_ptr = int_to_ptr
    check_calls("create_masked_load", 1)
    check_calls("create_masked_store", 2)
    check_calls("create_atomic_rmw", 3)
    check_calls("create_atomic_cas", None)
