"""A part is one registration: fuse finds it, counts it, reports it, copies it and takes it off again."""

import ast
import copy
import inspect
import weakref
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tigon
import tigon.fusion.engine.model
import tigon.fusion.parts
from tigon.fusion.engine import part as registry
from tigon.fusion.engine.part import REGISTRY, ModulePart, Part, Stage, list_kinds, register
from tigon.fusion.engine.patch import Patch, plain_forward
from tigon.fusion.engine.probe import CASES, build_probe, recognition, run
from tigon.fusion.engine.reasons import Reason
from tigon.fusion.parts.mlp_formula import recognize_mlp
from tigon.ops import acts

ROOT = Path(__file__).parents[2]


@pytest.fixture
def trial(monkeypatch):
    """register, for parts that are gone after the test."""
    monkeypatch.setattr(registry, "REGISTRY", REGISTRY[:])
    return register


def untouched(model):
    names = {"_tigon", "_tigon_fusion", "forward", "_replicate_for_data_parallel"}
    return not any(names & vars(module).keys() for module in model.modules())


@dataclass(frozen=True)
class Doubled:
    """y = 2 x."""

    def __str__(self) -> str:
        return "2 · x"


@recognition
def recognize_doubled(module):
    if list(module.children()) or list(module.parameters()):
        return None
    probe = build_probe(module, {})
    for case in CASES:
        x = case.input(8)
        with torch.set_grad_enabled(case.gradients):
            y = run(probe, x)
            if not case.agrees(y, x + x, [x]):
                return None
    return Doubled()


def doubled_forward(self, *args):
    patch = self._tigon
    if not patch.ledger.active or len(args) != 1 or not patch.still_holds(self):
        return plain_forward(self, *args)
    patch.ledger.count("doubled", patch.key)
    return args[0] + args[0]


class Twice(nn.Module):
    def forward(self, x):
        return 2 * x


class TwiceWithAGradientOfItsOwn(nn.Module):
    def forward(self, x):
        return x + x.detach()


def test_a_part_is_one_row(trial):
    trial(ModulePart("doubled", recognize_doubled, doubled_forward))
    model, x = nn.Sequential(Twice(), TwiceWithAGradientOfItsOwn(), nn.ReLU()), torch.randn(3, 8)
    plain = model(x)
    with tigon.fuse(model) as fusion:
        assert torch.equal(model(x), plain)
        report = fusion.report()
        assert [(row.kind, row.name, row.what, row.calls) for row in report.fused_rows] == [
            ("doubled", "Twice", "2 · x", 1)
        ]
        assert "Ran in the last step: doubled 1." in str(report)
        assert report.to_dict()["calls"] == {"doubled": 1}
    assert untouched(model)
    with tigon.fuse(model, parts=tigon.PARTS) as fusion:
        assert not fusion.report().fused_rows


# ------------------------------------------------------------------------------- a parent, and some of its children


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.left(x) + self.right(x)


def pair_forward(self, x):
    patch = self._tigon
    if patch.ledger.active:
        patch.ledger.count("pair", patch.key)
    return plain_forward(self, x)


class PairPart(Part):
    """Replaces two layers that one module holds, both or none, and tells one from the other by the formula."""

    kind, stage = "pair", Stage.AROUND

    def fuse(self, site, module):
        if not isinstance(module, Pair):
            return
        layers = [module.left, module.right]
        reason = next((why for layer in layers if (why := site.why_not(layer)) is not None), None)
        if reason is not None:
            site.record_skipped(self, module, reason)
            return
        patches = [Patch(self, site.ledger, side) for side in ("left", "right")]
        for layer, patch in zip(layers, patches, strict=True):
            site.install(layer, pair_forward, patch)
        site.record_fused(self, module, "left, right", *patches)


def test_a_part_may_replace_children_of_a_module_together(trial):
    trial(PairPart())
    model, x = nn.Sequential(Pair(), Pair()), torch.randn(3, 8)
    model[1].right.forward = lambda x: -x  # another library's
    plain = model(x)
    with tigon.fuse(model) as fusion:
        assert torch.equal(model(x), plain)
        rows = [(row.kind, row.fused, row.count, row.calls) for row in fusion.report().rows if row.kind == "pair"]
        assert rows == [("pair", True, 1, 2), ("pair", False, 1, 0)]
        assert model[0].left._tigon.formula == "left"
        assert "_tigon" not in vars(model[1].left), "both or none"
        twin = copy.deepcopy(model)
        twin(x)
        assert vars(twin)["_tigon_fusion"].report().calls == {"pair": 2}
        assert twin[0].left._tigon.ledger is not model[0].left._tigon.ledger
    del model[1].right.forward
    assert untouched(model)
    with tigon.fuse(model, parts=tigon.PARTS) as fusion:
        assert "pair" not in {row.kind for row in fusion.report().rows}


