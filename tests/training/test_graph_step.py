"""`tigon.graph_step`: the numbers of the eager step, a graph for each signature, a sentence for what a replay misses.

On a CPU there are no CUDA graphs. There the tests of what happens around a capture record by a stand-in, whose replay
runs the step again: numbers are those of the step in any case. What a real replay does is tested on a GPU.
"""

import contextlib
import copy
import random
import types
import warnings
from typing import ClassVar, NamedTuple

import numpy
import pytest
import torch
from torch import nn

import tigon
from tigon.fusion.logits import labels as labels_module
from tigon.kernels import is_captured, rehearsal
from tigon.training import capture

EAGER = 3  # the default of `warmup`


class Both(NamedTuple):
    loss: torch.Tensor
    rows: torch.Tensor


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def step_of(model, optimizer):
    def step(x, y, scale=1.0):
        loss = (model(x) - y).square().mean() * scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def batches(n, rows=(4,)):
    generator = torch.Generator().manual_seed(1)
    sizes = [rows[i % len(rows)] for i in range(n)]
    return [(torch.randn(m, 6, generator=generator), torch.randn(m, 1, generator=generator)) for m in sizes]


def trained(wrap, steps, make=sgd):
    """Losses of the steps and the weights after them."""
    model = network()
    optimizer = make(model)
    step = wrap(step_of(model, optimizer), optimizer)
    losses = [step(*args, **options).detach() for args, options in steps]
    return torch.stack(losses), list(model.parameters()), step


def plain(step, optimizer):
    return step


def same(got, expected):
    assert torch.equal(got[0], expected[0])
    assert all(torch.equal(a, b) for a, b in zip(got[1], expected[1], strict=True))


class StandIn:
    """A recorder whose replay runs the step again, and whose capture changes no weights, as a real one does not."""

    world: ClassVar[list] = []

    def __init__(self, device):
        self.device, self.waits, self.forgotten = device, [], 0

    @contextlib.contextmanager
    def enter_stream(self):
        yield

    def hand_over(self, results):
        pass

    def forget(self):
        self.forgotten += 1

    def record(self, run):
        before = [(t, t.detach().clone()) for t in self.tensors()]
        missing = [p for p in self.parameters() if p.grad is None]
        first = run()
        with torch.no_grad():
            for t, value in before:
                t.copy_(value)
        made = [(p, p.grad) for p in missing if p.grad is not None]

        def replay():
            for mine, fresh in zip(first[1], run()[1], strict=True):
                mine.copy_(fresh)
            for p, grad in made:
                if p.grad is not None:
                    grad.copy_(p.grad)

        return first, replay

    def parameters(self):
        return [p for optimizer in self.world for group in optimizer.param_groups for p in group["params"]]

    def tensors(self):
        for optimizer in self.world:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    yield from (p,) if p.grad is None else (p, p.grad)
                    # Not the step counters, which are on the host even where the weights are not.
                    yield from (t for t in optimizer.state[p].values() if isinstance(t, torch.Tensor) and t.dim())


@pytest.fixture
def recorded(monkeypatch):
    """Captures are possible here; wrap(step, optimizer, **options) makes a GraphStep that the stand-in knows."""
    monkeypatch.setattr(capture, "can_capture", lambda device: True)
    monkeypatch.setattr(capture, "Recorder", StandIn)
    monkeypatch.setattr(StandIn, "world", [])

    def wrap(step, optimizer, **options):
        StandIn.world.append(optimizer)
        return tigon.graph_step(step, optimizer, **options)

    return wrap


# ---------------------------------------------------------------------------------------------------- without a graph


