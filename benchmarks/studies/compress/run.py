"""What each way to compress feed-forward layers costs a model: ReLU, GELU and SwiGLU, at equal bytes.

    python -m studies.compress.run --data docs --model relu --model DIR --output benchmarks/results
    python -m studies.compress.run … --name cpu-compress.json         goes on where the file ends

--data is a folder whose .md and .txt files, by turns, are calibration and held-out text; --model a folder of a model
of transformers with its tokenizer, or `relu`: a language model of 0.9 million weights on bytes, trained here on the
calibration half. Models run in fp32, from the weights they have. Each row is one way to store the layers:

    bits A, bits A/B share   all neurons at A bits; the heavy share at A and the others at B; groups of 64
    nearest A, A/B share     the same with each weight rounded to nearest, and not for the calibration's inputs
    bits within, auto        `feed_forward(method=…)` within the bytes of bits 4/3 0.25
    bits, prune, rank, svd   within 0.6 of the bytes; "recovered": with 100 steps of recovery
    torchao int4, int3       torchao's weight-only rounding to nearest, groups of 64, asymmetric: a scale and a zero

loss: nats a token of held-out text; of encoders the squared difference of their answers, relative to their mean square.
distance: the same of the calibration text against the model before (KL for predictions).
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import report
from torch import Tensor, nn

from tigon import compress
from tigon.compress.calibration import OutputDistance
from tigon.compress.recognition import find_feed_forwards

CPU = torch.device("cpu")  # where all of it runs
FIXED = {
    "bits 4": compress.Bits(4, 4), "bits 3": compress.Bits(3, 3), "bits 4/3 0.25": compress.Bits(4, 3, 0.25),
    "nearest 4": compress.Bits(4, 4, fit=False),
    "nearest 3": compress.Bits(3, 3, fit=False), "nearest 4/3 0.25": compress.Bits(4, 3, 0.25, fit=False),
}  # fmt: skip
SPLIT, BUDGET, STEPS = "bits 4/3 0.25", 0.6, 100
WITHIN = {"bits within": "bits", "auto within": "auto"}
FLOATS = {"prune": 0, "rank": 0, "svd": 0, "auto": 0, "prune recovered": STEPS, "rank recovered": STEPS}
SPLITS = ("nearest 4/3 0.25", "bits 4/3 0.25", "bits within")
PEERS = {"torchao int4": "int4", "torchao int3": "int3"}
WAYS = ("whole", *FIXED, *WITHIN, *FLOATS, *PEERS)
LENGTH = 256
BATCH, SHORT = 8, 128  # sequences of a step of training `relu`, and their bytes


@dataclass
class Row:
    """One way to store one model's feed-forward layers."""

    model: str
    method: str
    status: str = "ok"
    reason: str = ""
    bits: float | None = None  # of storage for each weight, scales included
    share: float | None = None  # of the bytes in fp32
    distance: float | None = None
    loss: float | None = None
    error: float | None = None  # mean over the layers
    seconds: float | None = None  # of the processor
    tokens: int | None = None  # of calibration
    held: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Case:
    """A model, its texts as ids, and how held-out text is judged."""

    name: str
    model: nn.Module
    calibration: Tensor
    held: Tensor

    def __post_init__(self) -> None:
        self.before = OutputDistance(self.model, [{"input_ids": ids} for ids in self.held.split(4)])
        self.known = OutputDistance(self.model, [{"input_ids": ids} for ids in self.calibration.split(4)])

    @torch.no_grad()
    def loss(self) -> float:
        if not self.before.is_nats:
            return self.before.measure()
        total = 0.0
        for ids in self.held.split(4):
            logits = self.model(input_ids=ids).logits[:, :-1]
            total += float(F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum"))
        return total / self.held[:, 1:].numel()


# ------------------------------------------------------------------------------------------------------------ models


def texts(folder: Path) -> tuple[list[str], list[str]]:
    """Calibration and held-out text: the files by turns."""
    files = sorted(path for kind in ("*.md", "*.txt") for path in folder.rglob(kind))
    if len(files) < 2:
        sys.exit(f"compress: --data must hold at least two .md or .txt files, got {len(files)} in {folder}")
    read = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    return read[::2], read[1::2]


def windows(ids: list[int], tokens: int, length: int) -> Tensor:
    count = tokens // length
    if len(ids) < count * length:
        sys.exit(f"compress: --data must hold {tokens:,} tokens in each half, got {len(ids):,}")
    stride = len(ids) // count  # from all of the text, evenly
    return torch.tensor([ids[i * stride : i * stride + length] for i in range(count)])


def relu_model(data: tuple[list[str], list[str]], calibration: int, held: int, steps: int) -> Case:
    """A language model of bytes with ReLU, trained on the calibration half."""
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=256, hidden_size=128, ffn_dim=512, num_hidden_layers=4, num_attention_heads=4,
        word_embed_proj_dim=128, max_position_embeddings=LENGTH, dropout=0.0, pad_token_id=None, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    model = OPTForCausalLM(config)
    train, other = (list("\n".join(half).encode()) for half in data)
    source = torch.tensor(train)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    draw = torch.Generator().manual_seed(0)
    for step in range(steps):
        places = torch.randint(len(source) - SHORT, (BATCH, 1), generator=draw) + torch.arange(SHORT)
        loss = model(input_ids=source[places], labels=source[places]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"relu: step {step}, loss {float(loss.detach()):.3f}", file=sys.stderr, flush=True)
    return Case("relu", model.eval(), windows(train, calibration, LENGTH), windows(other, held, LENGTH))


def load_pretrained(folder: Path, data: tuple[list[str], list[str]], calibration: int, held: int) -> Case:
    """Texts as they stand, cut into windows; special tokens around texts are left out."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, (config.architectures or ["AutoModel"])[0])
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    halves = [[i for text in half for i in tokenizer(text, add_special_tokens=False)["input_ids"]] for half in data]
    return Case(
        f"{config.model_type} {config.hidden_size}×{config.num_hidden_layers}", model,
        windows(halves[0], calibration, LENGTH), windows(halves[1], held, LENGTH),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- rows


def measure_all(case: Case, way: str) -> Row:
    row, began = Row(case.name, way, tokens=case.calibration.numel(), held=case.held.numel()), time.process_time()
    undo: Callable[[], None] = lambda: None  # noqa: E731
    try:
        if way == "whole":
            row.bits, row.share, row.distance = 32.0, 1.0, 0.0
        elif way in PEERS:
            undo = with_torchao(case, PEERS[way], row)
        else:
            undo = compress_model(case, way, row)
        row.loss = case.loss()
        row.distance = case.known.measure() if row.distance is None else row.distance
        row.seconds = time.process_time() - began
    except Exception as error:
        row.status, row.reason = "failed", f"{type(error).__name__}: {error}"
    finally:
        undo()
    return row


def compress_model(case: Case, way: str, row: Row) -> Callable[[], None]:
    options: dict[str, Any] = {"method": FIXED[way]} if way in FIXED else {}
    if way in WITHIN:
        # As much as the fixed split takes, to the byte and a rounding of the share.
        options = {"method": WITHIN[way], "budget": compute_share(case, SPLIT) * (1 + 1e-9)}
    elif way in FLOATS:
        options = {"method": way.split()[0], "budget": BUDGET, "recover": FLOATS[way]}
    found = compress.feed_forward(case.model, case.calibration, **options)
    row.share = found.bytes / found.bytes_before
    row.distance = found.distance
    row.bits, row.error = 32 * row.share, statistics.mean(one.error for one in found.layers)
    chosen = next(one.name for one in found.methods if one.chosen)
    row.reason = "; ".join(f"{one.name} {one.distance:.4g}" for one in found.methods if one.distance is not None)
    row.reason = f"{chosen} of {row.reason}" if way.startswith("auto") else ""
    return found.remove


def compute_share(case: Case, way: str) -> float:
    found = compress.feed_forward(case.model, case.calibration[:1].repeat(2, 1), method=FIXED[way])
    share = found.bytes / found.bytes_before
    found.remove()
    return share


def with_torchao(case: Case, word: str, row: Row) -> Callable[[], None]:
    """Weights rounded by torchao, in its own classes; bytes counted as if they were packed."""
    from torchao.quantization import IntxWeightOnlyConfig, MappingType, PerGroup, quantize_

    bits = int(word[-1])
    config = IntxWeightOnlyConfig(getattr(torch, word), PerGroup(64), MappingType.ASYMMETRIC)
    layers, _ = find_feed_forwards(case.model, {"input_ids": case.calibration[:1]})
    names = {name for one in layers for name in one.layers}
    before = {name: copy.deepcopy(case.model.get_submodule(name)) for name in names}
    quantize_(case.model, config, filter_fn=lambda _, name: name in names)
    row.bits = bits + 8 * (4 + 1) / 64  # a scale in fp32 and a zero in a byte for each group
    row.share = row.bits / 32

    def undo() -> None:
        for name, layer in before.items():
            case.model.set_submodule(name, layer)

    return undo


def describe_row(rows: list[Row]) -> list[str]:
    """How much of what 3 bits lose against 4 each split takes back, in held-out loss and in distance."""
    lines = []
    for model, what in ((m, w) for m in dict.fromkeys(row.model for row in rows) for w in ("loss", "distance")):
        loss = {row.method: getattr(row, what) for row in rows if row.model == model and row.loss is not None}
        for start in ("nearest", "bits"):
            three, four = f"{start} 3", f"{start} 4"
            if not {three, four} <= set(loss) or loss[three] == loss[four]:
                continue
            # Rounding to nearest is no way back from a better rounding.
            for way in (way for way in SPLITS if way in loss and (start == "nearest" or way in SPLITS[1:])):
                back = (loss[three] - loss[way]) / (loss[three] - loss[four])
                lines.append(f"{model}: {way} takes back {back:.0%} of the {what} between {three} and {four}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", required=True, type=Path, help="folder of .md and .txt files")
    parser.add_argument("--model", action="append", required=True, help="`relu`, or a folder; may be repeated")
    parser.add_argument("--output", required=True, type=Path, help="folder for the result file; a begun study goes on")
    parser.add_argument("--name", help="name of the result file; default: by the device")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), help="what is measured")
    parser.add_argument("--tokens", type=int, default=8192, help="of calibration; at most 4096 count for distances")
    parser.add_argument("--held", type=int, default=4096, help="held-out tokens")
    parser.add_argument("--steps", type=int, default=300, help="of training `relu`")
    options = parser.parse_args(arguments)
    halves = texts(options.data)
    empty = report.result("compress", [], device=CPU)
    path = options.output / (options.name or report.file_name(empty))
    rows = [Row(**row) for row in report.load(path)["rows"]] if path.exists() else []
    for name in options.model:
        if name == "relu":
            case = relu_model(halves, options.tokens, options.held, options.steps)
        else:
            case = load_pretrained(Path(name), halves, options.tokens, options.held)
        there = {row.method for row in rows if row.model == case.name}
        for way in (way for way in options.only if way not in there):
            rows.append(measure_all(case, way))
            row = rows[-1]
            print(f"{case.name}: {way}: {row.bits} bits, loss {row.loss}, distance {row.distance} "
                  f"({row.seconds} s) {row.reason}", file=sys.stderr, flush=True)  # fmt: skip
            report.save(path, report.result("compress", rows, device=CPU, notes=describe_row(rows)))
    print("\n".join(describe_row(rows)))
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
