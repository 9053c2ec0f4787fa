"""Every loss type has a reference, a case that tests compare, and a row in its page; the code in docstrings runs."""

from __future__ import annotations

import inspect
import math
import re
import textwrap
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import test_distillation
import test_policy
import test_preference
import torch
import torch.nn.functional as F

import tigon
from tigon import losses
from tigon.losses import distillation, policy
from tigon.losses.distillation.options import LOSS_TYPES, TOPK_LOSS_TYPES
from tigon.losses.policy import options as policy_options
from tigon.losses.preference import families, reference

DOCS = Path(__file__).parents[2] / "docs" / "losses"


def list_types(options: list[dict[str, Any]], default: str) -> set[str]:
    found = [given.get("loss_type", default) for given in options]
    return {kind for each in found for kind in ([each] if isinstance(each, str) else each)}


def preference_cases(name: str, default: str) -> set[str]:
    return list_types([options for family, options in test_preference.KINDS if family == name], default)


def distill_cases(is_topk: bool) -> set[str]:
    """The types whose kernels run, too."""
    kernels = [options for options, rest in test_distillation.BRANCHES if (rest is not None) == is_topk]
    return list_types(kernels, "") & set(test_distillation.KINDS[:-1] if is_topk else test_distillation.KINDS)


class Anything:
    """Options with any loss type, so that the reference alone can refuse a type."""

    def __init__(self, config: Any, loss_type: str) -> None:
        self.config, self.loss_type, self.types = config, loss_type, (loss_type,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)


def evaluate_reference(name: str, kind: str) -> torch.Tensor:
    """The reference's loss for a type; NotImplementedError without a formula."""
    x, head, target = torch.randn(4, 3, 5), tigon.Head(torch.randn(7, 5)), torch.zeros(4, 3, dtype=torch.long)
    if name == "grpo":
        config: Any = Anything(losses.GRPO(max_completion_length=3), kind)
        return policy.grpo_reference(x, head, target, torch.ones(4), config=config)[0]
    if name == "distill":
        config = Anything(losses.Distill(), kind)
        return distillation.distill_reference(x, head, losses.Hidden(x + 1, head), config=config)[0]
    if name == "distill_topk":
        topk, config = losses.TopK(target[..., None], -torch.ones(4, 3, 1)), Anything(losses.DistillTopK(), kind)
        return distillation.distill_topk_reference(x, head, topk, config=config)[0]
    logits = F.linear(x, head.weight)
    own = {"kto": (torch.tensor([True, False] * 2), torch.zeros(4)), "dpo": (None,)}.get(name, ())
    kinds = {"dpo": losses.DPO, "cpo": losses.CPO, "simpo": losses.SimPO, "kto": losses.KTO}
    config = Anything(kinds[name](label_smoothing=0.1) if name == "dpo" else kinds[name](), kind)
    return getattr(reference, f"{name}_reference")(logits, target, *own, config=config)


class Types(NamedTuple):
    """A public loss's types. known: the table that checks the options. words: those that type checkers see.

    cases: types that tests compare with the reference. page, column: the table with the types' rows.
    """

    name: str
    known: tuple[str, ...]
    config: Any
    cases: set[str]
    page: str
    column: str = "`loss_type`"

    @property
    def words(self) -> tuple[str, ...]:
        hint = typing.get_type_hints(self.config)["loss_type"]
        return typing.get_args(typing.get_args(hint)[0] if self.name == "dpo" else hint)

    def rows(self) -> set[str]:
        """The types that have a row with a formula."""
        tables = re.findall(r"(?:^\|.*\n)+", (DOCS / self.page).read_text(encoding="utf-8") + "\n", re.MULTILINE)
        (table,) = (t for t in tables if t.startswith(f"| {self.column} |"))
        return set(re.findall(r'^\| `"(\w+)"`[^|]*\| *[^ |]', table, re.MULTILINE))


TYPES = (
    Types("dpo", tuple(families.DPO_LOSSES), losses.DPO, preference_cases("dpo", "sigmoid"), "preference.md"),
    *(
        Types(
            name, known, config, preference_cases(name, config().loss_type), "preference.md", f"`loss_type` of `{name}`"
        )
        for name, known, config in (
            ("cpo", families.CPO_TYPES, losses.CPO), ("simpo", ("sigmoid", "hinge"), losses.SimPO),
            ("kto", families.KTO_TYPES, losses.KTO),
        )
    ),
    Types("grpo", policy.LOSS_TYPES, losses.GRPO, list_types([o for o, _ in test_policy.CASES], "dapo"), "policy.md"),
    Types("distill", LOSS_TYPES, losses.Distill, distill_cases(False), "distillation.md"),
    Types("distill_topk", TOPK_LOSS_TYPES, losses.DistillTopK, distill_cases(True), "distillation.md"),
)  # fmt: skip
# Losses with a single formula: the entry in their page.
SINGLE = {
    "orpo": "| `orpo` |", "rloo": "| `rloo` |", "coding_rate": "\n::: tigon.losses.coding_rate\n",
    "choice": "\n::: tigon.losses.choice\n", "choice_logits": "\n::: tigon.losses.choice_logits\n",
    "info_nce": "\n::: tigon.losses.info_nce\n",
}  # fmt: skip


