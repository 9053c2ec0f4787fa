"""Is training with `tigon.fuse(model)` the same training? Eight families on real text, plain and fused.

    python benchmarks/converge.py --output results --jobs 8                    # 300 steps, into results/
    python benchmarks/converge.py --output /tmp/out --short --families llama   # what the tests run
    python benchmarks/converge.py --output results --fp8 --families llama --batches rows --plain 3
    python benchmarks/converge.py --output results --held-out --jobs 3 --plot  # FP8 and bf16, on unseen text

Rounding makes two runs of the same training differ, and the difference grows from step to step. How much is measured:
each plain run has the model's weights in another order (residual width, heads, hidden units of the MLP, experts,
vocabulary) and the rows of each batch too. Every run computes the same function, and its sums in another order. A fused
run, in an order of its own, has to be no further from the plain runs than these are from one another:
`convergence.py` judges. The file is written after every family and dtype; a run that is begun again goes on.

FP8 rounds more coarsely than any order of sums. --fp8 adds runs with FP8 layers to the rows, to show their scores,
which no limit binds. --held-out measures the loss on unseen text instead, for a Llama with three seeds: in a training
from random weights, and in a further training on other text, which begins with the weights that bf16 has trained.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import itertools
import math
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from convergence import HeldOut, Runs, Training, describe_held_out, judge
from harness import report
from torch import Tensor, nn

import tigon
from tigon.fusion.fp8.layers import ignore_sizes

# Shakespeare's plays, in the public domain: the first third of tinyshakespeare, of github.com/karpathy/char-rnn (MIT).
TEXT = Path(__file__).parent / "data" / "shakespeare.txt"
# Other text: the pages of the documentation, prose with code.
PAGES = Path(__file__).parents[1] / "docs"
VOCABULARY = 512
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
IGNORE = -100

# All sizes differ, because `Order` recognises an axis by its length.
WIDTH, HEADS, KV_HEADS, HEAD, HIDDEN, EXPERTS, EXPERT = 80, 4, 2, 16, 144, 6, 56
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "max_position_embeddings": 256,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "use_cache": False,
}  # fmt: skip
# Together the families have every part that fuse replaces; the record has the calls of each run.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},  # a norm of each head of q and k
    "gemma2": {"query_pre_attn_scalar": HEAD, "sliding_window": 64, "final_logit_softcapping": 5.0},
    "phi3": {},  # packed projections
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 0.5},
    "olmo2": {},  # norms behind the blocks, and of all heads of q and k at once
    "qwen3_moe": {
        "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "output_router_logits": True,
    },
    "gpt_neox": {"num_attention_heads": WIDTH // HEAD, "rotary_pct": 0.5},  # layer norms, biases, no gate
}  # fmt: skip
BATCHES = ("rows", "packed", "accumulated")
# "labels": the model's own loss, divided by the number of tokens. "logits": a loop that sums F.cross_entropy of the
# logits that the model returns, and divides the gradients.
PATHS = ("labels", "logits")
MICRO = 2  # batches whose gradients are accumulated

LONG = {"steps": 300, "plain": 4, "batch": 8, "seq": 128}
# A rounding decides a near tie in a router, and from there on the run is a different one. In bf16 all runs diverge
# early. In fp32 some orders diverge and others do not, and more plain runs show how many.
PLAIN_ROUTED = 8
SHORT = {"steps": 12, "plain": 4, "batch": 4, "seq": 24}
RATE, WARMUP, CLIP = 1e-3, 10, 1.0

# Trainings whose loss is measured on held-out text: sizes of the model and of the batches, of HELD rows of text that
# no step trains on, and of the two parts, with their steps, text and rate.
HELD_MODEL = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8,
              "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 256}  # fmt: skip
HELD_SIZE = {"batch": 8, "seq": 256, "held": 64}
HELD_SHORT = {"batch": 2, "seq": 24, "held": 4}
SCRATCH, TUNING = "from random weights", "fine-tuning"
HELD_PARTS = {SCRATCH: (300, "plays", RATE), TUNING: (150, "pages", RATE / 3)}
HELD_AT = (0, 10, 25, 50, 100, 150, 200, 300)  # steps after which the held-out text is read
SEEDS = 3
HELD_SIDES: dict[str, dict[str, Any] | None] = {  # options of fuse; None: the plain model
    "hf": None, "tigon": {}, "tigon-fp8": {"fp8": True}, "tigon-fp8 first=2": {"fp8": tigon.FP8(first=2)},
}  # fmt: skip
TAUGHT = "tigon"  # the side whose weights the second part begins with


# ------------------------------------------------------------------------------------------------------- models, text


def build(family: str, dtype: torch.dtype, device: torch.device, seed: int = 0, **sizes: int) -> nn.Module:
    """The same weights at every call with this seed. sizes: of the configuration, in place of the family's."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {k: v for k, v in BASE.items() if family != "gpt_neox" or k not in ("head_dim", "num_key_value_heads")}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**options, **FAMILIES[family], **sizes}))
    return model.to(device, dtype).train()