# -------------------------------------------------------------------------------------------------- the whole model


class Seen:
    """The tail that was fused; a copy of the model has a tail of its own."""

    def __init__(self):
        self.tail = lambda: None

    def __deepcopy__(self, memo):
        copied = Seen()
        copied.tail = weakref.ref(memo[id(self.tail())])
        return copied


class TailPart(Part):
    """Replaces the last module of a model, and again if another one took its place. Each forward holds its ledger."""

    kind, stage = "tail", Stage.MODEL

    def fuse(self, site, module):
        assert module is site.model, "of the whole model, once"
        tail = module[-1]
        site.get_cached(Seen).tail = weakref.ref(tail)
        forward = self.forward_of_copy(site, tail) if isinstance(tail, nn.Linear) else Reason("it is no linear layer")
        site.replace(self, tail, forward, None, "the last layer", key="tail")
        site.claim(tail)
        site.entrances.append(module)

    def is_stale(self, site):
        return site.model[-1] is not site.get_cached(Seen).tail()

    def forward_of_copy(self, site, module):
        ledger = site.ledger

        def forward(self, x):
            if ledger.active:
                ledger.count("tail", "tail")
            return plain_forward(self, x)

        return forward


def test_a_part_may_act_on_the_whole_model_and_again_when_the_model_changes(trial):
    trial(TailPart())
    trial(ModulePart("linear", lambda m: "x Wᵀ" if type(m) is nn.Linear else None, doubled_forward))
    model, x = nn.Sequential(nn.ReLU(), nn.Linear(8, 8)), torch.randn(3, 8)
    fusion = tigon.fuse(model)
    model(x)
    assert fusion.report().calls == {"tail": 1}, "the tail is claimed: no other part replaces it"
    twin = copy.deepcopy(model)
    first, model[-1] = model[-1], nn.Linear(8, 8)
    model(x)
    model(x)
    rows = [(row.name, row.what, row.count, row.calls) for row in fusion.report().fused_rows]
    assert rows == [("Linear", "the last layer", 1, 1)], "the row of the first tail is gone"
    assert untouched(first)
    model[-1] = nn.Identity()
    assert [str(row.what) for row in fusion.report().skipped_rows if row.kind == "tail"] == ["it is no linear layer"]
    twin(x)
    assert vars(twin)["_tigon_fusion"].report().calls == {"tail": 1}, "the copy's forward counts in the copy's ledger"
    assert fusion.report().calls == {"tail": 1}
    fusion.remove()
    vars(twin)["_tigon_fusion"].remove()
    assert untouched(model)
    assert untouched(twin)


# ----------------------------------------------------------------------------------------------------- completeness


def test_every_file_registers_one_part():
    run = [part.forward if isinstance(part, ModulePart) else type(part) for part in REGISTRY]
    assert tuple(r.__module__.removeprefix("tigon.fusion.parts.") for r in run) == tigon.fusion.parts.FILES
    assert set(list_kinds()) == tigon.PARTS
    for part in REGISTRY:
        assert not isinstance(part, ModulePart) or part.stage is Stage.MODULE
        assert f'"{part.kind}"' in tigon.fuse.__doc__ or part.argument in inspect.signature(tigon.fuse).parameters


def test_fuse_knows_no_part_by_name():
    """fuse's own files name neither a part's file nor its kind."""
    for name in ("model", "part", "patch", "step", "report"):
        code = (ROOT / f"src/tigon/fusion/engine/{name}.py").read_text()
        words = {node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)}
        assert words.isdisjoint(list_kinds()), name
        assert "from tigon.fusion.parts" not in code, name


def test_a_new_activation_is_recognised(monkeypatch):
    """A row of the table of activations is enough for MLPs."""

    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x):
            return self.down(F.softplus(self.gate(x)) * self.up(x))

    assert not hasattr(recognize_mlp(Gate()), "act")
    row = acts.Activation("softplus", F.softplus, None, "log(1 + exp(g))")
    monkeypatch.setitem(acts.ACTS, "softplus", row)
    assert recognize_mlp(Gate()).act == "softplus"
