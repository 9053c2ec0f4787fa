"""The tools of every kernel file: choosing a backend, making a launch an operator, launching kernels.

language    what a kernel is written in: `tl`, and the decorators `jit` and `do_not_specialize`
dispatch    Triton kernels or the torch reference, decided per call
autograd    a launch function as a torch.library op and as an autograd.Function
launches    launching a compiled kernel without Triton's dispatch
device      properties of a device on which launches depend
rows        how the rows of a tensor lie in memory
parts       how few wide rows are cut into parts for several programs
autocast    which dtype autocast casts to
capturing   whether a CUDA graph is being captured, or rehearsed
arguments   what callers may pass: tensors, layers, keywords that exist
"""

from tigon.kernels.arguments import Layer, check_no_shape, check_tensors, unknown_keyword, weight_and_bias
from tigon.kernels.autocast import autocast_as, autocast_device, autocast_dtype
from tigon.kernels.autograd import (
    applied,
    can_look,
    differentiable,
    differentiable_directly,
    first_order,
    graph_is_kept,
    is_exporting,
    is_traced,
    keep,
    kept,
    launcher,
    way_back,
)
from tigon.kernels.capturing import is_captured, rehearsal
from tigon.kernels.device import (
    can_describe,
    describe,
    has_copy_engine,
    is_hopper,
    multiprocessors,
    register_limit,
    shared_memory,
)
from tigon.kernels.dispatch import (
    BACKENDS,
    DTYPES,
    INTERPRET,
    use_backend,
    use_triton,
    why_not_triton,
)
from tigon.kernels.language import HAS_TRITON, do_not_specialize, jit, tl, triton
from tigon.kernels.launches import Plan, launch
from tigon.kernels.parts import Parts, fold_warps, part_tile, parts_of, summed_in_parts
from tigon.kernels.rows import cdiv, empty_rows, in_order, memory_order, next_power_of_2, row_groups, rows_of, uneven

__all__ = [
    "BACKENDS",
    "DTYPES",
    "HAS_TRITON",
    "INTERPRET",
    "Layer",
    "Parts",
    "Plan",
    "applied",
    "autocast_as",
    "autocast_device",
    "autocast_dtype",
    "can_describe",
    "can_look",
    "cdiv",
    "check_no_shape",
    "check_tensors",
    "describe",
    "differentiable",
    "differentiable_directly",
    "do_not_specialize",
    "empty_rows",
    "first_order",
    "fold_warps",
    "graph_is_kept",
    "has_copy_engine",
    "in_order",
    "is_captured",
    "is_exporting",
    "is_hopper",
    "is_traced",
    "jit",
    "keep",
    "kept",
    "launch",
    "launcher",
    "memory_order",
    "multiprocessors",
    "next_power_of_2",
    "part_tile",
    "parts_of",
    "register_limit",
    "rehearsal",
    "row_groups",
    "rows_of",
    "shared_memory",
    "summed_in_parts",
    "tl",
    "triton",
    "uneven",
    "unknown_keyword",
    "use_backend",
    "use_triton",
    "way_back",
    "weight_and_bias",
    "why_not_triton",
]
