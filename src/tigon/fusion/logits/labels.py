"""Labels that know how many labels count, whatever a loss does to them first.

On a GPU the loss skips ignored rows if their number is on the host before the loss starts. So the labels are
counted when the model is called, and the count is copied to the host while the forward pass runs. The loss receives
a tensor made from the labels: shifted, padded, flattened, masked. `Labels` follows these steps, each of which keeps
or lowers the count, and no other step: a loss that makes other targets (a prompt's tokens too, labels twice)
gets a plain tensor, and visits every row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.graph_capture import is_captured

IGNORED = -100


class Labels(Tensor):
    """The labels that a model was called with, or a subset of them.

    count: an upper bound on the number of labels that are not ignored.
    version: the tensor's version up to which every write to the memory has kept the count.
    """

    count: Any = None
    version: int = -2  # no tensor has this version: compiled code makes Labels without a count

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if torch.compiler.is_compiling() or func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        writes = func in _WRITES
        current = isinstance(first, Labels) and _version(first) == first.version
        keeps = current and (func in _STEPS or writes) and _keeps_the_count(func, args, kwargs)
        result = func(*_plain(args), **_plain(kwargs))
        if not keeps or not isinstance(first, Labels):
            return result
        if writes:
            first.version = _version(first)
            return first if isinstance(result, Tensor) else result
        if type(result) is not Tensor or result.dtype != torch.int64:
            return result
        # A mask that is larger than the labels broadcasts them.
        spread = func is not F.pad and result.numel() > first.numel()
        return result if spread else _labels(result, first.count)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(plain(self))


def count_labels(labels: Any) -> Any:
    """Start counting the labels, and copying the count to the host. Only a plain label tensor on a GPU is counted.

    On a CPU the loss counts the targets itself.
    """
    if type(labels) is not Tensor or labels.dtype != torch.int64 or torch.compiler.is_compiling():
        return labels
    if not is_far(labels) or torch._C._are_functorch_transforms_active():
        return labels
    from tigon.losses.head.chunks import ValidCount

    return _labels(labels, ValidCount(labels, IGNORED))


def is_far(labels: Tensor) -> bool:
    """Whether the host would have to wait to count these labels, and an asynchronous copy can avoid that."""
    return labels.is_cuda and not is_captured(labels)


def valid_count(target: Tensor, ignore_index: int) -> Any:
    """An upper bound on the targets that count, being copied to the host; None where no bound is certain."""
    if not isinstance(target, Labels) or ignore_index != IGNORED or _version(target) != target.version:
        return None
    return target.count


def plain(t: Any) -> Any:
    """Labels as a plain tensor; any other value unchanged."""
    if not isinstance(t, Labels):
        return t
    with torch._C.DisableTorchFunctionSubclass():
        return t.as_subclass(Tensor)


def _labels(t: Tensor, count: Any) -> Labels:
    made = t.as_subclass(Labels)
    made.count, made.version = count, _version(t)
    return made


def _version(t: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return -1 if t.is_inference() else t._version


def _plain(value: Any) -> Any:
    if isinstance(value, Labels):
        return plain(value)
    if type(value) in (list, tuple):
        return type(value)([_plain(v) for v in value])
    if type(value) is dict:
        return {k: _plain(v) for k, v in value.items()}
    return value


# --------------------------------------------------------------------------------- steps that add no target that counts

_METADATA = {
    *(getattr(Tensor, name).__get__ for name in (
        "shape", "dtype", "device", "ndim", "is_cuda", "layout", "requires_grad", "_version",
    )),
    *(getattr(Tensor, name) for name in (
        "dim", "size", "numel", "stride", "is_contiguous", "is_floating_point", "is_inference", "__len__",
    )),
}  # fmt: skip
_MASKS = {Tensor.masked_fill, torch.masked_fill, Tensor.masked_fill_}
_WRITES = {Tensor.masked_fill_, Tensor.__setitem__}
_STEPS = {
    Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.contiguous, Tensor.clone,
    torch.clone, Tensor.detach, Tensor.to, Tensor.cuda, Tensor.long, Tensor.squeeze, torch.squeeze, Tensor.unsqueeze,
    torch.unsqueeze, Tensor.transpose, torch.transpose, Tensor.t, Tensor.narrow, torch.narrow, Tensor.__getitem__,
    Tensor.masked_fill, torch.masked_fill, F.pad,
}  # fmt: skip


def _keeps_the_count(func: Any, args: Any, kwargs: Any) -> bool:
    if func in _MASKS:
        return _is_ignored(args[2] if len(args) > 2 else kwargs.get("value"))
    if func is Tensor.__setitem__:
        return len(args) == 3 and _is_ignored(args[2])
    if func is F.pad:
        given = dict(zip(("input", "pad", "mode", "value"), args, strict=False)) | kwargs
        return given.get("mode", "constant") == "constant" and _is_ignored(given.get("value"))
    if func is Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(map(_takes_each_once, index))
    return True


def _is_ignored(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == IGNORED


def _takes_each_once(index: Any) -> bool:
    """Whether the index is a slice, a number or a mask; a list or tensor with positions may name a position twice."""
    if isinstance(index, Tensor):
        return index.dtype == torch.bool
    return index is None or index is Ellipsis or isinstance(index, (int, slice))