def read_texts(paths: Iterable[Path]) -> list[str]:
    return [f"{line}\n" for path in paths for line in path.read_text(encoding="utf-8").splitlines() if line]


@functools.cache
def make_tokenizer() -> Any:
    from tigon.cli.tokens import train_tokenizer

    return train_tokenizer(read_texts([TEXT]), VOCABULARY)


@functools.cache
def lines(source: str = "plays") -> list[list[int]]:
    """The plays or the pages as token ids, line by line. The tokenizer is trained on the plays."""
    texts = read_texts([TEXT] if source == "plays" else sorted(PAGES.rglob("*.md")))
    ids: list[list[int]] = make_tokenizer()(texts, add_special_tokens=False)["input_ids"]
    return ids


class Text:
    """Batches of the text: the batch of a step depends only on the step's number, in every run.

    held: rows of the text that no step gets, on the device. seed: of the order of the other rows.
    """

    def __init__(
        self, batches: str, batch: int, length: int, device: torch.device, source: str = "plays", held: int = 0,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.batches, self.batch, self.device = batches, batch, device
        self.steps: dict[int, tuple[list[dict[str, Any]], int]] = {}
        ids = torch.tensor([i for line in lines(source) for i in line])
        starts = torch.tensor([j for line in lines(source) for j in range(len(line))])
        count = len(ids) // length
        self.ids = ids[: count * length].view(count, length)
        self.positions = starts[: count * length].view(count, length)
        chosen = torch.randperm(count, generator=torch.Generator().manual_seed(1))
        self.held = self.ids[chosen[count - held :]].to(device)
        self.chosen = chosen[: count - held]
        if seed:
            order = torch.randperm(len(self.chosen), generator=torch.Generator().manual_seed(1 + seed))
            self.chosen = self.chosen[order]

    def step(self, number: int) -> tuple[list[dict[str, Any]], int]:
        """The micro-batches of a step (input_ids, labels that are not yet shifted, and what else the model gets), and
        the number of their predicted tokens."""
        if number not in self.steps:
            self.steps[number] = self._step(number)
        return self.steps[number]

    def _step(self, number: int) -> tuple[list[dict[str, Any]], int]:
        rows = self.chosen[torch.arange(number * self.batch, (number + 1) * self.batch) % len(self.chosen)]
        ids = self.ids[rows]
        inputs = {"input_ids": ids, "labels": ids.clone()}
        if self.batches == "packed":
            # Every line is a document: its positions begin anew, and it neither sees nor predicts another line.
            at = torch.arange(ids.shape[1]).expand_as(ids)
            starts = (self.positions[rows] == 0) | (at == 0)
            inputs["position_ids"] = at - torch.where(starts, at, 0).cummax(-1).values
            inputs["labels"][starts] = IGNORE
        if self.batches == "accumulated":
            # Prompts of different lengths, so that micro-batches differ in the number of valid tokens.
            prompts = torch.arange(self.batch) * ids.shape[1] // self.batch
            inputs["labels"][torch.arange(ids.shape[1]) < prompts[:, None]] = IGNORE
        items = int((inputs["labels"][:, 1:] != IGNORE).sum())
        moved = {k: v.to(self.device) for k, v in inputs.items()}
        if self.batches != "accumulated":
            return [moved], items
        parts = {k: v.chunk(MICRO) for k, v in moved.items()}
        more = {"num_items_in_batch": torch.tensor(items, device=self.device)}
        return [{k: v[i] for k, v in parts.items()} | more for i in range(MICRO)], items


@functools.lru_cache(maxsize=2)
def texts(batches: str, batch: int, length: int, device: torch.device) -> Text:
    return Text(batches, batch, length, device)


# --------------------------------------------------------------------------------------------------------- the orders


class Order:
    """One order of everything that a sum runs over. seed None is the order as it is.

    A parameter's axes are known by their lengths, which no two parts of a model share. GPT-NeoX alone has no head
    width of its own: there the heads are as wide as the model together, and are known by name.
    """

    def __init__(self, family: str, seed: int | None) -> None:
        self.seed = seed
        draw = torch.Generator().manual_seed(seed or 0)

        def shuffled(n: int) -> Tensor:
            return torch.arange(n) if seed is None else torch.randperm(n, generator=draw)

        self.vocabulary = shuffled(VOCABULARY)
        self.new = self.vocabulary.argsort()
        width, hidden, expert = shuffled(WIDTH), shuffled(HIDDEN), shuffled(EXPERT)
        groups = shuffled(KV_HEADS)
        each = HEADS // KV_HEADS
        heads = torch.cat([group * each + shuffled(each) for group in groups])
        q, kv = _blocks(heads, HEAD), _blocks(groups, HEAD)
        axes = [
            self.vocabulary, width, hidden, torch.cat([hidden, HIDDEN + hidden]), expert,
            torch.cat([expert, EXPERT + expert]), shuffled(EXPERTS), q, kv,
            torch.cat([q, len(q) + kv, len(q) + len(kv) + kv]),
        ]  # fmt: skip
        self.named: dict[str, tuple[int, Tensor]] = {}
        if family == "gpt_neox":
            heads = shuffled(WIDTH // HEAD)
            self.named["attention.dense.weight"] = 1, _blocks(heads, HEAD)
            axes.append(_blocks(heads, 3 * HEAD))
        self.axes = {len(axis): axis for axis in axes}
        if len(self.axes) != len(axes):
            raise ValueError(f"two axes are equally long: {sorted(map(len, axes))}")
        self.draw = draw

    def of(self, name: str, value: Tensor, *, back: bool = False) -> Tensor:
        """A parameter permuted to this order; with `back`, from this order to the original."""
        for i, size in enumerate(value.shape):
            axis = self.axes.get(size)
            for end, (at, other) in self.named.items():
                if name.endswith(end) and at == i:
                    axis = other
            if axis is not None:
                axis = axis.to(value.device)
                value = value.index_select(i, axis.argsort() if back else axis)
        return value

    def apply(self, model: nn.Module) -> None:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(self.of(name, p.detach()))

    def weights(self, model: nn.Module) -> Tensor:
        """All parameters as one vector in fp32, in the original order."""
        return torch.cat([self.of(n, p.detach(), back=True).float().flatten() for n, p in model.named_parameters()])

    def batches(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The micro-batches, their rows and their tokens' numbers in this order."""
        if self.seed is None:
            return parts
        self.new = new = self.new.to(parts[0]["input_ids"].device)
        found = []
        for part in (parts[i] for i in torch.randperm(len(parts), generator=self.draw)):
            rows = torch.randperm(len(part["input_ids"]), generator=self.draw).to(new.device)
            moved = {k: v[rows] if v.dim() else v for k, v in part.items()}
            labels = moved["labels"]
            moved["labels"] = torch.where(labels == IGNORE, labels, new[labels.clamp(min=0)])
            found.append(moved | {"input_ids": new[moved["input_ids"]]})
        return found


def _blocks(order: Tensor, size: int) -> Tensor:
    return (order[:, None] * size + torch.arange(size)).flatten()


# ----------------------------------------------------------------------------------------------------------- training


def forward(model: nn.Module, inputs: dict[str, Any], path: str, items: int) -> Tensor:
    """The loss of a micro-batch; with path "logits" a sum, whose gradients the caller must divide."""
    if path == "labels":
        return model(**inputs).loss
    out = model(**{k: v for k, v in inputs.items() if k not in ("labels", "num_items_in_batch")})
    logits, target = out.logits[:, :-1].float().flatten(0, 1), inputs["labels"][:, 1:].flatten()
    loss = F.cross_entropy(logits, target, ignore_index=IGNORE, reduction="sum")
    auxiliary = getattr(out, "aux_loss", None)  # the router's auxiliary loss
    return loss if auxiliary is None else loss + items * model.config.router_aux_loss_coef * auxiliary


def train(
    model: nn.Module, order: Order, text: Text, steps: int, path: str, wide: nn.Module | None = None, *,
    rate: float = RATE, watch: Callable[[int], None] = lambda steps: None,
) -> tuple[list[float], list[float]]:  # fmt: skip
    """Losses and gradient norms of each step, the latter before clipping.

    wide: the same model in fp32, which computes the gradients that this one is trained with.
    watch: called before the first step and after each, with the number of steps so far.
    """
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    losses, norms = [], []
    watch(0)
    for number in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (number + 1) / WARMUP)
        if wide is not None:
            wide.load_state_dict(model.state_dict())
        batches, items = text.step(number)
        parts = []
        for inputs in order.batches(batches):
            loss = forward(model if wide is None else wide, inputs, path, items)
            loss.backward()
            parts.append(loss.detach() if path == "labels" else loss.detach() / items)
        if wide is not None:
            for p, q in zip(parameters, wide.parameters(), strict=True):
                p.grad, q.grad = q.grad.to(p.dtype), None
        if path == "logits":
            torch._foreach_div_([p.grad for p in parameters], float(items))
        # Not the norm of clip_grad_norm_, which rounds it to the gradients' dtype.
        norm_of = [
            torch.linalg.vector_norm(p.grad, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters
        ]
        norms.append(torch.linalg.vector_norm(torch.stack(norm_of)))
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(torch.stack(parts).double().sum())
        watch(number + 1)
    # The losses are read once, at the end, so that no step waits for the device.
    return torch.stack(losses).tolist(), torch.stack(norms).double().tolist()


def training(row: Runs, side: str, path: str, seed: int, device: torch.device) -> Training:
    """One run of a row, in the order of this seed; 0 is the order as it is. Side "exact" computes in fp32."""
    model = build(row.model, DTYPES[row.dtype], device)
    order = Order(row.model, seed or None)
    start = Order(row.model, None).weights(model)
    order.apply(model)
    text = texts(row.batches, row.batch, row.seq, device)
    wide = build(row.model, torch.float32, device) if side == "exact" else None
    with ignore_sizes():
        fusion = tigon.fuse(model, fp8=side == "fp8") if side in ("tigon", "fp8") else None
        losses, norms = train(model, order, text, row.steps, path, wide)
    calls = {} if fusion is None else dict(fusion.report().calls)
    return Training(side, path, seed, losses, norms, order.weights(model) - start, calls)


def sides(dtype: str, plain: int, has_fp8: bool = False) -> list[tuple[str, str]]:
    """Side and path of a row's runs: the plain ones, a fused one for each path, in FP8 too if wanted, and below fp32
    one that is exact.

    Plain runs take the paths in turns: where the division by the number of tokens stands is part of the spread.
    """
    exact = [("exact", PATHS[0])] if dtype == "bf16" else []
    fused = [(side, path) for side in (("tigon", "fp8") if has_fp8 else ("tigon",)) for path in PATHS]
    return [("hf", PATHS[i % len(PATHS)]) for i in range(plain)] + fused + exact


def run(row: Runs, plain: int, has_fp8: bool, device: torch.device) -> Runs:
    """Train and record a row's runs, each in an order of its own."""
    begun = time.perf_counter()
    runs = enumerate(sides(row.dtype, plain, has_fp8))
    row.record([training(row, side, path, seed, device) for seed, (side, path) in runs])
    row.seconds = round(time.perf_counter() - begun, 1)
    return row


# ------------------------------------------------------------------------------------------------------ held-out text


def measure_held_out(model: nn.Module, text: Text) -> float:
    """The mean loss of the text's held-out rows."""
    model.eval()
    with torch.no_grad():
        losses = [model(input_ids=ids, labels=ids).loss.double() for ids in text.held.split(text.batch)]
    return float(torch.stack(losses).mean())


def train_held_out(seed: int, is_short: bool, device: torch.device) -> list[HeldOut]:
    """Both parts of one seed, with each of HELD_SIDES."""
    size = HELD_SHORT if is_short else HELD_SIZE
    sizes = {"num_hidden_layers": 3} if is_short else HELD_MODEL
    reader = build("llama", torch.bfloat16, device, **sizes)  # plain, so that weights alone decide the loss
    rows: list[HeldOut] = []
    taught: dict[str, Tensor] | None = None
    for part, (steps, source, rate) in HELD_PARTS.items():
        steps = SHORT["steps"] if is_short else steps
        text = Text("rows", size["batch"], size["seq"], device, source, size["held"], seed)
        learnt: dict[str, Tensor] | None = None
        for side, options in HELD_SIDES.items():
            begun = time.perf_counter()
            model = build("llama", torch.bfloat16, device, seed, **sizes)
            if taught is not None:
                model.load_state_dict(taught)
            row = HeldOut(part, side, seed, source, size["batch"], size["seq"], steps, rate)

            def watch(steps: int, row: HeldOut = row, model: nn.Module = model, text: Text = text) -> None:
                if steps in HELD_AT or steps == row.steps:
                    reader.load_state_dict(model.state_dict())
                    row.held_out.append((steps, measure_held_out(reader, text)))

            with ignore_sizes():
                fusion = None if options is None else tigon.fuse(model, **options)
                row.losses, _ = train(model, Order("llama", None), text, steps, PATHS[0], rate=rate, watch=watch)
            row.calls = {} if fusion is None else dict(fusion.report().calls)
            if ("fp8" in side) != ("fp8" in row.calls):
                raise RuntimeError(f"converge: {side} ran {row.calls.get('fp8', 0)} calls in FP8 on {device}.")
            row.parameters = sum(p.numel() for p in model.parameters())
            row.seconds = round(time.perf_counter() - begun, 1)
            rows.append(row)
            if side == TAUGHT:
                learnt = {name: value.clone() for name, value in model.state_dict().items()}
        taught = learnt
    return rows


# --------------------------------------------------------------------------------------------------------------- tasks


def attempt(row: Runs, plain: int, has_fp8: bool, device: str) -> Runs:
    """`run`, or a row with the reason why the run failed."""
    try:
        return run(row, plain, has_fp8, torch.device(device))
    except Exception as error:
        row.runs, row.status = [], "failed"
        row.reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return row


def prepare() -> None:
    """Limit each process to one thread: Python bounds a run, not products, and the processes share the cores."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="transformers")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.set_verbosity_error()


def run_all(
    task: Callable[..., Any], arguments: list[tuple[Any, ...]], device: str, jobs: int, budget: float = math.inf
) -> Iterator[Any]:  # fmt: skip
    """The result of a task for each tuple of arguments when it is there. After `budget` seconds none is begun."""
    begun = time.perf_counter()
    if jobs == 1:
        prepare()
        for each in arguments:
            if time.perf_counter() - begun < budget:
                yield task(*each, device)
        return
    context = multiprocessing.get_context("spawn")  # a CUDA context does not survive a fork
    with concurrent.futures.ProcessPoolExecutor(jobs, context, prepare) as pool:
        waiting = iter(arguments)
        running = {pool.submit(task, *each, device) for each in itertools.islice(waiting, jobs)}
        while running:
            done, running = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            if time.perf_counter() - begun < budget:
                running |= {pool.submit(task, *each, device) for each in itertools.islice(waiting, len(done))}
            yield from (future.result() for future in done)


def parse_list(choice: str, all_of: Iterable[str], what: str, parser: argparse.ArgumentParser) -> list[str]:
    chosen = choice.split(",")
    if unknown := [name for name in chosen if name not in all_of]:
        parser.error(f"--{what}: {unknown[0]!r} is none of {', '.join(all_of)}")
    return chosen


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", required=True, type=Path, help="folder for the result file; begun ones go on")
    parser.add_argument("--families", default=",".join(FAMILIES), help="separated by commas")
    parser.add_argument("--dtype", help="fp32,bf16 by default; bf16 with --fp8")
    parser.add_argument("--batches", default=",".join(BATCHES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int)
    parser.add_argument(
        "--plain", type=int, help="plain runs of each row, at least 3; default: 4, and 8 of routed models in fp32"
    )
    parser.add_argument("--short", action="store_true", help=f"{SHORT['steps']} steps of small batches")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no further row is begun")
    parser.add_argument("--fp8", action="store_true", help="fused runs with FP8 layers, too, into a file of their own")
    parser.add_argument("--held-out", action="store_true", help="FP8 and bf16 by the loss on held-out text instead")
    parser.add_argument("--plot", action="store_true", help="with --held-out: a chart beside the result file")
    options = parser.parse_args(arguments)
    if options.held_out:
        return compare_held_out(options)
    size = dict(SHORT if options.short else LONG)
    size["steps"] = options.steps or size["steps"]
    least = size.pop("plain")
    if options.plain is not None and options.plain < 3:
        parser.error("--plain must be at least 3: of a run that is left out, two are to remain")
    families = parse_list(options.families, FAMILIES, "families", parser)
    dtypes = parse_list(options.dtype or ("bf16" if options.fp8 else "fp32,bf16"), DTYPES, "dtype", parser)
    if options.fp8 and dtypes != ["bf16"]:
        parser.error("--fp8 needs --dtype bf16: FP8 products give bf16")
    batches = parse_list(options.batches, BATCHES, "batches", parser)

    device = torch.device(options.device)
    empty = report.result("converge", [], device=device)
    path = options.output / report.file_name(empty, "converge-fp8" if options.fp8 else None)
    wanted = [Runs(f, dtype, b, **size) for b in reversed(batches) for dtype in dtypes for f in reversed(families)]
    rows = load_rows(path, empty, wanted)
    if rows:
        print(f"{path} has {len(rows)} of {len(wanted)} rows", flush=True)
    todo = [row for row in wanted if key(row) not in {key(r) for r in rows}]

    def plain(row: Runs) -> int:
        routed = "num_experts" in FAMILIES[row.model] and row.dtype == "fp32" and not options.short
        return options.plain or (PLAIN_ROUTED if routed else least)

    runs = [(row, plain(row), options.fp8) for row in todo]
    for row in run_all(attempt, runs, options.device, options.jobs, options.budget):
        rows.append(row)
        rows.sort(key=lambda r: [key(w) for w in wanted].index(key(r)), reverse=True)
        judge(rows)
        report.save(path, report.result("converge", rows, device=device))
        what = row.reason or f"loss {row.loss.split()[-1]}"
        if options.fp8 and row.runs:
            what += f", FP8's losses {max(row.of('fp8', 'loss')):.3g} × as far apart as those of plain runs"
        print(f"{row.model} {row.dtype} {row.batches}: {row.status}, {what}, {row.seconds:.0f} s", flush=True)
    print(report.to_text(report.result("converge", rows, device=device)))
    return 0 if len(rows) == len(wanted) and all(row.status == "ok" for row in rows) else 1


def compare_held_out(options: argparse.Namespace) -> int:
    """1 if a side ends beyond the spread of seeds in bf16, else 0. The file is written after every seed."""
    device = torch.device(options.device)
    rows: list[HeldOut] = []
    seeds = [(seed, options.short) for seed in range(SEEDS)]
    for found in run_all(train_held_out, seeds, options.device, options.jobs, options.budget):
        rows = sorted([*rows, *found], key=lambda r: (r.part != SCRATCH, [*HELD_SIDES].index(r.side), r.seed))
        content = report.result("held-out", rows, device=device)
        path = options.output / report.file_name(content)
        report.save(path, content)
        print(f"seed {found[0].seed}: {sum(row.seconds for row in found):.0f} s", flush=True)
    lines = describe_held_out(rows, TAUGHT)
    print("\n".join(lines), flush=True)
    if options.plot and rows:
        from harness.plots import plot

        plot(content, path.with_suffix(".png"))
    return int(any("BEYOND" in line for line in lines))


def key(row: Runs) -> tuple[Any, ...]:
    return row.model, row.dtype, row.batches, row.batch, row.seq, row.steps


def load_rows(path: Path, empty: dict[str, Any], wanted: list[Runs]) -> list[Runs]:
    """The wanted rows that a file of this device and these versions has; those that failed are tried again."""
    if not path.exists():
        return []
    content = report.load(path)
    if content["environment"]["packages"] != empty["environment"]["packages"]:
        raise SystemExit(f"{path} is of other versions: move it away, or choose another --output")
    rows = [Runs(**row) for row in content["rows"] if row["status"] != "failed"]
    return [row for row in rows if key(row) in {key(w) for w in wanted}]


if __name__ == "__main__":
    sys.exit(main())
