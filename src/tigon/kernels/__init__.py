"""Shared kernel infrastructure: backend dispatch, operator registration, kernel launches.

language       Triton's language for kernels: `tl`, and the decorators `jit` and `do_not_specialize`
dispatch       Triton kernels or the torch reference, decided per call
autograd       a launch function as a torch.library op and as an autograd.Function
launch_cache   launches compiled kernels without Triton's dispatch
device         device properties that launches depend on
rows           row layout in memory
row_parts      splits few wide rows into parts for several programs
autocast       autocast's target dtype
graph_capture  whether a CUDA graph is being captured, or rehearsed
arguments      checks callers' tensors, layers and keywords
"""

from tigon.kernels.arguments import Layer, check_no_shape, check_plain, check_tensors, unknown_keyword, weight_and_bias
from tigon.kernels.autocast import autocast_as, autocast_device, autocast_dtype
from tigon.kernels.autograd import (
    SymInt,
    add_anchor,
    bind_apply,
    differentiable,
    differentiable_directly,
    is_concrete,
    is_exporting,
    is_graph_retained,
    is_traced,
    launcher,
    load_tensors,
    make_function,
    run_once_differentiable,
    save_tensors,
)
from tigon.kernels.device import (
    can_describe,
    describe,
    has_copy_engine,
    is_hopper,
    multiprocessors,
    register_limit,
    shared_memory,
)
from tigon.kernels.dispatch import BACKENDS, DTYPES, INTERPRET, use_backend, use_triton, why_not_triton
from tigon.kernels.graph_capture import find_capture, is_captured, rehearsal
from tigon.kernels.language import HAS_TRITON, do_not_specialize, jit, tl, triton
from tigon.kernels.launch_cache import Plan, launch
from tigon.kernels.row_parts import Parts, cut_rows, find_sum_parts, fold_warps, part_tile
from tigon.kernels.rows import (
    cdiv,
    dense_like,
    dense_like_second,
    empty_rows,
    in_order,
    memory_order,
    next_power_of_2,
    row_groups,
    uneven,
    view_rows,
)
