"""LiGR: its logits are those of dense layers, candidates are alone or a set, and histories are encoded once."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from requests_made import SCHEMA, batch, chosen, of_request, randomly

from tigon.kernels import use_backend
from tigon.rank.data.fields import Id
from tigon.rank.data.schema import Schema
from tigon.rank.models.ligr.config import LiGRConfig
from tigon.rank.models.ligr.model import THETA, LiGR
from tigon.rank.models.ranker import Ranker

HISTORIES, CANDIDATES = [4, 0, 7, 1], [3, 2, 1, 5]


def ranker(**options):
    return randomly(LiGR(SCHEMA, LiGRConfig(16, 3, 2, **options)))


def close(got, expected, at_most=1e-12):
    assert got.keys() == expected.keys() == {"click", "like"}
    for label, logits in expected.items():
        assert got[label].shape == logits.shape
        assert (got[label] - logits).abs().max() <= at_most * logits.abs().max()


def joined(parts):
    return {label: torch.cat([part[label] for part in parts]) for label in parts[0]}


# ----------------------------------------------------------------------------------------------------- what it computes


def dense(model, made, r):
    """Request r by the formulas, in one sequence with a mask; positions turn pairs of numbers as complex ones."""
    tokens, one = model.tokens, of_request(made, r)
    n, count = one.events, one.candidates
    before = torch.cat((torch.full((1,), torch.inf), one.age[:-1]))[:n]
    newest = one.age[-1:] if n else torch.tensor([torch.inf])
    x = torch.cat((
        tokens.context(one.context, 1), tokens.events(one.history, before - one.age),
        tokens.candidates(one.items, newest.expand(count)),
    ))  # fmt: skip
    position = torch.cat((torch.arange(n + 1), torch.full((count,), n + 1))).double()
    half = model.head_dim // 2
    angle = position[:, None] * THETA ** (-torch.arange(half).double() / half)
    turn = torch.polar(torch.ones(()).double(), angle)[:, None]

    def turned(q):
        z = torch.complex(q[..., :half], q[..., half:]) * turn
        return torch.cat((z.real, z.imag), -1)

    def norm(y, like):
        return F.layer_norm(y, y.shape[-1:], like.weight, like.bias)

    def add(y, f, residual):
        return y + f if residual.gate is None else y + torch.sigmoid(residual.gate(y)) * f

    for number, layer in enumerate(model.layers):
        seen = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        seen[n + 1 :, n + 1 :] = True if number >= model.setwise_from else torch.eye(count).bool()
        q, k, v = layer.qkv(norm(x, layer.attention_norm)).unflatten(-1, (3, layer.heads, -1)).unbind(1)
        z = torch.einsum("ihd,jhd->hij", turned(q), turned(k)) / model.head_dim**0.5
        o = torch.einsum("hij,jhd->ihd", z.masked_fill(~seen, -torch.inf).softmax(-1), v)
        x = add(x, layer.out(o.flatten(1)), layer.attention_residual)
        gate, up = layer.gate_up(norm(x, layer.unit_norm)).chunk(2, -1)
        x = add(x, layer.down(F.silu(gate) * up), layer.unit_residual)
    return dict(zip(model.labels, model.head(norm(x[n + 1 :], model.norm)).t(), strict=True))


@pytest.mark.parametrize(
    ("options", "gates"),
    [({}, 6), ({"gate": False}, 0), ({"setwise_layers": 0}, 6), ({"setwise_layers": 2, "expansion": 1.5}, 6)],
)
def test_logits_are_those_of_dense_layers(options, gates):
    model, made = ranker(**options), batch(HISTORIES, CANDIDATES)
    assert sum(".gate.weight" in name for name, _ in model.named_parameters()) == gates
    with torch.no_grad():
        expected = joined([dense(model, made, r) for r in range(made.requests)])
        close(model(made), expected)


def test_tokens_are_normed_sums_of_what_fields_are():
    model, made = ranker(), batch([2], [2], seed=3)
    tokens = model.tokens

    def normed(x):
        return torch.nn.functional.layer_norm(x, x.shape, tokens.norm.weight, tokens.norm.bias)

    table = {name: tokens.field_tokens(name) for name in tokens.names}
    assert set(table) == set(SCHEMA.fields)
    code, gap = made.history, torch.tensor([1000.0, 5.0])

    def genres(ragged, row):
        codes = ragged.values[ragged.offsets[row] : ragged.offsets[row + 1]]
        found = table["genres"].table[codes].mean(0) if len(codes) else torch.zeros(4).double()
        return table["genres"].project.weight @ found

    def number(name, x):
        return table[name].missing if x.isnan() else table[name].slope * x.double()

    found = tokens.events(code, gap)
    for row, place in enumerate((9, 2)):  # 2⁹ ≤ 1000 + 1 < 2¹⁰, and 2² ≤ 5 + 1 < 2³
        expected = table["item"].table[code["item"][row]] + table["what"].table[code["what"][row]]
        expected = expected + genres(code["genres"], row) + number("stars", code["stars"][row])
        torch.testing.assert_close(found[row], normed(expected + tokens.gap[1 + place]))
    found = tokens.candidates(made.items, torch.tensor([torch.inf, 0.0]))
    for row, place in enumerate((0, 1)):
        words = made.items["words"]
        rows = table["words"].table[words.values[words.offsets[row] : words.offsets[row + 1]]]
        expected = tokens.candidate + table["item"].table[made.items["item"][row]] + genres(made.items["genres"], row)
        if len(rows):
            pooled = (rows @ table["words"].query).softmax(0) @ rows
            expected = expected + pooled
        expected = expected + number("position", made.items["position"][row])
        torch.testing.assert_close(found[row], normed(expected + tokens.newest[place]))
    at = int(made.context["at"][0]) // 10**6
    expected = tokens.start + table["country"].table[made.context["country"][0]] + number("age", made.context["age"][0])
    expected = expected + table["at"].hour[at // 3600 % 24] + table["at"].day[at // 86400 % 7]
    torch.testing.assert_close(tokens.context(made.context, 1)[0], normed(expected))
    never = torch.tensor([torch.iinfo(torch.int64).min])
    torch.testing.assert_close(table["at"](never)[0], table["at"].missing)


def test_options_leave_out_what_they_say():
    made = batch(HISTORIES, CANDIDATES)
    other = dataclasses.replace(
        made, history={**made.history, "what": (made.history["what"] + 1) % 3, "stars": torch.ones(made.events)}
    )
    older = dataclasses.replace(made, age=made.age * 3)
    plain, blind, timeless = ranker(), ranker(actions=False), ranker(ages=False)
    assert blind.tokens.sides["events"] == ["item", "genres"]
    with torch.no_grad():
        close(blind(other), blind(made), 0)
        close(timeless(older), timeless(made), 0)
        for changed in (other, older):
            assert (plain(changed)["click"] - plain(made)["click"]).abs().max() > 1e-3


# ------------------------------------------------------------------------------------------------ encoded once, kept


@pytest.mark.parametrize("setwise", [0, 1, 3])
def test_scores_by_a_cache_are_those_of_one_pass(setwise):
    model, made = ranker(setwise_layers=setwise), batch(HISTORIES, CANDIDATES)
    cache = model.encode(made)
    assert len(cache) == 4
    assert cache.lengths == (5, 1, 8, 2)
    assert cache.nbytes == 2 * 3 * 16 * 16 * 8
    with torch.no_grad():
        close(model.score(cache, made), model(made))
        part = cache.select([2, 0])
        turned = [of_request(made, r) for r in (2, 0)]
        found = [model.score(part.select([place]), one) for place, one in enumerate(turned)]
        close(joined(found), joined([model(one) for one in turned]))
        later = dataclasses.replace(made, age=made.age + 3600)
        close(model.score(cache, made, elapsed=3600.0), model(later))


def test_appended_events_are_those_of_encoding_all():
    model, made = ranker(), batch(HISTORIES, CANDIDATES)
    elapsed = torch.tensor([5.0, 100.0, 0.0, 7000.0]).double()
    # Some have their events in two parts, one has all of them new, one has none that is new. The first parts were
    # encoded for requests that came earlier: their ages were smaller then.
    old = [[0, 1], [], [0, 1, 2], [0]]
    new = [[2, 3], [], [3, 4, 5, 6], []]
    past = chosen(made, events=old)
    of = torch.tensor([r for r, one in enumerate(old) for _ in one])
    past = dataclasses.replace(past, age=past.age - elapsed[of])
    before = model.encode(past)
    kept = before.keys.clone()
    cache = model.append(before, chosen(made, events=new), elapsed)
    expected = model.encode(made)
    assert cache.lengths == expected.lengths
    for name in ("keys", "values"):
        torch.testing.assert_close(getattr(cache, name), getattr(expected, name), rtol=1e-12, atol=1e-12)
    assert torch.equal(cache.newest, expected.newest)
    assert torch.equal(before.keys, kept)
    with torch.no_grad():
        close(model.score(cache, made), model(made))
        # One event at a time, and nothing at last.
        by_one = model.encode(chosen(made, events=[[], [], [], []]))
        for place in range(7):
            by_one = model.append(by_one, chosen(made, events=[[place] if place < n else [] for n in HISTORIES]))
        by_one = model.append(by_one, chosen(made, events=[[]] * 4))
        close(model.score(by_one, made), model(made))


# --------------------------------------------------------------------------------------------------- training, odd rows


def test_every_weight_gets_a_finite_gradient():
    model, made = ranker(dropout=0.1).train(), batch(HISTORIES, CANDIDATES)
    loss = sum(F.binary_cross_entropy_with_logits(z, made.labels[k].double()) for k, z in model(made).items())
    loss.backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all(), name
        assert weight.grad.any(), name


@pytest.mark.parametrize(("width", "layers"), [(32, 2), (64, 2), (128, 3), (256, 6)])
def test_candidates_depend_on_the_events_from_the_start(width, layers):
    """A fit learns which items are alike by what events do to logits: at first 0.004 of them if weights are 0.02."""
    torch.manual_seed(0)
    model, made = LiGR(SCHEMA, LiGRConfig(width, layers, 2)).eval(), batch(HISTORIES, CANDIDATES)
    turned = {name: x.flip(0) if isinstance(x, torch.Tensor) else x for name, x in made.history.items()}
    other = dataclasses.replace(made, history=turned)
    with torch.no_grad():
        here, there = model(made)["click"], model(other)["click"]
    assert (here - there).std() > 0.1 * here.std()
    assert 0.3 < here.std() < 3


def test_unseen_values_and_empty_histories_have_logits():
    model = LiGR(SCHEMA, LiGRConfig(16, 3, 2)).eval()
    assert (
        not model.tokens.field_tokens("item").table[0].any()
    )  # an item that training does not have adds nothing at first
    made = batch([0, 0], [2, 1])
    made = dataclasses.replace(made, items={**made.items, "item": torch.zeros(3, dtype=torch.int64)})
    with torch.no_grad():
        found = model(made)
    assert all(z.isfinite().all() and z.dtype == torch.float32 for z in found.values())
    empty = dataclasses.replace(batch([], []), offsets=torch.zeros(1).long(), history_offsets=torch.zeros(1).long())
    with pytest.raises(ValueError, match="must have at least one length"):
        model(empty)


def test_dropout_is_of_training_alone():
    model, made = ranker(dropout=0.5), batch(HISTORIES, CANDIDATES)
    with torch.no_grad():
        close(model(made), model(made), 0)
        assert not torch.equal(model.train()(made)["click"], model(made)["click"])


def test_bf16_is_near():
    torch.manual_seed(0)
    model, made = LiGR(SCHEMA, LiGRConfig(32, 3, 2)), batch(HISTORIES, CANDIDATES)
    with torch.no_grad():
        expected = model(made)
        with torch.autocast("cpu", torch.bfloat16):
            found, cached = model(made), model.score(model.encode(made), made)
    assert found["click"].dtype == torch.float32
    close(found, expected, 2e-2)
    close(cached, expected, 2e-2)


def test_kernels_give_the_logits_and_gradients_of_references(backend, device):
    """Of forward, of a cache with an appended event, and of the next item; sequences of length 1 are among them."""
    made = batch([5, 0, 2], [3, 1, 2]).to(device)
    torch.manual_seed(0)
    exact = randomly(LiGR(SCHEMA, LiGRConfig(32, 2, 2)), std=0.2)
    model = LiGR(SCHEMA, LiGRConfig(32, 2, 2)).to(device)
    model.load_state_dict(exact.state_dict())
    exact.train()
    on_cpu = made.to("cpu")

    def step(ranker, given):
        logits = ranker(given)
        loss = ranker.next_item_loss(given) + sum(z.square().mean() for z in logits.values())
        return logits, loss, torch.autograd.grad(loss, list(ranker.parameters()))

    with use_backend("torch"):
        expected, loss, gradients = step(exact, on_cpu)
    found, got, own = step(model, made)
    close({name: z.double().cpu() for name, z in found.items()}, expected, 1e-4)
    torch.testing.assert_close(got.double().cpu(), loss, rtol=1e-4, atol=0)
    for (name, _), a, b in zip(model.named_parameters(), own, gradients, strict=True):
        assert (a.double().cpu() - b).norm() <= 1e-4 * b.norm() + 1e-7, name
    cache = model.append(
        model.encode(chosen(made, events=[[0, 1, 2], [], [0]])), chosen(made, events=[[3, 4], [], [1]])
    )
    with torch.no_grad():
        close({name: z.double().cpu() for name, z in model.score(cache, made).items()}, expected, 1e-4)


def test_the_score_weighs_probabilities():
    logits = {"click": torch.tensor([0.0, 2.0]), "like": torch.tensor([-1.0, 1.0])}
    model = LiGR(SCHEMA, LiGRConfig(16, 1, 2, setwise_layers=0, weights={"click": 0.5, "like": 2.0}))
    expected = 0.5 * logits["click"].sigmoid() + 2 * logits["like"].sigmoid()
    torch.testing.assert_close(model.combine(logits), expected)
    torch.testing.assert_close(
        LiGR(SCHEMA, LiGRConfig(16, 1, 2, setwise_layers=0)).combine(logits), sum(z.sigmoid() for z in logits.values())
    )
    with pytest.raises(ValueError, match=r"LiGR.combine: logits must have 'like', got \['click'\]"):
        model.combine({"click": logits["click"]})


# -------------------------------------------------------------------------------------------------------------- folders


def test_what_is_no_ranker_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="folder must be a folder, got the file"):
        LiGR(SCHEMA, LiGRConfig(16, 1, 2)).save_pretrained(tmp_path / "file")
    with pytest.raises(ValueError, match=r"LiGR.from_pretrained: folder must hold config.json"):
        LiGR.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"kind": "other"}')
    with pytest.raises(ValueError, match=r"Ranker.from_pretrained: kind must be one of .*'ligr'.*, got 'other'"):
        Ranker.from_pretrained(tmp_path)


def test_a_saved_ranker_is_the_same_and_files_that_do_not_fit_together_are_refused(tmp_path):
    model, made = ranker(gate=False, weights={"like": 1.0}).float(), batch(HISTORIES, CANDIDATES)
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "schema.json", "config.json", "model.safetensors", "manifest.json",
    }  # fmt: skip
    loaded = Ranker.from_pretrained(tmp_path)
    assert (type(loaded), loaded.training, loaded.schema, loaded.config) == (LiGR, False, SCHEMA, model.config)
    assert loaded.score_weights == {"click": 0.0, "like": 1.0}
    with torch.no_grad():
        close(loaded(made), model(made), 0)
    (tmp_path / "schema.json").write_text((tmp_path / "schema.json").read_text() + " ")
    with pytest.raises(ValueError, match=r"schema.json has changed since it was written"):
        LiGR.from_pretrained(tmp_path)
    (tmp_path / "manifest.json").unlink()  # as of somebody who has changed files on purpose
    for name, changed in (
        ("schema.json", SCHEMA.replace({"item": Id(vocab=[1], side="item", history=True)}).to_json()),
        ("config.json", '{"kind": "ligr", "depth": 3}'),
        ("model.safetensors", "x"),
    ):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_text(changed)
        with pytest.raises(
            ValueError,
            match=r"must be of one ranker, as save_pre|does not fit the model|is damaged|unknown options for LiGR",
        ):
            LiGR.from_pretrained(tmp_path)
        (tmp_path / name).write_bytes(whole)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"config.json must hold an object, got a list"):
        LiGR.from_pretrained(tmp_path)


def test_what_makes_no_model_is_refused():
    model, made = LiGR(SCHEMA, LiGRConfig(16, 2, 2)), batch([1, 2], [1, 1])
    for options, words in (
        ({"width": 18}, r"width a multiple of 2 · heads, got 18, 2 and 2"),
        ({"layers": 0}, "must be positive"),
        ({"setwise_layers": 3}, r"setwise_layers must lie in \[0, 2\], got 3"),
        ({"dropout": 1.0}, r"dropout in \[0, 1\), got 4.0 and 1.0"),
        ({"weights": {"buy": 1.0}}, r"weights must be for the labels \['click', 'like'\], got 'buy'"),
    ):
        with pytest.raises(ValueError, match=words):
            LiGR(SCHEMA, LiGRConfig(**{"width": 16, "layers": 2, "heads": 2, **options}))
    with pytest.raises(ValueError, match=r"LiGR: every request must have a candidate, got none for request 1"):
        model(batch([1, 2], [1, 0]))
    with pytest.raises(ValueError, match="got none for request 0"):
        model.score(model.encode(made), batch([1, 2], [0, 1]))
    with pytest.raises(ValueError, match=r"LiGR.score: batch must have the cache's 2 requests, got 1"):
        model.score(model.encode(made), batch([1], [1]))
    with pytest.raises(ValueError, match=r"LiGR.append: batch must have the cache's 2 requests, got 1"):
        model.append(model.encode(made), batch([1], [1]))
    with pytest.raises(ValueError, match=r"Cache.select: requests must lie in \[0, 2\), got 2"):
        model.encode(made).select([0, 2])
    without = dataclasses.replace(made, context={})
    with pytest.raises(ValueError, match="batch must have the context field 'age'"):
        model(without)
    items = Schema({"item": "item"}, {"item": SCHEMA.fields["item"]})
    with pytest.raises(ValueError, match="the schema must name labels to score candidates, got none"):
        LiGR(items, LiGRConfig(16, 1, 2))(made)
