"""Every type of a loss has a formula in the reference, a case that the tests run, and a row in its page.

`missing` takes the types as an argument, so that the last tests can hand it one that has nothing of this.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import test_distillation
import test_policy
import test_preference
import torch
import torch.nn.functional as F
from ops_table import OPS

import tigon
from tigon import losses, nn
from tigon.losses import CPO, DPO, GRPO, KTO, SimPO, distillation, policy
from tigon.losses.distillation import options as distillation_options
from tigon.losses.policy import options as policy_options
from tigon.losses.preference import families

DOCS = Path(__file__).parents[2] / "docs" / "losses"


def values(test: Callable[..., Any], *names: str) -> list[Any]:
    """What a test is parametrized with under these names, which stand together in one mark."""
    for mark in test.pytestmark:  # type: ignore[attr-defined]
        given = mark.args[0] if isinstance(mark.args[0], str) else ",".join(mark.args[0])
        if [name.strip() for name in given.split(",")] == list(names):
            return list(mark.args[1])
    raise AssertionError(f"{test.__name__} is not parametrized with {names}")


def types_in(options: dict[str, Any], default: str) -> list[str]:
    found = options.get("loss_type", default)
    return [found] if isinstance(found, str) else list(found)


def preference_cases(name: str, default: str) -> set[str]:
    """Those that are compared with the reference, values and gradients."""
    of = values(test_preference.test_every_type_is_its_formula_of_whole_logits, "name", "options")
    return {kind for family, options in of if family == name for kind in types_in(options, default)}


def preference_reference(name: str, kind: str) -> torch.Tensor:
    logits, target = torch.randn(4, 3, 7), torch.zeros(4, 3, dtype=torch.long)
    options: dict[str, Any] = {"loss_type": kind}
    if name == "dpo":
        options["label_smoothing"] = 0.1
    if name == "kto":
        options |= {"label": torch.tensor([True, False, True, False]), "ref_logps": torch.zeros(4)}
    return test_preference.REFERENCES[name](logits, target, **options)


class Anything:
    """Options whose types are not looked at, so that the reference alone can refuse one."""

    def __init__(self, config: Any, loss_type: str) -> None:
        self.config, self.loss_type = config, loss_type

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)


def policy_reference(kind: str) -> torch.Tensor:
    x, weight, target = torch.randn(2, 3, 4), torch.randn(7, 4), torch.zeros(2, 3, dtype=torch.long)
    config: Any = Anything(GRPO(max_completion_length=3), kind)
    return policy.grpo_reference(x, weight, target, torch.ones(2), config=config)[0]


def distill_reference(kind: str) -> torch.Tensor:
    x, head, config = torch.randn(3, 4), tigon.Head(torch.randn(7, 4)), Anything(losses.Distill(), kind)
    return distillation.distill_reference(x, head, losses.Hidden(x + 1, head), config=config)[0]


def topk_reference(kind: str) -> torch.Tensor:
    ids = torch.tensor([[0, 1]]).expand(3, 2)
    x, head, config = torch.randn(3, 4), tigon.Head(torch.randn(7, 4)), Anything(losses.DistillTopK(), kind)
    return distillation.distill_topk_reference(x, head, losses.TopK(ids, -torch.ones(3, 2)), config=config)[0]


def distill_cases(op: str, test: Callable[..., Any], default: str) -> set[str]:
    """Those that are compared with the reference, and whose kernels run."""
    (row,) = (row for row in OPS if row.name == op)
    topk = op == "distill_topk"
    branches = {
        options["loss_type"]
        for options, rest in values(test_distillation.test_kernels, "options", "rest")
        if (rest is not None) == topk
    }
    kernels = branches | {kind for case in row.cases for kind in types_in(case.options, default)}
    return kernels & set(values(test, "kind"))


@dataclass(frozen=True)
class Types:
    """The types of one public loss.

    known: the table that its options are checked by. words: those that type checkers see. reference: what computes a
    type, and raises for one that it has no formula of. cases: types that tests compare with the reference. page and
    heading: where the rows are; of several tables there, the one whose first cell holds `column`.
    """

    name: str
    known: tuple[str, ...]
    words: tuple[str, ...]
    reference: Callable[[str], torch.Tensor]
    cases: frozenset[str]
    page: str
    column: str = "`loss_type`"


def of_preference(name: str, config: Any, known: Sequence[str], column: str) -> Types:
    hints = typing.get_type_hints(config)["loss_type"]
    words = typing.get_args(typing.get_args(hints)[0]) if name == "dpo" else typing.get_args(hints)
    cases = frozenset(preference_cases(name, config().loss_type))

    def reference(kind: str) -> torch.Tensor:
        return preference_reference(name, kind)

    return Types(name, tuple(known), words, reference, cases, "preference.md", column)


def words_of(config: Any) -> tuple[str, ...]:
    return typing.get_args(typing.get_type_hints(config)["loss_type"])


POLICY_CASES = frozenset(
    kind
    for options, _ in values(test_policy.test_formulas, "options", "which")
    for kind in types_in(options, GRPO().loss_type)
)
TYPES = (
    of_preference("dpo", DPO, tuple(families.DPO_LOSSES), "`loss_type`"),
    of_preference("cpo", CPO, families.CPO_TYPES, "`loss_type` of `cpo`"),
    of_preference("simpo", SimPO, words_of(SimPO), "`loss_type` of `simpo`"),
    of_preference("kto", KTO, families.KTO_TYPES, "`loss_type` of `kto`"),
    Types("grpo", policy.LOSS_TYPES, words_of(GRPO), policy_reference, POLICY_CASES, "policy.md"),
    Types(
        "distill", distillation_options.LOSS_TYPES, words_of(losses.Distill), distill_reference,
        frozenset(distill_cases("distill", test_distillation.test_every_kind_is_that_of_whole_logits, "jsd")),
        "distillation.md",
    ),
    Types(
        "distill_topk", distillation_options.TOPK_LOSS_TYPES, distillation_options.TOPK_LOSS_TYPES, topk_reference,
        frozenset(
            distill_cases(
                "distill_topk", test_distillation.test_every_kind_of_given_classes_is_that_of_whole_logits, "kl"
            )
        ),
        "distillation.md",
    ),
)  # fmt: skip
# Losses of one formula, which have no types: the page that has them in a table.
SINGLE = {"orpo": "preference.md", "rloo": "policy.md"}
# Losses of one formula that their own tests write out: the page that has their entry.
OWN_TESTS = {"coding_rate": "coding-rate.md", "choice": "choice.md", "choice_logits": "choice.md"}


def tables(text: str) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Each table of a page: the first cell of its head, and the cells of its rows."""
    for block in re.findall(r"(?:^\|.*\n)+", text + "\n", re.MULTILINE):
        rows = [
            tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|")))
            for line in block.splitlines()
        ]
        yield rows[0][0], rows[2:]


