"""FSDP2 gathers the weights of FP8 layers in e4m3: one byte a parameter instead of two.

FSDP2 asks the local tensor of a sharded parameter for `fsdp_pre_all_gather` and `fsdp_post_all_gather`. Both are set
here, on the plain local tensors: parameters, optimizer states and checkpoints stay what they are.

All ranks need one scale for a weight before any rank casts its shard. The first gather of a forward pass measures all
shards, and one all-reduce takes the maxima; a gather in the backward pass uses these maxima, unless a weight has
another version. Joined layers have a common maximum. Scales are powers of two, so each byte is the byte that the whole
weight would give.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tigon.fusion.engine.patch import is_hooked
from tigon.fusion.fp8.layers import FP8Group, FP8Unit
from tigon.ops.fp8.gathered import GatheredWeight
from tigon.ops.fp8.weight import quantize_weight

HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


class WeightGather:
    """The gathers in e4m3 of one fused model."""

    def __init__(self) -> None:
        self._shards: list[WeightShard] = []

    def install(self, model: nn.Module) -> None:
        """Let FSDP2 gather the weights of FP8 layers in e4m3, where a model is sharded and does not do so yet.

        Compiled modules run in bf16: a model with one keeps its gathers.

        Raises: ValueError for weights that are sharded in a way that FSDP2's hooks do not support. RuntimeError where
            torch's FSDP2 lacks a private attribute that the gathers need.
        """
        try:
            self._install(model)
        except AttributeError as error:
            raise RuntimeError(
                f'fuse: FP8(all_gather="fp8") does not know the FSDP2 of torch {torch.__version__} ({error}). Use '
                'FP8(all_gather="bf16").'
            ) from error

    def _install(self, model: nn.Module) -> None:
        if self._shards and all(shard.is_installed() for shard in self._shards):
            return
        owners = _list_owners(model)
        if not owners or any(map(_is_compiled, model.modules())):
            return
        # A parameter may have got other memory, as `load_state_dict(assign=True)` gives.
        gathered, self._shards = self._reset(WeightShard.remove), []
        maxima: dict[Any, Maxima] = {}
        for modules in list_joint_layers(model):
            found = [owners.get(id(m)) for m in modules]
            # Layers with hooks run in bf16, and should get their weights unrounded, as other users of a weight should.
            if any(pair is None or pair[1]._module_info.shared_modules for pair in found) or any(
                map(is_hooked, modules)
            ):
                continue
            pairs: list[Any] = found
            for _, param in pairs:
                _check_sharding(param)
            keys = {(param.mesh_info.shard_process_group, _read_dtype(param)) for _, param in pairs}
            if len(keys) > 1:
                continue
            (key,) = keys
            common = maxima.setdefault(key, Maxima(*key))
            joint = [WeightShard(module, param, common, len(common.joint)) for module, param in pairs]
            common.joint.append(joint)
            self._shards += joint
        for common in maxima.values():
            common.allocate()
        for module in {*gathered, *self._reset(WeightShard.install)}:
            module.unshard()

    def remove(self) -> None:
        """Let FSDP2 gather the parameters' own dtype again, from its next gather on."""
        self._reset(WeightShard.remove)
        self._shards = []

    def _reset(self, change: Any) -> list[Any]:
        """Change each shard while nothing is gathered. Returns the modules whose parameters were gathered before."""
        modules = {id(m): m for shard in self._shards if (m := shard.module()) is not None}
        gathered = []
        for module in modules.values():
            groups = _list_groups(module)
            if any(group.is_unsharded or group._all_gather_result is not None for group in groups):
                module.unshard()  # waits for a gather under way
                for group in groups:
                    group._to_sharded()  # `reshard` leaves a root's parameters as they are during a forward pass
                gathered.append(module)
        for shard in self._shards:
            change(shard)
        return gathered

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightGather:
        return WeightGather()  # the copy's parameters are other tensors


class Maxima:
    """The largest magnitudes of weights that one group of processes shards and gathers in one dtype.

    joint: the shards of layers with a common scale. amax: for each, 0-d fp32.
    """

    def __init__(self, processes: dist.ProcessGroup, dtype: torch.dtype) -> None:
        self.processes, self.dtype = processes, dtype
        self.joint: list[list[WeightShard]] = []
        self.amax: Sequence[Tensor] = ()
        self._event: torch.cuda.Event | None = None

    def allocate(self) -> None:
        # Never freed and allocated again: FSDP2 gathers on several streams. An address is a multiple of 16.
        device = self.joint[0][0].read_padded().device
        self._buffer = torch.zeros(len(self.joint), 4, device=device)[:, 0]
        self.amax = self._buffer.unbind()

    def prepare(self, shard: WeightShard) -> None:
        """Measure all weights, unless they have been measured for the forward pass that gathers this shard."""
        is_forward = torch._C._current_graph_task_id() == -1
        if (is_forward and shard.is_gathered) or any(s.mark != s.read_mark() for s in self.joint[shard.index]):
            self.measure()
        if is_forward:
            shard.is_gathered = True
        if self._event is not None:
            torch.cuda.current_stream(shard.scale.device).wait_event(self._event)

    @torch.no_grad()
    def measure(self) -> None:
        shards = [shard for joint in self.joint for shard in joint]
        norms = iter(torch._foreach_norm([shard.read_padded() for shard in shards], torch.inf))
        width, zero = max(map(len, self.joint)), self._buffer.new_zeros(())
        rows = [next(norms) if i < len(joint) else zero for joint in self.joint for i in range(width)]
        # Rounding keeps order, so the largest number rounded is the largest of the rounded numbers.
        amax = torch.stack(rows).to(self.dtype).float().view(-1, width).amax(1)
        # As integers, since a maximum of floats would drop NaN: bits of numbers that are not negative have their order.
        bits = amax.abs().view(torch.int32)
        dist.all_reduce(bits, dist.ReduceOp.MAX, self.processes)
        self._buffer.copy_(bits.view(torch.float32))
        if bits.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(bits.device))
        for shard in shards:
            shard.mark, shard.is_gathered = shard.read_mark(), False