def test_on_a_cpu_every_call_is_eager():
    steps = [(b, {}) for b in batches(6)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = trained(tigon.graph_step, steps)
    same(got, trained(plain, steps))
    assert (got[2].graphs, got[2].replays, got[2].eager) == (0, 0, 6)
    assert repr(got[2]).startswith("GraphStep(")
    assert repr(got[2]).endswith("step: 0 graphs, 0 replays, 6 eager calls)")


def test_arguments_and_results_keep_their_form():
    x = torch.ones(2)

    def step(batch, name, *, sizes):
        return {"sum": batch["x"] + batch["y"][0], "name": name, "both": Both(batch["x"] * sizes[0], batch["x"])}

    got = tigon.graph_step(step, None)({"x": x, "y": (x,)}, "a", sizes=[2, None])
    assert torch.equal(got["sum"], x + x)
    assert got["name"] == "a"
    assert type(got["both"]) is Both
    assert torch.equal(got["both"].loss, 2 * x)


@pytest.mark.parametrize(
    ("make", "kind", "sentence"),
    [
        (lambda m: tigon.graph_step(3, None), TypeError, "step must be a function, got int"),
        (lambda m: tigon.graph_step(len, m), TypeError, "optimizer must be a torch.optim.Optimizer, several, or None"),
        (lambda m: tigon.graph_step(len, None, warmup=0), ValueError, "warmup must be an integer, at least 1, got 0"),
        (lambda m: tigon.graph_step(len, None, max_graphs=True), ValueError, "max_graphs must be an integer"),
        (lambda m: tigon.graph_step(len, sgd(m), gradients=m.parameters()), ValueError, "gradients must be None where"),
        (
            lambda m: tigon.graph_step(len, tigon.training.MicroBatchSAM(sgd(m))),
            TypeError, "optimizer must not be a MicroBatchSAM, which cannot be captured",
        ),
        (lambda m: tigon.graph_step(m, None)(m), TypeError, r"arguments of the step must be .*, got Sequential\."),
        (lambda m: tigon.graph_step(m, None)(m[0].weight), ValueError, "arguments of the step must not require grad"),
        (lambda m: tigon.graph_step(lambda: m, None)(), TypeError, r"results of the step must be .*, got Sequential\."),
        (
            lambda m: tigon.graph_step(lambda x: x.to_sparse(), None)(torch.ones(2)),
            TypeError, r"results of the step must be plain tensors, got a tensor of torch.sparse_coo\.",
        ),
        (
            lambda m: tigon.graph_step(lambda x: x.as_subclass(labels_module.Labels), None)(torch.ones(2)),
            TypeError, r"results of the step must be plain tensors, got Labels\.",
        ),
    ],
)  # fmt: skip
def test_bad_arguments_get_a_sentence(make, kind, sentence):
    with pytest.raises(kind, match=f"graph_step: {sentence}"):
        make(network())


def test_an_optimizer_that_is_not_named_is_refused_before_it_steps():
    model = network()
    before = copy.deepcopy(model.state_dict())
    step = tigon.graph_step(step_of(model, sgd(model)), sgd(model))
    with pytest.raises(ValueError, match=r"must name every optimizer .* got a step that calls SGD.step\(\) of another"):
        step(*batches(1)[0])
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    sgd(model).step()  # the watch ends with the call


def test_an_optimizer_around_another_is_that_other(recorded):
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

        param_groups = property(lambda self: self.optimizer.param_groups)
        state = property(lambda self: self.optimizer.state)

        def step(self):
            self.optimizer.step()

        def zero_grad(self):
            self.optimizer.zero_grad()

    steps = [(b, {}) for b in batches(EAGER + 2)]
    got = trained(recorded, steps, make=lambda m: Wrapper(sgd(m)))
    same(got, trained(plain, steps))
    assert got[2].replays == 2


# ---------------------------------------------------------------------------------------------------- around a capture


def test_the_numbers_are_those_of_eager_steps(recorded):
    steps = [(b, {}) for b in batches(17, rows=(4, 4, 7))]
    got = trained(recorded, steps)
    same(got, trained(plain, steps))
    assert (got[2].graphs, got[2].eager, got[2].replays) == (2, 2 * EAGER, 17 - 2 * EAGER)
    assert all(p.grad is None for p in got[1])


def test_another_number_is_another_graph(recorded):
    scales = [1, 1.0, True, 2.0] * (EAGER + 2)
    steps = [(b, {"scale": s}) for b, s in zip(batches(len(scales)), scales, strict=True)]
    got = trained(recorded, steps)
    same(got, trained(plain, steps))
    assert got[2].graphs == 4


def test_modes_are_part_of_the_signature(recorded):
    x = torch.ones(2, 6)
    layer = nn.Linear(6, 6)
    step = tigon.graph_step(lambda x: layer(x), None, warmup=1)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            for _ in range(3):
                assert torch.equal(step(x), layer(x))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        for _ in range(3):
            assert step(x).dtype == torch.bfloat16
    assert step.graphs == 4


def test_beyond_max_graphs_steps_are_eager_and_it_is_said_once(recorded):
    steps = [(b, {}) for b in batches(8 * (EAGER + 1), rows=(2, 3, 4, 5))]
    with pytest.warns(UserWarning, match="runs eagerly with further shapes: max_graphs=2 graphs are kept") as said:
        got = trained(lambda *given: recorded(*given, max_graphs=2), steps)
    assert len(said) == 1
    same(got, trained(plain, steps))
    assert got[2].graphs == 2


def test_signatures_that_never_come_again_are_forgotten(recorded, monkeypatch):
    monkeypatch.setattr(capture, "_COUNTED", 5)
    step = tigon.graph_step(lambda x: x + 1, None)
    for n in range(1, 40):
        assert torch.equal(step(torch.zeros(n)), torch.ones(n))
    assert len(step._rehearsed) <= 5


def test_inputs_are_not_written_to_and_results_stay_when_the_graph_runs_again(recorded):
    weight = torch.ones(3, requires_grad=True)
    step = tigon.graph_step(lambda x: x.add_(1) * weight, None, warmup=1)
    inputs = [torch.full((3,), float(i)) for i in range(4)]
    results = [step(x) for x in inputs]
    assert [(x[0].item(), r[0].item(), r.requires_grad) for x, r in zip(inputs, results, strict=True)] == [
        (i, i + 1, False) for i in range(4)
    ]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_may_be_emptied_anywhere(recorded, inside, to_none):
    """Kept gradients are added to by the graph, so that it works on the tensors that the caller sets to zero."""

    def run(wrap):
        model = network()
        optimizer = sgd(model)

        def step(x, y):
            if inside:
                optimizer.zero_grad(set_to_none=to_none)
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        step, losses = wrap(step, optimizer), []
        for batch in batches(9):
            if not inside:
                optimizer.zero_grad(set_to_none=to_none)
            losses.append(step(*batch).detach())
        return torch.stack(losses), list(model.parameters()), step

    got = run(recorded)
    same(got, run(plain))
    assert got[2].replays == 9 - EAGER
    assert all((p.grad is None) == to_none for p in got[1])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_are_left_for_an_optimizer_outside(accumulation, recorded):
    """A micro-batch with no gradients before it makes them, in a graph of its own; the others add to them."""

    def run(wrap):
        model = network()
        optimizer = sgd(model)
        StandIn.world = [optimizer]

        def passes(x, y):
            loss = (model(x) - y).square().mean()
            loss.backward()
            return loss

        step = wrap(passes, None, gradients=model.parameters()) if wrap else passes
        kept, losses = {}, []
        for i, batch in enumerate(batches(8 * accumulation, rows=(4, 4, 5))):
            losses.append(step(*batch).detach())
            if (i + 1) % accumulation == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                if accumulation > 1:  # all graphs add to the same gradients
                    kept = kept or {p: torch.zeros_like(p) for p in model.parameters()}
                    for p, grad in kept.items():
                        p.grad = grad.zero_()
        return torch.stack(losses), list(model.parameters()), step

    got = run(tigon.graph_step)
    same(got, run(None))
    assert (got[2].graphs, got[2].replays) == {1: (1, 3), 2: (2, 9)}[accumulation]


def test_a_layer_that_is_frozen_or_moved_gets_another_graph(recorded):
    model = network()
    step = tigon.graph_step(lambda x: model(x).sum().backward(), None, gradients=model.parameters(), warmup=1)
    StandIn.world = [sgd(model)]
    x = torch.ones(2, 6)
    for _ in range(3):
        model.zero_grad()
        step(x)
    model[0].weight.requires_grad_(False)
    for _ in range(3):
        model.zero_grad()
        step(x)
        assert model[0].weight.grad is None
        assert model[0].bias.grad is not None
    assert step.graphs == 2
    model[2].weight.data = model[2].weight.data.clone()
    model.zero_grad()
    with pytest.warns(UserWarning, match="captures again"):
        step(x)


REPLACED = {
    "weights": lambda model, optimizer: setattr(model[0].weight, "data", model[0].weight.data.clone()),
    "state": lambda model, optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "gradients": lambda model, optimizer: optimizer.zero_grad(),
}


@pytest.mark.parametrize("what", REPLACED)
def test_memory_that_was_replaced_is_captured_anew(what, recorded):
    def run(wrap):
        model = network()
        optimizer = sgd(model)

        def step(x, y):
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        step, losses = wrap(step, optimizer), []
        for i, batch in enumerate(batches(2 * EAGER + 4)):
            if i == EAGER + 2:
                REPLACED[what](model, optimizer)
            losses.append(step(*batch).detach())
            optimizer.zero_grad(set_to_none=False)  # the graph adds to these gradients
        return torch.stack(losses), list(model.parameters()), step

    with pytest.warns(UserWarning, match="captures again: the memory of parameters, gradients or optimizer state"):
        got = run(recorded)
    same(got, run(plain))
    assert (got[2].eager, got[2].replays, got[2]._recorder.forgotten) == (2 * EAGER, 4, 1)


def test_a_learning_rate_that_changed_is_refused(recorded):
    model = network()
    optimizer = sgd(model)
    step = recorded(step_of(model, optimizer), optimizer)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for batch in batches(EAGER):
        step(*batch)
        schedule.step()  # eager steps see it
    step(*batches(1)[0])
    step(*batches(1)[0])
    schedule.step()
    weights = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"optimizer's lr must stay as it was in the capture, 0\.0125, got 0\.00625"):
        step(*batches(1)[0])
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    step.reset()
    step(*batches(1)[0])


