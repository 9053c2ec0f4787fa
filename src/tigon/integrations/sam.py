"""Sharpness-aware minimization in the Hugging Face Trainer: a callback.

    trainer = Trainer(model, args, train_dataset=data)
    trainer.add_callback(MicroBatchSAMCallback(trainer, rho=0.05))

Each rank's micro-batches are the shards: m is gradient_accumulation_steps times the rank count. Optimizer, clipping,
mixed precision, checkpoints and resuming are the Trainer's; the callback is stateless.
"""

from __future__ import annotations

import copy
import types
from typing import Any

from tigon.install import install
from tigon.training.micro_batch_sam import check_finite, refuse_fsdp1
from tigon.training.passes import two_passes

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(f"tigon.integrations.sam needs transformers: {install('hf')}.") from error


class MicroBatchSAMCallback(TrainerCallback):
    """Runs each training step twice: along the gradient, and back with the gradient found there.

    Args:
        trainer: its `training_step` is replaced by two passes for the duration of training, on this instance.
        rho, adaptive, eta: as in `tigon.training.MicroBatchSAM`.
    Raises: TypeError if trainer is not a trainer, for a trainer that generates batches in training_step (GRPO,
        RLOO), and for a model under DeepSpeed or FSDP1; ValueError for a rho or an eta that is negative or not finite.

    The logged training loss is the first pass's, at the unperturbed weights; a TRL trainer's other metrics are the mean
    over both passes. If training ends with an error, `training_step` stays replaced until the next training ends.
    """

    def __init__(self, trainer: Any, rho: float = 0.05, *, adaptive: bool = False, eta: float = 0.0) -> None:
        if not callable(getattr(trainer, "training_step", None)):
            raise TypeError(f"MicroBatchSAMCallback: trainer must be a Trainer, got {type(trainer).__name__}.")
        if hasattr(trainer, "_buffered_inputs"):
            raise TypeError(
                f"MicroBatchSAMCallback: {type(trainer).__name__} generates batches in its training_step, so a second "
                "pass would use the next batch."
            )
        self.trainer = trainer
        self.rho, self.adaptive, self.eta = check_finite("rho", rho), adaptive, check_finite("eta", eta)
        self._put: Any = None
        self._before: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if getattr(self.trainer, "is_deepspeed_enabled", False):
            raise TypeError("MicroBatchSAMCallback: DeepSpeed does not expose the gradients; use DDP or FSDP2.")
        refuse_fsdp1(self.trainer.model_wrapped)
        held = vars(self.trainer)
        if self._put is not None and held.get("training_step") is self._put:
            return
        self._before = held.get("training_step")
        once = self.trainer.training_step

        def training_step(trainer: Any, model: Any, inputs: Any, *more: Any, **options: Any) -> Any:
            params = [p for p in model.parameters() if p.requires_grad]
            # Each pass gets a separate dictionary: a loss may pop the labels.
            return two_passes(
                lambda: once(model, copy.copy(inputs), *more, **options), params, [self.rho] * len(params), model,
                adaptive=self.adaptive, eta=self.eta,
            )  # fmt: skip

        self._put = held["training_step"] = types.MethodType(training_step, self.trainer)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        held = vars(self.trainer)
        if self._put is None or held.get("training_step") is not self._put:
            return  # other code has wrapped the replaced training_step
        if self._before is None:
            del held["training_step"]
        else:
            held["training_step"] = self._before
        self._put = None
