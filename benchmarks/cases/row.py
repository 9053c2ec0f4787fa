"""What a row of the table of benchmarks holds, and how its implementations are loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cases.inputs import Expected, Inputs, Shape

Loader = Callable[[], Callable[..., Any]]


@dataclass(frozen=True)
class Implementation:
    load: Loader
    note: str = ""
    # It writes into its inputs or into the incoming gradient: it gets a private copy, renewed before each round.
    overwrites: bool = False
    # Measured only when it is named in --peers.
    on_request: bool = False
    gpu_only: bool = False
    # Where it cannot be imported it has no row; others get one that says so.
    where_installed: bool = False


@dataclass(frozen=True)
class Op:
    """One operator, or one use of it with a name of its own: "rope-interleaved".

    shape_names: what the numbers of a shape mean.
    shapes: of real models, for a GPU.  small: for a CPU and for --quick.  tiny: where only the host's work counts.
    extra: further shapes of the record (benchmarks/run.py --record).
    make(shape, dtype, device, ignored): random inputs; `ignored` is the fraction of targets that are -100.
    expect(inputs): the right answer in fp64.
    nbytes(shape, itemsize): fewest bytes moved by the (forward, backward): each input read once, each output written
        once. What an implementation saves for its backward, or reads twice, is its own affair and not counted.
    flops(shape): of the (forward, backward), where arithmetic is the floor; None where memory is.
    floor(inputs): products timed in the same run, whose sum is the floor; None: nbytes at the copy bandwidth. A product
        is a tuple of ways to compute it, of which the fastest counts.
    counted: nbytes in words, (forward, backward), for the documentation.
    slack: how many times the tolerance a result may be off in 16 bits, where rounded logits alone put it off as much.
    """

    name: str
    shapes: tuple[Shape, ...]
    make: Callable[[Shape, torch.dtype, torch.device, float], Inputs]
    expect: Callable[[Inputs], Expected]
    nbytes: Callable[[Shape, int], tuple[int, int]]
    counted: tuple[str, str]
    implementations: dict[str, Implementation]
    shape_names: tuple[str, ...] = ("rows", "width")
    small: tuple[Shape, ...] = ((256, 1024),)
    tiny: Shape = (8, 64)
    extra: tuple[Shape, ...] = ()
    flops: Callable[[Shape], tuple[int, int]] | None = None
    floor: Callable[[Inputs], list[tuple[Callable[[], Any], ...]]] | None = None
    slack: float = 1.0

    @property
    def operator(self) -> str:
        """The public function that this is a use of."""
        return self.name.split("-")[0]


OVERWRITES_DY = "writes dx over the incoming gradient"
OVERWRITES_INPUTS = "overwrites its inputs; they are renewed before each round"


def plain(eager: Callable[..., Any]) -> dict[str, Implementation]:
    """What models write, as it stands and compiled; in one graph, since a break in it would time eager code."""
    return {
        "eager": Implementation(lambda: eager),
        "compile": Implementation(lambda: torch.compile(eager, fullgraph=True)),
    }


def torch_own(function: Callable[..., Any], note: str = "one operator of PyTorch's own") -> dict[str, Implementation]:
    return {"torch": Implementation(lambda: function, note=note)}


def tigon(name: str, **options: Any) -> Loader:
    def load() -> Callable[..., Any]:
        import tigon

        op = getattr(tigon, name)
        return lambda **kwargs: op(**kwargs, **options)

    return load


def liger(
    function: str, arguments: Callable[..., tuple[Any, ...]], pick: Callable[[Any], Any] = lambda out: out
) -> Loader:
    """A Liger autograd function with the positional arguments that its own modules pass by default."""

    def load() -> Callable[..., Any]:
        apply = getattr(liger_ops(), function).apply
        return lambda **kwargs: pick(apply(*arguments(**kwargs)))

    return load


def liger_ops() -> Any:
    """liger_kernel.ops, held to its Triton kernels, as `pip install liger-kernel` gives them.

    Where the CuTe DSL happens to be installed, with QuACK for one, some of its operators would take CuTe kernels.
    LIGER_KERNEL_IMPL and LIGER_KERNEL_IMPL_<OP> still choose.
    """
    import liger_kernel.ops
    from liger_kernel.backends import get_impl, set_impl

    if get_impl() is None and not os.environ.get("LIGER_KERNEL_IMPL"):
        set_impl("triton")
    return liger_kernel.ops


def quack(load: Loader, note: str = "") -> dict[str, Implementation]:
    return {"quack": Implementation(load, note=note, gpu_only=True, where_installed=True)}