REFUSED = {  # what a step does with its optimizer and loss after the backward pass, and how many calls run eagerly
    "no step": (sgd, lambda o, loss: loss, r"step must call SGD.step\(\) itself in every call", 1),
    "a number": (sgd, lambda o, loss: [o.step(), loss.item()], "results of the step must be tensors on cpu", 1),
    "torch's draw": (sgd, lambda o, loss: [o.step(), torch.rand(()) + loss][1], "must draw its .* on the GPU", EAGER),
    "Python's draw": (sgd, lambda o, loss: [o.step(), loss * random.random()][1], "must draw its .* GPU", EAGER),
    "NumPy's draw": (  # of the generator that models share
        sgd, lambda o, loss: [o.step(), loss * numpy.random.rand()][1],  # noqa: NPY002
        "must draw its .* GPU", EAGER,
    ),
    "counts": (  # its step counters are on the CPU, and it does not say whether it can be captured
        lambda m: torch.optim.Adagrad(m.parameters()), lambda o, loss: [o.step(), o.zero_grad()],
        "step must not change Adagrad's state 'step' .* An optimizer that counts on the host cannot be captured", EAGER,
    ),
    "a schedule": (
        sgd, lambda o, loss: [o.step(), o.param_groups[0].update(lr=o.param_groups[0]["lr"] / 2)],
        "step must not change SGD's lr from the host.* Call schedulers after the step", EAGER,
    ),
    "not capturable": (
        lambda m: torch.optim.AdamW(m.parameters()), lambda o, loss: loss,
        "optimizer must be made with capturable=True.* got AdamW with capturable=False", 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_no_replay_repeats_is_refused(name, recorded):
    make, body, sentence, eager = REFUSED[name]
    model = network()
    optimizer = make(model)

    def step(x, y):
        loss = (model(x) - y).square().mean()
        loss.backward()
        return body(optimizer, loss)

    step = recorded(step, optimizer)
    with pytest.raises((RuntimeError, ValueError), match=f"graph_step: .*{sentence}"):  # noqa: PT012
        for batch in batches(EAGER + 1):
            step(*batch)
    assert (step.eager, step.graphs) == (eager, 0)


def test_autocast_around_the_call_is_refused(recorded):
    step = tigon.graph_step(lambda x: x, None)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast must be entered inside step"):
        step(torch.ones(2))


def test_tensors_elsewhere_are_refused_or_said(recorded, monkeypatch):
    with pytest.raises(ValueError, match="arguments of the step must be on one GPU, got tensors on cpu and meta"):
        tigon.graph_step(lambda x, y: x, None)(torch.ones(2), torch.ones(2, device="meta"))
    # The weights can be captured, what the step is called with cannot.
    monkeypatch.setattr(capture, "can_capture", lambda device: device.type == "cpu")
    model = network()
    step = tigon.graph_step(lambda x: x, sgd(model))
    with pytest.warns(
        UserWarning, match="runs eagerly: the tensors it is called with are not on the parameters' device"
    ):
        step(torch.ones(2, device="meta"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(torch.ones(2, device="meta"))


def test_warnings_of_a_rehearsal_come_through_but_for_that_of_the_capture_to_come(recorded):
    def step(x):
        warnings.warn("of the step", stacklevel=1)
        warnings.warn("step() is running without CUDA graph capture. If you never intend to", stacklevel=1)
        return x

    with pytest.warns(UserWarning, match="of the step") as said:
        tigon.graph_step(step, None)(torch.ones(1))
    assert len(said) == 1


def test_rehearsals_take_the_paths_of_the_capture(recorded):
    """Kernels of other sizes would have to be compiled in the capture."""
    seen = []
    on_a_gpu = types.SimpleNamespace(is_cuda=True)

    def step(x):
        seen.append(rehearsal.active and is_captured(on_a_gpu) and not labels_module.is_far(on_a_gpu))
        return x

    step = tigon.graph_step(step, None)
    step(torch.ones(1))
    assert seen == [True]
    assert not rehearsal.active
    assert not is_captured(torch.ones(1))
