"""Head losses as operators: named tensors and frozen options on both sides of torch.library.

A torch.library schema takes tensors, numbers and strings, but no objects. `pack` turns a record (a NamedTuple with
numbers, strings and further records) into lists for integers, floats and strings; `Unpacker` reads the record back. A
loss is then four functions that take (tensors, options, shards), and no function counts positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from tigon.kernels import differentiable, differentiable_directly, is_traced, launcher
from tigon.losses.head.vocabulary_parallel import Shards

R = TypeVar("R", bound=type)
DTYPES = {dtype: str(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
# Types of each record's fields; resolved once, since torch.compile does not trace type hints.
FIELDS: dict[type, tuple[Any, ...]] = {}
LISTS = "int[] ints, float[] floats, str[] words"
TENSORS = {Tensor: "Tensor", Tensor | None: "Tensor?", list[Tensor]: "Tensor[]"}


def record(cls: R) -> R:
    """Let `pack` take a NamedTuple. Its fields are int, bool, float, str, dtype, a record, or tuples of these."""
    FIELDS[cls] = tuple(_field_type(hint) for hint in get_type_hints(cls).values())
    return cls


def _field_type(hint: Any) -> Any:
    if get_origin(hint) is tuple:
        return (_field_type(get_args(hint)[0]),)
    # Hints that are not classes are string literals.
    return hint if isinstance(hint, type) else str


def with_floats(value: Any, kind: Any = None) -> Any:
    """Convert the values in float fields to float, where users may have written a whole number."""
    kind = type(value) if kind is None else kind
    if kind is float:
        return float(value)
    if isinstance(kind, tuple):
        return tuple([with_floats(each, kind[0]) for each in value])
    if kind in FIELDS:
        return kind(*[with_floats(each, field) for each, field in zip(value, FIELDS[kind], strict=True)])
    return value


class Packed(NamedTuple):
    """Lists that go through a schema. None is empty: torch.library takes an empty list for a list of tensors."""

    ints: list[int]
    floats: list[float]
    words: list[str]


def pack(*records: Any) -> Packed:
    """Pack the records' numbers and strings, field by field."""
    packed = Packed([], [], [])
    for each in records:
        _pack(each, type(each), packed)
    return packed


def _pack(value: Any, kind: Any, packed: Packed) -> None:
    if kind is int or kind is bool:
        packed.ints.append(int(value))
    elif kind is float:
        packed.floats.append(float(value))
    elif kind is str:
        packed.words.append(value)
    elif kind is torch.dtype:
        packed.words.append(DTYPES[value])
    elif isinstance(kind, tuple):
        packed.ints.append(len(value))
        for each in value:
            _pack(each, kind[0], packed)
    else:
        for each, field in zip(value, FIELDS[kind], strict=True):
            _pack(each, field, packed)


class Unpacker:
    """Reads records in the order in which they were packed."""

    def __init__(self, ints: list[int], floats: list[float], words: list[str]) -> None:
        self._ints, self._floats, self._words = iter(ints), iter(floats), iter(words)

    def read(self, kind: Any) -> Any:
        if kind is int:
            return next(self._ints)
        if kind is bool:
            return bool(next(self._ints))
        if kind is float:
            return next(self._floats)
        if kind is str:
            return next(self._words)
        if kind is torch.dtype:
            return DTYPES_BY_NAME[next(self._words)]
        if isinstance(kind, tuple):
            return tuple([self.read(kind[0]) for _ in range(next(self._ints))])
        return kind(*[self.read(field) for field in FIELDS[kind]])


class LossOperator:
    """A function that takes (tensors, options, shards), as a torch.library operator.

    Args:
        name: the operator is `torch.ops.tigon.<name>`.
        tensors: the NamedTuple with the function's tensors, each a Tensor, a Tensor or None, or a list of tensors.
        options: the option record, or a pair: a function that packs the options, and a function that reads them from
            an `Unpacker`.
        fake: as the function, returns empty tensors with the right shapes and dtypes.
        results: how many tensors the function returns.
    """

    def __init__(
        self, name: str, tensors: type[Any], options: Any, fake: Callable[..., Any], function: Callable[..., Any],
        results: int,
    ) -> None:  # fmt: skip
        self.tensors = tensors
        self.pack, self.read = options if isinstance(options, tuple) else (pack, lambda unpack: unpack.read(options))
        types = {field: TENSORS[hint] for field, hint in get_type_hints(tensors).items()}
        given = ", ".join(f"{kind} {field}" for field, kind in types.items())
        self.lists = [i for i, kind in enumerate(types.values()) if kind == "Tensor[]"]

        def run(*arguments: Any, shards: Shards | None = None) -> Any:
            return function(*self.split(arguments), shards)

        def run_fake(*arguments: Any) -> Any:
            return fake(*self.split(arguments), None)

        run.__name__ = run.__qualname__ = name
        schema = f"({given}, {LISTS}) -> ({', '.join(['Tensor'] * results)})"
        self.launch = launcher(run_fake, schema)(run)

    def join(self, tensors: Any, options: Any) -> tuple[Any, ...]:
        """The arguments for a launch. Without a schema the options remain an object, which costs no time."""
        return (*tensors, *self.pack(options)) if is_traced(tensors[0]) else (*tensors, options)

    def split(self, arguments: Any) -> tuple[Any, Any]:
        """Split a launch's arguments into tensors and options."""
        count = len(self.tensors._fields)
        packed = arguments[count:]
        return self.tensors(*arguments[:count]), packed[0] if len(packed) == 1 else self.read(Unpacker(*packed))

    def __call__(self, tensors: Any, options: Any, shards: Shards | None = None) -> Any:
        own = {} if shards is None else {"shards": shards}
        return self.launch(*self.join(tensors, options), **own)


def make_differentiable(
    stage: LossOperator, save: Callable[..., None], backward: Callable[..., Any], *, outputs: int = 1,
    unsaved: tuple[int, ...] = (),
) -> Callable[..., Any]:  # fmt: skip
    """Give a stage a gradient, and return the function to call: (tensors, options, shards).

    Args:
        save: (ctx, tensors, options, output) → None. `ctx.shards` is set.
        backward: (ctx, *gradients) → gradients for the first inputs; the other inputs get None.
        outputs, unsaved: as in `tigon.kernels.differentiable`.
    """

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.shards = getattr(ctx, "own", {}).get("shards")
        ctx.nones = [None] * len(inputs)
        if not getattr(ctx, "hides", False):  # torch.library wants a gradient for each tensor in a list
            for i in stage.lists:
                ctx.nones[i] = [None] * len(inputs[i])
        save(ctx, *stage.split(inputs), output)

    def complete(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        found = backward(ctx, *gradients)
        return (*found, *ctx.nones[len(found) :])

    run = differentiable(stage.launch, setup_context, complete, outputs=outputs, unsaved=unsaved)
    run_over_shards = differentiable_directly(stage.launch, setup_context, complete, outputs=outputs, unsaved=unsaved)

    def apply(tensors: Any, options: Any, shards: Shards | None = None) -> Any:
        if shards is None:
            return run(*stage.join(tensors, options))
        return run_over_shards(*tensors, options, {"shards": shards})

    return apply