class WeightShard:
    """A rank's shard of one weight, and the two hooks by which FSDP2 gathers the weight in e4m3.

    module: the module that gathers the parameter, by weak reference, as `param`, which is FSDP2's own record.
    size: the whole weight's.
    maxima, index: where the weight's largest magnitude is.
    mark: the local tensor and its version as last measured. is_gathered: whether a forward pass has gathered since.
    """

    def __init__(self, module: Any, param: Any, maxima: Maxima, index: int) -> None:
        self.module, self.param = weakref.ref(module), weakref.ref(param)
        self.maxima, self.index = maxima, index
        self.mark: Any = None
        self.size = param._orig_size
        self._handle: Any = None
        self.is_gathered = False
        self.scale = torch.ones(1, device=param._sharded_param_data.device)

    def read_param(self) -> Any:
        param = self.param()
        if param is None:
            raise ReferenceError("FP8: the sharded parameter of a gather no longer exists.")
        return param

    def read_padded(self) -> Tensor:
        """This rank's rows, and zeros where other ranks have more: (rows, K)."""
        param = self.read_param()
        padded: Tensor = param._sharded_param_data.view(param.padded_sharded_param_size)
        return padded

    def read_mark(self) -> Any:
        local = self.read_param()._sharded_local_tensor
        return id(local), None if local.is_inference() else local._version

    def is_installed(self) -> bool:
        param = self.param()
        hook = None if param is None else vars(param._sharded_local_tensor).get(HOOKS[0])
        return getattr(hook, "__self__", None) is self

    def install(self) -> None:
        param = self.read_param()
        self.attach()
        # `load_state_dict(assign=True)` gives a parameter another local tensor.
        linear = param._module_info.module
        self._handle = linear.register_load_state_dict_post_hook(lambda *_: self.attach())
        _forget_gathered(param)

    def attach(self) -> None:
        for name in HOOKS:
            setattr(self.read_param()._sharded_local_tensor, name, getattr(self, name))

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        param = self.param()
        if param is None:
            return
        for name in HOOKS:
            vars(param._sharded_local_tensor).pop(name, None)
        _forget_gathered(param)

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        """The bytes that this rank sends."""
        self.maxima.prepare(self)
        weight = quantize_weight([self.read_padded().to(self.maxima.dtype)], self.maxima.amax[self.index])
        self.scale.copy_(weight.scale[:1])
        return (weight.data.view(torch.uint8),), None

    def fsdp_post_all_gather(
        self, outputs: Sequence[Tensor], metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The weight that the layer multiplies by. out: the weight from an earlier gather, whose memory is filled."""
        if out is not None:
            return None
        return GatheredWeight(outputs[0], self.scale, self.size, dtype), ()

    def __reduce__(self) -> Any:
        return _load_as_none, ()  # local tensors are pickled with their attributes


def _load_as_none() -> None:
    return None


def list_joint_layers(model: nn.Module) -> Iterator[list[nn.Module]]:
    """The linear layers that run in FP8, those with a common scale together."""
    for module in model.modules():
        patch: Any = vars(module).get("_tigon")
        state = getattr(patch, "fp8", None)
        if isinstance(state, FP8Unit):
            formula = patch.formula
            yield [getattr(module, name) for name in (formula.gate, formula.up) if name is not None]
            yield [getattr(module, formula.down)]
        elif isinstance(state, FP8Group):
            yield [module]
        elif isinstance(state, dict):
            for names in state:
                yield [getattr(module, name) for name in names]


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def _list_groups(module: Any) -> list[Any]:
    """FSDP2's groups of parameters that a module gathers. torch before 2.12 has one at most."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def _list_owners(model: nn.Module) -> dict[int, tuple[Any, Any]]:
    """For the id of each module with a sharded weight: the module that gathers it, and FSDP2's record of the weight."""
    return {
        id(param._module_info.module): (module, param)
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in _list_groups(module)
        for param in group.fsdp_params
        if param._module_info.param_name == "weight"
    }


def _check_sharding(param: Any) -> None:
    post = param.post_forward_mesh_info
    why = (
        "the parameters are offloaded to the CPU" if param.offload_to_cpu
        else "the parameters are sharded along another dimension than the first" if param.fsdp_placement.dim != 0
        else "the parameters are sharded by tensor parallelism, too" if param.is_dtensor
        else "reshard_after_forward is a number" if post is not None and post is not param.mesh_info
        else "the mesh has no dimension to shard along" if not hasattr(param.mesh_info, "shard_process_group")
        else ""
    )  # fmt: skip
    if why:
        raise ValueError(f'fuse: FP8(all_gather="fp8") cannot gather a model\'s weights in e4m3: {why}.')


def _read_dtype(param: Any) -> torch.dtype:
    dtype: torch.dtype = param.mp_policy.param_dtype or param._sharded_param_data.dtype
    return dtype


def _forget_gathered(param: Any) -> None:
    """Let the next gather make its buffers and the whole parameter anew; a gradient that waits stays."""
    whole = getattr(param, "_unsharded_param", None)
    if whole is not None:
        if whole.grad is not None:
            waiting = param.unsharded_accumulated_grad
            param.unsharded_accumulated_grad = whole.grad if waiting is None else waiting + whole.grad
        del param._unsharded_param
    param.all_gather_outputs = []
    param._init_extensions()
