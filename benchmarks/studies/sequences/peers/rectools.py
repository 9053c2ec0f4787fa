"""RecTools' SASRec, its LiGR layers, its HSTU: trained by Lightning as `fit` does, and stopped by the study."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytorch_lightning as pl
import torch
from rectools.dataset import Dataset
from rectools.models import HSTUModel, SASRecModel
from rectools.models.nn.item_net import IdEmbeddingsItemNet
from rectools.models.nn.transformers.ligr import LiGRLayers
from torch import Tensor, nn

from studies.sequences.peers.peer import Peer, Watch, histories


class RecToolsPeer(Peer):
    """A fitted or a fitting model of RecTools. times: whether its backbone reads when events were."""

    def __init__(self, module: nn.Module, data: Any, longest: int, codes: Tensor, extra: int, times: bool) -> None:
        super().__init__(module, data, longest, codes)
        self.extra, self.times = extra, times
        self.model: Any = None  # RecTools' own, which holds the module

    def inputs(self, left_out: int) -> dict[str, Tensor]:
        x, where = histories(self.data, self.codes, left_out, self.longest)
        if not self.times:
            return {"x": x}
        seconds = self.data.seconds.cpu().long()
        asked = seconds[self.data.offsets[1:] - left_out]  # of the event to rank: left_out ≥ 1
        when = torch.cat((seconds[where], asked[:, None]), 1)
        # Before the first event stands its time, or where there is none what is asked for.
        first = when[torch.arange(len(when)), (x == 0).sum(1)]
        when[:, :-1] = torch.where(x > 0, when[:, :-1], first[:, None])
        return {"x": x, "unix_ts": when}

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        model = self.module
        items = model.item_model.get_all_embeddings()
        session = model.encode_sessions(batch, items)[:, -1:]
        found: Tensor = model.similarity_module(session, items)[:, 0]
        return found[:, self.extra :]


def make_frame(data: Any) -> pd.DataFrame:
    """The events to train by, as RecTools reads them. Where a set has no times, order stands for them, in seconds."""
    user = torch.repeat_interleave(data.offsets.diff())
    place = torch.arange(len(user))
    kept = place < data.offsets[1:][user] - 2
    when = place if data.seconds is None else data.seconds.cpu().long()
    return pd.DataFrame(
        {
            "user_id": user[kept].numpy(),
            "item_id": data.items.cpu()[kept].numpy(),
            "weight": 1.0,
            "datetime": pd.to_datetime(when[kept].numpy(), unit="s").astype("datetime64[ns]"),
        }
    )


class Judge(pl.Callback):  # type: ignore[misc]
    """Lightning asks it after each epoch. began: makes the watch, once RecTools has made the model."""

    def __init__(self, began: Callable[[nn.Module], Watch]) -> None:
        self.began = began
        self.watch: Watch | None = None

    def __deepcopy__(self, memo: Any) -> Judge:
        return self  # RecTools trains with a copy of the trainer that it was given

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.watch = self.began(module.torch_model)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        assert self.watch is not None
        if self.watch.ends(float(trainer.callback_metrics["train_loss"])):
            trainer.should_stop = True


def build(method: str, setting: dict[str, Any], longest: int, times: bool, trainer: Callable[[], pl.Trainer]) -> Any:
    """RecTools' model by its own constructor; what is not named here is its default."""
    options: dict[str, Any] = {
        "n_blocks": setting["layers"], "n_heads": setting["heads"], "n_factors": setting["width"],
        "dropout_rate": setting["dropout"], "session_max_len": longest, "loss": "softmax", "lr": setting["lr"],
        "batch_size": setting["batch_size"], "item_net_block_types": (IdEmbeddingsItemNet,),
        "get_trainer_func": trainer,
    }  # fmt: skip
    if method == "rectools-hstu":
        return HSTUModel(relative_time_attention=times, lightning_module_kwargs={"logits_t": 0.05}, **options)
    if method == "rectools-ligr":
        return SASRecModel(transformer_layers_type=LiGRLayers, **options)
    return SASRecModel(**options)


def fit_rectools(
    method: str, data: Any, setting: dict[str, Any], longest: int, judge: Callable[[Peer], float]
) -> Watch:
    times = method == "rectools-hstu" and data.seconds is not None

    def trainer() -> pl.Trainer:
        return pl.Trainer(
            accelerator="gpu" if data.items.device.type == "cuda" else "cpu", devices=1, max_epochs=setting["epochs"],
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[asked],
        )  # fmt: skip

    def began(module: nn.Module) -> Watch:
        ready = model.data_preparator
        inside = ready.get_known_items_sorted_internal_ids()
        outside = ready.item_id_map.convert_to_external(inside)
        codes = torch.zeros(data.catalogue + 1, dtype=torch.int64)
        codes[torch.from_numpy(outside.astype(np.int64))] = torch.from_numpy(inside.astype(np.int64))
        peer = RecToolsPeer(module, data, longest, codes, ready.n_item_extra_tokens, times)
        peer.model = model
        return Watch(peer, judge, setting)

    asked = Judge(began)
    model = build(method, setting, longest, times, trainer)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # as Lightning advises: products in TF32 take half the time
    try:
        model.fit(Dataset.construct(make_frame(data)))
    finally:
        torch.set_float32_matmul_precision(before)
    assert asked.watch is not None
    return asked.watch
