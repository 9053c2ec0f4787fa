"""What prompt rankers are worth on MovieLens 100K, and what shared prefixes save.

    PYTHONPATH=src python benchmarks/rank_prompts.py --data ml-100k --model SmolLM2-135M-Instruct --json out.json
    PYTHONPATH=src python benchmarks/rank_prompts.py --only speed --json speed.json

--data is a folder with RecBole's ml-100k.inter, .item and .user; --model one with a causal language model and its
tokenizer. Ten consecutive ratings of a user are a request, its history what the user rated strictly before, the label
a rating of 4 or more. The latest fifth of the requests is for tests: users and films that no earlier request shows are
new. Both ways of tuning see the same requests in the same order with the same weights and settings:

    zero       the model as it is
    shared     tuned with the prefix computed once for its candidates
    separate   tuned with a sequence for each candidate, as cross-encoders are
    student    a model of 10 million weights from scratch, on labels alone and with the tuned model as its teacher
    speed      no data: the shape of Qwen3-1.7B with random weights, 4096 tokens and 32 candidates of 128
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import tigon
from tigon.rank import metrics
from tigon.rank.prompt import Prompt, PromptRanker, Requests, read, taught

PROMPT = Prompt.of({
    "instruction": "You are given a member's profile and the films they rated.",
    "profile": "Age {{ age }}, {{ gender }}, {{ occupation }}.",
    "event": "{{ title }} ({{ year }}), {{ genres }}: {{ rating }} of 5",
    "candidate": "Film: {{ title }} ({{ year }}), {{ genres }}.",
    "tasks": {"like": {
        "question": "Will the member rate this film 4 or 5 of 5? Answer yes or no.", "answers": {"yes": 1, "no": 0},
        "label": "rating >= 4",
    }},
    "columns": {"request": "request", "user": "user", "item": "item", "time": "time"},
})  # fmt: skip
SHOWN = 10
BATCH, RATE, PREFIX = 16, 3e-5, 512
WAYS = ("zero", "shared", "separate", "student", "speed")


# -------------------------------------------------------------------------------------------------------------- data


def rows(path: Path) -> tuple[list[str], list[list[str]]]:
    head, *lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [name.split(":")[0] for name in head.split("\t")], [line.split("\t") for line in lines]


def tables(folder: Path) -> dict[str, Any]:
    """Impressions in requests of ten, the same ratings as the history, and what is known of films and members."""
    import pyarrow as pa

    _, ratings = rows(folder / "ml-100k.inter")
    by_user: dict[str, list[tuple[int, str, int]]] = {}
    for user, item, rating, when in ratings:
        by_user.setdefault(user, []).append((int(float(when)), item, int(float(rating))))
    shown: dict[str, list[Any]] = {name: [] for name in ("request", "user", "item", "time", "rating")}
    for user, own in sorted(by_user.items()):
        own.sort()
        for place, (_, item, rating) in enumerate(own):
            first = own[place - place % SHOWN][0]
            for name, value in zip(shown, (f"{user}/{place // SHOWN}", user, item, first, rating), strict=True):
                shown[name].append(value)
    events = {name: [] for name in ("user", "item", "time", "rating")}
    for user, item, rating, when in ratings:
        for name, value in zip(events, (user, item, int(float(when)), int(float(rating))), strict=True):
            events[name].append(value)
    _, films = rows(folder / "ml-100k.item")
    _, members = rows(folder / "ml-100k.user")
    return {
        "data": pa.table(shown), "history": pa.table(events),
        "items": pa.table({
            "item": [f[0] for f in films], "title": [f[1] for f in films], "year": [f[2] for f in films],
            "genres": [f[3].replace(" ", ", ") for f in films],
        }),
        "users": pa.table({
            "user": [m[0] for m in members], "age": [m[1] for m in members],
            "gender": ["male" if m[2] == "M" else "female" for m in members], "occupation": [m[3] for m in members],
        }),
    }  # fmt: skip


class Split:
    """Requests to train on and to test, and which test rows are of new members and new films."""

    def __init__(self, folder: Path, train: int, test: int) -> None:
        data = read(PROMPT, **tables(folder))
        early, late = data.split(by="time", fraction=0.2, seed=0)
        self.all_train = list(Requests(early, PROMPT, history_max=64))
        order = torch.Generator().manual_seed(1)
        late_requests = Requests(late, PROMPT, history_max=64)
        chosen = sorted(torch.randperm(len(late), generator=order)[:test].tolist())
        self.test = late_requests.__getitems__(chosen)
        picked = torch.randperm(len(self.all_train), generator=order)[:train].tolist()
        self.train = [self.all_train[i] for i in picked]
        seen_users, seen_items = set(early.column("user")), set(early.column("item"))
        sizes = torch.tensor([len(late_requests[i].candidates) for i in range(len(late))])
        ends = torch.cat((sizes.new_zeros(1), sizes.cumsum(0))).tolist()
        user, item = late.column("user"), late.column("item")
        at = [row for i in chosen for row in range(ends[i], ends[i + 1])]
        self.rows = {
            "all": torch.ones(len(at), dtype=torch.bool),
            "new members": torch.tensor([user[row] not in seen_users for row in at]),
            "known members": torch.tensor([user[row] in seen_users for row in at]),
            "new films": torch.tensor([item[row] not in seen_items for row in at]),
        }
        self.labels = torch.tensor([1.0 - r for request in self.test for r in request.labels["like"]])
        counts = torch.tensor([len(request.candidates) for request in self.test])
        self.offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0)))

    def told(self) -> dict[str, int]:
        return {
            "train_requests": len(self.train), "all_train_requests": len(self.all_train),
            "test_requests": len(self.test), "test_rows": len(self.labels),
            **{f"rows_of_{name.replace(' ', '_')}": int(mask.sum()) for name, mask in self.rows.items()},
        }  # fmt: skip

    def worth(self, scores: torch.Tensor) -> dict[str, float]:
        found = {}
        for name, mask in self.rows.items():
            own = self.labels[mask]
            if 0 < own.sum() < len(own):
                found[f"auc {name}"] = float(metrics.auc(scores[mask], own))
        found["ndcg@10"] = float(metrics.ndcg(scores, self.labels, self.offsets, k=10).mean)
        found["log_loss"] = float(metrics.log_loss(scores.clamp(1e-6, 1 - 1e-6), self.labels))
        return found


# ---------------------------------------------------------------------------------------------------------- training


def pretrained(folder: str, device: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    return model, AutoTokenizer.from_pretrained(folder)


def small(tokenizer: Any, device: str, seed: int) -> Any:
    """10 million weights, of which the embedding of the teacher's tokenizer is the most."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=math.ceil(len(tokenizer) / 64) * 64, hidden_size=160, intermediate_size=480, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device)


