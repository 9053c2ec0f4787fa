"""A part is one row: registered where CONTRIBUTING says, it is found by fuse, counted, reported and taken off again."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tigon
import tigon.fusion.model  # registers the parts
from tigon.fusion import part as registry
from tigon.fusion.part import PARTS, Part, register
from tigon.fusion.patch import plain_forward
from tigon.fusion.probe import CASES, probe_of, recognition, run
from tigon.fusion.report import KINDS
from tigon.ops import acts
from tigon.parts.mlp import recognize_mlp

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Doubled:
    """y = 2 x."""

    def __str__(self) -> str:
        return "2 · x"


@recognition
def recognize_doubled(module):
    if list(module.children()) or list(module.parameters()):
        return None
    probe = probe_of(module, {})
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


def test_a_part_is_one_row(monkeypatch):
    monkeypatch.setattr(registry, "PARTS", PARTS[:])
    monkeypatch.setattr("tigon.fusion.model.PARTS", registry.PARTS)
    register(Part("doubled", "mlp", recognize_doubled, doubled_forward))
    model, x = nn.Sequential(Twice(), TwiceWithAGradientOfItsOwn(), nn.ReLU()), torch.randn(3, 8)
    plain = model(x)
    with tigon.fuse(model) as fusion:
        assert torch.equal(model(x), plain)
        report = fusion.report()
        assert [(row.kind, row.name, row.what, row.calls) for row in report.fused] == [("doubled", "Twice", "2 · x", 1)]
        assert "Ran in the last step: doubled 1." in str(report)
        assert report.to_dict()["calls"] == {"doubled": 1}
    assert "forward" not in vars(model[0])
    with tigon.fuse(model, mlp=False) as fusion:
        assert not fusion.report().fused


def test_every_part_has_an_option_a_kind_and_a_word_in_the_docs():
    import inspect

    page = (ROOT / "docs/how-it-works/fuse.md").read_text()
    options = set(inspect.signature(tigon.fuse).parameters)
    assert {part.kind for part in PARTS} == {"norm", "mlp", "experts"}
    for part in PARTS:
        assert part.kind in KINDS
        assert part.option in options
        assert f"| `{part.option}` | `{part.kind}` |" in page
    files = {part.recognize.__module__.rpartition(".")[2] for part in PARTS}
    tests = "".join(p.read_text() for p in (ROOT / "tests").glob("*/test_*.py"))
    assert all(f"recognize_{name}(" in tests for name in files)


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


@pytest.mark.parametrize("name", ["norm", "mlp", "relu2", "experts"])
def test_recognition_reads_the_code(name):
    """Each registered recognition is behind the reading of the forward's code."""
    part = next(p for p in PARTS if p.recognize.__module__ == f"tigon.parts.{name}")
    assert part.recognize.__wrapped__.__name__ == f"recognize_{name}"
