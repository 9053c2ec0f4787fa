"""The next item of a history by LiGR, SASRec and peers: leave-one-out, full ranking; and what a ranking costs.

    python -m studies.sequences.run --data s3rec --sets Beauty,Yelp --output benchmarks/results
    python -m studies.sequences.run --data s3rec --methods "ligr; rectools-sasrec; recbole-sasrec" --output …
    python -m studies.sequences.run --part speed --output benchmarks/results

Fits are bound by the host: `--jobs 8` runs as many side by side on one device. `--resume a.json b.json --sets ""` joins
result files, and goes on from them.

Sets are a reader's own: `NAME.txt` with lines `user item item …` in time order (S3-Rec's form), or `NAME.inter` in
RecBole's form (ml-100k). Of each user the last event is the test, the one before validates, the others train; of these
the latest 50 are read. All items are ranked. All models are trained in the same run, on the same sequences, with the
same loss over all items, and stop where validation says so; the test decides nothing.

SASRec is the pre-norm form with learned positions, written here in plain PyTorch. RecTools' SASRec, LiGR layers and
HSTU and RecBole's SASRec are trained by their packages, where these are installed: `studies/rank_peers` says how.
"""

from __future__ import annotations

import argparse
import copy
import csv
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from harness import report
from torch import Tensor, nn

import tigon
from studies.rows import Row
from studies.sequences import peers as rank_peers
from tigon import rank

LONGEST = 50
CUTS = (5, 10, 20)
SETTINGS = ("width", "layers", "heads", "weight_decay", "warmup", "batch_size", "epochs", "every", "patience")
CHOSEN = ("dropout", "lr")  # of seed 0, by validation


# -------------------------------------------------------------------------------------------------------- the sequences


class Sequences(NamedTuple):
    """Users' items in time order, from 1 on: user u's are items[offsets[u]] … items[offsets[u + 1] − 1].

    names: of the items, "" for 0. seconds: when, fp64; stars: ratings, int64 from 1; both None where the file has none.
    """

    name: str
    items: Tensor
    offsets: Tensor  # on the CPU
    names: list[str]
    seconds: Tensor | None
    stars: Tensor | None

    @property
    def catalogue(self) -> int:
        return len(self.names) - 1

    @property
    def users(self) -> int:
        return len(self.offsets) - 1

    def to(self, device: torch.device) -> Sequences:
        return self._replace(
            items=self.items.to(device),
            seconds=None if self.seconds is None else self.seconds.to(device),
            stars=None if self.stars is None else self.stars.to(device),
        )


def read(folder: Path, name: str) -> Sequences:
    path = folder / f"{name}.txt"
    if path.is_file():
        lines = [line.split()[1:] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        events = [(user, item, 0.0, 0) for user, line in enumerate(lines) for item in line]
        timed = False
    else:
        path = next((p for p in (folder / f"{name}.inter", folder / name / f"{name}.inter") if p.is_file()), None)
        if path is None:
            raise SystemExit(f"rank_sequences.py: --data must hold {name}.txt or {name}.inter, got {folder} without.")
        with path.open(encoding="utf-8", newline="") as file:
            header, *rows = csv.reader(file, delimiter="\t")
        u, i, r, t = (
            [h.partition(":")[0] for h in header].index(c) for c in ("user_id", "item_id", "rating", "timestamp")
        )
        found = sorted(rows, key=lambda row: (int(row[u]), float(row[t])))  # stable: equal times as they stand
        number = {user: n for n, user in enumerate(dict.fromkeys(row[u] for row in found))}
        events = [(number[row[u]], row[i], float(row[t]), int(float(row[r]))) for row in found]
        timed = True
    code = {item: n for n, item in enumerate(dict.fromkeys(event[1] for event in events), 1)}
    users = torch.tensor([event[0] for event in events])
    counts = users.bincount()
    kept = counts[users] >= 3  # one to train by, one to validate, one to test
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), counts[counts >= 3].cumsum(0)))
    items = torch.tensor([code[event[1]] for event in events])[kept]
    seconds = torch.tensor([event[2] for event in events], dtype=torch.float64)[kept] if timed else None
    stars = torch.tensor([event[3] for event in events])[kept] if timed else None
    return Sequences(name, items, offsets, ["", *code], seconds, stars)