def separate_loss(ranker: PromptRanker, batch: Any, most: int) -> tuple[torch.Tensor, int]:
    """The same loss by a padded sequence for each candidate; backward in micro-batches of at most `most` tokens."""
    shared, model = batch.shared, ranker.model
    device = next(model.parameters()).device
    ids = shared.input_ids[0].tolist()
    layout, sequences, start = shared.layout, [], 0
    prefixes, begin = [], 0
    for length in layout.prefix_lengths:
        prefixes.append(ids[begin : begin + length])
        begin += length
    start = layout.prefix_rows
    for prefix, own in zip(prefixes, layout.suffix_lengths, strict=True):
        for length in own:
            sequences.append(prefix + ids[start : start + length])
            start += length
    columns = torch.tensor(ranker.encoder.answers["like"], device=device)
    labels = batch.labels.to(device)
    total, tokens = torch.zeros((), device=device), 0
    longest = max(map(len, sequences))
    step = max(1, most // longest)
    for first in range(0, len(sequences), step):
        some = sequences[first : first + step]
        width = max(map(len, some))
        padded = torch.tensor([[0] * (width - len(s)) + s for s in some], device=device)
        mask = torch.tensor([[0] * (width - len(s)) + [1] * len(s) for s in some], device=device)
        z = model(padded, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), logits_to_keep=1).logits
        own = F.cross_entropy(z[:, -1, columns].float(), labels[first : first + step], reduction="sum") / len(sequences)
        own.backward()
        total += own.detach()
        tokens += padded.numel()
    return total, tokens


