"""RecBole's SASRec, trained by RecBole's Trainer on RecBole's own leave-one-out split, and stopped by the study."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recbole.config import Config
from recbole.data import create_dataset, data_preparation
from recbole.model.sequential_recommender.sasrec import SASRec
from recbole.trainer import Trainer
from recbole.utils import init_seed
from torch import Tensor

from studies.sequences.peers.peer import Peer, Watch, histories


class RecBolePeer(Peer):
    """RecBole's SASRec, fitting or fitted. It knows all items, for it reads the events that are left out as names."""

    def inputs(self, left_out: int) -> dict[str, Tensor]:
        x, _ = histories(self.data, self.codes, left_out, self.longest)
        lengths = (x > 0).sum(1)
        # RecBole pads at the end.
        place = (torch.arange(self.longest) + self.longest - lengths[:, None]) % self.longest
        return {self.module.ITEM_SEQ: x.gather(1, place), self.module.ITEM_SEQ_LEN: lengths}

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        batch[self.module.ITEM_SEQ_LEN] = batch[self.module.ITEM_SEQ_LEN].clamp(min=1)
        found: Tensor = self.module.full_sort_predict(batch)
        return found[:, self.codes[self.codes > 0].sort().values.to(found.device)]


class Ended(Exception):
    """After the last epoch: RecBole's loop has no other way out where it does not validate itself."""


@contextmanager
def apart() -> Iterator[Path]:
    """A folder to work in, since RecBole writes logs where it runs, reads the program's arguments, and sets devices."""
    here, arguments, devices = os.getcwd(), sys.argv, os.environ.get("CUDA_VISIBLE_DEVICES")
    # NumPy 2 removed these names, which RecBole 1.2.1 reads as it starts.
    for name, kind in (("float_", np.float64), ("complex_", np.complex128), ("unicode_", np.str_)):
        if not hasattr(np, name):
            setattr(np, name, kind)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.argv = arguments[:1]
        try:
            yield Path(folder)
        finally:
            os.chdir(here)
            sys.argv = arguments
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            if devices is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = devices


def recbole_parts(
    data: Any, setting: dict[str, Any], seed: int, longest: int, folder: Path
) -> tuple[Any, Any, Any, Any]:
    """Its configuration, its data set, its loader of training pairs, and its model on the data's device."""
    (folder / "study").mkdir()
    user = torch.repeat_interleave(data.offsets.diff()).tolist()
    # Order stands for time: whole numbers below 2²⁴ are exact in its fp32.
    lines = [f"{u}\t{item}\t{n}\n" for n, (u, item) in enumerate(zip(user, data.items.tolist(), strict=True))]
    header = "user_id:token\titem_id:token\ttimestamp:float\n"
    (folder / "study" / "study.inter").write_text(header + "".join(lines))
    cuda = data.items.device.type == "cuda"
    config = Config(
        model="SASRec",
        dataset="study",
        config_dict={
            "data_path": str(folder), "checkpoint_dir": str(folder / "saved"), "seed": seed, "use_gpu": cuda,
            "gpu_id": "0" if cuda else "", "show_progress": False, "state": "ERROR",
            "load_col": {"inter": ["user_id", "item_id", "timestamp"]}, "MAX_ITEM_LIST_LENGTH": longest,
            "eval_args": {"split": {"LS": "valid_and_test"}, "group_by": "user", "order": "TO", "mode": "full"},
            "train_neg_sample_args": None, "loss_type": "CE", "epochs": setting["epochs"],
            "train_batch_size": setting["batch_size"], "learning_rate": setting["lr"],
            "hidden_size": setting["width"], "inner_size": 4 * setting["width"], "n_layers": setting["layers"],
            "n_heads": setting["heads"], "hidden_dropout_prob": setting["dropout"],
            "attn_dropout_prob": setting["dropout"],
        },
    )  # fmt: skip
    init_seed(config["seed"], config["reproducibility"])
    dataset = create_dataset(config)
    loader, _, _ = data_preparation(config, dataset)
    init_seed(config["seed"], config["reproducibility"])
    return config, dataset, loader, SASRec(config, loader.dataset).to(config["device"])


class Watched(Trainer):  # type: ignore[misc]
    """RecBole's loop, with an end that the study sets; validated by the study alone."""

    watch: Watch

    def _train_epoch(self, train_data: Any, *args: Any, **named: Any) -> Any:
        loss = super()._train_epoch(train_data, *args, **named)
        if self.watch.ends(loss / len(train_data)):
            raise Ended
        return loss


def fit_recbole(data: Any, setting: dict[str, Any], seed: int, longest: int, judge: Callable[[Peer], float]) -> Watch:
    with apart() as folder:
        config, dataset, loader, model = recbole_parts(data, setting, seed, longest, folder)
        inside = dataset.field2token_id[dataset.iid_field]
        codes = torch.tensor([0, *(inside.get(str(item), 0) for item in range(1, data.catalogue + 1))])
        trainer = Watched(config, model)
        trainer.watch = Watch(RecBolePeer(model, data, longest, codes), judge, setting)
        with suppress(Ended):
            trainer.fit(loader, saved=False, verbose=False)
        trainer.tensorboard.close()
    return trainer.watch
