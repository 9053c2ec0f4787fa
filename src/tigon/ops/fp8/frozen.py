"""Frozen weights in e4m3 under adapters: products for the result and for the input's gradient, rounded once.

Layers with one input, such as query, key and value, are stacked with one scale, as in `multiply`: their input gradient
is one product. The weight stays in place beside its copies, or the copy replaces the weight:

    `JointWeight`      the parameters stay; copies are made and kept by its policy
    `ReplacedWeights`  one e4m3 copy, transposed for each backward pass; a `ReplacedWeight` stands for each parameter
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from tigon.ops.fp8.columns import transpose_rows
from tigon.ops.fp8.products import multiply_rows
from tigon.ops.fp8.recipe import Rows, Weight
from tigon.ops.fp8.store import Copies
from tigon.ops.fp8.weight import measure_weights, quantize_weight


class ReplacedWeights:
    """Frozen weights (Nᵢ, K) with one input as their e4m3 copy alone: 1 byte a number.

    The copy is made from the parameters, whose memory is released until `give_back`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.rows = quantize_weight(parameters, measure_weights(parameters))
        self.dtypes = [p.dtype for p in parameters]
        self.sizes = [len(p) for p in parameters]
        self.parameters = list(parameters)
        for p in parameters:
            p.data = p.data.new_empty(0)

    def read_rows(self, parameters: Sequence[Tensor]) -> Weight:
        return self.rows

    def read_transposed(self, parameters: Sequence[Tensor]) -> Weight:
        data, scale = self.rows
        N, K = data.shape
        return Weight(transpose_rows(data)[:, :N].contiguous(), scale[:1].expand(K).contiguous())

    def dequantize(self, i: int) -> Tensor:
        """The i-th weight as rounded, in the parameter's dtype: exact, since the scale is a power of two."""
        data, scale = (t.split(self.sizes)[i] for t in self.rows)
        dtype = self.dtypes[i]
        weight: Tensor = data.to(dtype) * scale[:1].to(dtype)
        return weight

    def stand_in(self, i: int) -> ReplacedWeight:
        """What takes the i-th parameter's place in its module."""
        shape = self.sizes[i], self.rows.data.shape[1]
        number = torch.full((), torch.nan, dtype=self.dtypes[i], device=self.rows.data.device)
        made: ReplacedWeight = torch.Tensor._make_subclass(ReplacedWeight, number.expand(shape), False)
        made.source, made.position, made.facts = self, i, (number.dtype, number.device, torch.Size(shape))
        return made

    def give_back(self) -> list[nn.Parameter]:
        """The parameters, which now hold the weights as rounded."""
        return [self.give_one_back(i) for i in range(len(self.parameters))]

    def give_one_back(self, i: int) -> nn.Parameter:
        p = self.parameters[i]
        if p.shape[0] != self.sizes[i]:
            p.data = self.dequantize(i)
        return p

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.rows)


# What a `ReplacedWeight` answers without its numbers.
_PROPERTIES_OF_NUMBERS = {"T", "mT", "H", "mH", "real", "imag"}
_METHODS_WITHOUT_NUMBERS = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "is_contiguous",
    "is_floating_point", "is_complex", "is_inference", "is_shared", "get_device", "requires_grad_", "untyped_storage",
    "data_ptr", "__hash__", "__len__", "_is_view", "is_pinned", "is_conj", "is_neg", "register_hook",
}  # fmt: skip
_CONVERSIONS = {"to", "cuda", "cpu", "bfloat16", "half", "float", "type_as"}


