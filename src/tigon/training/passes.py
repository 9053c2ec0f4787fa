"""Two passes over a batch shard: the first finds a step's direction, the second the gradient after the step.

    g  = ∇L(p)              not reduced over the ranks that hold other shards; dropout drawn, running statistics updated
    p' = p + rho · g / ‖g‖  (perturb.py)
    p.grad += ∇L(p')        the same dropout; running statistics put back to those of the first pass
    p  = p                  the old bits

A rank's shard follows from how the model is wrapped:

    DistributedDataParallel    each rank's own: the first pass reduces nothing
    fully_shard, 2-d mesh      each replica group's own: the first pass reduces over the ranks that share the weights
    fully_shard, 1-d mesh      that of all ranks, which have the gradient only together
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from tigon.training.perturb import copy_all, perturb, restore, squared_norm

T = TypeVar("T")


def two_passes(
    run: Callable[[], T], params: Sequence[nn.Parameter], rho: Sequence[float], model: nn.Module | None = None, *,
    adaptive: bool = False, eta: float = 0.0,
) -> T:  # fmt: skip
    """Add the gradient at the perturbed weights to p.grad.

    Args:
        run: forward and backward pass over a shard; called twice.
        params: the parameters to perturb, each listed once.
        rho: the step length, for each parameter.
        model: as called, including wrappers: their reductions are suppressed in the first pass, its statistics restored
            after the second.
        adaptive, eta: as in `perturb`.
    Returns: run's result at the unperturbed weights.
    Raises: RuntimeError if the first pass leaves no gradient, TypeError for a sparse gradient, ValueError for
        parameters that share memory. Weights are unchanged then, and if the first pass raises, gradients too.
    """
    # Computed once: traversing a model takes the host as long as some kernels take.
    modules = [] if model is None else list(model.modules())
    sharded = _find_sharded(modules)
    # The model may have parameters in another optimizer: their first-pass gradients are dropped too.
    in_model = (p for m in modules for p in m._parameters.values() if p is not None)
    touched = list({id(p): p for p in itertools.chain(params, in_model) if p.requires_grad}.values())
    # Earlier shards' gradients are set aside: the first pass needs its own shard's alone.
    gathered = [p.grad for p in touched]
    draws = _draws(params)
    buffers = list({id(b): b for m in modules for b in m._buffers.values() if b is not None}.values())
    # The second pass updates running statistics again. Buffers that the first pass wrote are restored afterwards.
    versions = [b._version for b in buffers]
    for p in touched:
        p.grad = None
    try:
        with _first_pass(modules, sharded):
            result = run()
        moved = [(p, length) for p, length in zip(params, rho, strict=True) if p.grad is not None]
        own = [g for p, _ in moved if (g := p.grad) is not None]
    finally:
        for p, g in zip(touched, gathered, strict=True):
            p.grad = g
    _check(own)
    # The second pass repeats the first pass's dropout. Random numbers then continue from the end of the first pass.
    after_first = _draws(params)
    tracked = _find_statistics(modules)
    written = [b for b, v in zip(buffers, versions, strict=True) if b._version != v or id(b) in tracked]
    statistics = [torch.empty_like(b) for b in written]
    with torch.no_grad():
        copy_all(statistics, written)
        local, own = [_local(p) for p, _ in moved], [_local(g) for g in own]
        _check_apart(local)
        squares = _squares_of_shard([p for p, _ in moved], local, own, adaptive, eta)
        kept = perturb(local, own, squares, [length for _, length in moved], adaptive=adaptive, eta=eta)
        del own, squares
    try:
        _weights_changed(sharded)
        _set_draws(draws)
        with _reducing(sharded):
            run()
    finally:
        restore(local, kept)
        _weights_changed(sharded)
        _set_draws(after_first)
        copy_all(written, statistics)
    return result


def _check(grads: Sequence[Tensor]) -> None:
    if not grads:
        raise RuntimeError(
            "MicroBatchSAM: the first pass left no gradient. The loss must depend on the optimizer's parameters, and "
            "nothing (DeepSpeed, an optimizer in the backward pass) may clear the gradients."
        )
    if any(g.layout != torch.strided for g in grads):
        raise TypeError("MicroBatchSAM: gradients must be dense, got a sparse one: nn.Embedding(..., sparse=False).")


def _check_apart(params: Sequence[Tensor]) -> None:
    places = [p.untyped_storage().data_ptr() for p in params if p.numel() and p.device.type != "meta"]
    if len(set(places)) == len(places):
        return
    # Parameters may share a storage (nn.LSTM's flattened weights), but not elements.
    spans = sorted((p.data_ptr(), p.data_ptr() + p.numel() * p.element_size()) for p in params if p.numel())
    if any(end > start for (_, end), (start, _) in itertools.pairwise(spans)):
        raise ValueError(
            "MicroBatchSAM: two parameters must not share memory, which would be perturbed twice. Tie weights by "
            "making them one nn.Parameter."
        )


# ------------------------------------------------------------------------------------------- shared by both passes


# The host's random state, and for each device type the indices and their states.
Draws = tuple[Tensor, list[tuple[str, list[int], list[Tensor]]]]


def _draws(params: Iterable[Tensor]) -> Draws:
    devices = {p.device: p for p in params if p.device.type != "cpu"}
    kinds = {device.type for device in devices}
    return torch.get_rng_state(), [
        (kind, *get_device_states(*(p for device, p in devices.items() if device.type == kind))) for kind in kinds
    ]


def _set_draws(draws: Draws) -> None:
    on_host, on_devices = draws
    torch.set_rng_state(on_host)
    for kind, devices, states in on_devices:
        set_device_states(devices, states, device_type=kind)


def _find_statistics(modules: Iterable[nn.Module]) -> set[int]:
    """BatchNorm and similar statistics, which fused kernels update without advancing the version counter."""
    with_buffers = (m for m in modules if m._buffers and getattr(m, "track_running_stats", False))
    return {id(b) for m in with_buffers for b in m._buffers.values()}


def _weights_changed(sharded: Iterable[Any]) -> None:
    # Autocast caches weight casts until it ends, and FSDP2 may keep gathered weights. Both would be stale.
    torch.clear_autocast_cache()
    for module in sharded:
        module.reshard()


# --------------------------------------------------------------------------------------------------- several devices


def _has_process_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _find_sharded(modules: Iterable[nn.Module]) -> list[Any]:
    """The modules to which `fully_shard` was applied."""
    if not _has_process_group():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in modules if isinstance(module, FSDPModule)]


@contextlib.contextmanager
def _first_pass(modules: Iterable[nn.Module], sharded: Sequence[Any]) -> Iterator[None]:
    """A context in which gradients belong to this rank's shard alone."""
    with contextlib.ExitStack() as held:
        for module in modules:
            if isinstance(module, nn.parallel.DistributedDataParallel):
                held.enter_context(module.no_sync())
        held.enter_context(_reducing(sharded))
        for module in sharded:
            held.enter_context(_no_all_reduce(module))
        yield


