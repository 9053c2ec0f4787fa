"""Losses of a head whose classes lie on several ranks: the numbers of one process that has the whole head."""

from __future__ import annotations

import dataclasses
import functools
import math
from contextlib import nullcontext
from unittest import mock

import flat
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numerics import Errors, _as_fp64, evaluate
from ops_table.cross_entropy import LINEAR_CROSS_ENTROPY
from ops_table.distillation import DISTILL, DISTILL_TOPK
from ops_table.item_softmax import ITEM_SOFTMAX
from ops_table.logprob import GRPO, LINEAR_LOGPROB
from ops_table.row import Case
from torch.distributed.fsdp import fully_shard
from world import world_of

import tigon
import tigon.integrations.trl
from tigon.losses.head.chunks import ValidCount
from tigon.retrieve.training.over_items import item_softmax

pytestmark = pytest.mark.xdist_group("distributed")
ranks = world_of(4, 2)

# Scores of its kernels are in units of log 2 and reach 13: one rounding of such a score is 2⁻²¹ of its probability.
OF_ITEMS = dataclasses.replace(ITEM_SOFTMAX, roundings=8)
OPS = {op.name: op for op in (LINEAR_CROSS_ENTROPY, LINEAR_LOGPROB, GRPO, DISTILL, DISTILL_TOPK, OF_ITEMS)}
# Which inputs have a row for each class.
SPLIT = {
    "linear_cross_entropy": (1, 3), "linear_logprob": (1, 2, 4), "grpo": (1, 2), "distill": (1, 2, 3, 5),
    "distill_topk": (1, 2), "item_softmax": (1, 3),
}  # fmt: skip
# In fp32 three chunks by the widest of uneven shards; by a narrower one, which would wait for ever for others, one.
THREE_CHUNKS = Case("three chunks, every option", (500, 16, 60), {
    "chunk_bytes": 20000, "label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0, "scale": 0.7,
})  # fmt: skip


