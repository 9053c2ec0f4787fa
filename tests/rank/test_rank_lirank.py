"""LiRank: its logits are those of written-out formulas, whichever way its tables are read, trained and kept."""

import copy
import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from requests_made import SCHEMA, batch, of_request, randomly
from torch.utils._python_dispatch import TorchDispatchMode

from tigon import rank
from tigon.kernels import use_backend
from tigon.kernels.dispatch import meta_as_gpu
from tigon.rank.data.fields import Id, Ids, Number, Text, Time
from tigon.rank.data.schema import Schema
from tigon.rank.evaluation.score import compare_scores
from tigon.rank.kernels.batch_norm_relu import batch_norm_relu
from tigon.rank.models.lirank import padded_linear, towers
from tigon.rank.models.lirank.cross_layers import CrossLayers
from tigon.rank.models.lirank.quantize import count_bytes

QR = SCHEMA.replace(
    {"hashed": Id(hash_rows=5, hash="qr", side="row"), "wide": Id(hash_rows=7, dim=4, side="context"), "note": Text()}
)
SMALL = {"width": 8, "rank": 4, "layers": 2, "mlp": (6,)}


def made(schema=QR, **options):
    return rank.LiRank(schema, rank.LiRankConfig(**{**SMALL, **options}))


def drawn(candidates=(3, 1, 4), seed=0, schema=QR):
    names = {name: field for name, field in schema.fields.items() if not isinstance(field, Text)}
    return batch([0] * len(candidates), list(candidates), Schema(schema.roles, names), seed)


# ---------------------------------------------------------------------------------------------------- what it computes