def rows_of(of: Types, text: str) -> set[str]:
    """The types that have a row with a formula."""
    (rows,) = (rows for head, rows in tables(text) if head == of.column)
    return {found[1] for cell, formula, *_ in rows if formula and (found := re.match(r'`"(\w+)"`', cell))}


def has_reference(of: Types, kind: str) -> bool:
    try:
        return bool(of.reference(kind).isfinite())
    except NotImplementedError:
        return False


def missing(of: Types, known: Sequence[str] | None = None, page: str | None = None) -> list[str]:
    """What the types lack, a sentence each."""
    known = of.known if known is None else known
    rows = rows_of(of, (DOCS / of.page).read_text(encoding="utf-8") if page is None else page)
    found = []
    for kind in known:
        if not has_reference(of, kind):
            found.append(f"{of.name}'s {kind} has no formula in the reference")
        if kind not in of.cases:
            found.append(f"{of.name}'s {kind} has no case in the tables of tests/losses")
        if kind not in rows:
            found.append(f"{of.name}'s {kind} has no row in docs/losses/{of.page}")
        if kind not in of.words:
            found.append(f"{of.name}'s {kind} is not among the words of its options' type")
    # The rows of distill are those of distill_topk as well, which has one kind less.
    if of.name != "distill_topk":
        found += [f"{of.name} has no {kind}, which has a row in docs/losses/{of.page}" for kind in rows - set(known)]
    found += [f"{of.name} does not take {kind}, a word of its options' type" for kind in set(of.words) - set(known)]
    return found


@pytest.mark.parametrize("of", TYPES, ids=lambda of: of.name)
def test_every_type_has_a_reference_a_case_and_a_row(of):
    assert not missing(of)


def test_every_option_that_is_a_loss_type_is_among_them():
    """Of all public options, found by their field: a new family of types is a new row of TYPES."""
    configs = [c for name in losses.__all__ if is_dataclass(c := getattr(losses, name))]
    typed = {c.__name__.lower() for c in configs if "loss_type" in {f.name for f in fields(c)}}
    assert typed == {of.name.replace("_", "") for of in TYPES}


