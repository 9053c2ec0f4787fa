"""Tigon in Lightning: a callback fuses the model that a LightningModule holds.

    trainer = L.Trainer(max_steps=1000, callbacks=[TigonCallback()])

Source: Lightning 2.6, `Callback`, https://lightning.ai/docs/pytorch/stable/extensions/callbacks.html
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tigon.fusion.engine.model import Fusion, fuse
from tigon.fusion.engine.report import Report

try:
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    try:
        from pytorch_lightning.callbacks import Callback
    except ImportError:
        raise ImportError(f"tigon.integrations.lightning needs Lightning, pip install lightning: {error}.") from None


class TigonCallback(Callback):  # type: ignore[misc]
    """Fuses the LightningModule in `setup`, before its strategy wraps it.

    Args:
        remove: restore the model when the run ends. Earlier fusions stay.
        report: print, on the main process, the fused parts when the run begins, and the parts that ran in the last
            step.
        options: for `tigon.fuse` (parts=…, recompute=…).

    A model created in `configure_model` does not exist in `setup`: fusion happens in `on_fit_start`. `fusion` is the
    `tigon.Fusion` from then on, None before; `report()` covers the last training step.
    """

    def __init__(self, *, remove: bool = False, report: bool = True, **options: Any) -> None:
        super().__init__()
        self.fusion: Fusion | None = None
        self._remove, self._print, self._options = remove, report, options
        self._ours = False
        self._checked = 0  # steps in the sanity check before training
        self._trained: Report | None = None  # for the last training step, where a validation has run since

    def report(self) -> Report:
        """The fused parts, and how often they ran in the last training step, or else in the last step of any kind.

        Raises RuntimeError before there is a model.
        """
        if self.fusion is None:
            raise RuntimeError("TigonCallback.report: nothing is fused before the run begins.")
        now = self.fusion.report()
        return now if self._trained is None else replace(self._trained, active=now.active)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._trained = None

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self.fusion is not None and self._trained is None and not getattr(trainer, "sanity_checking", False):
            report = self.fusion.report()
            self._trained = report if report.steps > self._checked else None

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        self._checked = 0 if self.fusion is None else self.fusion.report().steps

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._fuse(trainer, pl_module)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self.fusion is None:
            self._fuse(trainer, pl_module)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.fusion is None:
            return
        if self._print and trainer.is_global_zero:
            print(self.report().last_step())
        if self._remove and self._ours:
            self.fusion.remove()
            self.fusion = None

    def _fuse(self, trainer: Any, pl_module: Any) -> None:
        if self.fusion is not None and self.fusion.report().active:
            return  # fused for an earlier run
        fused_before = any("_tigon_fusion" in vars(module) for module in pl_module.modules())
        fusion = fuse(pl_module, **self._options)
        if not fusion.report().fused_rows:
            fusion.remove()  # there was nothing to fuse; on_fit_start tries again, after configure_model
            return
        self.fusion, self._ours = fusion, not fused_before
        if self._print and trainer.is_global_zero:
            print(fusion.report())
