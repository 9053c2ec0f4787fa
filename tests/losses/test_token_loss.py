"""The walk behind losses of log-probabilities: whatever the parts, the answer of whole logits, to fp64."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from flat import token_loss
from modes import Watch
from torch.utils.checkpoint import checkpoint

from tigon.losses import ValidLengths
from tigon.losses.family import BATCH, FAMILIES, Family
from tigon.losses.operator import record

# torch's word for a buffer that is too small.
pytestmark = pytest.mark.filterwarnings("error:An output with one or more elements was resized")

S, T, H, V = 6, 50, 16, 70


@record
class ToyOptions(NamedTuple):
    group_size: int  # how sequences go group_size


class ToyTensors(NamedTuple):
    sequence: torch.Tensor | None = None
    token: torch.Tensor | None = None


class Toy(Family):
    """Every number of a part has a share in the loss."""

    key = "toy"
    Options = ToyOptions
    Tensors = ToyTensors
    sums = ("count",)
    per_token = ("logprob",)
    wants_entropy = True
    wants_mean_logit = True

    def group_size(self):
        return self.options.group_size

    @property
    def per_sequence(self):
        return ("total",) if self.group_size() else ()

    def __call__(self, part):
        sequence, token = part.tensors
        found = {"count": part.mask.sum(), "logprob": part.logprob}
        loss = 0.1 * (part.entropy * part.mask).sum()
        if self.group_size() == 0:
            loss = loss + (sequence * part.logprob.exp() * token * part.mask).sum()
        else:
            found["total"] = total = (part.logprob * token).sum(1, keepdim=True)
            if self.group_size() == 2:  # the first of all pairs, then the second
                first, second = total.chunk(2)
                loss = loss + F.logsigmoid(first - second).sum()
            else:
                loss = loss + F.logsigmoid(sequence * total).sum()
        if part.reference is not None:
            loss = loss + (part.reference * part.logprob).sum()
        return loss, found


@pytest.fixture(autouse=True)
def _toy(monkeypatch):
    monkeypatch.setitem(FAMILIES, "toy", Toy)


def batch(device):
    x, weight, bias = (torch.randn(s, device=device, dtype=torch.float64) for s in ((S, T, H), (V, H), (V,)))
    target = torch.randint(0, V, (S, T), device=device)
    target[:, :12] = -100
    target[2] = -100  # a sequence without anything that counts
    target[4, 20:] = -100
    tensors = torch.randn(S, device=device, dtype=torch.float64), torch.rand(S, T, device=device, dtype=torch.float64)
    reference = tuple(torch.randn(s, device=device, dtype=torch.float64) for s in ((S, T, 8), (V, 8)))
    return x, weight, bias, target, tensors, reference


def whole(x, weight, bias, target, tensors, reference, group_size):
    """The toy with all logits in memory."""
    at, mask = target.clamp(min=0).unsqueeze(-1), target != -100
    logp = F.log_softmax((x @ weight.t() + bias) / 0.8, -1)
    logprob = torch.where(mask, logp.gather(-1, at).squeeze(-1), 0.0)
    loss = 0.1 * -torch.where(mask, (logp.exp() * logp).sum(-1), 0.0).sum()
    sequence, token = tensors[0].unsqueeze(1), tensors[1]
    total = (logprob * token).sum(1, keepdim=True)
    if group_size == 0:
        loss = loss + (sequence * logprob.exp() * token * mask).sum()
    elif group_size == 2:
        loss = loss + F.logsigmoid(total[: S // 2] - total[S // 2 :]).sum()
    else:
        loss = loss + F.logsigmoid(sequence * total).sum()
    if reference is not None:
        theirs = F.log_softmax(reference[0] @ reference[1].t() / 0.8, -1).gather(-1, at).squeeze(-1)
        loss = loss + (torch.where(mask, theirs, 0.0) * logprob).sum()
    return loss, logprob, total


@pytest.mark.parametrize("chunk_bytes", [1, 40000, None])  # parts in several pieces, several parts, one part
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("with_reference", [False, True])
@pytest.mark.parametrize("group_size", [0, 1, 2, BATCH])
def test_parts_change_nothing(group_size, with_reference, known, chunk_bytes, backend, device):
    # The walk is the same code on either backend, and whether lengths are known changes no kernel.
    if backend == "triton" and device.type == "cpu" and (chunk_bytes == 40000 or known == (chunk_bytes is None)):
        pytest.skip("interpreted kernels are slow")
    dtype = torch.float64 if backend == "torch" else torch.float32
    x, weight, bias, target, tensors, reference = batch(device)
    leaves = [t.to(dtype).requires_grad_() for t in (x, weight, bias)]
    loss, found = token_loss(
        "toy", [group_size], leaves[0], leaves[1], target, leaves[2],
        reference=(*(t.to(dtype) for t in reference), None) if with_reference else (None, None, None),
        tensors=[t.to(dtype) for t in tensors], lengths=ValidLengths(target) if known else [T] * S, temperature=0.8,
        chunk_bytes=chunk_bytes,
    )  # fmt: skip
    grads = torch.autograd.grad(3 * loss, leaves)
    exact = [t.clone().requires_grad_() for t in (x, weight, bias)]
    answer, logprob, total = whole(*exact, target, tensors, reference if with_reference else None, group_size)
    close = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 2e-4, "atol": 2e-4}
    torch.testing.assert_close(loss.double(), answer, **close)
    torch.testing.assert_close(found["logprob"].double(), logprob, **close)
    if group_size:
        torch.testing.assert_close(found["total"].double(), total.squeeze(1), **close)
    for got, expected in zip(grads, torch.autograd.grad(3 * answer, exact), strict=True):
        torch.testing.assert_close(got.double(), expected, **close)


@pytest.mark.parametrize("group_size", [0, 1])
def test_a_length_that_is_too_short_is_loud(group_size, device):
    x, weight, bias, target, tensors, _ = batch(device)
    lengths = [38, 38, 0, 38, 7, 38]
    loss, _ = token_loss("toy", [group_size], x, weight, target, bias, tensors=tensors, lengths=lengths)
    assert loss.isnan()


def test_lengths_that_do_not_fit_are_refused(device):
    x, weight, _, target, tensors, _ = batch(device)
    for lengths in ([1], [51] * S):
        with pytest.raises(ValueError, match=r"toy: chunks.valid_tokens must hold a number from 0 to 50 for each of 6"):
            token_loss("toy", [0], x, weight, target, tensors=tensors, lengths=lengths)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"x": torch.ones(2, 5)}, r"x must be \(S, T, H\) and weight \(V, H\) with the same H, got \(2, 5\)"),
        ({"weight": torch.ones(7, 4)}, r"x must be \(S, T, H\) .* got \(2, 3, 5\) and \(7, 4\)"),
        ({"x": torch.ones(2, 3, 5).int()}, "x must have a float dtype, got torch.int32"),
        ({"weight": torch.ones(7, 5, device="meta")}, "weight must be on x's device cpu, got meta"),
        ({"bias": torch.ones(7).half()}, "bias must have x's dtype torch.float32, got torch.float16"),
        ({"ref_x": torch.ones(2, 4, 6)}, r"ref\.x must be \(S, T, H'\) .* got \(2, 4, 6\) and \(7, 6\)"),
        ({"ref_weight": torch.ones(7, 6).half()}, r"ref\.weight must have ref\.x's dtype torch.float32, got .*16"),
        ({"ref_bias": torch.ones(6)}, r"ref\.bias must have shape \(7,\), got \(6,\)"),
        ({"ref_bias": torch.ones(7).half()}, r"ref\.bias must have ref\.x's dtype torch.float32, got torch.float16"),
        (
            {"ref_x": torch.ones(2, 3, 6).half(), "ref_weight": torch.ones(7, 6).half()},
            r"ref\.x must have x's dtype torch.float32, got torch.float16",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_refused(change, sentence):
    made = {
        "x": torch.ones(2, 3, 5), "weight": torch.ones(7, 5), "bias": None, "ref_x": torch.ones(2, 3, 6),
        "ref_weight": torch.ones(7, 6), "ref_bias": None, **change,
    }  # fmt: skip
    target = torch.zeros(2, 3, dtype=torch.long)
    reference = (made["ref_x"], made["ref_weight"], made["ref_bias"])
    with pytest.raises(ValueError, match=f"toy: {sentence}"):
        token_loss("toy", [0], made["x"], made["weight"], target, made["bias"], reference=reference)


@pytest.mark.parametrize("group_size", [0, 2])
def test_a_checkpoint_computes_once_more_not_twice(group_size, device, monkeypatch):
    x, weight, bias, target, tensors, _ = batch(device)
    calls = []
    monkeypatch.setattr(Toy, "wants_entropy", property(lambda _: not calls.append(1)))
    leaves = [t.requires_grad_() for t in (x, weight, bias)]

    def call(x, weight, bias):
        return token_loss("toy", [group_size], x, weight, target, bias, tensors=tensors)[0]

    expected = torch.autograd.grad(call(*leaves), leaves)
    once = len(calls)
    found = torch.autograd.grad(checkpoint(call, *leaves, use_reentrant=False), leaves)
    assert len(calls) == 3 * once  # without a checkpoint, within one, and again in its backward pass
    assert all(map(torch.equal, found, expected))


class Partly(Toy):
    """Parts of the first sequence have a loss that depends on nothing."""

    def __call__(self, part):
        loss, found = super().__call__(part)
        at = part.sequences // T if part.sequences is not None and self.group_size() == 0 else part.sequences
        return loss.detach() if at is None or (at == 0).any() else loss, found


@pytest.mark.parametrize("trained", [(0,), (0, 1, 2), (1, 2)])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("group_size", [0, 1, 2, BATCH])
def test_every_row_of_a_gradient_is_written(group_size, known, trained, device, monkeypatch):
    """torch fills what it allocates with NaN where it is told to be deterministic."""
    monkeypatch.setitem(FAMILIES, "toy", Partly)
    x, weight, bias, target, tensors, _ = batch(device)
    leaves = [t.requires_grad_(i in trained) for i, t in enumerate((x, weight, bias))]
    lengths = ValidLengths(target) if known else [T] * S

    def call():
        loss, found = token_loss(
            "toy", [group_size], *leaves[:2], target, leaves[2], tensors=tensors, lengths=lengths, chunk_bytes=1
        )
        return loss, found["logprob"], *torch.autograd.grad(loss, [leaves[i] for i in trained])

    expected = call()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        got = call()
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
    if 0 in trained and group_size != BATCH:
        assert (expected[2][0] == 0).all()
        assert (expected[2][5] != 0).any()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (0, 0), (4, 3)])  # (4, 3): nothing counts
@pytest.mark.parametrize("group_size", [0, 1, 2, BATCH])
def test_a_batch_without_anything_that_counts(group_size, shape, known, device):
    x = torch.randn(*shape, H, device=device, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, H, device=device, dtype=torch.float64, requires_grad=True)
    target = torch.full(shape, -100, device=device)
    tensors = torch.ones(shape[0], device=device), torch.ones(shape, device=device)
    lengths = [0] * shape[0] if known else [shape[1]] * shape[0]
    loss, _ = token_loss("toy", [group_size], x, weight, target, tensors=tensors, lengths=lengths)
    loss.backward()
    # A pair of empty sequences, and a batch of them, have a loss: that of equal sums.
    pairs = {0: 0, 1: shape[0], 2: shape[0] // 2, BATCH: shape[0]}[group_size]
    torch.testing.assert_close(loss, pairs * F.logsigmoid(torch.zeros_like(loss)))
    assert x.grad.abs().sum() == 0
    assert weight.grad.abs().sum() == 0


@pytest.mark.parametrize("group_size", [0, 1, 2, BATCH])
def test_a_batch_of_one_chunk_is_one_part_in_its_order(group_size, device):
    """Nothing is sorted, looked up or filled: of few tokens, launches take longer than the numbers."""
    x, weight, bias, target, tensors, _ = batch(device)
    target = target.clamp(min=0)  # every token counts
    leaves = [t.requires_grad_() for t in (x, weight)]
    for chunk_bytes in (None, 1):
        with Watch() as seen:
            token_loss(
                "toy", [group_size], *leaves, target, bias, tensors=tensors, lengths=[T] * S, chunk_bytes=chunk_bytes
            )
        assert bool({"index_select", "index_copy_"} & seen.names) == (chunk_bytes == 1)
        assert "sort" not in seen.names
