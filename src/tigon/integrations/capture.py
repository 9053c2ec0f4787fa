"""A Trainer's step as a CUDA graph: one launch by the host for a micro-batch's forward and backward pass.

    trainer = Trainer(model, args, train_dataset=data)
    trainer.add_callback(CapturedSteps(trainer))

A graph for each shape of a micro-batch holds what Python spends its time on, the thousands of launches of the two
passes. Clipping, optimizer, schedule, logs and checkpoints stay the Trainer's: a few launches, which run ahead of the
device. So every optimizer and every callback works, and the numbers are those of the uncaptured run, bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from tigon.fusion.shared_prefix.attention import _find_window
from tigon.install import install
from tigon.integrations.packing.padding_free import IMAGES
from tigon.integrations.sam import MicroBatchSAMCallback
from tigon.kernels import rehearsal
from tigon.training.capture import GraphStep, graph_step
from tigon.training.capture.recorder import can_capture, is_capturing

try:
    from accelerate import DistributedType
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError(f"tigon.integrations.capture needs transformers: {install('hf')}.") from error

Mode = Literal["auto", "on"]
WARMUP = 3
# auto: tokens times the mean size of a weight matrix, up to which launching the work on a matrix, about 0.35 ms, takes
# longer than the work itself on an H100 or H200, 6 operations for each token and weight at 350 TFLOP/s.
MOST_WORK = 2e10
# Without a replay after this many micro-batches, shapes do not repeat.
PATIENCE = 50
# The dtype by which the collator marks masks that leave nothing out; the graph of such batches needs no mask.
FULL = torch.int8
# Whose steps compute on the device alone, except for metrics, which are taken from the device when they are logged.
LOSSES = ("transformers.trainer", "trl.trainer.sft_trainer", "trl.trainer.reward_trainer")


def count_most_tokens(model: nn.Module) -> int:
    """The most tokens of a micro-batch whose work is done before Python has launched it; see MOST_WORK."""
    sizes = [p.numel() for p in model.parameters() if p.dim() > 1]
    return int(MOST_WORK * len(sizes) / max(1, sum(sizes)))


class CapturedSteps(TrainerCallback):
    """Replays a micro-batch's forward and backward pass as a CUDA graph, for the duration of training.

    Args:
        trainer: a transformers.Trainer, or TRL's SFTTrainer or RewardTrainer, not training yet. Its `training_step` is
            replaced on this instance.
        mode: "auto" captures micro-batches with few tokens, whose work is done before Python has launched it: about
            6,600 tokens for Qwen3-0.6B, 1,800 for Llama-3.2-1B. "on" captures all, and a loss of your own too.
        max_graphs: how many shapes get a graph; further shapes run eagerly.
        report: print one line when training ends, on the main process.
    Raises: TypeError if trainer is not a Trainer; ValueError for another mode.

    reason: why steps run uncaptured; empty as long as they are captured. A Trainer that cannot be captured trains as
    without this callback, and warns once. Lengths that change at every batch are not captured: pack, or pad to a few.
    """

    def __init__(self, trainer: Any, mode: Mode = "auto", *, max_graphs: int = 8, report: bool = True) -> None:
        if not isinstance(trainer, Trainer):
            raise TypeError(f"CapturedSteps: trainer must be a transformers.Trainer, got {type(trainer).__name__}.")
        if mode not in ("auto", "on"):
            raise ValueError(f"CapturedSteps: mode must be 'auto' or 'on', got {mode!r}.")
        self.trainer: Any = trainer
        self.mode, self.reason = mode, ""
        self.graph: GraphStep[Any, Any] | None = None
        self._max_graphs, self._print = max_graphs, report
        self._puts: list[tuple[Any, str, Any]] = []
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._attached: list[tuple[Tensor, Tensor, int]] = []
        self._pending: list[tuple[tuple[str, ...], Tensor]] = []
        self._filters = False
        if can_capture(trainer.args.device):
            vars(trainer)["get_train_dataloader"] = mark_masks(trainer, trainer.get_train_dataloader, mode)
            if trainer.args.dataloader_pin_memory:  # else the copy of a batch waits for the step before it
                trainer.accelerator.dataloader_config.non_blocking = True

    def __str__(self) -> str:
        if self.reason:
            return f"Captured steps: none, since {self.reason}."
        if self.graph is None:
            return "Captured steps: none, before training."
        replays, graphs = self.graph.replays, self.graph.graphs
        text = f"Captured steps: {replays} of {self._calls} micro-batches replayed a CUDA graph"
        text += f", one for each of {graphs} shapes." if graphs > 1 else "."
        if self._large:
            text += f" {self._large} had over {self.most_tokens:,} tokens, which take longer than their launches."
        return text

    # ------------------------------------------------------------------------------------------ the Trainer's events

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._uninstall()
        self.graph, self.reason = None, ""
        reason = find_obstacle(self.trainer, self.mode)
        if reason:
            self._give_up(reason, quiet=not can_capture(args.device))
            return
        self.graph = graph_step(
            self._run, None, gradients=list(model.parameters()), warmup=WARMUP, max_graphs=self._max_graphs
        )
        self._calls = self._large = 0
        self._draws = False
        self.most_tokens = count_most_tokens(model)
        self._own = self.trainer.training_step
        self._put(self.trainer, "training_step", types.MethodType(self._replace_training_step(), self.trainer))
        if isinstance(getattr(self.trainer, "_metrics", None), dict):
            for name in ("log", "evaluate"):
                self._put(self.trainer, name, self._flush_before(getattr(self.trainer, name)))
        for module, function in list_checkpoints(model):
            self._put(module, "_gradient_checkpointing_func", functools.partial(self._checkpoint, function))

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._restore_filter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._restore_filter()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._print and state.is_world_process_zero and (self.mode == "on" or can_capture(args.device)):
            print(self)
        self._uninstall()

    # -------------------------------------------------------------------------------------------------- a micro-batch

    def _replace_training_step(self) -> Callable[..., Tensor]:
        own = self._own

        def training_step(trainer: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            self._calls += 1
            self._attach_gradients()
            found = None
            if self._is_large(inputs):
                self._large += 1
                loss: Tensor = own(model, unmark(inputs), num_items_in_batch)
            else:
                # A graph's losses visit every row, and so do eager losses in here: the bits of a step depend on its
                # shape, not on whether the shape came often enough for a graph, which a resumed run would not know.
                with rehearsal(), score_all_positions():
                    found = None if self.reason else self._step(model, inputs, num_items_in_batch)
                    loss = own(model, unmark(inputs), num_items_in_batch) if found is None else self._filter(found)
            self._keep_gradients(model)
            return loss

        return training_step

    def _is_large(self, inputs: Any) -> bool:
        if self.mode == "on":
            return False
        tokens = inputs.get(getattr(self.trainer.model, "main_input_name", "input_ids"))
        return not isinstance(tokens, Tensor) or tokens.numel() > self.most_tokens

    def _step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor | None:
        """The micro-batch's loss, with its gradients in place; None if the Trainer's own step must run."""
        trainer, graph = self.trainer, self.graph
        assert graph is not None
        if self._draws:
            self._give_up(
                "a checkpointed layer draws random numbers, whose state is saved on the host: dropout or noise"
            )
            return None
        if not IMAGES.isdisjoint(inputs):
            self._give_up("a tower reads the sizes of images on the host, which no graph replays")
            return None
        if not model.training:  # after an evaluation; a replay runs no Python that would see to it
            model.train()
            if callable(train := getattr(trainer.optimizer, "train", None)):
                train()
        batch = dict(trainer._prepare_inputs(inputs))
        if "input_ids" in batch:
            for name in batch.keys() & {"max_length_q", "max_length_k"}:
                batch[name] = batch["input_ids"].numel()  # a bound serves as well, and is the same for all packs
        self._model = model
        before = graph.eager, graph.replays
        try:
            found = graph(batch, num_items_in_batch, trainer.current_gradient_accumulation_steps)
        except MetricError as error:
            self._give_up(str(error))
            return None
        except Exception as error:
            if (graph.eager, graph.replays) != before:
                raise  # the step's own error
            self._give_up(f"the capture failed: {str(error).strip().removeprefix('graph_step: ').rstrip('.')}")
            return None
        if found["names"]:
            self._pending.append((found["names"], found["values"]))
        if not graph.replays and graph.eager >= PATIENCE:
            self._give_up(
                f"no shape came more than {WARMUP} times in {graph.eager} micro-batches: pack or pad to a few"
            )
        loss: Tensor = found["loss"]
        return loss

    def _run(self, batch: dict[str, Any], num_items_in_batch: Any, accumulation: int) -> dict[str, Any]:
        """The step that is captured. accumulation: the Trainer's step reads this number, so graphs differ by it."""
        batch = dict(batch)
        with contextlib.ExitStack() as stack:
            stack.enter_context(NumbersOnDevice())
            if is_causal_batch(batch):
                stack.enter_context(leave_out_causal_masks())
            collected = stack.enter_context(collect_metrics(self.trainer))
            loss = self._own(self._model, unmark(batch), num_items_in_batch)
        names = tuple(name for name, _ in collected)
        values = torch.stack([value.double() for _, value in collected]) if collected else None
        return {"loss": loss, "names": names, "values": values}

    def _checkpoint(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a checkpointed layer. A capture cannot save the random state, which earlier steps must not need."""
        device = self.trainer.args.device
        if is_capturing(device):
            return own(*args, **kwargs, preserve_rng_state=False)
        read = functools.partial(torch.cuda.get_rng_state, device) if device.type == "cuda" else torch.get_rng_state
        before = read()
        outputs = own(*args, **kwargs)
        self._draws = self._draws or not torch.equal(read(), before)
        return outputs

    # ------------------------------------------------------------------------------------------------- gradients

    def _attach_gradients(self) -> None:
        """With accumulation, all graphs add to the same gradients, which the Trainer has taken off the parameters."""
        if self._gradients and all(p.grad is None for p, _ in self._gradients):
            torch._foreach_zero_([grad for _, grad in self._gradients])
            self._attached = [(p, grad, grad._version) for p, grad in self._gradients if p.requires_grad]
            for p, grad, _ in self._attached:
                p.grad = grad

    def _keep_gradients(self, model: Any) -> None:
        trainer = self.trainer
        if trainer.args.gradient_accumulation_steps == 1 or not trainer.accelerator.sync_gradients:
            return
        for p, grad, version in self._attached:
            if grad._version == version and p.grad is grad:  # no micro-batch used p: the optimizer must leave p out
                p.grad = None
        self._attached = []
        if not self._gradients and not self.reason:
            self._gradients = [(p, p.grad) for p in model.parameters() if p.grad is not None]

    # ---------------------------------------------------------------------------------------------- losses, metrics

    def _filter(self, loss: Tensor) -> Tensor:
        """logging_nan_inf_filter on the device: the Trainer's would wait for every loss."""
        trainer = self.trainer
        if not trainer.args.logging_nan_inf_filter:
            return loss
        trainer.args.logging_nan_inf_filter, self._filters = False, True
        average = trainer._tr_loss / (1 + trainer.state.global_step - trainer._globalstep_last_logged)
        return torch.where(loss.isfinite(), loss, average)

    def _restore_filter(self) -> None:
        if self._filters:
            self.trainer.args.logging_nan_inf_filter, self._filters = True, False

    def _flush_before(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def flush_before(*args: Any, **kwargs: Any) -> Any:
            self._flush()
            return own(*args, **kwargs)

        return flush_before

    def _flush(self) -> None:
        """Give the trainer the metrics of all steps since the last log, read from the device at once."""
        if not self._pending:
            return
        numbers = iter(torch.cat([values for _, values in self._pending]).tolist())
        metrics = self.trainer._metrics["train"]
        for names, _ in self._pending:
            for name in names:
                if name == TOKENS:
                    self.trainer._total_train_tokens += int(next(numbers))
                    metrics["num_tokens"] = [self.trainer._total_train_tokens]
                else:
                    metrics[name].append(next(numbers))
        self._pending.clear()

    # ------------------------------------------------------------------------------------------------ on and off

    def _put(self, instance: Any, name: str, value: Any) -> None:
        self._puts.append((instance, name, vars(instance).get(name)))
        vars(instance)[name] = value

    def _uninstall(self) -> None:
        self._restore_filter()
        self._flush()
        for instance, name, before in reversed(self._puts):
            if before is None:
                vars(instance).pop(name, None)
            else:
                vars(instance)[name] = before
        self._puts.clear()
        self._gradients, self._attached = [], []
        if self.graph is not None:
            self.graph.reset()

    def _give_up(self, reason: str, quiet: bool = False) -> None:
        self.reason, self._gradients = reason, []
        if self.graph is not None:
            self.graph.reset()
        if self.mode == "on" or not quiet:
            warnings.warn(f"CapturedSteps: the steps run uncaptured, since {reason}.", stacklevel=2)


# ---------------------------------------------------------------------------------------------- what is not captured


def find_obstacle(trainer: Any, mode: Mode) -> str:
    """Why this Trainer's step is not captured, as far as its options say; else empty."""
    args, accelerator, name = trainer.args, trainer.accelerator, type(trainer).__name__
    optim = str(getattr(args.optim, "value", args.optim))
    devices = sorted({str(p.device) for p in trainer.model.parameters()})
    functions = [
        (method, function)
        for method in ("compute_loss", "training_step")
        for function in (getattr(type(trainer), method), vars(trainer).get(method))
        if function is not None and not getattr(function, "__module__", "").startswith((*LOSSES, "tigon.integrations."))
    ]
    if not can_capture(args.device):
        return "there is no CUDA device"
    if args.full_determinism:
        return "full_determinism=True makes the host wait for every kernel"
    if args.world_size > 1 or args.n_gpu > 1 or accelerator.distributed_type != DistributedType.NO:
        return "the run has several processes or GPUs, or a wrapper such as DDP, FSDP or DeepSpeed"
    if len(devices) > 1:
        return f"the model's parameters are on {' and '.join(devices)}"
    if args.torch_compile:
        return "torch_compile=True compiles the step instead"
    if accelerator.scaler is not None:
        return "fp16 scales the loss by a number that the host decides; bf16 does not"
    if args.torch_empty_cache_steps is not None or getattr(args, "activation_offloading", False):
        return "torch_empty_cache_steps and activation_offloading manage memory inside the step"
    if "lomo" in optim or "layerwise" in optim:
        return f"optim={optim!r} changes the weights inside the backward pass"
    if any(isinstance(callback, MicroBatchSAMCallback) for callback in trainer.callback_handler.callbacks):
        return "MicroBatchSAMCallback sets the random state between its two passes"
    if type(trainer)._prepare_inputs is not Trainer._prepare_inputs or hasattr(trainer, "_buffered_inputs"):
        return f"{name} makes its batches inside the step"
    for method, function in functions:
        if function.__module__.startswith("trl."):
            return f"{name}'s {method} reads results on the host"
        if mode == "auto":
            return f"{name}.{method} is your own, and Python would not run in a replay; mode='on' captures it"
    if mode == "auto" and getattr(trainer, "compute_loss_func", None) is not None:
        return "compute_loss_func is your own, and Python would not run in a replay; mode='on' captures it"
    return ""


def list_checkpoints(model: nn.Module) -> list[tuple[nn.Module, Callable[..., Any]]]:
    """The modules that torch checkpoints, with the functions that do it and would save the random state."""
    found = []
    for module in model.modules():
        function: Any = getattr(module, "_gradient_checkpointing_func", None)
        saves = getattr(function, "keywords", {}).get("preserve_rng_state", True)
        if getattr(function, "func", function) is checkpoint and saves and getattr(module, "gradient_checkpointing", 0):
            found.append((module, function))
    return found


# ------------------------------------------------------------------------------------------------------------ masks


class MaskMarker:
    """A collator whose attention masks of integer ones come as int8: no device is asked whether a mask is needed."""

    def __init__(self, collator: Callable[[Any], Any]) -> None:
        self.collator = collator

    def __call__(self, features: Any) -> Any:
        batch = self.collator(features)
        mask = batch.get("attention_mask") if hasattr(batch, "get") else None
        if isinstance(mask, Tensor) and mask.device.type == "cpu" and mask.dim() == 2:
            if mask.dtype in (torch.int64, torch.int32, FULL) and bool((mask == 1).all()):
                batch["attention_mask"] = mask.to(FULL)
            elif mask.dtype == FULL:
                batch["attention_mask"] = mask.long()
        return batch


def unmark(batch: Any) -> Any:
    """The batch with the mask that a model expects."""
    mask = batch.get("attention_mask") if hasattr(batch, "get") else None
    if isinstance(mask, Tensor) and mask.dtype == FULL:
        batch["attention_mask"] = mask.long()
    return batch


def mark_masks(trainer: Any, own: Callable[[], Any], mode: Mode) -> Callable[[], Any]:
    """A trainer's get_train_dataloader whose batches have marked masks, if the steps can be captured."""

    @functools.wraps(own)
    def get_train_dataloader() -> Any:
        if find_obstacle(trainer, mode):
            return own()
        collator = trainer.data_collator
        trainer.data_collator = MaskMarker(collator)
        try:
            return own()
        finally:
            trainer.data_collator = collator

    return get_train_dataloader


def is_causal_batch(batch: dict[str, Any]) -> bool:
    """Whether all rows are whole sequences, so that causal attention needs no mask."""
    mask = batch.get("attention_mask")
    return not batch.keys() & {"position_ids", "cu_seq_lens_q"} and (mask is None or mask.dtype == FULL)


@contextlib.contextmanager
def leave_out_causal_masks() -> Iterator[None]:
    """Inside the block transformers makes no mask for SDPA where attention is causal and nothing is left out.

    Outside a capture transformers decides so itself, by reading the mask; in a capture it would make the mask.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as registry

    own = registry["sdpa"]

    def make_mask(*args: Any, mask_function: Any = None, **options: Any) -> Any:
        length = options.get("q_length")
        if isinstance(length, int) and length == options.get("kv_length") and not options.get("use_vmap"):
            with contextlib.suppress(ValueError):  # a mask that is more than causal is made
                window = _find_window(mask_function)
                if window is None or length < window:
                    return None
        return own(*args, mask_function=mask_function, **options)

    registry["sdpa"] = make_mask
    try:
        yield
    finally:
        del registry["sdpa"]
        if registry["sdpa"] is not own:
            registry["sdpa"] = own


@contextlib.contextmanager
def score_all_positions() -> Iterator[None]:
    """Inside the block TRL's forward scores positions without a label too: leaving them out waits for the device."""
    utils: Any = sys.modules.get("trl.trainer.utils")
    own = getattr(utils, "_use_triton", None)
    if own is None:
        yield
        return
    utils._use_triton = lambda device: False
    try:
        yield
    finally:
        utils._use_triton = own


# ---------------------------------------------------------------------------------------------- numbers for the host

TOKENS = "tokens seen"


class NumbersOnDevice(TorchFunctionMode):
    """torch.tensor(number, device=…) fills memory on the device, since a capture can copy nothing from the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and len(args) == 1 and isinstance(args[0], (bool, int, float)):
            return torch.full((), args[0], **kwargs)
        return func(*args, **kwargs)


class MetricError(RuntimeError):
    """A trainer's metric that the host must read during the step."""


class Metric:
    """A number for the log that stays on the device: where a trainer reads it, computation goes on."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __getattr__(self, name: str) -> Any:
        raise MetricError(f"the trainer reads a metric during the step, by {name}")

    def _apply(self, operation: Callable[..., Tensor], *others: Any) -> Metric:
        return Metric(operation(self.value, *(o.value if isinstance(o, Metric) else o for o in others)))

    def sum(self) -> Metric:
        return self._apply(torch.sum)

    def mean(self) -> Metric:
        return self._apply(torch.mean)

    def min(self) -> Metric:
        return self._apply(torch.min)

    def max(self) -> Metric:
        return self._apply(torch.max)

    def item(self) -> Metric:
        return self._apply(torch.Tensor.double if self.value.is_floating_point() else torch.Tensor.long)

    def __add__(self, other: Any) -> Metric:
        return self._apply(torch.add, other)

    __radd__ = __add__

    def __floordiv__(self, other: Any) -> Metric:
        return self._apply(torch.floor_divide, other)

    def __truediv__(self, other: Any) -> Metric:
        """By a count; 0 for a count of 0, as trainers log after asking `count > 0`."""
        return self._apply(lambda x, y: (x / y).masked_fill(y == 0, 0) if isinstance(y, Tensor) else x / y, other)

    def __gt__(self, other: Any) -> bool:
        if other != 0:
            raise MetricError("the trainer compares a metric during the step")
        return True

    def __bool__(self) -> bool:
        raise MetricError("the trainer decides by a metric during the step")


@contextlib.contextmanager
def collect_metrics(trainer: Any) -> Iterator[list[tuple[str, Tensor]]]:
    """The metrics that a TRL trainer appends inside the block, still on the device, with the tokens that it counts."""
    collected: list[tuple[str, Tensor]] = []
    held = vars(trainer)
    if not isinstance(held.get("_metrics"), dict):
        yield collected
        return
    before = {name: held[name] for name in ("_metrics", "_total_train_tokens") if name in held}
    accelerator = vars(trainer.accelerator)
    gather = {name: accelerator.get(name) for name in ("gather", "gather_for_metrics")}
    held["_metrics"] = {mode: defaultdict(list) for mode in before["_metrics"]}
    held["_total_train_tokens"] = 0
    accelerator.update(dict.fromkeys(gather, Metric))
    try:
        yield collected
        found, tokens = held["_metrics"]["train"], held["_total_train_tokens"]
    finally:
        held.update(before)
        for name, own in gather.items():
            if own is None:
                del accelerator[name]
            else:
                accelerator[name] = own
    device = trainer.args.device
    if found.pop("num_tokens", None):
        collected.append((TOKENS, _on_device(tokens, device)))
    collected += [(name, _on_device(value, device)) for name, values in found.items() for value in values]


def _on_device(value: Any, device: torch.device) -> Tensor:
    return value.value if isinstance(value, Metric) else torch.full((), value, device=device)
