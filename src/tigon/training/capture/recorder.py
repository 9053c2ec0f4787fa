"""Capture the kernels that a function launches: the stream, the memory, and torch's errors."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

# torch's warning where a step waits for the device.
_WAITS = "called a synchronizing CUDA operation"
# Irrelevant warnings: about a capturable optimizer's eager step, and about the mode that reports waits.
_NOISE = "running without CUDA graph capture", "Synchronization debug mode is a prototype"


class Recorder:
    """The stream for warm-ups and captures, and the memory that all graphs of a step share.

    One graph runs at a time. Its results are copied, or in the parameters, before the next graph runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Lines in the step that waited for the device in the last warm-up.
        self.waits: list[str] = []
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def enter_stream(self) -> Iterator[None]:
        """Run on the capture stream: cuBLAS, for example, has a workspace per stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def hand_over(self, results: list[Tensor]) -> None:
        for t in results:
            t.record_stream(torch.cuda.current_stream(self.device))

    def forget(self) -> None:
        """Drop the recorded graphs, which frees their memory."""
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Capture the kernels in run(). Returns: run's result, and the function that launches the kernels again."""
        graph = torch.cuda.CUDAGraph()
        # Frees the warm-ups' memory: the graph has separate memory.
        torch.cuda.synchronize(self.device)
        gc.collect()
        torch.cuda.empty_cache()
        failure: BaseException | None = None
        # Not `with torch.cuda.graph`: if the end of the capture raises, that hides the step's error, and stays on the
        # stream. thread_local: a thread that pins memory for a loader would break a "global" capture.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                made = run()
            except BaseException as error:
                failure = error
            try:
                graph.capture_end()
            except RuntimeError as error:
                failure = failure or error
        if failure is None:
            return made, graph.replay
        self._recover()
        if isinstance(failure, RuntimeError) and ("captur" in str(failure) or "CUDA error" in str(failure)):
            raise RuntimeError(self._sentence(failure)) from failure
        raise failure

    def _recover(self) -> None:
        """Clean up after a failed capture, which torch leaves half open."""
        # The allocator would keep serving this stream from the graph's memory.
        with contextlib.suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
        self.forget()
        # The generator would refuse to draw outside a capture, until a capture succeeds.
        with contextlib.suppress(RuntimeError), torch.cuda.stream(self._stream):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            torch.zeros((), device=self.device)
            graph.capture_end()

    def _sentence(self, failure: RuntimeError) -> str:
        said = str(failure).strip().split("\n")[0].rstrip(".")
        if self.waits:
            hint = (
                f"Lines that waited for the device in the previous call, which no capture can: {', '.join(self.waits)}."
            )
        else:
            hint = (
                "The step must not wait for the device (.item(), .cpu(), `if tensor`, a boolean index), copy "
                "tensors from the host, or run backward while the loss of an earlier eager step is still alive."
            )
        return (
            f"graph_step: the step cannot be captured in a CUDA graph: {said}. {hint} If CUDA fails afterwards, "
            "restart the process."
        )


def can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


def is_capturing(device: torch.device) -> bool:
    return can_capture(device) and torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def filter_warnings(waits: list[str] | None) -> Iterator[None]:
    """Suppress torch's warning that an optimizer runs eagerly. waits: collects the lines that wait for the device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mode = torch.cuda.get_sync_debug_mode() if torch.cuda.is_available() else 0
        is_listening = waits is not None and torch.cuda.is_available() and mode == 0
        if is_listening:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            if is_listening:
                torch.cuda.set_sync_debug_mode(mode)
    for w in caught:
        if waits is not None and is_listening and _WAITS in str(w.message):
            place = f"{w.filename}:{w.lineno}"
            if place not in waits:
                waits.append(place)
        elif not any(noise in str(w.message) for noise in _NOISE):
            warnings.warn_explicit(w.message, w.category, w.filename, w.lineno, source=w.source)
