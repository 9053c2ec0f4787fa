"""The Lightning callback: in Lightning itself where it is installed, else in a stand-in that calls its hooks in order.

The order is that of `Trainer._run` of Lightning 2.6: setup of callbacks, of the module, configure_model, the strategy,
on_fit_start, the steps, teardown.
"""

import contextlib
import importlib.util
import re
import runpy
import types
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
from small_llama import CALLS, absent, batch, import_anew, llama, ran, ran_in_fp8, stand_in

from tigon.fusion.fp8.layers import ignore_sizes

EXAMPLES = Path(__file__).parents[2] / "examples"


class Callback:
    """The hooks that the callback has, and one that it has not."""

    def setup(self, trainer, pl_module, stage): ...
    def on_fit_start(self, trainer, pl_module): ...
    def on_sanity_check_end(self, trainer, pl_module): ...
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx): ...
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx): ...
    def on_validation_start(self, trainer, pl_module): ...
    def teardown(self, trainer, pl_module, stage): ...


class LightningModule(nn.Module):
    def setup(self, stage): ...
    def configure_model(self): ...


class Trainer:
    is_global_zero = True

    def __init__(self, max_epochs=1, callbacks=(), **options):
        self.max_epochs, self.callbacks = max_epochs, callbacks

    def call(self, hook, module, *args, **kwargs):
        for callback in self.callbacks:
            getattr(callback, hook)(self, module, *args, **kwargs)

    def validate(self, module, batches, sanity=False):
        self.sanity_checking = sanity
        self.call("on_validation_start", module)
        with torch.no_grad():
            for i, inputs in enumerate(batches):
                module.eval().validation_step(inputs, i)
        module.train()
        if sanity:
            self.call("on_sanity_check_end", module)

    def fit(self, module, train_dataloaders, val_dataloaders=None):
        self.call("setup", module, stage="fit")
        module.setup("fit")
        module.configure_model()
        optimizer = module.configure_optimizers()
        self.call("on_fit_start", module)
        module.train()
        if val_dataloaders is not None:
            self.validate(module, val_dataloaders, sanity=True)
        for _ in range(self.max_epochs):
            for i, inputs in enumerate(train_dataloaders):
                self.call("on_train_batch_start", module, inputs, i)
                optimizer.zero_grad()
                loss = module.training_step(inputs, i)
                loss.backward()
                optimizer.step()
                self.call("on_train_batch_end", module, loss, inputs, i)
            if val_dataloaders is not None:
                self.validate(module, val_dataloaders)
        self.call("teardown", module, stage="fit")


@pytest.fixture(params=["Lightning", "stand-in"])
def lightning(request, monkeypatch):
    if request.param == "stand-in":
        stand_in(monkeypatch, "lightning", LightningModule=LightningModule, Trainer=Trainer)
        stand_in(monkeypatch, "lightning.pytorch.callbacks", Callback=Callback)
    elif importlib.util.find_spec("lightning") is None:
        pytest.skip("needs lightning")
    import lightning

    module = import_anew(monkeypatch, "tigon.integrations.lightning")
    return types.SimpleNamespace(
        LightningModule=lightning.LightningModule, Trainer=lightning.Trainer, TigonCallback=module.TigonCallback
    )


def language_model(lightning, late=False):
    class LanguageModel(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses = None if late else llama(), []

        def configure_model(self):
            self.model = self.model or llama()

        def training_step(self, inputs, batch_idx):
            loss = self.model(**inputs).loss
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return LanguageModel()


def fit(lightning, module, *callbacks, validation=None, **options):
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=list(callbacks), **options,
    )  # fmt: skip
    with contextlib.redirect_stderr(None):
        data = torch.utils.data.DataLoader([batch(seed) for seed in range(3)], batch_size=None)
        trainer.fit(module, data, *(() if validation is None else (torch.utils.data.DataLoader(validation, None),)))
    return torch.stack(module.losses)


@pytest.mark.parametrize("late", [False, True], ids=["made at once", "made in configure_model"])
def test_a_run_is_the_plain_run(lightning, late, capsys):
    plain = fit(lightning, language_model(lightning, late))
    callback = lightning.TigonCallback()
    module = language_model(lightning, late)
    fused = fit(lightning, module, callback)
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=0)
    assert ran(callback.fusion) == CALLS
    printed = capsys.readouterr().out
    assert "1 × Linear" in printed
    assert "Ran in the last step: head 1" in printed
    losses = fit(lightning, module, callback)  # a second run of the same module
    assert len(losses) == 6
    assert ran(callback.fusion) == CALLS


def test_the_report_is_of_a_training_step_where_a_validation_ran_last(lightning, capsys):
    """The validation reads the logits, which would be an error in a training step."""
    module, callback = language_model(lightning), lightning.TigonCallback()
    module.validation_step = lambda inputs, batch_idx: module.model(**inputs).logits.argmax(-1)
    fit(lightning, module, callback, validation=[batch(7)])
    printed = capsys.readouterr().out
    assert "Ran in the last step: head 1" in printed
    assert "argmax" not in printed
    assert not callback.report().logits_built_by
    assert callback.fusion.report().logits_built_by == {"argmax": 1}, "the last step of all"


def test_remove_at_the_end(lightning):
    module, callback = language_model(lightning), lightning.TigonCallback(remove=True, report=False)
    fit(lightning, module, callback)
    assert callback.fusion is None
    assert not any("_tigon" in vars(m) or "_tigon_fusion" in vars(m) for m in module.modules())
    with pytest.raises(RuntimeError, match="nothing is fused before the run begins"):
        callback.report()


def test_options_and_what_was_fused_before(lightning, capsys):
    import tigon

    module, callback = language_model(lightning), lightning.TigonCallback(report=False, parts=tigon.PARTS - {"rotary"})
    fit(lightning, module, callback)
    assert ran(callback.fusion) == {k: v for k, v in CALLS.items() if k != "rotary"}

    module = language_model(lightning)
    fusion = tigon.fuse(module.model)
    fit(lightning, module, again := lightning.TigonCallback(report=False, remove=True))
    assert again.fusion is fusion
    assert fusion.report().active, "what the user has fused stays fused"
    assert capsys.readouterr().out == ""


def test_fp8(lightning):
    module, callback = language_model(lightning), lightning.TigonCallback(report=False, fp8=True)
    module.model.bfloat16()
    with ignore_sizes():
        fit(lightning, module, callback)
    assert ran_in_fp8(callback.fusion) == 3


def test_ddp_in_lightning(monkeypatch):
    pytest.importorskip("lightning")
    import lightning

    module = import_anew(monkeypatch, "tigon.integrations.lightning")
    options = {"strategy": "ddp", "devices": 1}
    plain = fit(lightning, language_model(lightning), **options)
    callback, model = module.TigonCallback(report=False), language_model(lightning)
    fused = fit(lightning, model, callback, **options)
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=0)
    assert ran(callback.fusion) == CALLS
    torch.distributed.destroy_process_group()


def test_the_example(lightning, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / "lightning_module.py"))
    printed = capsys.readouterr().out
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", printed)]
    assert len(losses) == 4
    assert losses[-1] < 0.75 * losses[0]
    assert "Ran in the last step: head 1" in printed


def test_without_lightning_one_sentence(monkeypatch):
    absent(monkeypatch, "lightning", "pytorch_lightning")
    with pytest.raises(ImportError, match=r"^tigon\.integrations\.lightning needs Lightning, pip install .*\.$"):
        import_anew(monkeypatch, "tigon.integrations.lightning")