def even(V: int, world: int) -> list[int]:
    """As torch.chunk."""
    size = -(-V // world)
    return [max(0, min(V, (r + 1) * size) - r * size) for r in range(world)]


def uneven(V: int, world: int) -> list[int]:
    """Of any sizes, and of four nothing on the last."""
    return [V - V // 5, V // 5] if world == 2 else [V // 2, V - V // 2 - V // 5, V // 5, 0]


SIZES = {"even": even, "uneven": uneven}


def case_of(name: str, number: int) -> Case:
    return OPS[name].cases[number] if number >= 0 else THREE_CHUNKS


def shard(t, sizes, rank):
    return t if t is None else t.split(sizes)[rank].clone()


def on_a_rank(rank, world, device, calls, split, backend):
    """Results and gradients of each call, with this rank's part of the head."""
    found = []
    for name, number, dtype, seed in calls:
        op, case = OPS[name], case_of(name, number)
        inputs = list(op.draw(case, dtype, device, torch.Generator().manual_seed(seed)))
        sizes = SIZES[split](inputs[1].shape[0], world)
        for i in SPLIT[name]:
            inputs[i] = shard(inputs[i], sizes, rank)
        options = case.options | {"group": dist.group.WORLD}
        try:
            with tigon.use_backend(backend):
                found.append(evaluate(op.public, inputs, options, op.differentiable(inputs), seed))
        except Exception as error:
            raise AssertionError(f"{name}, {case}, {dtype}, draw {seed}: {error}") from error
    return found


def together(name, by_rank):
    """What the ranks found as one process would have; all that is whole must have the same bits everywhere."""
    found = {}
    for key, value in by_rank[0].items():
        parts = [answer[key] for answer in by_rank]
        if key in {f"gradient of input {i}" for i in SPLIT[name]}:
            found[key] = None if value is None else torch.cat(parts)
            continue
        assert all(torch.equal(part, value) for part in parts if value is not None), f"{key} differs between ranks"
        found[key] = value
    return found


def check(world, split, backend, calls):
    """calls: (op, case, dtype). Error against fp64 at most twice eager's, on the whole head in one process."""
    # Errors of few numbers are luck. On a GPU, whose products round otherwise, there is time for more.
    most = {name: {"distill_topk": 8, "item_softmax": 16}.get(name, 4) for name in OPS}
    on_gpu = world.device_type == "cuda"
    draws = {call: case_of(*call[:2]).draws for call in calls}
    draws = {call: max(8, n) if on_gpu else min(most[call[0]], n) for call, n in draws.items()}
    drawn = [(*call, seed) for call in calls for seed in range(draws[call])]
    # Kernels are compiled on the way.
    answers = world.run(on_a_rank, drawn, split, backend, limit=300 if world.device_type == "cuda" else 90)
    errors, complaints = {}, []
    for i, (name, number, dtype, seed) in enumerate(drawn):
        op, case = OPS[name], case_of(name, number)
        inputs = op.draw(case, dtype, torch.device("cpu"), torch.Generator().manual_seed(seed))
        grad = op.differentiable(inputs)
        exact = evaluate(op.reference, [_as_fp64(t) for t in inputs], case.options, grad, seed)
        there = [t.to(world.device_type) if isinstance(t, torch.Tensor) else t for t in inputs]
        base = evaluate(op.eager, there, case.options, grad, seed)
        base = {key: t if t is None else t.cpu() for key, t in base.items()}
        ours, theirs = errors.setdefault((name, str(case), dtype, op.roundings), (Errors(), Errors()))
        try:
            ours.add(together(name, [answer[i] for answer in answers]), exact)
            theirs.add(base, exact)
        except AssertionError as error:
            complaints.append(f"{name}, {case}, {dtype}, draw {seed}: {error}")
    for (name, case, dtype, roundings), (ours, theirs) in errors.items():
        try:
            ours.assert_at_most_twice(theirs, roundings)
        except AssertionError as error:
            complaints.append(f"{name}, {case}, {dtype}: {error}")
    assert not complaints, "\n".join([f"{world.size} {split} shards, {backend}:", *complaints])


@pytest.mark.parametrize(("dtype", "split"), [(torch.float32, "uneven"), (torch.bfloat16, "even")], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_every_case_of_the_table(ranks, name, split, dtype):
    backend = "triton" if ranks.device_type == "cuda" else "torch"
    numbers = [*range(len(OPS[name].cases)), *([-1] if name == "linear_cross_entropy" else [])]
    if name.startswith("distill") and dtype == torch.bfloat16 and ranks.device_type == "cpu":
        numbers = [0, len(numbers) - 1]  # rows are of fp32 there, whatever x is of
    check(ranks, split, backend, [(name, number, dtype) for number in numbers])


@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_logprob", "distill", "distill_topk"])
def test_the_kernels_too(ranks, name):
    """Interpreted where there is no GPU. tests/ops/test_shard_statistics.py has the branches of the first two."""
    # Few rows each: both kinds of a second exchange, a cosine, rows beyond one block, a second softmax under softcaps.
    numbers = {"distill": (0, 1, 4, 5, 6), "distill_topk": (0, 1, 3, 4)}.get(name, (2,))
    check(ranks, "uneven", "triton", [(name, number, torch.float32) for number in numbers])


def find_wrong_classes(rank, world, device):
    """Rows of dx that are NaN for a target, and for an id, that no rank has. Forward KL with and without a gradient."""
    x, weight, _, target = head(device, rows=(6,))
    own = shard(weight, uneven(61, world), rank)
    logprobs, ids = F.linear(x, weight).log_softmax(-1).topk(3)
    teacher, leaf, group = x.flip(-1), x.clone().requires_grad_(), dist.group.WORLD
    target[1] = ids[2, 1] = 61
    sentence = mock.patch("tigon.losses.distillation._check_ids")
    with tigon.use_backend("triton"), mock.patch("tigon.ops.targets.is_concrete", return_value=False), sentence:
        losses = [
            flat.distill(leaf, own, teacher, own, target, hard_weight=0.5, group=group)[0],
            flat.distill_topk(leaf, own, ids.clamp(max=60), logprobs, target, hard_weight=0.5, group=group)[0],
            flat.distill_topk(leaf, own, ids, logprobs, group=group)[0],
        ]
        found = [torch.autograd.grad(loss, leaf)[0].isnan().any(1).nonzero().flatten().tolist() for loss in losses]
        kl = flat.distill(leaf, own, teacher, own, loss_type="kl", group=group)[0]
        with torch.no_grad():
            torch.testing.assert_close(flat.distill(leaf, own, teacher, own, loss_type="kl", group=group)[0], kl)
    return found


def test_classes_that_no_rank_has_are_loud_in_their_rows(ranks):
    assert ranks.run(find_wrong_classes) == [[[1], [1], [2]]] * ranks.size


def test_the_kernels_of_a_softmax_over_items(ranks):
    """Tiles of items on each rank, and a rank without any: what tests/losses/test_over_items.py knows of one device."""
    calls = [("item_softmax", number, torch.float32) for number in range(5)]
    check(ranks, "uneven", "triton", [*calls, *(("item_softmax", number, torch.float16) for number in (0, 3))])


def of_items(rank, world, device):
    """Targets that are out of range, and a loss of no queries; the same bits on all ranks, and on every run."""
    draw = torch.Generator().manual_seed(0)
    query, items = torch.randn(7, 16, generator=draw).to(device), torch.randn(40, 16, generator=draw).to(device)
    target = torch.tensor([3, 40, -100, 39, -1, 0, 20], device=device)
    own = items.tensor_split(world)[rank]
    with tigon.use_backend("triton"), mock.patch("tigon.ops.targets.is_concrete", return_value=False):
        found = [losses(query, own, target, group=dist.group.WORLD) for _ in range(2)]
        assert all(map(torch.equal, *(map(torch.nan_to_num, part) for part in found)))
        none = losses(query[:0], own, target[:0], group=dist.group.WORLD)
        with pytest.raises(ValueError, match=r"target must have shape \(7,\)"):
            losses(query, own, target[:3], group=dist.group.WORLD)
    right = torch.tensor([0, 2, 3, 5, 6], device=device)
    alone = losses(query[right], items, target[right])
    for mine, theirs in zip((found[0][0][right], found[0][1][right]), alone, strict=False):
        torch.testing.assert_close(mine, theirs)
    return found[0][0], none


def losses(query, items, target, **options):
    query, items = query.clone().requires_grad_(), items.clone().requires_grad_()
    loss = item_softmax(query, items, target, scale=0.7, reduction="none", **options)
    loss.sum().backward()
    return loss.detach(), query.grad, items.grad


def test_targets_outside_of_all_ranks_items_give_nan(ranks):
    found = ranks.run(of_items)
    for loss, none in found:
        assert loss.isnan().tolist() == [False, True, False, False, True, False, False]
        assert torch.equal(loss.nan_to_num(), found[0][0].nan_to_num())
        assert none[0].shape == (0,)
        assert not none[2].any()


# ---------------------------------------------------------------------------------------------------------- DTensors


def head(device, rows=(6, 50), H=16, V=61, dtype=torch.float32):
    """V is no multiple of the ranks. Every fifth target is ignored."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(*rows, H, generator=draw).to(device, dtype)
    weight = (3 * torch.randn(V, H, generator=draw) / H**0.5).to(device, dtype)
    bias = torch.randn(V, generator=draw).to(device, dtype)
    target = torch.randint(0, V, rows, generator=draw).to(device)
    target.view(-1)[::5] = -100
    return x, weight, bias, target


def on_a_mesh(rank, world, device, x_is):
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    x, weight, bias, target = head(device)
    mesh = dist.device_mesh.init_device_mesh(device.type, (world,))
    weight, bias = (distribute_tensor(t, mesh, [Shard(0)]).requires_grad_() for t in (weight, bias))
    placement = {"plain": None, "split sequence": Shard(1)}[x_is]
    x = x.requires_grad_() if placement is None else distribute_tensor(x, mesh, [placement]).requires_grad_()
    loss = flat.linear_cross_entropy(x, weight, target, bias=bias, chunk_bytes=1)
    assert not isinstance(loss, DTensor)
    logprob = flat.linear_logprob(x, weight, target, bias=bias)
    (loss + logprob.entropy.sum() / 300).backward()
    assert weight.grad.placements == bias.grad.placements == (Shard(0),)
    assert weight.grad.to_local().shape == weight.to_local().shape
    if placement is not None:
        assert x.grad.placements == (placement,)
    return loss, logprob.logprob, x.grad, weight.grad, bias.grad


def plain(device):
    x, weight, bias, target = (t.double() if t.is_floating_point() else t for t in head(device))
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    loss = LINEAR_CROSS_ENTROPY.reference(x, weight, target, bias)
    logprob, entropy = LINEAR_LOGPROB.reference(x, weight, bias, None, None, target)
    grads = torch.autograd.grad(loss + entropy.sum() / 300, leaves)
    return loss.detach(), logprob.detach(), *grads


@pytest.mark.parametrize("x_is", ["plain", "split sequence"])
def test_dtensors(ranks, x_is):
    for found in ranks.run(on_a_mesh, x_is):
        for mine, right in zip(found, plain("cpu"), strict=True):
            torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-5)


def refusals(rank, world, device):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x, weight, bias, target = head(device)
    mesh = dist.device_mesh.init_device_mesh(device.type, (world,))
    square = dist.device_mesh.init_device_mesh(device.type, (2, world // 2))
    split = distribute_tensor(weight, mesh, [Shard(0)])
    calls = (
        (x, distribute_tensor(weight, mesh, [Shard(1)]), {}),
        (x, distribute_tensor(weight, square, [Replicate(), Shard(0)]), {}),
        (x, split, {"bias": bias}),
        (distribute_tensor(x, mesh, [Shard(2)]), split, {}),
        (distribute_tensor(x, mesh, [Replicate()]), weight, {"group": dist.group.WORLD}),
        (x, weight, {"group": square}),
        (x, split, {"group": dist.new_group([0, 1])}),
    )
    messages = []
    for x, weight, options in calls:
        with pytest.raises(ValueError, match="linear_cross_entropy") as error:
            flat.linear_cross_entropy(x, weight, target, **options)
        messages.append(str(error.value))
    with pytest.raises(ValueError, match=r"target must lie in \[0, 61\)") if device.type == "cpu" else nullcontext():
        flat.linear_cross_entropy(x, split, torch.full_like(target, 61))
    return messages


def test_what_does_not_fit_gets_a_sentence(ranks):
    expected = (
        "weight must be Shard(0), rows of classes, on a 1-d mesh",
        "weight must be Shard(0), rows of classes, on a 1-d mesh",
        "bias must be a DTensor that is Shard(0)",
        "x must be on the weight's mesh, whole or split by tokens",
        "x must be a plain tensor beside a plain weight",
        "group must be a 1-d mesh, got 2",
        "group must be left out beside a DTensor",
    )
    for messages in ranks.run(refusals):
        for message, start in zip(messages, expected, strict=True):
            assert message.startswith(f"linear_cross_entropy: {start}"), message


# ----------------------------------------------------------------------------------------------- options and families


def of_options(rank, world, device):
    """What the table has not: by name, results of the whole head, which this rank has alone, and of its part of it."""
    x, weight, bias, target = head(device)
    sizes = even(61, world)
    span = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    found = {}

    def both(name, loss_of, *needed):
        """loss_of(x, weight, bias, part, **options): the loss, or the loss and other results."""
        for part in (slice(None), span):
            whole = part is not span
            leaves = [t.clone().requires_grad_(i in needed) for i, t in enumerate((x, weight[part], bias[part]))]
            result = loss_of(*leaves, part, **({} if whole else {"group": dist.group.WORLD}))
            loss, others = result if isinstance(result, tuple) else (result, {})
            grads = [None] * 3
            if needed:
                wanted = torch.autograd.grad(loss.sum(), [leaves[i] for i in needed], allow_unused=True)
                for i, g in zip(needed, wanted, strict=True):
                    grads[i] = g[span] if whole and i and g is not None else g
            found.setdefault(name, []).append([loss.detach(), *grads, *others.values()])

    def entropy_of(x, w, b, part, **options):
        return flat.linear_cross_entropy(x, w, target, bias=b, **options)

    def under_autocast(*inputs, **options):
        with torch.autocast(device.type, torch.bfloat16):
            return entropy_of(*inputs, **options)

    def into_main_grad(x, w, b, part, **options):
        main = torch.ones_like(w)
        loss = entropy_of(x, w, b, part, chunk_bytes=1, main_grad=main, main_grad_scale=0.5, **options)
        return loss * 0.5, {"main_grad": main[span] if main.shape[0] == 61 else main}

    def nothing_valid(x, w, b, part, **options):
        ignored = torch.full_like(target, -100)
        return flat.linear_cross_entropy(x, w, ignored, bias=b, reduction="sum", **options)

    def everything(x, w, b, part, **options):
        return torch.zeros(()), flat.linear_logprob(x, w, target, bias=b, **options)._asdict()

    count = ValidCount(target)
    both("frozen head", entropy_of, 0)
    both("frozen trunk", entropy_of, 1, 2)
    both("counted", lambda *inputs, **options: 4 * entropy_of(*inputs, num_valid=count, **options), 0, 1, 2)
    both("autocast", under_autocast, 0, 1, 2)
    both("main_grad", into_main_grad, 0, 1, 2)
    both("nothing valid", nothing_valid, 0, 1, 2)
    with torch.no_grad():
        both("no_grad", entropy_of)
        both("all results", everything)

    # The teacher wants a gradient, which it does not get, and has a bias where the student may have none.
    teacher_x, teacher_weight = (t.clone().requires_grad_() for t in (x.flip(-1), weight.roll(1, 0)))

    def distilled(x, w, b, part, target=target, of_teacher=bias, **options):
        theirs = None if of_teacher is None else of_teacher.flip(0)[part]
        return flat.distill(
            x, w, teacher_x, teacher_weight[part], target, bias=b, teacher_bias=theirs, hard_weight=0.5, **options
        )

    def distilled_in_bf16(*inputs, **options):
        with torch.autocast(device.type, torch.bfloat16):
            return distilled(*inputs, **options)

    def without_biases(x, w, b, part, **options):
        return distilled(x, w, None, part, of_teacher=None, **options)

    def across(x, w, b, part, **options):
        turned = x.transpose(0, 1).contiguous().transpose(0, 1)
        return distilled(turned, w, None, part, num_valid=count, chunk_bytes=1, **options)

    def in_halves(x, w, b, part, **options):
        theirs = (t.detach().half() for t in (teacher_x, teacher_weight[part]))
        return flat.distill(x.half(), w.half(), *theirs, target, bias=b.half(), reduction="mean", **options)

    def all_ignored(*inputs, **options):
        return distilled(*inputs, target=torch.full_like(target, -100), **options)

    def no_rows(x, w, b, part, **options):
        ids, empty = target[:0, :, None].expand(0, 50, 3), x.new_empty(0, 50, 3)
        loss, _ = flat.distill_topk(x[:0], w, ids, empty, target[:0], bias=b, **options)
        mine, _ = flat.distill(x[:0], w, teacher_x[:0], teacher_weight[part], bias=b, **options)
        return loss + mine

    both("distill, autocast", distilled_in_bf16, 0, 1, 2)
    both("distill, no biases", without_biases, 0, 1)
    both("distill, strided and counted", across, 0, 1)
    both("distill, fp16", in_halves, 0, 1, 2)
    both("distill, all ignored", all_ignored, 0, 1, 2)
    both("distill, no rows", no_rows, 0, 1, 2)
    both("distill, frozen trunk", functools.partial(distilled, loss_type="cosine"), 1, 2)
    with torch.no_grad():
        both("distill, no_grad", distilled)
    assert teacher_x.grad is teacher_weight.grad is None

    # Of log-probabilities: pairs, or one completion a sequence, and a reference's head that is split as well.
    ref_weight, label = weight.roll(1, 0), torch.arange(6, device=device) % 2 == 0
    of_reference = {"ref_x": x.flip(-1)}
    for name, options in {
        "dpo": of_reference, "orpo": {}, "cpo": {"loss_type": "simpo"}, "simpo": {},
        "kto": {"label": label, "kl_x": x, "kl_target": target, "ref_kl_x": x.flip(-1), **of_reference},
    }.items():  # fmt: skip

        def of_family(x, w, b, part, name=name, options=options, **more):
            ref = {"ref_weight": ref_weight[part]} if "ref_x" in options else {}
            return getattr(flat, name)(x, w, target, bias=b, chunk_bytes=2**14, **options, **ref, **more)

        both(name, of_family, 0, 1, 2)
    return found


def test_options_and_families(ranks):
    for found in ranks.run(of_options):
        assert len(found) == 21
        for name, (whole, part) in found.items():
            half = name.endswith(("autocast", "fp16"))
            close = {"rtol": 2e-3 if half else 1e-4, "atol": 2e-3 if half else 2e-5, "equal_nan": True}
            for mine, right in zip(part, whole, strict=True):
                if right is None:
                    assert mine is None, name
                    continue
                torch.testing.assert_close(mine, right, **close, msg=lambda m, n=name: f"{n}: {m}")
            nothing = ("nothing valid", "all results", "distill, all ignored", "distill, no rows")
            assert (whole[0].abs() > 0) != (name in nothing), name


def of_distillation(rank, world, device):
    """Of DTensors: loss, metrics and gradients; and what is refused."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x, weight, bias, target = head(device)
    teacher = x.flip(-1), weight.roll(1, 0), bias.flip(0)
    mesh = dist.device_mesh.init_device_mesh(device.type, (world,))
    options = {"hard_weight": 0.3, "temperature": 2.0, "reduction": "mean", "chunk_bytes": 1}
    found = []
    for split in (False, True):
        leaves, theirs = [x, weight, bias], list(teacher)
        if split:
            placements = [Shard(1)], [Shard(0)], [Shard(0)]
            leaves, theirs = (
                [distribute_tensor(t, mesh, at) for t, at in zip(side, placements, strict=True)]
                for side in (leaves, theirs)
            )
        leaves = [t.detach().requires_grad_() for t in leaves]
        loss, metrics = flat.distill(
            *leaves[:2], *theirs[:2], target, bias=leaves[2], teacher_bias=theirs[2], **options
        )
        found.append([loss, *metrics.values(), *torch.autograd.grad(loss, leaves)])
    found = [[t.full_tensor() if hasattr(t, "full_tensor") else t for t in each] for each in found]

    own, theirs = (t.split(sizes)[rank] for t, sizes in ((weight, even(61, world)), (weight, uneven(61, world))))
    with pytest.raises(ValueError, match=r"distill: teacher.head must be split over the ranks as head is"):
        flat.distill(x, own, x, theirs, group=dist.group.WORLD)
    split = distribute_tensor(weight, mesh, [Shard(0)])
    for heads in ((split, weight), (weight, split)):
        with pytest.raises(ValueError, match=r"distill: head and teacher.head must both be DTensors"):
            flat.distill(x, heads[0], x, heads[1])
    whole = distribute_tensor(weight, mesh, [Replicate()])
    with pytest.raises(ValueError, match="distill: of the teacher: weight must be Shard"):
        flat.distill(x, split, x, whole)
    ids = distribute_tensor(target[..., None], mesh, [Replicate()])
    with pytest.raises(ValueError, match=r"distill_topk: teacher.ids must be a plain tensor, whole on every rank"):
        flat.distill_topk(x, split, ids, x[..., :1])
    return found


def test_distillation_of_dtensors(ranks):
    for whole, part in ranks.run(of_distillation):
        torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-6)


def of_one_chunk_here(rank, world, device):
    """By the classes of the first rank a little more than the budget, by those of the last one less."""
    x, weight, _, _ = head(device, rows=(200,), H=256, dtype=torch.bfloat16)
    own = weight.split(uneven(61, world))[rank].clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CPU_CHUNK_BYTES", "CHUNK_BYTES"):
            patch.setattr(f"tigon.ops.linear.chunk_size.{name}", 2**14)
        loss, _ = flat.distill(x, own, x.flip(-1), own, loss_type="kl", group=dist.group.WORLD)
    return loss.detach()


def test_as_many_chunks_on_all_devices(ranks):
    losses = ranks.run(of_one_chunk_here, limit=30)
    assert all(torch.equal(loss, losses[0]) for loss in losses)


# ------------------------------------------------------------------------------------------------ what is exchanged


def of_halves(rank, world, device):
    """Groups of two, whose ranks are not those of the world; the sizes of a weight are asked for once."""
    from tigon.losses.head import vocabulary_parallel as shards

    groups = [dist.new_group([first + 1, first]) for first in range(0, world, 2)]
    x, weight, _, target = head(device)
    place = rank % 2
    own = weight.split([40, 21])[place].clone().requires_grad_()
    asked, gather = [], shards.all_gather

    def counted(out, given, **options):
        asked.append((out.numel(), given.dtype))
        return gather(out, given, **options)

    shards.all_gather = counted
    try:
        group, count = groups[rank // 2], 240
        losses = [flat.linear_cross_entropy(x, own, target, num_valid=count, group=group) for _ in range(2)]
    finally:
        shards.all_gather = gather
    return losses[0], torch.autograd.grad(losses[1], own)[0], asked, dist.get_rank(group)


def test_groups_within_the_world(ranks):
    x, weight, _, target = head("cpu")
    exact = weight.double().requires_grad_()
    loss = LINEAR_CROSS_ENTROPY.reference(x.double(), exact, target)
    (dw,) = torch.autograd.grad(loss, exact)
    for rank, (mine, grad, asked, place) in enumerate(ranks.run(of_halves)):
        assert place == rank % 2
        torch.testing.assert_close(mine.double(), loss.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(grad.double(), dw.split([40, 21])[place], rtol=1e-4, atol=1e-6)
        # Two sizes once, then of each call's 240 valid tokens three numbers from both.
        assert asked == [(2, torch.int64), (2 * 240 * 3, torch.float32), (2 * 240 * 3, torch.float32)]


# -------------------------------------------------------------------------------------------------------- fused models


def small_llama(device):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=301, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    ids = torch.randint(0, 301, (2, 40), generator=torch.Generator().manual_seed(1))
    return LlamaForCausalLM(config).to(device), ids.to(device)


def split(model, mesh, way):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    if way == "transformers":
        parallel = pytest.importorskip("transformers.distributed.tensor_parallel")
        style = parallel.ALL_PARALLEL_STYLES["colwise_gather_output"]
        style.shard_param(model.lm_head, "weight", mesh)
        style.install_forward(model.lm_head, mesh)
        return
    layouts = {"torch": Replicate(), "not gathered": Shard(-1)}
    style = ColwiseParallel(output_layouts=layouts[way], use_local_output=way == "torch")
    parallelize_module(model, mesh, {"lm_head": style})


def of_a_model(rank, world, device, way):
    """Loss and gradients of a model whose head is split, with the built logits in between, and the report's counts."""
    model, ids = small_llama(device)
    mesh = dist.device_mesh.init_device_mesh(device.type, (world,))
    split(model, mesh, way)
    with tigon.use_backend("triton" if device.type == "cuda" else "torch"), tigon.fuse(model) as fusion:
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        loss = out.loss.full_tensor() if hasattr(out.loss, "full_tensor") else out.loss
        calls = [row.calls for row in fusion.report().rows if row.kind == "head"]
        logits = model(input_ids=ids, labels=ids).logits
        logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits + 0.0
    plain = model(input_ids=ids).logits
    plain = plain.full_tensor() if hasattr(plain, "full_tensor") else plain
    # On a GPU the other layers' kernels round as they do.
    close = {"rtol": 0, "atol": 0} if device.type == "cpu" else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(logits, plain, **close)
    grads = {name: p.grad for name, p in model.named_parameters()}
    return loss, grads, calls, type(model.lm_head.weight.grad).__name__


def stale_on_one(rank, world, device):
    """What each rank is told of logits whose weight changed on the last rank alone, where no counter shows it."""
    model, ids = small_llama(device)
    split(model, dist.device_mesh.init_device_mesh(device.type, (world,)), "torch")
    with tigon.fuse(model):
        logits = model(input_ids=ids, labels=ids).logits
        own = model.lm_head.weight.to_local()
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(own):
            own.add_(rank == world - 1)
        with pytest.raises(RuntimeError, match="the head's weight changed in place") as caught:
            logits + 0.0
    return str(caught.value)


def test_stale_logits_of_a_split_head_are_an_error_on_all_ranks_together(ranks):
    """A rank that had nothing to complain of would wait for the others' logits."""
    assert len(set(ranks.run(stale_on_one, limit=20))) == 1


@pytest.mark.parametrize("way", ["torch", "transformers"])
def test_a_fused_model_with_a_split_head(ranks, way):
    model, ids = small_llama("cpu")
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    for mine, grads, calls, kind in ranks.run(of_a_model, way):
        assert (calls, kind) == ([1], "DTensor")
        torch.testing.assert_close(mine, loss.detach(), rtol=1e-5, atol=1e-5)
        for name, p in model.named_parameters():
            torch.testing.assert_close(grads[name], p.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


# ------------------------------------------------------------------------------------------------------ TRL's trainers


def jsd_of_logits(
    student_logits, teacher_logits, labels=None, beta=0.5, temperature=1.0, reduction="batchmean",
    num_items_in_batch=None,
):  # fmt: skip
    """As GKDTrainer's generalized_jsd_loss, of what its trainer gives it."""
    q, p = (logits.float().log_softmax(-1)[labels != -100] for logits in (student_logits, teacher_logits))
    m = torch.logsumexp(torch.stack([q, p]), 0) - math.log(2)
    return (F.kl_div(m, p, reduction="sum", log_target=True) + F.kl_div(m, q, reduction="sum", log_target=True)) / (
        2 * num_items_in_batch
    )


jsd_of_logits.__module__ = "trl.stand_in"


class Stepping:
    def __init__(self, model, teacher_model=None):
        self.model, self.teacher_model = model, teacher_model

    def training_step(self, model, inputs):
        loss = self.compute_loss(model, inputs)
        loss.backward()
        return loss.detach()

    prediction_step = training_step


class Gkd(Stepping):
    generalized_jsd_loss = staticmethod(jsd_of_logits)

    def compute_loss(self, model, inputs):
        outputs = model(input_ids=inputs)
        with torch.no_grad():
            taught = self.teacher_model(input_ids=inputs)
        return self.generalized_jsd_loss(
            student_logits=outputs.logits[:, :-1, :], teacher_logits=taught.logits[:, :-1, :],
            labels=inputs[:, 1:].masked_fill(inputs[:, 1:] < 60, -100), num_items_in_batch=50,
        )  # fmt: skip


def students(device):
    model, ids = small_llama(device)
    teacher, _ = small_llama(device)
    with torch.no_grad():
        teacher.lm_head.weight.copy_(teacher.lm_head.weight.roll(1, 0))
    return model, teacher, ids


def of_gkd(rank, world, device, way, teachers_way):
    """Loss, gradients of head and embedding, and what the report says; a teacher split in no way is whole."""
    model, teacher, ids = students(device)
    mesh = dist.device_mesh.init_device_mesh(device.type, (world,))
    for each, how in ((model, way), (teacher, teachers_way)):
        if how == "freed":
            fully_shard(each.lm_head, mesh=mesh, reshard_after_forward=True)
        elif how is not None:
            split(each, mesh, how)
    trainer = Gkd(model, teacher)
    with tigon.integrations.trl.fuse(trainer) as fusion:
        loss = trainer.training_step(model, ids)
        report = fusion.report()
    grads = model.lm_head.weight.grad.full_tensor(), model.model.embed_tokens.weight.grad
    return loss, *grads, (report.calls, report.left, [m.logits_built_by for m in report.models.values()])


def test_gkd_of_split_heads(ranks):
    """Both alike go through distill. A teacher whose head is whole, and heads whose weights FSDP2 frees behind their
    forward, through TRL's own loss, and the report says so."""
    model, teacher, ids = students("cpu")
    loss = Gkd(model, teacher).training_step(model, ids)
    plain = loss, model.lm_head.weight.grad, model.model.embed_tokens.weight.grad
    assert loss > 1e-3
    unlike = "the heads of the student and the teacher are split differently over devices"
    freed = "the student's or the teacher's logits are built: its head is not fused, or FSDP2 frees it"
    for way, teachers_way, reason in (
        ("transformers", "torch", ""),
        ("torch", None, unlike),
        ("freed", "freed", freed),
    ):
        for *mine, (calls, left, built) in ranks.run(of_gkd, way, teachers_way):
            assert (calls, left) == (({}, {reason: 1}) if reason else ({"distill": 1}, {}))
            assert any(built) == bool(reason)
            torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-6)


def _chunked_divergence_loss(
    student_hidden_states, teacher_hidden_states, student_lm_head_weight, teacher_lm_head_weight, completion_mask, beta,
    num_items_in_batch=None, student_lm_head_bias=None, teacher_lm_head_bias=None, student_logit_scale=1.0,
    teacher_logit_scale=1.0, student_final_logit_softcapping=None, teacher_final_logit_softcapping=None,
    temperature=1.0,
):  # fmt: skip
    raise AssertionError("replaced")


class Distillation(Stepping):
    def _compute_loss(self, hidden, taught, weight, teacher_weight, mask):
        return _chunked_divergence_loss(hidden, taught, weight, teacher_weight, mask, 0.5, num_items_in_batch=50)


def of_fsdp_shards(rank, world, device):
    """Each rank has tokens of its own, another number of them, and of both heads the rows that FSDP2 gave it."""
    from torch.distributed.tensor import Shard, distribute_tensor

    x, weight, _, target = head(device)
    x, target = x[:2, : 10 + rank], target[:2, : 10 + rank]
    mesh = dist.device_mesh.init_device_mesh(device.type, (world,))
    trainer, found = Distillation(torch.nn.Linear(1, 1)), []
    with tigon.integrations.trl.fuse(trainer):
        for sharded in (False, True):
            own, theirs = weight, weight.roll(1, 0)
            if sharded:
                own, theirs = (torch.nn.Parameter(distribute_tensor(t, mesh, [Shard(0)])) for t in (own, theirs))
            hidden = (x + rank).requires_grad_()
            loss, entropy, valid = trainer._compute_loss(hidden, x, own, theirs, target != -100)
            found.append([loss.detach(), entropy, valid, *torch.autograd.grad(loss, hidden)])
    return found


def test_fsdp_shards_are_no_split_head_for_distillation(ranks):
    for whole, sharded in ranks.run(of_fsdp_shards):
        assert whole[0] > 1e-3
        for mine, right in zip(sharded, whole, strict=True):
            assert torch.equal(mine, right)
