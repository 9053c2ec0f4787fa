"""A whole training step as a CUDA graph: one launch by the host, however many kernels.

    the first calls with a shape   run eagerly: real steps, with all one-time compilation, loading and allocation
    the next                       is captured: the step's Python runs, and the device records instead of running
    that call and all later calls  inputs are copied to where the graph reads, the graph runs, results are copied

Python does not run in a replay. Host state that a replay would miss is part of the signature under which a graph is
cached (shapes, dtypes, numbers, modes), or is compared before a replay (learning rates that are not tensors, memory
that moved), or is an error in the capture (host counters and random numbers).

signature    the structure of arguments and results, by which graphs are cached
optimizers   the optimizers' memory and numbers that a capture bakes in
recorder     the stream, the memory and the capture itself
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tigon.kernels.graph_capture import rehearsal
from tigon.training.capture.optimizers import (
    OptimizerState,
    check_capturable,
    check_host,
    list_optimizers,
    list_parameters,
    read_host_state,
)
from tigon.training.capture.recorder import Recorder, can_capture, filter_warnings, is_capturing
from tigon.training.capture.signature import Signature, flatten

P = ParamSpec("P")
R = TypeVar("R")

# Signatures whose warm-up calls are counted: bounded, since every new length is a new signature.
_COUNTED = 1024


def graph_step(
    step: Callable[P, R],
    optimizer: Optimizer | Sequence[Optimizer] | None,
    *,
    gradients: Iterable[Tensor] | None = None,
    warmup: int = 3,
    max_graphs: int = 8,
) -> GraphStep[P, R]:
    """Run a whole training step as a CUDA graph, with a graph for each input shape.

    Args:
        step: a whole step: forward pass, backward pass, clipping if any, the optimizer's step and `zero_grad`.
            Arguments and results are tensors, numbers and strings, also in lists, tuples and dicts; tensors come back
            detached. Everything else, such as the model, comes from the enclosing scope.
        optimizer: the optimizers that step calls, made with capturable=True where they have that option; None if step
            calls none.
        gradients: without an optimizer, the parameters whose gradients step leaves for clipping and an optimizer
            after the call. The graph adds to a gradient that is there before the call, and makes the others in its own
            memory, where they are valid until the next call.
        warmup: how many calls with new shapes run eagerly before the capture. These are regular training steps.
        max_graphs: how many graphs are kept. With further shapes the step runs eagerly.
    Returns: a `GraphStep`, which takes step's arguments and returns step's results, with the same numbers as an eager
        step.
    Raises: TypeError for an optimizer that is not an Optimizer, for other arguments and results, and for
        `MicroBatchSAM`; ValueError for warmup or max_graphs below 1, gradients beside an optimizer, optimizers that are
        not capturable or not named, inputs on two devices, inputs that require grad, autocast around the call, and an
        optimizer number that changed after the capture; RuntimeError for a step that cannot be captured.

    On a CPU every call is eager. Python does not run in a replay: prints, counts and decisions stay those of the
    capture, and the parameters' gradients are None afterwards, except for `gradients`.
    `docs/how-to/cuda-graphs.md` lists the limits.

        def step(input_ids, labels):
            loss = model(input_ids=input_ids, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = tigon.graph_step(step, optimizer)
        for batch in loader:
            loss = step(batch["input_ids"], batch["labels"])
    """
    return GraphStep(step, optimizer, gradients=gradients, warmup=warmup, max_graphs=max_graphs)


class GraphStep(Generic[P, R]):
    """A step made by `graph_step`: call it as the step itself.

    graphs: the number of cached graphs. replays, eager: how many calls were replays, and how many ran eagerly.
    """

    def __init__(
        self,
        step: Callable[P, R],
        optimizer: Optimizer | Sequence[Optimizer] | None,
        *,
        gradients: Iterable[Tensor] | None,
        warmup: int,
        max_graphs: int,
    ) -> None:
        if not callable(step):
            raise TypeError(f"graph_step: step must be a function, got {type(step).__name__}.")
        for name, number in (("warmup", warmup), ("max_graphs", max_graphs)):
            if type(number) is not int or number < 1:
                raise ValueError(f"graph_step: {name} must be an integer, at least 1, got {number!r}.")
        self._step, self._warmup, self._most = step, warmup, max_graphs
        self._optimizers = list_optimizers(optimizer)
        if self._optimizers and gradients is not None:
            raise ValueError("graph_step: gradients must be None where step calls the optimizer, which uses them up.")
        self._leaves = list(gradients or ())
        self._warned: set[str] = set()
        self._recorder: Recorder | None = None
        self._stepped: set[int] = set()
        self.replays = self.eager = 0
        self.reset()

    def __repr__(self) -> str:
        name = getattr(self._step, "__qualname__", type(self._step).__name__)
        return f"GraphStep({name}: {self.graphs} graphs, {self.replays} replays, {self.eager} eager calls)"

    @property
    def graphs(self) -> int:
        """The number of cached graphs."""
        return len(self._graphs)

    def reset(self) -> None:
        """Drop all graphs and free their memory; the next calls run eagerly, and are then captured again.

        Call this after a change that a replay would miss, such as `model.eval()` or `Fusion.remove()`.
        """
        self._graphs: dict[Any, _Graph] = {}
        self._rehearsed: dict[Any, int] = {}
        if self._recorder is not None:
            self._recorder.forget()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        signature, tensors = flatten((args, kwargs), "arguments of the step")
        if any(t.requires_grad for t in tensors):
            raise ValueError(
                "graph_step: arguments of the step must not require grad, since a replay reads copies of them; got a "
                "tensor that does. Parameters belong to the scope around the step."
            )
        device = self._device(tensors)
        if device is None:
            return self._run_eagerly(signature, tensors)
        # Whether the graph adds to a gradient or makes it, and for which parameters, is decided in the capture.
        leaves = tuple((p.grad is None, p.requires_grad) for p in self._leaves)
        key = signature, _read_modes(device), leaves
        graph = self._graphs.get(key)
        if graph is not None and graph.is_stale():
            self._warn_once(
                "captures again: the memory of parameters, gradients or optimizer state that the graph uses was "
                "replaced, for example by an optimizer's load_state_dict."
            )
            self.reset()
            graph = None
        if graph is None:
            if self.graphs >= self._most:
                self._warn_once(
                    f"runs eagerly with further shapes: max_graphs={self._most} graphs are kept. Pad the batches to "
                    "fewer shapes, or raise max_graphs."
                )
                return self._run_eagerly(signature, tensors)
            rehearsed = self._rehearsed.get(key, 0)
            if rehearsed < self._warmup:
                if len(self._rehearsed) >= _COUNTED:
                    self._rehearsed.clear()
                self._rehearsed[key] = rehearsed + 1
                return self._rehearse(signature, tensors, device, last=rehearsed + 1 == self._warmup)
            graph = self._graphs[key] = self._capture(signature, tensors, device)
        self.replays += 1
        result: R = graph.replay(tensors)
        return result

    # ------------------------------------------------------------------------------------------------- ways to run

    def _device(self, tensors: list[Tensor]) -> torch.device | None:
        """The GPU to capture the step on; None for an eager run."""
        devices = {t.device for t in tensors} or self._devices_of_parameters()
        if torch.compiler.is_compiling() or not any(map(can_capture, devices)):
            if any(map(can_capture, self._devices_of_parameters())):
                self._warn_once(
                    "runs eagerly: the tensors it is called with are not on the parameters' device. Move them there "
                    "before the call."
                )
            return None
        if len(devices) > 1:
            raise ValueError(
                "graph_step: arguments of the step must be on one GPU, got tensors on "
                f"{' and '.join(sorted(map(str, devices)))}."
            )
        (device,) = devices
        if is_capturing(device):
            return None  # the step becomes part of the caller's capture
        if self._recorder is None:
            self._recorder = Recorder(device)
        if self._recorder.device != device:
            raise ValueError(f"graph_step: the step was captured on {self._recorder.device}, got tensors on {device}.")
        return device

    def _devices_of_parameters(self) -> set[torch.device]:
        return {p.device for p in list_parameters(self._optimizers) or self._leaves}

    def _run(self, signature: Signature, tensors: Sequence[Tensor]) -> tuple[Signature, list[Tensor]]:
        """Call the step; returns the result's signature and tensors, detached."""
        args, kwargs = signature.rebuild(tensors)
        returned, results = flatten(self._step(*args, **kwargs), "results of the step")
        # Without autograd's graph, which would keep the activations alive.
        return returned, [t.detach() for t in results]

    def _run_eagerly(self, signature: Signature, tensors: Sequence[Tensor]) -> R:
        self.eager += 1
        with self._watch_optimizers():
            returned, results = self._run(signature, tensors)
        result: R = returned.rebuild(results)
        return result

    def _rehearse(self, signature: Signature, tensors: list[Tensor], device: torch.device, last: bool) -> R:
        """An eager step that compiles, loads and allocates everything that the capture needs."""
        assert self._recorder is not None
        self._check_modes(device)
        for optimizer in self._optimizers:
            check_capturable(optimizer)
        self.eager += 1
        with (
            self._recorder.enter_stream(),
            rehearsal(),
            self._watch_optimizers(),
            filter_warnings(self._recorder.waits if last else None),
        ):
            # Copies, as the capture reads: memory alignment decides which kernel is compiled.
            returned, results = self._run(signature, [t.clone() for t in tensors])
        returned.check_results(results, device)
        self._recorder.hand_over([*results, *(p.grad for p in self._leaves if p.grad is not None)])
        idle = [o for o in self._optimizers if id(o) not in self._stepped]
        if idle:
            raise RuntimeError(
                f"graph_step: step must call {type(idle[0]).__name__}.step() itself in every call, since a replay "
                "leaves no gradients behind for a later step."
            )
        result: R = returned.rebuild(results)
        return result

    def _capture(self, signature: Signature, tensors: list[Tensor], device: torch.device) -> _Graph:
        assert self._recorder is not None
        self._check_modes(device)
        inputs = [t.clone() for t in tensors]
        state = OptimizerState(self._optimizers, self._leaves)
        before = read_host_state(self._optimizers)

        def run() -> tuple[Signature, list[Tensor]]:
            with self._watch_optimizers():
                return self._run(signature, inputs)

        try:
            (returned, results), replay = self._recorder.record(run)
        finally:
            state.end_capture()
        check_host(before, read_host_state(self._optimizers))
        returned.check_results(results, device)
        return _Graph(replay, inputs, returned, results, state)

    # ------------------------------------------------------------------------------------------------- checks

    @contextlib.contextmanager
    def _watch_optimizers(self) -> Iterator[None]:
        """Record which optimizers step, and refuse optimizers that graph_step was not told about."""
        self._stepped.clear()

        def steps(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            # Compared by groups: an optimizer that wraps another steps too, and shares the other's groups.
            if not any(o.param_groups is optimizer.param_groups for o in self._optimizers):
                raise ValueError(
                    "graph_step: optimizer must name every optimizer that step calls, got a step that calls "
                    f"{type(optimizer).__name__}.step() of another."
                )
            self._stepped.add(id(optimizer))

        handle = register_optimizer_step_pre_hook(steps)
        try:
            yield
        finally:
            handle.remove()

    def _check_modes(self, device: torch.device) -> None:
        if torch.is_autocast_enabled(device.type) and torch.is_autocast_cache_enabled():
            raise ValueError(
                "graph_step: autocast must be entered inside step, got a call under autocast: its cache would hand "
                "the graph weights that were cast before the capture."
            )

    def _warn_once(self, sentence: str) -> None:
        if sentence not in self._warned:
            self._warned.add(sentence)
            warnings.warn(f"graph_step: the step {sentence}", stacklevel=3)


class _Graph:
    """A captured step, with the memory for inputs, results and optimizers."""

    def __init__(
        self,
        replay: Callable[[], None],
        inputs: list[Tensor],
        returned: Signature,
        results: list[Tensor],
        state: OptimizerState,
    ) -> None:
        self._replay, self._inputs, self._returned, self._results = replay, inputs, returned, results
        self._state = state

    def is_stale(self) -> bool:
        return self._state.is_stale()

    def replay(self, tensors: list[Tensor]) -> Any:
        self._state.check_numbers()
        for mine, t in zip(self._inputs, tensors, strict=True):
            mine.copy_(t)
        self._replay()
        self._state.end_replay()
        # Copies: the next replay overwrites the graph's own.
        return self._returned.rebuild(t.clone() for t in self._results)


def _read_modes(device: torch.device) -> tuple[Any, ...]:
    """torch's modes that affect a computation: a graph has the modes of its capture."""
    kind = device.type
    casts = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), casts