class Slices(NamedTuple):
    """Runs of events, one a user: from starts on, so many. On the host, and rows on the device."""

    starts: Tensor
    lengths: Tensor

    def rows(self, device: torch.device) -> Tensor:
        """(Σ lengths,), the places of all events."""
        ends = self.lengths.cumsum(0)
        before = torch.repeat_interleave(self.starts - (ends - self.lengths), self.lengths)
        return (before + torch.arange(int(ends[-1]))).to(device, non_blocking=True)

    def padded(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(B, T) places, and whether there is an event; rows are padded at the end."""
        place = torch.arange(int(self.lengths.max()))
        there = place < self.lengths[:, None]
        places = (self.starts[:, None] + place).where(there, self.starts[:, None])
        return places.to(device, non_blocking=True), there.to(device, non_blocking=True)


def slices(data: Sequences, users: Tensor, left_out: int, most: int) -> Slices:
    """The latest `most` events of users without their last `left_out`."""
    ends = data.offsets[users + 1] - left_out
    starts = torch.maximum(data.offsets[users], ends - most)
    return Slices(starts, ends - starts)


# ------------------------------------------------------------------------------------------------------------ the sides


class Side(nn.Module):
    """A model of next items. loss(users): of their training events. hidden(users, left_out): (B, D), what scores the
    items of `table` (items + 1, D)."""

    def loss(self, users: Tensor) -> Tensor:
        raise NotImplementedError

    def hidden(self, users: Tensor, left_out: int) -> Tensor:
        raise NotImplementedError

    @property
    def table(self) -> Tensor:
        raise NotImplementedError

    def scores(self, users: Tensor, left_out: int) -> Tensor:
        """(B, items + 1) fp32, of item 0 too, which is none."""
        return self.hidden(users, left_out).float() @ self.table.float().t()


class LiGRSide(Side):
    """`rank.LiGR` by its public methods. times, stars: events say when, and how they were rated, if the set knows."""

    def __init__(
        self, data: Sequences, width: int, layers: int, heads: int, dropout: float, times: bool = False,
        stars: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.data = data
        fields: dict[str, Any] = {"item": rank.Id(hash_rows=data.catalogue, side="item", history=True)}
        roles: dict[str, Any] = {"item": "item"}
        if stars:
            fields["stars"] = rank.Id(hash_rows=5, side="action")
            roles["action"] = ["stars"]
        self.ranker = rank.LiGR(
            rank.Schema(roles, fields),
            rank.LiGRConfig(width, layers, heads, setwise_layers=0, dropout=dropout, ages=times, **options),
        )
        self.times, self.stars = times, stars

    def batch(self, chosen: Slices) -> rank.Batch:
        data, device = self.data, self.data.items.device
        rows = chosen.rows(device)
        history = {"item": data.items[rows]} | ({"stars": data.stars[rows]} if self.stars else {})  # type: ignore[index]
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), chosen.lengths.cumsum(0)))
        # Gaps alone are read: any moment behind all events will do for the request's.
        age = 1e10 - data.seconds[rows] if self.times else torch.zeros(len(rows), device=device)  # type: ignore[index]
        none = torch.zeros(0, dtype=torch.int64)
        return rank.Batch(torch.zeros_like(offsets), offsets, {}, {}, history, age, {}, None, none)

    def loss(self, users: Tensor) -> Tensor:
        # One more than are read: the last is a target alone.
        return self.ranker.next_item_loss(self.batch(slices(self.data, users, 2, LONGEST + 1)))

    def hidden(self, users: Tensor, left_out: int) -> Tensor:
        x, _, layout = self.ranker.encode_histories(self.batch(slices(self.data, users, left_out, LONGEST)))
        return x[layout.cu_suffix[1:].long() - 1]

    @property
    def table(self) -> Tensor:
        return self.ranker.tokens.field_tokens("item").table


class SASRecLayer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        rate = self.dropout.p if self.training else 0.0
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(o))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class SASRecSide(Side):
    """SASRec: item + learned position, pre-norm causal layers, softmax over all items by the tied embeddings.

    Source: https://arxiv.org/abs/1808.09781, with the loss over all items, which RecBole's runs use.
    """

    def __init__(self, data: Sequences, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.data = data
        self.item, self.position = nn.Embedding(data.catalogue + 1, width), nn.Embedding(LONGEST, width)
        self.norm, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.layers = nn.ModuleList(SASRecLayer(width, heads, dropout) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
                if isinstance(module, nn.Linear):
                    nn.init.zeros_(module.bias)

    def stream(self, items: Tensor) -> Tensor:
        """(B, T) items, padded at the end: nothing before reads what is behind."""
        x = self.dropout(self.norm(self.item(items) + self.position.weight[: items.shape[1]]))
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.last(x)
        return found

    def loss(self, users: Tensor) -> Tensor:
        places, there = slices(self.data, users, 2, LONGEST + 1).padded(self.data.items.device)
        items = self.data.items[places]
        x, target, there = self.stream(items[:, :-1]), items[:, 1:], there[:, 1:]
        # A row a place, of which padded ones do not count: without a count on the device nothing waits for it.
        logits = x.flatten(0, 1) @ self.table[1:].t()
        return F.cross_entropy(logits, torch.where(there, target - 1, -1).flatten(), ignore_index=-1)

    def hidden(self, users: Tensor, left_out: int) -> Tensor:
        chosen = slices(self.data, users, left_out, LONGEST)
        places, _ = chosen.padded(self.data.items.device)
        last = (chosen.lengths - 1).to(places.device)
        return self.stream(self.data.items[places])[torch.arange(len(users), device=places.device), last]

    @property
    def table(self) -> Tensor:
        return self.item.weight


# What each side is made of, beside width, layers, heads and dropout.
SIDES: dict[str, tuple[type[Side], dict[str, Any]]] = {
    "sasrec": (SASRecSide, {}),
    "ligr": (LiGRSide, {}),
    "ligr, no gate": (LiGRSide, {"gate": False}),
    "ligr, 2 × inner": (LiGRSide, {"expansion": 2.0}),
    "ligr, times": (LiGRSide, {"times": True}),
    "ligr, stars": (LiGRSide, {"stars": True}),
    "ligr, times and stars": (LiGRSide, {"times": True, "stars": True}),
}
DEFAULT_SIDES = "; ".join(("sasrec", "ligr", "ligr, no gate", *rank_peers.PEERS))


# ------------------------------------------------------------------------------------------------------------- the fits


@torch.no_grad()
def ranks(side: Side | rank_peers.Peer, data: Sequences, left_out: int, new: bool, size: int = 2048) -> Tensor:
    """(users,), the place from 1 of the event before the last `left_out`. new: among items that a user did not have."""
    side.eval()
    found = []
    for users in torch.arange(data.users).split(size):
        z = side.scores(users, left_out + 1)
        z[:, 0] = -torch.inf
        target = data.items[(data.offsets[users + 1] - 1 - left_out).to(z.device)].unsqueeze(1)
        wanted = z.gather(1, target)
        if new:
            had = slices(data, users, left_out + 1, 10**9)
            row = torch.repeat_interleave(had.lengths).to(z.device)
            z[row, data.items[had.rows(z.device)]] = -torch.inf
            z.scatter_(1, target, wanted)
        found.append((z >= wanted).sum(1))
    return torch.cat(found)


def measures(places: Tensor, suffix: str = "") -> dict[str, float]:
    """Hit rate and NDCG of places. suffix: "_new" where a user's own items are left out."""
    gain = 1 / torch.log2(places.double() + 1)
    found = {}
    for k in CUTS:
        found[f"hr@{k}{suffix}"] = (places <= k).double().mean().item()
        found[f"ndcg@{k}{suffix}"] = torch.where(places <= k, gain, 0).mean().item()
    return found


def batches(
    data: Sequences, size: int, draw: np.random.Generator, among: np.ndarray[Any, Any] | None = None
) -> Iterator[Tensor]:
    """Users in random batches; in each of about one length, so that padding costs little. among: these users alone."""
    lengths = data.offsets.diff().numpy()
    order = draw.permutation(data.users if among is None else among)
    pools = [order[start : start + 16 * size] for start in range(0, len(order), 16 * size)]
    cut = [
        part[start : start + size]
        for pool in pools
        for part in (pool[np.argsort(lengths[pool], kind="stable")],)
        for start in range(0, len(pool), size)
    ]
    for at in draw.permutation(len(cut)):
        users = torch.from_numpy(cut[at])
        if int(lengths[cut[at]].max()) > 3:  # somebody has two events to train by
            yield users


def fit(name: str, data: Sequences, seed: int, setting: dict[str, Any], device: torch.device) -> Row:
    if name in rank_peers.PEERS:
        return fit_peer(name, data, seed, setting)
    kind, options = SIDES[name]

    def made() -> Side:
        torch.manual_seed(seed)
        parts = (setting[key] for key in ("width", "layers", "heads", "dropout"))
        return kind(data, *parts, **options).to(device)

    # Kernels are compiled before the clock starts.
    side = made()
    for users in itertools.islice(batches(data, setting["batch_size"], np.random.default_rng(seed)), 3):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = side.loss(users)
        loss.backward()
    with torch.no_grad():
        side.hidden(users, 1)
    draw, side = np.random.default_rng(seed), made()
    decayed = [p for p in side.parameters() if p.dim() > 1]
    plain = [p for p in side.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": setting["weight_decay"]}, {"params": plain, "weight_decay": 0.0}],
        lr=setting["lr"], betas=(0.9, 0.98), fused=device.type == "cuda",
    )  # fmt: skip
    start, best, kept, losses, epoch = time.monotonic(), -1.0, None, [], 0
    best_epoch, wait, step = 0, 0, 0
    while epoch < setting["epochs"] and time.monotonic() - start < setting["seconds"]:
        side.train()
        total = torch.zeros((), device=device)
        count = 0
        for users in batches(data, setting["batch_size"], draw):
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = setting["lr"] * min(1.0, step / setting["warmup"])
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = side.loss(users)
            loss.backward()
            nn.utils.clip_grad_norm_(side.parameters(), 5.0)
            optimizer.step()
            total += loss.detach()
            count += 1
        losses.append(total.item() / max(1, count))
        epoch += 1
        if epoch % setting["every"]:
            continue
        found = measures(ranks(side, data, 1, False))["ndcg@10"]
        if found > best:
            best, best_epoch, wait = found, epoch, 0
            kept = copy.deepcopy(side.state_dict())
        else:
            wait += 1
            if wait >= setting["patience"]:
                break
    seconds = time.monotonic() - start
    if kept is not None:
        side.load_state_dict(kept)
    validation = measures(ranks(side, data, 1, False))
    test = measures(ranks(side, data, 0, False)) | measures(ranks(side, data, 0, True), "_new")
    own = {**setting, **options, "best_epoch": best_epoch, "epochs_run": epoch}
    over = epoch < setting["epochs"] and wait < setting["patience"]
    own["ended"] = "seconds" if over else "patience" if wait >= setting["patience"] else "epochs"
    own["parameters"] = sum(p.numel() for p in side.parameters())
    own["losses"] = [round(x, 4) for x in losses]
    return Row("quality", data.name, seed, name, own, test, validation, seconds)


def fit_peer(name: str, data: Sequences, seed: int, setting: dict[str, Any]) -> Row:
    """A row as `fit` gives, of a peer that its package trains."""

    def judge(peer: rank_peers.Peer) -> float:
        return measures(ranks(peer, data, 1, False))["ndcg@10"]

    peer, own, seconds = rank_peers.fit(name, data, seed, setting, LONGEST, judge)
    validation = measures(ranks(peer, data, 1, False))
    test = measures(ranks(peer, data, 0, False)) | measures(ranks(peer, data, 0, True), "_new")
    return Row("quality", data.name, seed, name, own, test, validation, seconds)


# ------------------------------------------------------------------------------------------------------------- its cost


def cost_batch(schema: rank.Schema, histories: list[int], candidates: list[int], device: torch.device) -> rank.Batch:
    draw = torch.Generator().manual_seed(0)
    E, C = sum(histories), sum(candidates)
    rows = schema.fields["item"].rows  # type: ignore[attr-defined]

    def codes(n: int, most: int) -> Tensor:
        return torch.randint(1, most, (n,), generator=draw)

    ages = [torch.randint(1, 10**7, (n,), generator=draw).sort(descending=True).values for n in histories]
    return rank.Batch(
        torch.tensor([0, *candidates]).cumsum(0), torch.tensor([0, *histories]).cumsum(0), {},
        {"item": codes(C, rows)}, {"item": codes(E, rows), "what": codes(E, 4)}, torch.cat(ages).double(),
        {"click": torch.randint(0, 2, (C,), generator=draw).float()}, None, torch.arange(C),
    ).to(device)  # fmt: skip


def padded_logits(ranker: rank.LiGR, batch: rank.Batch, layout: tigon.PrefixLayout) -> Tensor:
    """What a padded step computes: [context, events, candidates] of each request with a dense mask, in plain torch.

    The same weights, the same logits; tokens are those of the ranker. bf16 and shapes that a user of torch would have.
    """
    from tigon.rank.models.ligr.tokens import event_tokens

    device = layout.device
    offsets = layout.cu_prefix.long() - torch.arange(layout.requests + 1, device=device)
    history, newest = event_tokens(ranker.tokens, batch, offsets)
    candidates = ranker.tokens.candidates(batch.items, newest[layout.request])
    prefix = torch.tensor(layout.prefix_lengths, device=device)
    count = torch.tensor([len(s) for s in layout.suffix_lengths], device=device)
    P, C = max(layout.prefix_lengths), max(len(s) for s in layout.suffix_lengths)
    R = layout.requests
    row_p, row_c = torch.arange(P, device=device), torch.arange(C, device=device)
    there_p, there_c = row_p < prefix[:, None], row_c < count[:, None]
    x = history.new_zeros(R, P + C, ranker.tokens.width)
    x[:, :P][there_p] = history
    x[:, P:][there_c] = candidates
    position = torch.cat((row_p.expand(R, P), prefix[:, None].expand(R, C)), 1)
    cos, sin = (t.unsqueeze(2) for t in ranker.rotary_angles(position, torch.get_autocast_dtype(device.type)
                if torch.is_autocast_enabled(device.type) else x.dtype))  # fmt: skip
    causal = (row_p[:, None] >= row_p).expand(R, P, P)
    reads = there_p[:, None].expand(R, C, P)
    alone = torch.eye(C, dtype=torch.bool, device=device).expand(R, C, C)
    nothing = torch.zeros(R, P, C, dtype=torch.bool, device=device)

    def mask(own: Tensor) -> Tensor:
        upper, lower = torch.cat((causal, nothing), 2), torch.cat((reads, own), 2)
        return torch.cat((upper, lower), 1).unsqueeze(1)

    masks = mask(alone), mask(there_c[:, None] | alone)

    def turned(q: Tensor) -> Tensor:
        a, b = q.chunk(2, -1)
        return q * cos + torch.cat((-b, a), -1) * sin

    def add(residual: Any, x: Tensor, f: Tensor) -> Tensor:
        return x + f if residual.gate is None else x + torch.sigmoid(residual.gate(x)) * f

    for number, layer in enumerate(ranker.layers):
        norm = layer.attention_norm
        h = F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias)
        q, k, v = layer.qkv(h).unflatten(-1, (3, layer.heads, -1)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (turned(q), turned(k), v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=masks[number >= ranker.setwise_from])
        x = add(layer.attention_residual, x, layer.out(o.transpose(1, 2).flatten(2)))
        norm = layer.unit_norm
        gate, up = layer.gate_up(F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias)).chunk(2, -1)
        x = add(layer.unit_residual, x, layer.down(F.silu(gate) * up))
    x = F.layer_norm(x, x.shape[-1:], ranker.norm.weight, ranker.norm.bias)[:, P:]
    z = ranker.head(x).float().squeeze(-1)  # type: ignore[misc]
    return z[there_c]