def test_every_public_loss_has_a_reference():
    functions = {name for name in losses.__all__ if inspect.isfunction(getattr(losses, name))}
    assert functions == {of.name for of in TYPES} | set(SINGLE) | set(OWN_TESTS)
    assert {
        name for name, _ in values(test_preference.test_every_type_is_its_formula_of_whole_logits, "name", "options")
    } == set(test_preference.REFERENCES)
    for name, page in SINGLE.items():
        first = [cells[0] for _, rows in tables((DOCS / page).read_text(encoding="utf-8")) for cells in rows]
        assert f"`{name}`" in first
    for name, page in OWN_TESTS.items():
        assert f"\n::: tigon.losses.{name}\n" in (DOCS / page).read_text(encoding="utf-8")


# ---------------------------------------------------------------------------------------------- contributions, tried


@pytest.fixture
def dummy(monkeypatch):
    """A type of DPO that stands in the one place of the source that CONTRIBUTING.md names."""
    row = families.PairLoss(lambda p: (p.margin - 1).square() + p.ratio_l)
    monkeypatch.setitem(families.DPO_LOSSES, "dummy", row)


@pytest.mark.parametrize("chunk_bytes", [1, None])
@pytest.mark.parametrize("kinds", ["dummy", ("sigmoid", "dummy")], ids=str)
def test_a_row_is_a_type_of_dpo(dummy, kinds, chunk_bytes):
    x, weight, bias, target = test_preference.batch()
    given = test_preference.given()
    ref = tuple(given.values())
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    logps = test_preference.reference.token_logps(F.linear(*leaves), target).sum(1)
    r_w, r_l = (logps - torch.cat(ref)).chunk(2)
    m = 0.1 * (r_w - r_l)
    expected = ((m - 1) ** 2 + r_l).mean()
    if kinds != "dummy":
        expected = expected - F.logsigmoid(m).mean()
    wanted = torch.autograd.grad(expected, leaves)
    config, chunks = DPO(loss_type=kinds), losses.ChunkOptions(chunk_bytes=chunk_bytes)
    head = tigon.Head(*leaves[1:])
    by_function = losses.dpo(leaves[0], head, target, ref, config=config, chunks=chunks)[0]
    for loss in (by_function, nn.DPOLoss(config, chunks)(leaves[0], head, target, ref)[0]):
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
        for got, right in zip(torch.autograd.grad(loss, leaves), wanted, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-12)


def test_a_row_is_in_the_sentences_of_dpo(dummy):
    with pytest.raises(ValueError, match=r"dpo: loss_type must be one of .*'sft', 'dummy', got 'dumy'"):
        DPO(loss_type="dumy")
    # What a row does not claim, it is not taken for.
    with pytest.raises(ValueError, match=r"f_divergence_type must be 'reverse_kl' for \['dummy'\]"):
        DPO(loss_type=["sigmoid", "dummy"], f_divergence_type="forward_kl")


def lacking(of):
    return [
        "has no formula in the reference", "has no case in the tables of tests/losses",
        f"has no row in docs/losses/{of.page}", "is not among the words of its options' type",
    ]  # fmt: skip


def test_a_row_without_the_rest_is_not_complete(dummy):
    of = TYPES[0]
    found = missing(of, tuple(families.DPO_LOSSES))
    assert [re.sub(".*'s dummy ", "", sentence) for sentence in found] == lacking(of)


@pytest.mark.parametrize("of", TYPES, ids=lambda of: of.name)
def test_a_type_that_has_nothing_is_missed_everywhere(of):
    found = missing(of, (*of.known, "dummy"))
    assert [re.sub(".*'s dummy ", "", sentence) for sentence in found] == lacking(of)


@pytest.mark.parametrize("of", TYPES, ids=lambda of: of.name)
def test_a_row_that_is_removed_is_missed(of):
    page = (DOCS / of.page).read_text(encoding="utf-8")
    for kind in of.known:
        heads = [line for line in page.splitlines() if line.startswith(f"| {of.column} |")]
        assert len(heads) == 1
        before, head, after = page.partition(heads[0])
        without = before + head + re.sub(rf'^\| `"{kind}"`.*\n', "", after, count=1, flags=re.MULTILINE)
        assert missing(of, page=without) == [f"{of.name}'s {kind} has no row in docs/losses/{of.page}"]


def test_a_word_alone_is_no_loss_of_a_policy(monkeypatch):
    """It is refused, not taken for the clipped ones."""
    monkeypatch.setattr(policy_options, "LOSS_TYPES", (*policy.LOSS_TYPES, "dummy"))
    monkeypatch.setitem(policy_options.POLICY_LOSSES, "dummy", policy_options.PolicyLoss("none", "tokens"))
    x, weight, target = torch.randn(2, 3, 4), torch.randn(7, 4), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(NotImplementedError, match="grpo: 'dummy' has no formula"):
        losses.grpo(x, weight, target, torch.ones(2), config=GRPO(loss_type="dummy"))
