"""What compression costs an encoder's user: accuracy on SST-2, and the size of the file.

    PYTHONPATH=src python benchmarks/compress_sst2.py --data DIR --model DIR --output benchmarks/results

--data is GLUE's folder SST-2, with train.tsv and dev.tsv; --model a folder of an encoder with its tokenizer. The
encoder stays as it is: sentences are the means of its answers over their tokens, and a logistic regression on those of
training sentences judges those of dev. Compressed encoders are judged by the same regression, which has not seen them,
and by one that is fitted to their own answers ("refitted"). Calibration is text of training sentences.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import report
from torch import Tensor

from tigon import compress

BATCH, PENALTY = 64, 1e-4
WAYS: dict[
    str, tuple[dict[str, Any], bool]
] = {  # options of `feed_forward`, and whether embeddings are stored in bytes
    "whole": ({}, False),
    "bits 4/3 0.25": ({"method": compress.Bits(4, 3, 0.25)}, False),
    "bits 4/3 0.25, embeddings": ({"method": compress.Bits(4, 3, 0.25)}, True),
    "bits 4/3 0.25, embeddings, recovered": ({"method": compress.Bits(4, 3, 0.25), "recover": 50}, True),
}


@dataclass
class Row:
    """One encoder: its file, and its accuracy on dev in percent."""

    model: str
    method: str
    mb: float  # of the tensors' file, 10⁶ bytes
    share: float  # of the whole one's
    accuracy: float
    refitted: float
    sentences: int  # that the regression was fitted to
    dev: int
    seconds: float  # of the processor, for compression

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def sentences(path: Path, most: int) -> tuple[list[str], Tensor]:
    """Text and label of evenly spaced rows."""
    if not path.is_file():
        sys.exit(f"compress_sst2: --data must hold {path.name}, with the columns sentence and label")
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    rows = rows[:: max(1, len(rows) // most)][:most]
    return [row["sentence"].strip() for row in rows], torch.tensor([float(row["label"]) for row in rows])


@torch.no_grad()
def encoded(model: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    """(sentences, d): means over tokens, of unit length."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    found: dict[int, Tensor] = {}
    for start in range(0, len(order), BATCH):
        own = order[start : start + BATCH]
        batch = tokenizer([texts[i] for i in own], padding=True, truncation=True, return_tensors="pt")
        mask = batch["attention_mask"][..., None]
        y = model(**batch).last_hidden_state
        means = (y * mask).sum(1) / mask.sum(1)
        found |= dict(zip(own, F.normalize(means, dim=-1), strict=True))
    return torch.stack([found[i] for i in range(len(texts))])


def regression(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (d,) and bias of a logistic regression, by L-BFGS."""
    weight, bias = torch.zeros(x.shape[1], requires_grad=True), torch.zeros((), requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(x @ weight + bias, labels) + PENALTY * weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return weight.detach(), bias.detach()


def accuracy(x: Tensor, labels: Tensor, fitted: tuple[Tensor, Tensor]) -> float:
    return 100 * float(((x @ fitted[0] + fitted[1] > 0) == (labels > 0.5)).float().mean())


def size_of(model: Any) -> float:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return (Path(folder) / "model.safetensors").stat().st_size / 1e6


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", required=True, type=Path, help="GLUE's folder SST-2")
    parser.add_argument("--model", required=True, type=Path, help="folder of an encoder with its tokenizer")
    parser.add_argument("--output", required=True, type=Path, help="folder for the result file")
    parser.add_argument("--name", default="cpu-compress-sst2.json", help="name of the result file")
    parser.add_argument("--sentences", type=int, default=4000, help="that the regression is fitted to")
    parser.add_argument("--dev", type=int, default=872, help="that it is judged on")
    parser.add_argument("--calibration", type=int, default=800, help="training sentences for compression")
    options = parser.parse_args(arguments)
    from transformers import AutoModel, AutoTokenizer

    texts, labels = sentences(options.data / "train.tsv", options.sentences)
    dev, judged = sentences(options.data / "dev.tsv", options.dev)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows: list[Row] = []
    known: tuple[Tensor, Tensor] | None = None
    for way, (choice, tables) in WAYS.items():
        model = AutoModel.from_pretrained(options.model, dtype=torch.float32).eval()
        began = time.process_time()
        if choice:
            compress.feed_forward(model, texts[: options.calibration], tokenizer=tokenizer, **choice).forget()
        if tables:
            compress.embeddings(model).forget()
        seconds = time.process_time() - began
        own = regression(encoded(model, tokenizer, texts), labels)
        known = own if known is None else known
        x, size = encoded(model, tokenizer, dev), size_of(model)
        rows.append(
            Row(f"{model.config.model_type} {model.config.hidden_size}×{model.config.num_hidden_layers}", way, size,
                size / (rows[0].mb if rows else size), accuracy(x, judged, known), accuracy(x, judged, own),
                len(texts), len(dev), seconds)
        )  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)
        options.output.mkdir(parents=True, exist_ok=True)
        report.save(options.output / options.name, report.result("compress-sst2", rows, device=torch.device("cpu")))
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
