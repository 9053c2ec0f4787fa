"""RecTools' and RecBole's next-item models in the study of `rank_sequences.py`: packages train, the study measures.

A peer trains on all events of a user but the last two, by its package's own data preparation, loss, optimiser, batch
size and loop: RecTools' by Lightning, RecBole's by its Trainer. The study gives the width, the layers, the heads, the
longest history, and says when to stop: its own validation judges what the peer scores. Scores come from the peer's own
inference, in the order of the study's items; an item that RecTools never saw in training has −inf.

What differs from the packages' defaults: HSTU's temperature is 0.05, as in RecTools' tutorial (cosines divided by its
default, 1, are too much alike to learn from), and its loss is over all items, as everybody's is here. HSTU reads times
where the set has them, the time of the event to be ranked too, as in that tutorial. Dropout is what validation chooses.
Weights and activations are fp32, as by default in both.

Source: https://github.com/MobileTeleSystems/RecTools, https://github.com/RUCAIBox/RecBole
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import math
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from studies.sequences.peers.peer import Peer


class Recipe(NamedTuple):
    """The package and its needs by the names to import, and what it takes by default."""

    package: str
    modules: tuple[str, ...]
    batch_size: int  # users; of RecBole pairs of a history and its next item
    dropout: float
    lr: float


_RECTOOLS = Recipe("rectools", ("rectools", "pytorch_lightning", "implicit", "pandas"), 128, 0.2, 1e-3)
PEERS: dict[str, Recipe] = {
    "rectools-sasrec": _RECTOOLS,
    "rectools-ligr": _RECTOOLS,
    "rectools-hstu": _RECTOOLS,
    "recbole-sasrec": Recipe("recbole", ("recbole", "pandas", "sklearn", "colorlog", "texttable"), 2048, 0.5, 1e-3),
}
PACKAGES = ("rectools", "recbole", "pytorch-lightning", "pandas", "numpy")


def lacks(method: str) -> str | None:
    """What must be installed for a peer to run, in a sentence; None where nothing is missing."""
    missing = [name for name in PEERS[method].modules if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return f"left out, {method}: it needs the package {PEERS[method].package}, and there is no {', '.join(missing)}"


def versions() -> dict[str, str | None]:
    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {name: version(name) for name in PACKAGES}


def fit(
    method: str, data: Any, seed: int, setting: dict[str, Any], longest: int, judge: Callable[[Peer], float]
) -> tuple[Peer, dict[str, Any], float]:
    """The peer with its best weights, what the fit was, and its seconds in training, validations among them.

    Args:
        data: the study's `Sequences` on the device to train on.
        setting: width, layers, heads, dropout, lr, epochs, every, patience, seconds; the batch size is the recipe's.
        judge: what the study's validation says of a peer, more is better.
    """
    own = {key: value for key, value in setting.items() if key not in ("warmup", "weight_decay")}
    own["batch_size"] = PEERS[method].batch_size
    torch.manual_seed(seed)
    for name in ("pytorch_lightning", "lightning_fabric", "pytorch_lightning.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    begun = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of two packages that are older than pandas and Lightning here
        # Imported here: the study runs without them, and they take seconds.
        if method == "recbole-sasrec":
            from studies.sequences.peers.recbole import fit_recbole

            watch = fit_recbole(data, own, seed, longest, judge)
        else:
            from studies.sequences.peers.rectools import fit_rectools

            watch = fit_rectools(method, data, own, longest, judge)
    watch.restore()
    own |= {
        "best_epoch": watch.best_epoch,
        "epochs_run": watch.epoch,
        "ended": watch.ended,
        "preparing": round(watch.began - begun, 2),
        "unknown_items": int((watch.peer.codes[1:] == 0).sum()),
        "parameters": sum(p.numel() for p in watch.peer.module.parameters()),
        "losses": [round(x, 4) if math.isfinite(x) else str(x) for x in watch.losses],
        "versions": versions(),
    }
    return watch.peer, own, watch.seconds