class ReplacedWeight(nn.Parameter):
    """A parameter without memory, in whose place every operation gets the dequantised weight, made anew.

    `state_dict`, `torch.save`, pickle and `copy.deepcopy` keep the weight right. A write to the weight raises a
    RuntimeError.
    """

    source: ReplacedWeights
    position: int
    facts: tuple[torch.dtype, torch.device, torch.Size]
    """The same as dtype, device and shape, which take longer to read."""

    def dequantize(self) -> Tensor:
        return self.source.dequantize(self.position)

    def give_back(self) -> nn.Parameter:
        """The parameter in whose place this one stands."""
        return self.source.give_one_back(self.position)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # torch.nn.init passes its tensor by keyword.
        own = next((t for t in (*args[:1], *kwargs.values()) if isinstance(t, ReplacedWeight)), None)
        attribute = func.__self__.__name__ if name in ("__get__", "__set__") else None
        is_read = attribute not in _PROPERTIES_OF_NUMBERS if name == "__get__" else name in _METHODS_WITHOUT_NUMBERS
        if own is not None:
            if name == "detach" or (name == "__get__" and attribute == "data"):
                return own._share()
            if name == "__set__" and attribute == "data":
                if getattr(args[1], "source", None) is not own.source:
                    _refuse_write()
                return None
            trains = name == "requires_grad_" or (name == "__set__" and attribute == "requires_grad")
            if trains and (*args[1:], *kwargs.values(), True)[0]:
                _refuse_write()
            if is_read or name == "__set__":
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if name in _CONVERSIONS and not kwargs.get("copy"):
                moved = func(torch.empty(0, dtype=own.dtype, device=own.device), *args[1:], **kwargs)
                if (moved.dtype, moved.device) == (own.dtype, own.device):
                    return own
            is_write = name.endswith("_") and not name.endswith("__")
            if is_write or name == "__setitem__" or (name.startswith("__i") and name not in ("__int__", "__index__")):
                _refuse_write()
        if isinstance(kwargs.get("out"), ReplacedWeight):
            _refuse_write()
        return func(*_dequantize_all(args), **_dequantize_all(kwargs))

    def _share(self) -> ReplacedWeight:
        return self.source.stand_in(self.position)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplacedWeight:
        if id(self) not in memo:
            memo[id(self)] = copy.deepcopy(self.source, memo).stand_in(self.position)
        copied: ReplacedWeight = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.dequantize(), requires_grad=False).__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ReplacedWeight(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def _refuse_write() -> NoReturn:
    raise RuntimeError(
        'fuse: the weight under this adapter is kept in FP8 alone (FP8(base="release")), and cannot be written, '
        "trained or moved. Call fusion.remove() before, which gives the weight back as rounded."
    )


def _dequantize_all(value: Any) -> Any:
    if isinstance(value, ReplacedWeight):
        return value.dequantize()
    if type(value) in (list, tuple):
        return type(value)(_dequantize_all(item) for item in value)
    return {key: _dequantize_all(item) for key, item in value.items()} if type(value) is dict else value


# --------------------------------------------------------------------------------------------------------- products


class FrozenStack:
    """Frozen weights (Nᵢ, K) with one input, as a call and its backward pass read them.

    copies: from `JointWeight.read`, or ReplacedWeights. is_exact: sums in fp32.
    """

    def __init__(
        self, copies: Copies | ReplacedWeights, parameters: Sequence[Tensor], *, is_exact: bool = False
    ) -> None:
        self.copies, self.parameters, self.is_exact = copies, tuple(parameters), is_exact
        self.starts = [0]
        for p in parameters:
            self.starts.append(self.starts[-1] + p.shape[0])
        self._held: dict[str, Weight] | None = None

    def layer(self, i: int) -> FrozenLinear:
        return FrozenLinear(self, (i,))

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Inside, the weights are quantised or transposed once at most."""
        if self._held is not None:
            yield
            return
        self._held = {}
        try:
            yield
        finally:
            self._held = None

    def read(self, name: str) -> Weight:
        """name: "rows" for the weights as they are, or "transposed"."""
        found = None if self._held is None else self._held.get(name)
        if found is None:
            read = self.copies.read_rows if name == "rows" else self.copies.read_transposed
            found = read(self.parameters)
            if self._held is not None:
                self._held[name] = found
        return found


class FrozenLinear:
    """Some layers of a `FrozenStack`, side by side: a `tigon.ops.linear.lora.FrozenFP8`.

    indices: ascending.
    """

    block = None

    def __init__(self, stack: FrozenStack, indices: tuple[int, ...]) -> None:
        self.stack, self.indices = stack, indices

    @property
    def source(self) -> Tensor:
        """The parameter of a single layer."""
        return self.stack.parameters[self.indices[0]]

    @property
    def shape(self) -> tuple[int, int]:
        shapes = [self.stack.parameters[i].shape for i in self.indices]
        return sum(rows for rows, _ in shapes), shapes[0][1]

    @property
    def device(self) -> torch.device:
        return self.source.device

    def dense(self, dtype: torch.dtype) -> Tensor:
        weights = [self.stack.parameters[i].to(dtype) for i in self.indices]
        weights = [w.dequantize() if isinstance(w, ReplacedWeight) else w for w in weights]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    def multiply(self, rows: Rows) -> Tensor:
        """x Wᵀ: (M, K) rows -> (M, N) bf16."""
        data, scale = self.stack.read("rows")
        weight = Weight(self._select(data, 0), self._select(scale, 0))
        return multiply_rows(rows, weight, is_exact=self.stack.is_exact)

    def multiply_transposed(self, rows: Rows) -> Tensor:
        """dy W: (M, N) rows -> (M, K) bf16."""
        data, scale = self.stack.read("transposed")
        return multiply_rows(rows, Weight(self._select(data, 1), scale), is_exact=self.stack.is_exact)

    def join(self, others: Sequence[Any]) -> FrozenLinear | None:
        """The layers, this one among them, side by side in their order; None unless all are of one stack."""
        indices = [i for other in others for i in getattr(other, "indices", ())]
        if any(getattr(other, "stack", None) is not self.stack for other in others) or indices != sorted(set(indices)):
            return None
        return FrozenLinear(self.stack, tuple(indices))

    def hold(self) -> contextlib.AbstractContextManager[None]:
        return self.stack.hold()

    def _select(self, t: Tensor, dim: int) -> Tensor:
        """These layers' rows or columns, contiguous."""
        starts = self.stack.starts
        if len(self.indices) == len(starts) - 1:
            return t
        own = t.view(torch.uint8) if t.element_size() == 1 else t  # torch has few operations on e4m3
        parts = [own.narrow(dim, starts[i], starts[i + 1] - starts[i]) for i in self.indices]
        return (torch.cat(parts, dim) if len(parts) > 1 else parts[0].contiguous()).view(t.dtype)