def field_of(model, name, value):
    """The vectors of one row's value of a field, by their definitions."""
    field, inputs = model.schema.fields[name], model.inputs

    def row(part, code):
        for group in inputs.groups:
            every = [c for side in ("context", "rows", "attention") for c in group.columns[side]]
            for number, column in enumerate(every):
                if (column.name, column.part) == (name, part):
                    return group.tables.column_weight(number)[code]
        raise AssertionError(name)

    if isinstance(field, Number):
        at = [n for side in ("context", "rows") for n in inputs.numbers[side]].index(name)
        return [inputs.missing[at] if value.isnan() else value * inputs.slope[at] + inputs.shift[at]]
    if isinstance(field, Time):
        missing = int(value) == Time.MISSING
        hour, day = (int(value) // 3_600_000_000) % 24, (int(value) // 86_400_000_000) % 7
        return [row("hour", 0 if missing else 1 + hour), row("day", 0 if missing else 1 + day)]
    if isinstance(field, Ids):
        part = "attention" if field.pool == "attention" else "code"
        rows = [row(part, code) for code in value.tolist()]
        if not rows:
            return [torch.zeros(field.dim or model.config.width).double()]
        rows = torch.stack(rows)
        if part == "code":
            return [rows.mean(0)]
        (query,) = (q for group in inputs.groups for q in group.queries)
        return [(rows @ query).softmax(0) @ rows]
    if field.hash == "qr":
        quotient, remainder = divmod(int(value) - 1, field.hash_rows) if value else (-1, -1)
        return [row("quotient", 1 + quotient) * row("remainder", 1 + remainder)]
    return [row("code", int(value))]


def test_inputs_are_the_vectors_of_the_fields():
    model, requests = randomly(made()), drawn()
    x = model.inputs(requests.context, requests.items, torch.tensor([0, 0, 0, 1, 2, 2, 2, 2]))
    assert x.shape == (8, model.inputs.width)
    row = 0
    for r, size in enumerate((3, 1, 4)):
        one = of_request(requests, r)
        for candidate in range(size):
            vectors = []
            for side in (one.context, one.items):
                for name in side:
                    at = 0 if side is one.context else candidate
                    value = side[name]
                    value = (
                        value.values[value.offsets[at] : value.offsets[at + 1]]
                        if isinstance(value, tuple)
                        else value[at]
                    )
                    vectors += field_of(model, name, value)
            # In whichever order: the numbers of a row are those of the vectors.
            expected, found = torch.cat(vectors).sort().values, x[row].sort().values
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            row += 1
    # What is one in a request is read once for it, or for each of its rows alike.
    ones = drawn((1, 1, 1, 1))
    once, each = (model.inputs(ones.context, ones.items, request) for request in (None, torch.arange(4)))
    assert torch.equal(once, each)


@pytest.mark.parametrize(("kind", "low"), [("residual", 4), ("dcn", 4), ("dcn", None)])
def test_cross_layers_are_the_written_formula(kind, low):
    layers = randomly(CrossLayers(kind, 2, 6, low, 0.7))
    x0 = torch.randn(5, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = layers(x0)
    for row in range(5):
        x = x0[row]
        for layer in layers.layers:
            h = x if layer.down is None else layer.down.weight @ x
            if kind == "residual":
                q, k, v = h[:4], h[4:8], h[8:]
                A = torch.stack([torch.stack([q[i] * k[j] / 0.7 for j in range(4)]).softmax(0) for i in range(4)])
                h = A @ v + v
            x = x0[row] * (layer.up.weight @ h + layer.up.bias) + x
        torch.testing.assert_close(found[row], x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("gate", "norm"), [(True, "none"), (False, "layer"), (True, "batch")])
def test_logits_are_the_written_formula(gate, norm):
    towers = {"clicks": ["click"], "likes": ["like"]}
    model = randomly(made(gate=gate, norm=norm, towers=towers, tower_mlp=(5,)))
    if norm == "batch":
        model.mlp[0].norm.running_mean.normal_()
    requests = drawn()
    x0 = model.inputs(requests.context, requests.items, torch.tensor([0, 0, 0, 1, 2, 2, 2, 2]))

    def hidden(x, layer):
        h = F.relu(layer.norm(x @ layer.linear.weight.T + layer.linear.bias))
        return h if layer.gate is None else h * torch.sigmoid(h @ layer.gate.weight.T + layer.gate.bias)

    h = torch.cat((model.cross(x0), hidden(x0, model.mlp[0])), 1)
    logits = model(requests)
    for number, label in enumerate(("click", "like")):
        last = hidden(h, model.towers.hidden[number][0])
        torch.testing.assert_close(model.features(requests, label), last, rtol=1e-12, atol=1e-12)
        head = model.towers.heads[number]
        torch.testing.assert_close(logits[label], last @ head.weight[0] + head.bias[0], rtol=1e-12, atol=1e-12)
    assert (model.mlp[0].gate is None) != gate
    torch.testing.assert_close(model.features(requests), model.features(requests, "click"))


@pytest.mark.parametrize(("gate", "norm"), [(True, "none"), (True, "layer"), (False, "batch")])
def test_widths_that_are_no_multiple_of_8_get_zeros_where_that_is_faster(gate, norm, monkeypatch):
    towers = {"clicks": ["click"], "likes": ["like"]}
    model = randomly(made(gate=gate, norm=norm, mlp=(11, 6, 16, 9), towers=towers, tower_mlp=(13,)))
    requests = drawn()

    def found():
        model.zero_grad()
        logits = model(requests)
        sum(z.square().sum() for z in logits.values()).backward()
        return *logits.values(), *(p.grad for p in model.parameters())

    plain = found()
    counts = []
    monkeypatch.setattr(padded_linear, "is_padding_faster", lambda layer, x: counts.append(layer.out_features) is None)
    for a, b in zip(plain, found(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    assert 11 in counts
    assert 13 in counts
    assert not any(p.shape[-1] > model.inputs.width + 9 for p in model.parameters() if p.dim() > 1)


def test_hooks_and_adapters_of_hidden_layers_are_called(monkeypatch):
    class Adapter(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model, requests = randomly(made(gate=False, norm="none", mlp=(11, 6, 9))), drawn()
    plain = model(requests)
    model.mlp[1].linear.register_forward_hook(lambda layer, args, y: 3 * y)
    changed = model(requests)
    assert not torch.equal(changed["click"], plain["click"])
    monkeypatch.setattr(padded_linear, "is_padding_faster", lambda layer, x: True)
    torch.testing.assert_close(model(requests), changed)
    model.mlp[2].linear.__class__ = Adapter
    twice = model(requests)
    assert not torch.equal(twice["click"], changed["click"])
    monkeypatch.undo()
    torch.testing.assert_close(model(requests), twice)


@pytest.mark.parametrize("padded", [False, True])
def test_a_relu_that_is_a_products_last_step_is_torchs(padded, monkeypatch, backend, device):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(40, 13, generator=draw).to(device).requires_grad_()
    layer = torch.nn.Linear(13, 11, device=device)
    dy = torch.randn(40, 11, generator=draw).to(device)
    monkeypatch.setattr(padded_linear, "is_padding_faster", lambda layer, x: padded)

    def found(of):
        y = of(layer, x)
        assert not y[:, 11:].any()
        return y[:, :11], *torch.autograd.grad(y[:, :11], (x, layer.weight, layer.bias), dy)

    plain = found(lambda layer, x: F.relu(layer(x)))
    for a, b in zip(found(padded_linear.linear_relu), plain, strict=True):
        torch.testing.assert_close(a, b)
    # Of a layer that is frozen, or adapted, as well.
    layer.requires_grad_(False)
    y = padded_linear.linear_relu(layer, x)[:, :11]
    torch.testing.assert_close(torch.autograd.grad(y, x, dy)[0], plain[1])
    layer.register_forward_hook(lambda layer, args, y: 2 * y)
    torch.testing.assert_close(padded_linear.linear_relu(layer, x)[:, :11], 2 * plain[0])
    # Two dtypes are refused as torch does. Where nothing is differentiated, as in evaluation, NaN stays NaN.
    monkeypatch.undo()
    layer = torch.nn.Linear(13, 3, device=device)
    with pytest.raises(RuntimeError, match="dtype"):
        padded_linear.linear_relu(layer, x.bfloat16())
    with torch.no_grad():
        layer.weight[1] = float("nan")
        assert padded_linear.linear_relu(layer, x)[:, :3].isnan().all(0).tolist() == [False, True, False]


def test_calibration_is_fitted_on_the_logits_that_it_is_applied_to(backend, device):
    torch.manual_seed(0)
    model, requests = made(calibrate=True, norm="none", gate=False).to(device).eval(), drawn().to(device)
    with torch.autocast(device.type, torch.bfloat16):
        want = model(requests)
        logits = model.raw_logits(requests)
    assert all(z.dtype == torch.float32 for z in logits.values())
    for name, z in model.apply_calibration(logits, None).items():
        assert torch.equal(z, want[name])


def test_what_a_subclass_makes_of_hidden_and_an_mlp_that_is_wrapped_count(backend, device):
    """FSDP gives a module another class."""

    class Twice(rank.LiRank):
        def compute_hidden(self, batch):
            return 2 * super().compute_hidden(batch)

    class Wrapped(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.calls = inner, 0

        def forward(self, x):
            self.calls += 1
            return self.inner(x)

    torch.manual_seed(0)
    model, requests = made(gate=False, norm="none", mlp=(12, 7)).to(device), drawn().to(device)
    want = model(requests)["click"]
    twice = Twice(QR, model.config).to(device)
    twice.load_state_dict(model.state_dict())
    torch.testing.assert_close(twice(requests)["click"], model.logits(2 * model.compute_hidden(requests))["click"])
    model.mlp = Wrapped(model.mlp)
    torch.testing.assert_close(model(requests)["click"], want)
    assert model.mlp.calls == 1


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("options", [{}, {"cross": "dcn", "rank": None}, {"cross": "none"}, {"mlp": ()}])
def test_heads_read_what_stands_beside_each_other_where_it_is(options, together, backend, device):
    """The logits, and all gradients, of a head that is given all of it in one."""
    torch.manual_seed(0)
    towers = {"one": ["click", "like"]} if together else {"clicks": ["click"], "likes": ["like"]}
    model = made(gate=False, norm="none", towers=towers, **{"mlp": (12, 7), **options}).to(device)
    requests = drawn().to(device)

    def found(of):
        model.zero_grad()
        logits = of(requests)
        sum(z.square().sum() for z in logits.values()).backward()
        return *logits.values(), *(p.grad for p in model.parameters() if p.grad is not None)

    plain = found(lambda requests: model.logits(model.compute_hidden(requests)))
    assert all(z.dtype == torch.float32 for z in plain[:2])
    for a, b in zip(found(model), plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    # A head that is more than its weight is called, and so is the last layer of a cross.
    model.towers.heads[0].register_forward_hook(lambda layer, args, z: 3 * z)
    torch.testing.assert_close(model(requests)["click"], 3 * plain[0], rtol=1e-4, atol=1e-6)
    # So are towers, an MLP and its layers.
    seen = []
    for part in (model.towers, model.mlp, model.mlp and model.mlp[0]):
        if part is not None:
            part.register_forward_hook(lambda layer, args, y: seen.append((layer, y)))
    model(requests)
    assert [layer for layer, _ in seen] == [*([model.mlp[0], model.mlp] if model.mlp else []), model.towers]
    assert all(y.shape == (8, width) for (_, y), width in zip(seen[:-1], (12, 7), strict=False))
    if model.cross is not None:
        model.cross.layers[-1].up.register_forward_hook(lambda layer, args, u: 0 * u)
        model.cross.layers[0].up.register_forward_hook(lambda layer, args, u: 0 * u)
        x = model.inputs(requests.context, requests.items, torch.tensor([0, 0, 0, 1, 2, 2, 2, 2], device=device))
        torch.testing.assert_close(model.cross(x), x)


def test_zeros_are_put_beside_large_products_of_16_bits_on_a_gpu_alone():
    sizes = [(65_536, 640, 3500), (65_536, 3500, 3500), (65_536, 3504, 3504), (256, 3500, 3500)]
    assert [padded_linear.is_slow(*size) for size in sizes] == [True, True, False, False]
    layer = torch.nn.Linear(3500, 3500, device="meta")
    assert not padded_linear.is_padding_faster(layer, torch.empty(65_536, 3500, device="meta", dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize(("inputs", "outputs"), [(640, 1501), (1501, 1501), (1501, 640)])
def test_on_a_gpu_the_zeros_change_nothing(inputs, outputs):
    draw = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(9_000, inputs, device="cuda", generator=draw, requires_grad=True)
    layer = torch.nn.Linear(inputs, outputs, device="cuda")

    def found(of):
        x.grad = layer.weight.grad = layer.bias.grad = None
        with torch.autocast("cuda", torch.bfloat16):
            assert padded_linear.is_padding_faster(layer, x)
            y = of(x)
        y[:, :outputs].float().square().mean().backward()
        assert y[:, outputs:].count_nonzero() == 0
        return y[:, :outputs], x.grad, layer.weight.grad, layer.bias.grad

    for a, b in zip(found(lambda x: padded_linear.linear(layer, x)), found(layer), strict=True):
        assert (a - b).norm() < 4e-3 * b.norm()


def trained(layers, x, backend):
    """A step's output, gradients and buffers, and what evaluation says then."""
    layers = copy.deepcopy(layers).train()
    x = x.clone().requires_grad_()
    with use_backend(backend):
        y = layers(x)
        (y * torch.linspace(-1, 1, y.numel(), device=x.device).view(y.shape)).sum().backward()
        seen = layers.eval()(x[:5])
        (dx,) = torch.autograd.grad(seen.square().sum(), x)
    return y, x.grad, *(p.grad for p in layers.parameters()), *layers.buffers(), seen, dx


@pytest.mark.parametrize("rows", [1, 2, 70])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("gate", [True, False])
def test_the_kernels_of_batch_norm_and_gate_are_torchs_layers(gate, padded, rows, device, monkeypatch):
    torch.manual_seed(0)
    layers = randomly(towers.build_mlp(6, (11, 5, 16), gate, "batch", 0.0)).float().to(device)
    x = 3 + torch.randn(rows, 6, device=device)
    expected, calls = trained(layers, x, "torch"), []
    monkeypatch.setattr(padded_linear, "is_padding_faster", lambda layer, x: padded)

    def counted(h, *args, **options):
        calls.append(h.shape[1])
        return batch_norm_relu(h, *args, **options)

    monkeypatch.setattr(towers, "batch_norm_relu", counted)
    # The gradient of a bias before a norm is 0, but for what is left of sums of 70 rows.
    torch.testing.assert_close(trained(layers, x, "triton"), expected, rtol=2e-4, atol=5e-4)
    # In training and in evaluation; rows go from layer to layer with their zeros.
    assert calls == 2 * ([16, 8, 16] if padded else [11, 5, 16])
    assert expected[0].any()
    assert layers[0].norm.num_batches_tracked == 0


def test_hidden_layers_copy_no_activations_and_leave_no_pass_to_torch(monkeypatch):
    """Of three layers with zeros behind their columns: products, one kernel each way, and the sum of two gradients."""
    monkeypatch.setattr(padded_linear, "is_padding_faster", lambda layer, x: True)
    monkeypatch.setattr(padded_linear, "_computed_in", lambda x: x.dtype)  # the meta device has no autocast
    layers = towers.build_mlp(8, (11, 5, 13), True, "batch", 0.0).to("meta")
    x = torch.empty(70, 8, device="meta", requires_grad=True)

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape[:1] == (70,) and not func.is_view:
                names.append(func.overloadpacket.__name__)
            return out

    names: list[str] = []
    with meta_as_gpu(), Seen():
        for layer in layers:
            x = layer.forward_padded(x)
        x.backward(torch.empty_like(x))
    assert set(names) <= {"empty", "new_empty", "empty_like", "addmm", "mm", "add", "detach"}, names
    assert names.count("add") == 3
    assert layers[0].linear.weight.grad.shape == (11, 8)


@pytest.mark.parametrize("change", ["a hook", "a class of its own", "no momentum", "narrow weights"])
def test_batch_norms_of_other_ways_are_called(change, triton_backend, device):
    class Other(towers.BatchNorm):
        pass

    norm = towers.BatchNorm(6).to(device)
    h = torch.randn(5, 6, device=device)
    assert norm.relu(h) is not None
    if change == "a hook":
        norm.register_forward_hook(lambda module, args, y: 2 * y)
    elif change == "a class of its own":
        norm.__class__ = Other
    elif change == "no momentum":
        norm.momentum = None
    else:
        norm.bfloat16()
    assert norm.relu(h) is None
    assert norm.num_batches_tracked == 1


def test_rows_are_scored_by_themselves():
    model, requests = randomly(made(cross="dcn", calibrate="country")), drawn()
    whole = model(requests)["like"]
    alone = torch.cat([model(of_request(requests, r))["like"] for r in range(3)])
    torch.testing.assert_close(whole, alone, rtol=1e-12, atol=1e-12)
    for options in ({"cross": "none"}, {"mlp": ()}, {"cross": "none", "mlp": ()}):
        assert randomly(made(**options))(requests)["click"].shape == (8,)


def test_gradients_reach_every_part_and_are_those_of_differences():
    schema = Schema({"labels": ["click"]}, {
        "a": Id(hash_rows=3, hash="qr"), "b": Ids(vocab=("x", "y")), "c": Ids(vocab=("x", "y"), pool="attention"),
        "d": Number(scale="none"), "e": Time(unit="s"),
    })  # fmt: skip
    model = randomly(made(schema, width=2, layers=1, rank=2, mlp=(2,), calibrate=True)).double()
    requests = drawn((1,) * 8, seed=1, schema=schema)
    parameters = dict(model.named_parameters())

    def loss(*values):
        out = torch.func.functional_call(model, dict(zip(parameters, values, strict=True)), (requests,))
        return out["click"]

    given = tuple(p.detach().clone().requires_grad_() for p in parameters.values())
    assert torch.autograd.gradcheck(loss, given, fast_mode=True)
    grads = torch.autograd.grad(loss(*given).square().sum(), given)
    assert not [name for name, grad in zip(parameters, grads, strict=True) if not grad.any()]


@pytest.mark.parametrize("bits", [32, 8])
def test_kernels_say_what_the_references_say(bits, device):
    torch.manual_seed(0)
    model = made(width=4, norm="layer", calibrate=True)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn_like(p)
    model = (model if bits == 32 else rank.quantize_tables(model)).to(device)
    requests, found = drawn((2, 1)).to(device), {}
    for backend in ("torch", "triton"):
        model.zero_grad()
        if bits == 32:
            model.table_gradients("rows")
        with use_backend(backend):
            z = model(requests)["like"]
            z.square().sum().backward()
        found[backend] = (
            z,
            [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in model.parameters() if p.grad is not None],
        )
        assert bits == 8 or all(tables.weight.grad.is_sparse for tables in model.tables())
    torch.testing.assert_close(found["triton"], found["torch"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", ["none", "layer", "batch"])
def test_in_narrow_products_and_of_one_row_it_is_finite(norm):
    model, one = made(norm=norm, calibrate=True, dropout=0.1), drawn((1,))
    model.train()
    model(one)["click"].sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    wide = model.eval()(drawn())["click"]
    for ranker in (model, rank.quantize_tables(model)):
        with torch.autocast("cpu", torch.bfloat16):
            z = ranker(drawn())["click"]
        assert z.dtype == torch.float32
        assert 0 < (z - wide).abs().max() < 0.05 * (1 + wide.abs().max())


# ------------------------------------------------------------------------------------------------------------- training


def test_a_step_of_row_adagrad_touches_the_rows_of_its_batch():
    pytest.importorskip("accelerate")
    rows = {"a": [f"v{i}" for i in range(8)] * 4, "b": [1, 2] * 16, "y": [0, 1, 1, 0] * 8}
    schema = Schema({"labels": "y"}, {"a": Id(vocab=[f"v{i}" for i in range(30)]), "b": Id(vocab=(1, 2, 3))})
    data = rank.Impressions.read(rows, schema=schema)
    torch.manual_seed(0)
    model = made(data.schema)
    (tables,) = model.tables()
    before = tables.weight.detach().clone()
    options = rank.FitOptions(epochs=1, batch_size=16, table_optimizer="row-adagrad", lr=1e-3, table_lr=0.1, warmup=0.0)
    states = []
    rank.fit(model, data, None, options, after=lambda progress: states.append(progress.state()))
    moved = (tables.weight != before).any(1)
    assert moved.nonzero()[:, 0].tolist() == [*range(1, 9), 32, 33]
    optimizer = states[-1]["optimizer"]
    assert [group.get("initial_accumulator_value") for group in optimizer["param_groups"]] == [None, None, 0.0]
    (last,) = optimizer["param_groups"][-1]["params"]
    assert (optimizer["state"][last]["sum"] > 0).tolist() == moved.tolist()
    # The same weights by AdamW, whose gradients are dense again.
    rank.fit(model, data, None, rank.FitOptions(epochs=1))
    assert not tables.weight.is_sparse
    assert tables.grad == "dense"
    with pytest.raises(ValueError, match=r"table_optimizer must be 'adamw' for LiGR, got 'row-adagrad'"):
        rank.fit(_ligr(), _items(), None, rank.FitOptions(table_optimizer="row-adagrad"))


def _items():
    return rank.Impressions.read({"item_id": [1, 2], "click": [0, 1]})


def _ligr():
    return rank.LiGR(_items().schema, rank.LiGRConfig(8, 1, 2))


def test_data_of_other_codes_are_refused():
    pytest.importorskip("accelerate")
    data, other, less, none = (
        rank.Impressions.read({name: values, "y": [0, 1, 1]})
        for name, values in (("a", "pqr"), ("a", "qrs"), ("a", "pqq"), ("b", "pqr"))
        for values in ([*values],)
    )
    model = made(data.schema)
    for call, table, sentence in (
        (rank.score, other, r"rank\.score: data must be read with .* 'a' has a different vocabulary with 3"),
        (rank.fit, other, r"rank\.fit: data must be read with .* 'a' has a different vocabulary with 3"),
        (rank.score, less, "'a' has a vocabulary with 2 values, but 3 in the ranker's"),
        (rank.score, none, r"schema=ranker\.schema: data has no field 'a'\.$"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call(model, table)
    again = rank.Impressions.read({"a": ["q", "z", "r"], "y": [0, 1, 1]}, schema=data.schema)
    assert len(rank.score(model, again).score) == 3


# -------------------------------------------------------------------------------------------------- hashed in two


def test_codes_of_quotients_and_remainders_are_told_apart():
    import pyarrow as pa

    names = [f"v{i}" for i in range(400)]
    one, two = Id(hash_rows=50), Id(hash_rows=50, hash="qr")
    assert (one.rows, two.rows) == (51, 2501)
    values = pa.array([*names, None])
    codes = two.encode(values)
    assert len(one.encode(values).unique()) <= 51
    assert len(codes.unique()) > 350
    assert (codes[-1], int(codes.max()) < two.rows) == (0, True)
    model = made(Schema({"labels": ["y"]}, {"x": two}), cross="none", mlp=())
    assert model.inputs.tables()[0].first == [0, 51, 102]
    # Missing values add nothing at first; others are the remainder's small row.
    found = model.inputs({}, {"x": codes}, None)
    assert found[-1].abs().max() == 0
    assert 0 < found[:-1].abs().max() < 0.1
    assert Id(hash_rows=10**6, hash="qr").rows == 2**31 - 1
    assert Schema.from_json(Schema({}, {"x": two}).to_json()).fields["x"] == two


# ----------------------------------------------------------------------------------------- folders, programs, 8 bits


@pytest.mark.parametrize("bits", [32, 8])
def test_a_saved_ranker_and_its_program_are_the_same(bits, tmp_path):
    torch.manual_seed(0)
    model = made(calibrate="country", norm="batch", weights={"like": 1.0}, towers={"one": ["click", "like"]})
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn_like(p)
    model = model.eval() if bits == 32 else rank.quantize_tables(model)
    requests = drawn()
    with torch.no_grad():
        expected = model(requests)
    model.save_pretrained(tmp_path / "run")
    loaded = rank.Ranker.from_pretrained(tmp_path / "run")
    assert type(loaded) is rank.LiRank
    assert (loaded.config, loaded.score_weights) == (model.config, {"click": 0.0, "like": 1.0})
    with torch.no_grad():
        assert all(torch.equal(z, expected[label]) for label, z in loaded(requests).items())
    if bits == 32:  # a program of whose ranker `tigon rank export` makes
        return
    (file,) = rank.export(loaded, tmp_path / "program")
    program = torch.export.load(file)
    assert not any("tigon" in str(node.target) for node in program.graph.nodes)
    request = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2])
    features = {}
    for name, value in itertools.chain(requests.context.items(), requests.items.items()):
        if isinstance(value, tuple):
            lists = value.lists()
            most = max(map(len, lists))
            value = torch.tensor([codes + [-1] * (most - len(codes)) for codes in lists])
        value = value if value.is_floating_point() else value.long()
        features[name] = value[request] if name in requests.context else value
    for label, z in program.module()(features).items():
        torch.testing.assert_close(z, expected[label], rtol=1e-5, atol=1e-5)
    one = {name: value[:1] for name, value in features.items()}
    torch.testing.assert_close(program.module()(one)["like"], expected["like"][:1], rtol=1e-5, atol=1e-5)


def test_tables_of_8_bits_weigh_less_and_score_alike():
    torch.manual_seed(0)
    schema = Schema({"labels": ["click"]}, {"a": Id(hash_rows=500), "b": Id(hash_rows=90, hash="qr"), "c": Number()})
    model = rank.LiRank(schema, rank.LiRankConfig(30, rank=4, mlp=(8,))).eval()
    with torch.no_grad():
        model.inputs.tables()[0].weight.normal_()
    small = rank.quantize_tables(model)
    rows = 501 + 91 + 91
    assert (count_bytes(model)["tables"], count_bytes(small)["tables"]) == (120 * rows, 34 * rows)
    assert count_bytes(model)["rest"] == count_bytes(small)["rest"]
    assert model.config.bits == 32
    draw = torch.Generator().manual_seed(0)
    data = rank.Impressions.read({
        **{name: torch.randint(9999, (600,), generator=draw).numpy() for name in "ab"},
        "c": torch.randn(600, generator=draw).numpy(), "click": torch.randint(2, (600,), generator=draw).numpy(),
    }, schema=schema)  # fmt: skip
    model.schema = small.schema = data.schema
    found = compare_scores(model, small, data)
    assert 0 < found.mean < found.largest < 0.05
    before, after = found.auc["click"]
    assert before == pytest.approx(after, abs=0.01)
    with pytest.raises(ValueError, match=r"^rank\.quantize_tables: tables must have 32 bits, got 8-bit tables"):
        rank.quantize_tables(small)
    with pytest.raises(ValueError, match=r"8-bit tables cannot be trained; train first, then compress"):
        rank.fit(small, data, None, rank.FitOptions(epochs=1))
    with torch.no_grad():
        model.inputs.tables()[0].weight[3] = 1e6
    with pytest.raises(ValueError, match=r"weight must be finite and within ±65504"):
        rank.quantize_tables(model)


# ------------------------------------------------------------------------------------------------- what makes no model


def test_what_makes_no_model_is_refused():
    for options, words in (
        ({"width": 0}, "width must be positive and dropout in"),
        ({"cross": "deep"}, "cross must be one of 'residual', 'dcn', 'none', got 'deep'"),
        ({"rank": None}, "cross 'residual' needs rank"),
        ({"layers": 0}, "layers, rank and temperature must be positive, got 0"),
        ({"mlp": (4, 0)}, r"mlp must be positive widths, got \(4, 0\)"),
        ({"norm": "group"}, "norm must be one of 'none', 'batch', 'layer', got 'group'"),
        ({"bits": 4}, "bits must be 32 or 8, got 4"),
        ({"blocks": [{"kind": "mlp", "width": 4, "inputs": [0]}], "temperature": 0.0}, "temperature must be positive"),
        ({"calibrate": "contry"}, "calibrate must be .* an Id field's name, got 'contry'; did you mean 'country'"),
        ({"calibrate": "hashed"}, "calibrate must be .* got 'hashed'"),
        ({"towers": {"a": ["click"]}}, "towers must name each of the labels click, like once, got 'like' 0 times"),
        ({"towers": {"a": ["click", "like"], "b": ["buy"]}}, "towers must name .* got 'buy' 1 times"),
        ({"weights": {"buy": 1.0}}, r"weights must be for the labels \['click', 'like'\], got 'buy'"),
    ):
        with pytest.raises(ValueError, match=f"^LiRank: {words}"):
            made(**options)
    with pytest.raises(ValueError, match="the schema must name labels to learn, got none"):
        made(Schema({}, {"x": Number()}))
    with pytest.raises(ValueError, match="must have a field that is not text, got none"):
        made(Schema({"labels": "y"}, {"x": Text()}))
    model, requests = made(), drawn()
    with pytest.raises(ValueError, match="batch must have the field 'country', got"):
        model(dataclasses.replace(requests, context={"age": requests.context["age"]}))
    with pytest.raises(ValueError, match=r"LiRank.features: label must be one of click, like, got 'buy'"):
        model.features(requests, "buy")
    for options, words in (
        ({"hash_rows": 1}, "Id: hash_rows must be an integer of at least 2 .with 1, all values share a code., got 1"),
        ({"hash": "qr"}, "Id: hash 'qr' needs hash_rows, the number of rows"),
        ({"hash_rows": 5, "hash": "double"}, "Id: hash must be one of 'mod', 'qr', got 'double'"),
    ):
        with pytest.raises(ValueError, match=f"^{words}"):
            Id(**options)
    with pytest.raises(ValueError, match=r"LiGR: hash of an Id must be 'mod', got 'qr', which only LiRank reads"):
        rank.LiGR(QR, rank.LiGRConfig(16, 1, 2))
    with pytest.raises(ValueError, match=r"LiGR: the schema must name candidate items; .*, or use LiRank"):
        rank.LiGR(Schema({"labels": "y"}, {"x": Number()}), rank.LiGRConfig(16, 1, 2))