@contextlib.contextmanager
def _reducing(modules: Sequence[Any]) -> Iterator[None]:
    """A context in which FSDP2 reduces gradients. Afterwards its settings for this micro-batch are restored.

    In both passes of every micro-batch: unsharded pending gradients would mix with the next pass's.
    """
    names = ("reduce_grads", "all_reduce_grads")
    told = [(group, name, getattr(group, name)) for m in modules for group in _groups(m) for name in names]
    for module in modules:
        module.set_requires_gradient_sync(True, recurse=False)
    try:
        yield
    finally:
        for group, name, value in told:
            setattr(group, name, value)


def _groups(module: Any) -> list[Any]:
    """A module's parameter groups that `fully_shard` gathers and reduces together."""
    state = module._get_fsdp_state()
    return [g for g in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] if g is not None]


@contextlib.contextmanager
def _no_all_reduce(module: Any) -> Iterator[None]:
    """A context in which a replicated module is sharded over its own replica's ranks alone.

    `set_requires_all_reduce(False)` does not suffice: FSDP2 then keeps the reduced gradients to itself, to add them to
    the next backward pass's.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

    changed = []
    for group in _groups(module):
        whole = getattr(group, "mesh_info", None)
        if isinstance(whole, HSDPMeshInfo):
            alone = FSDPMeshInfo(whole.mesh, shard_mesh_dim=whole.shard_mesh_dim)
            for name in ("mesh_info", "post_forward_mesh_info"):
                # post_forward_mesh_info is the same object if weights are gathered again in the backward pass.
                if getattr(group, name) is whole:
                    setattr(group, name, alone)
                    changed.append((group, name, whole, alone))
    try:
        yield
    finally:
        for group, name, whole, alone in changed:
            if getattr(group, name) is alone:
                setattr(group, name, whole)


def _local(t: Any) -> Tensor:
    local: Tensor = t.to_local() if hasattr(t, "to_local") else t
    return local


def _squares_of_shard(
    params: Sequence[Any], local: Sequence[Tensor], grads: Sequence[Tensor], adaptive: bool, eta: float
) -> Tensor:
    """Σ g² of a whole gradient: ranks sum their parts of split parameters; replicated parameters need no sum."""
    members: dict[tuple[Any, ...], list[int]] = {}
    for i, p in enumerate(params):
        members.setdefault(_split_over(p), []).append(i)
    total: Tensor | None = None
    for groups, chosen in sorted(members.items(), key=lambda part: part[1]):
        squares = squared_norm([local[i] for i in chosen], [grads[i] for i in chosen], adaptive=adaptive, eta=eta)
        for group in groups:
            dist.all_reduce(squares, group=group)
        total = squares if total is None else total + squares.to(total.device, non_blocking=True)
    assert total is not None
    return total


def _split_over(p: Any) -> tuple[Any, ...]:
    """The process groups whose ranks hold different parts of a parameter."""
    if not hasattr(p, "placements"):
        return ()
    if any(placement.is_partial() for placement in p.placements):
        raise TypeError("MicroBatchSAM: parameters must be sharded or replicated DTensors, got one of partial sums.")
    return tuple(
        p.device_mesh.get_group(dim) for dim, placement in enumerate(p.placements) if not placement.is_replicate()
    )