def tune(
    ranker: PromptRanker, requests: list[Any], *, separate: bool, epochs: int, rate: float, seed: int
) -> dict[str, float]:
    """Train on the requests, and say how long the steps took and how many tokens they ran."""
    device = next(ranker.model.parameters()).device
    steps = epochs * (len(requests) // BATCH)
    optimizer = torch.optim.AdamW(ranker.model.parameters(), lr=rate, weight_decay=0.01)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1, (s + 1) / warm) * 0.5 * (1 + math.cos(math.pi * s / steps))
    )
    draw = torch.Generator().manual_seed(seed)
    ranker.model.train()
    tokens, seconds, losses, done = 0, 0.0, [], 0
    for _ in range(epochs):
        order = torch.randperm(len(requests), generator=draw).tolist()
        for start in range(0, len(order) - BATCH + 1, BATCH):
            some = [requests[i] for i in order[start : start + BATCH]]
            (batch,) = ranker.batches(some, tokens=1 << 30, labelled=True)
            finish(device)
            begin = time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                if separate:
                    loss, ran = separate_loss(ranker, batch, 32768)
                else:
                    loss, ran = ranker.loss(batch), batch.shared.rows
                    loss.backward()
            torch.nn.utils.clip_grad_norm_(ranker.model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            finish(device)
            if done:  # the first step compiles kernels
                seconds += time.perf_counter() - begin
                tokens += ran
            done += 1
            losses.append(float(loss.detach()))
    tail = losses[-20:]
    return {"seconds": seconds, "tokens": tokens, "steps": done, "final_loss": statistics.mean(tail)}


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def scored(ranker: PromptRanker, requests: list[Any]) -> torch.Tensor:
    device = next(ranker.model.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        return ranker.score(requests, tokens=65536 if device.type == "cuda" else 4096)["like"]


# ------------------------------------------------------------------------------------------------------------- speed


def speed(device: str, prefix: int, candidates: int, length: int, layers: int) -> dict[str, Any]:
    """Milliseconds of scoring and of a training step's forward and backward, shared and a sequence a candidate."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    answers = [9454, 2753]
    draw = torch.Generator().manual_seed(0)
    one = torch.randint(config.vocab_size, (prefix,), generator=draw)
    own = [torch.randint(config.vocab_size, (length,), generator=draw) for _ in range(candidates)]
    labels = torch.randint(2, (candidates,), generator=draw).to(device)
    whole = torch.stack([torch.cat((one, suffix)) for suffix in own]).to(device)
    tigon.fuse(model, shared_prefix=True)
    batch = tigon.SharedPrefixBatch([one], [own]).to(device)

    def shared() -> torch.Tensor:
        return batch.next_logits(model, answers)

    def separate(size: int, backward: bool) -> torch.Tensor:
        found = []
        for first in range(0, candidates, size):
            z = model(whole[first : first + size], use_cache=False, logits_to_keep=1).logits[:, -1, answers].float()
            if backward:
                (F.cross_entropy(z, labels[first : first + size], reduction="sum") / candidates).backward()
            found.append(z.detach())
        return torch.cat(found)

    def step(run: Any) -> None:
        run()
        for p in model.parameters():
            p.grad = None

    size = 2 if device == "cuda" else 1
    with torch.no_grad():
        a, b = shared().softmax(-1), separate(size, False).softmax(-1)
        found: dict[str, Any] = {"largest_difference": float((a - b).abs().max()), "rows": batch.rows}
        found["separate_rows"] = batch.separate_rows
        found["score_shared_ms"] = timed(shared, device)
        found["score_separate_ms"] = min(timed(lambda s=s: separate(s, False), device) for s in {1, 2 * size})
    model.train()
    found["train_shared_ms"] = timed(lambda: step(lambda: F.cross_entropy(shared(), labels).backward()), device)
    found["train_separate_ms"] = timed(lambda: step(lambda: separate(size, True)), device)
    for what in ("score", "train"):
        found[f"{what}_times"] = found[f"{what}_separate_ms"] / found[f"{what}_shared_ms"]
    return found


def timed(run: Any, device: str, repeats: int = 5) -> float:
    run()
    times = []
    for _ in range(repeats if device == "cuda" else 1):
        finish(torch.device(device))
        begin = time.perf_counter()
        run()
        finish(torch.device(device))
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


# -------------------------------------------------------------------------------------------------------------- main


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", default=",".join(WAYS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--train-requests", type=int, default=2000)
    parser.add_argument("--test-requests", type=int, default=600)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--student-requests", type=int, default=1 << 30, help="of all early requests")
    parser.add_argument("--student-epochs", type=int, default=2)
    parser.add_argument("--shape", default="4096,32,128,28", help="of speed: prefix, candidates, tokens, layers")
    given = parser.parse_args()
    ways = given.only.split(",")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU", "torch": torch.__version__,
        "settings": {k: str(v) for k, v in vars(given).items()}, "runs": [],
    }  # fmt: skip

    def note(way: str, seed: int | None, **values: Any) -> None:
        result["runs"].append({"way": way, "seed": seed, **values})
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        said = "  ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
        print(f"{way:>16} seed {seed}  {said}", flush=True)

    if "speed" in ways:
        note("speed", None, **speed(device, *map(int, given.shape.split(","))))
    if set(ways) - {"speed"}:
        quality(given, ways, device, result, note)
    print("written:", given.json)


def quality(given: Any, ways: list[str], device: str, result: dict[str, Any], note: Any) -> None:
    split = Split(given.data, given.train_requests, given.test_requests)
    result["split"] = split.told()
    print(result["split"], flush=True)

    def ranker_of(model: Any, tokenizer: Any, distil: float = 0.5) -> PromptRanker:
        return PromptRanker(model, tokenizer, PROMPT, prefix_len=PREFIX, distil=distil).to(device)

    if "zero" in ways:
        note("zero", None, **split.worth(scored(ranker_of(*pretrained(given.model, device)), split.test)))
    for seed in range(given.seeds):
        for way in ("shared", "separate"):
            if way not in ways:
                continue
            model, tokenizer = pretrained(given.model, device)
            ranker = ranker_of(model, tokenizer)
            cost = tune(ranker, split.train, separate=way == "separate", epochs=given.epochs, rate=RATE, seed=seed)
            note(way, seed, **split.worth(scored(ranker, split.test)), **cost)
            if way == "shared" and "student" in ways:
                students(given, split, ranker, tokenizer, device, seed, note, ranker_of)
            del model, ranker


def students(
    given: Any, split: Split, teacher: PromptRanker, tokenizer: Any, device: str, seed: int, note: Any, ranker_of: Any
) -> None:
    """Small models on all early requests: by their labels, and by the teacher that was tuned on fewer."""
    early = split.all_train[: given.student_requests]
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        listed = taught(early, teacher, tokens=65536 if device == "cuda" else 4096)
    for way, requests, share in (("student alone", early, 0.0), ("student taught", listed, 0.8)):
        ranker = ranker_of(small(tokenizer, device, seed), tokenizer, share)
        cost = tune(ranker, requests, separate=False, epochs=given.student_epochs, rate=1e-3, seed=seed)
        weights = sum(p.numel() for p in ranker.model.parameters())
        note(way, seed, weights=weights, **split.worth(scored(ranker, split.test)), **cost)


if __name__ == "__main__":
    main()