@pytest.mark.parametrize("of", TYPES, ids=lambda of: of.name)
def test_every_type_has_a_reference_a_case_and_a_row(of):
    assert all(evaluate_reference(of.name, kind).isfinite() for kind in of.known)
    assert set(of.known) <= of.cases
    if of.name == "distill_topk":  # one type fewer than distill, whose words and rows it shares
        assert set(of.known) <= of.rows() & set(of.words)
    else:
        assert set(of.known) == of.rows() == set(of.words)
    with pytest.raises(NotImplementedError, match="'dummy' has no formula"):
        evaluate_reference(of.name, "dummy")


def test_every_public_loss_is_here():
    configs = [c for name in losses.__all__ if is_dataclass(c := getattr(losses, name))]
    assert {c for c in configs if "loss_type" in {f.name for f in fields(c)}} == {of.config for of in TYPES}
    functions = {name for name in losses.__all__ if inspect.isfunction(getattr(losses, name))}
    assert functions == {of.name for of in TYPES} | set(SINGLE)
    pages = "\n".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    assert all(entry in pages for entry in SINGLE.values())


@pytest.mark.parametrize("chunk_bytes", [1, None])
def test_a_row_is_a_type_of_dpo(chunk_bytes, monkeypatch):
    monkeypatch.setitem(families.DPO_LOSSES, "dummy", families.PairLoss(lambda p: (p.margin - 1).square() + p.ratio_l))
    x, weight, bias, target = test_preference.batch()
    ref = tuple(test_preference.given().values())
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    r_w, r_l = (reference.token_logps(F.linear(*leaves), target).sum(1) - torch.cat(ref)).chunk(2)
    m = 0.1 * (r_w - r_l)
    expected = ((m - 1) ** 2 + r_l).mean() - F.logsigmoid(m).mean()
    config, chunks = losses.DPO(loss_type=("sigmoid", "dummy")), losses.ChunkOptions(chunk_bytes=chunk_bytes)
    loss, _ = losses.dpo(leaves[0], tigon.Head(*leaves[1:]), target, ref, config=config, chunks=chunks)
    for got, right in zip(*((r, *torch.autograd.grad(r, leaves)) for r in (loss, expected)), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match=r"dpo: loss_type must be one of .*'sft', 'dummy', got 'dumy'"):
        losses.DPO(loss_type="dumy")
    with pytest.raises(ValueError, match=r"f_divergence_type must be 'reverse_kl' for \['dummy'\]"):
        losses.DPO(loss_type=["sigmoid", "dummy"], f_divergence_type="forward_kl")


def test_a_type_without_a_formula_is_refused(monkeypatch):
    """A type that stands in the table alone is not taken for a clipped loss."""
    monkeypatch.setattr(policy_options, "LOSS_TYPES", (*policy.LOSS_TYPES, "dummy"))
    monkeypatch.setitem(policy_options.POLICY_LOSSES, "dummy", policy_options.PolicyLoss("none", "tokens"))
    x, weight, target = torch.randn(2, 3, 4), torch.randn(7, 4), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(NotImplementedError, match="grpo: 'dummy' has no formula"):
        losses.grpo(x, weight, target, torch.ones(2), config=losses.GRPO(loss_type="dummy"))


# What docstrings replace: names for the code, and the call.
LOGPS = torch.randn(4), torch.randn(4)
REPLACED = {
    "dpo": ({"beta": 0.1, "ref": (LOGPS[0][:2], LOGPS[1][:2])}, lambda x, head, t, n: losses.dpo(x, head, t, n["ref"])),
    "simpo": ({"beta": 2.0, "gamma_beta_ratio": 0.25}, lambda x, head, t, n: losses.simpo(x, head, t)),
    "grpo": (
        {"epsilon": 0.1, "advantages": torch.randn(4), "old": -3 + torch.rand(4, 3)},
        lambda x, head, t, n: losses.grpo(
            x, head, t, losses.Rollout(n["advantages"], n["old"]), config=losses.GRPO(epsilon=0.1)
        ),
    ),
    "distill": (
        {"beta": 0.3, "teacher_x": torch.randn(4, 3, 6), "teacher_weight": torch.randn(7, 6)},
        lambda x, head, t, n: losses.distill(
            x.view(-1, 5), head.weight, losses.Hidden(n["teacher_x"].view(-1, 6), n["teacher_weight"]),
            config=losses.Distill(beta=0.3),
        ),
    ),
    "distill_topk": (
        {"teacher": losses.TopK(torch.arange(3).expand(4, 3, 3), torch.randn(4, 3, 3).log_softmax(-1) - 0.1)},
        lambda x, head, t, n: losses.distill_topk(
            x, head.weight, n["teacher"], config=losses.DistillTopK(rest="drop", reduction="sum")
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLACED)
def test_the_code_that_docstrings_replace(name):
    x, weight, bias = torch.randn(4, 3, 5), torch.randn(7, 5), torch.randn(7)
    target = torch.tensor([[0, 1, 2], [3, 4, -100], [5, -100, -100], [6, 6, 6]])
    names, call = REPLACED[name]
    own = {"F": F, "torch": torch, "math": math, "x": x, "weight": weight, "bias": bias, "target": target, **names}
    if name == "distill":
        own |= {"x": x.view(-1, 5), "teacher_x": names["teacher_x"].view(-1, 6)}
    code = re.search(r"Replaces.*::\n\n((?:    .*\n?|\n)+)", inspect.getdoc(getattr(losses, name)) or "")
    exec(textwrap.dedent(code[1]), own)
    scale = 4 if name == "distill_topk" else 1  # the code's "batchmean" divides by the first size
    torch.testing.assert_close(call(x, tigon.Head(weight, bias), target, names)[0], scale * own["loss"])