def time_call(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median milliseconds."""
    for _ in range(3):
        run()
    found = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found)


def capture_graph(run: Callable[[], Tensor]) -> Callable[[], Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def cost(device: torch.device) -> Iterator[Row]:
    width, layers, heads = (512, 8, 8)
    history, candidates, many = (512, 512, 16)
    schema = rank.Schema(
        {"item": "item", "labels": ["click"], "action": ["what"]},
        {
            "item": rank.Id(hash_rows=100_000, side="item", history=True),
            "what": rank.Id(vocab=("a", "b", "c"), side="action"),
        },
    )
    cuda = device.type == "cuda"
    torch.manual_seed(0)
    ranker = rank.LiGR(schema, rank.LiGRConfig(width, layers, heads)).to(device).eval()
    with torch.no_grad():  # so that every part moves the logits
        for p in ranker.parameters():
            if p.dim() > 1:
                p.normal_(std=p.shape[-1] ** -0.5)
    exact = copy.deepcopy(ranker).double()
    half = copy.deepcopy(ranker).to(torch.bfloat16 if cuda else torch.float32)
    repeats = 30
    base = {"width": width, "layers": layers, "heads": heads, "history": history, "candidates": candidates}

    def apart(found: Tensor, expected: Tensor) -> float:
        return ((found.double() - expected).norm() / expected.norm()).item()

    for requests in (many, 1):
        batch = cost_batch(schema, [history] * requests, [candidates] * requests, device)
        layout = half.layout(batch)
        setting = {**base, "requests": requests}
        with torch.no_grad():
            # The specification, in fp64: by torch with masks, from the same weights.
            one = cost_batch(schema, [history], [candidates], device) if requests == 1 else batch
            expected = padded_logits(exact, one, exact.layout(one)) if requests <= 16 else None
            runs: dict[str, Callable[[], Tensor]] = {
                "ligr": lambda b=batch: half(b)["click"],
                "ligr, layout kept": lambda b=batch, at=layout: half(b, at)["click"],
                "padded torch": lambda b=batch, at=layout: padded_logits(half, b, at),
            }
            cache = half.encode(batch)
            runs["ligr, from a cache"] = lambda b=batch, kept=cache: half.score(kept, b)["click"]
            for name, run in runs.items():
                error = apart(run(), expected)
                found = {"ms": time_call(run, device, repeats), "error": error}
                if cuda and name == "ligr, layout kept":
                    found["graph_ms"] = time_call(capture_graph(run), device, repeats)
                yield Row("speed", f"{requests} requests", 0, name, setting, found)
    # Training, ragged.
    draw = np.random.default_rng(0)
    requests = 512
    lengths = draw.integers(64, 1025, requests).tolist()
    counts = draw.integers(8, 65, requests).tolist()
    batch = cost_batch(schema, lengths, counts, device)
    setting = {**base, "requests": requests, "history": "64–1024", "candidates": "8–64"}

    def step(logits: Callable[[rank.Batch], Tensor], parts: list[rank.Batch]) -> None:
        ranker.zero_grad(set_to_none=True)
        for part in parts:
            with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
                z = logits(part)
            (F.binary_cross_entropy_with_logits(z, part.labels["click"], reduction="sum") / batch.candidates).backward()

    def parts_of(size: int, order: list[int]) -> list[rank.Batch]:
        """Requests in groups, since padded ones of all do not fit."""
        return [
            cost_batch(schema, [lengths[r] for r in group], [counts[r] for r in group], device)
            for group in (order[start : start + size] for start in range(0, requests, size))
        ]

    ranker.train()
    size = max(1, requests // 8)
    groups = parts_of(size, sorted(range(requests), key=lambda r: lengths[r]))
    drawn = parts_of(size, list(range(requests)))
    # On the first group both give the same gradients.
    gradients = []
    for logits in (lambda b: ranker(b)["click"], lambda b: padded_logits(ranker, b, ranker.layout(b))):
        step(logits, groups[:1])
        gradients.append(torch.cat([p.grad.flatten().double() for p in ranker.parameters() if p.grad is not None]))
    cosine = F.cosine_similarity(*gradients, dim=0).item()
    sides: dict[str, Callable[[], None]] = {
        "ligr": lambda: step(lambda b: ranker(b)["click"], [batch]),
        "ligr, in groups by length": lambda: step(lambda b: ranker(b)["click"], groups),
        "padded torch, in groups by length": lambda: step(lambda b: padded_logits(ranker, b, ranker.layout(b)), groups),
        "padded torch, in groups": lambda: step(lambda b: padded_logits(ranker, b, ranker.layout(b)), drawn),
    }
    for name, run_step in sides.items():
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        try:
            found = {"ms": time_call(run_step, device, 5), "gradient_cosine": cosine}
            note = ""
        except torch.OutOfMemoryError:
            found, note = {}, "out of memory"
        if cuda:
            found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        setting_here = setting | {"groups": 1 if name == "ligr" else len(groups)}
        yield Row("speed", "training, ragged", 0, name, setting_here, found, note=note)


# ----------------------------------------------------------------------------------------------------------------- main


def points(method: str, options: argparse.Namespace) -> list[dict[str, float]]:
    """What validation of seed 0 chooses among. A peer's own dropout and step size are always among it, if not told."""
    peer = rank_peers.PEERS.get(method)
    dropout = options.dropout if peer is None or options.peer_dropout is None else options.peer_dropout
    found = [{"dropout": float(p), "lr": float(lr)} for p in dropout.split(",") for lr in options.lr.split(",")]
    own = {} if peer is None or options.peer_dropout else {"dropout": peer.dropout, "lr": peer.lr}
    return found if not own or own in found else [*found, own]


def choose_setting(name: str, data: Sequences, options: argparse.Namespace, device: torch.device) -> Row:
    """The fit of seed 0 whose validation is best among the settings, with what was tried."""
    base = {key: getattr(options, key) for key in SETTINGS}
    base["seconds"] = options.peer_seconds if name in rank_peers.PEERS else options.seconds
    fits = [fit(name, data, 0, base | point, device) for point in points(name, options)]
    first = max(fits, key=lambda row: row.validation["ndcg@10"])
    first.setting["tried"] = [
        {key: row.setting[key] for key in CHOSEN} | {"ndcg@10": row.validation["ndcg@10"]} for row in fits
    ]
    return first


def quality(keep: Callable[[Row], None], options: argparse.Namespace, device: torch.device) -> None:
    """Every method on every set, each row kept as it comes; one whose package is missing is named and skipped."""
    for name in options.sets.split(","):
        data = read(options.data, name).to(device)
        for method in map(str.strip, options.methods.split(";")):
            if method in rank_peers.PEERS and (lacks := rank_peers.lacks(method)):
                print(lacks, flush=True)
                continue
            if method in SIDES and SIDES[method][1].keys() & {"times", "stars"} and data.seconds is None:
                continue
            first = choose_setting(method, data, options, device)
            keep(first)
            setting = {key: first.setting[key] for key in (*SETTINGS, *CHOSEN, "seconds")}
            for seed in range(1, options.seeds):
                keep(fit(method, data, seed, setting, device))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--part", choices=["quality", "speed"], default="quality")
    parser.add_argument("--data", type=Path, help="folder of the sets")
    parser.add_argument("--sets", default="Beauty,Sports_and_Outdoors,Toys_and_Games,Yelp,ml-100k")
    parser.add_argument("--methods", default=DEFAULT_SIDES, help="separated by semicolons")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--dropout", default="0.5", help="values separated by commas; validation of seed 0 chooses")
    parser.add_argument("--lr", default="0.001", help="likewise")
    parser.add_argument("--peer-dropout", help="likewise; by default --dropout and the package's own")
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--warmup", type=int, default=100, help="steps")
    parser.add_argument("--batch-size", type=int, default=256, help="users")
    parser.add_argument("--epochs", type=int, default=200, help="at most")
    parser.add_argument("--every", type=int, default=2, help="epochs between validations")
    parser.add_argument("--patience", type=int, default=10, help="validations without a better one that end a fit")
    parser.add_argument("--seconds", type=float, default=40.0, help="of a fit, at most")
    parser.add_argument("--peer-seconds", type=float, default=60.0, help="of a fit of RecTools or RecBole, at most")
    parser.add_argument("--output", type=Path, required=True, help="folder of the result file")
    return parser.parse_args()


def main() -> None:
    options = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[Row] = []

    def keep(row: Row) -> None:
        rows.append(row)
        content = report.result("rank-sequences", rows, device=device)
        report.save(options.output / report.file_name(content, "rank-sequences"), content)
        print(row.data, row.method, row.seed, row.measures, flush=True)

    if options.part == "speed":
        for row in cost(device):
            keep(row)
    else:
        quality(keep, options, device)


if __name__ == "__main__":
    main()
