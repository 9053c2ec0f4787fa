"""An index over ranks: ids, scores and ties of one index with all items, whatever is written, saved and loaded."""

from __future__ import annotations

import os
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from world import world_of

import tigon
from tigon import retrieve
from tigon.losses import info_nce
from tigon.retrieve import Category, Index, Number, Schema, ShardedIndex, Tags, col
from tigon.retrieve.links.encoder import AttributeEncoder
from tigon.retrieve.storage import disk

pytest.importorskip("safetensors")
pytestmark = pytest.mark.xdist_group("distributed")
ranks = world_of(4, 2)

D = 8
FILTERS = (None, "kind == 'a'", "kind in ('a', 'c') and price < 6", "not tags has 't1'", "kind == 'never'", "price < 0")


def mesh_of(count, world):
    """The first ranks, or None for a rank that is not among them."""
    if count == world:
        return dist.device_mesh.init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (world,))
    group = dist.new_group(list(range(count)))
    return group if dist.get_rank() < count else None


def items(draw, numbers, named=int):
    """Small whole numbers: sums keep them, and many are equal."""
    vectors = torch.from_numpy(draw.integers(-2, 3, (len(numbers), D))).float()
    table = {
        "kind": draw.choice(["a", "b", "c"], len(numbers)), "price": draw.integers(0, 9, len(numbers)).astype(float),
        "tags": [[f"t{n}" for n in range(3) if draw.random() < 0.3] for _ in numbers],
    }  # fmt: skip
    return [named(n) for n in numbers], vectors, table


def schema():
    return Schema(kind=Category(), tags=Tags(70), price=Number())


def same(one, other, exactly=True):
    assert np.array_equal(np.asarray(one.ids.tolist()), np.asarray(other.ids.tolist()))
    if exactly:
        assert torch.equal(one.scores.view(torch.int32), other.scores.view(torch.int32))
    torch.testing.assert_close(one.scores, other.scores)
    assert bool(other.exact.all())


def compare(single, sharded, exactly=True, seed=0):
    """Searches of both, with the same queries on all ranks."""
    assert len(single) == len(sharded)
    draw = np.random.default_rng(seed)
    query = torch.from_numpy(draw.integers(-2, 3, (3, D))).float()
    for where in FILTERS:
        same(single.search(query, 7, where), sharded.search(query, 7, where), exactly)
    same(single.search(query, 300), sharded.search(query, 300), exactly)
    each = {"k": [2, 9, 1], "where": ["kind == 'a'", None, col("price") < 3]}
    same(single.search(query, **each), sharded.search(query, **each), exactly)


def of_updates(rank, world, device, count, metric, strings, codes):
    """Random updates of one index and of one over ranks, with searches between them."""
    mesh = mesh_of(count, world)
    if mesh is None:
        return None
    draw = np.random.default_rng(count)
    named = (lambda n: f"item {n} é") if strings else int
    given = {"dtype": "float16", "metric": metric, "codes": codes, "device": device}
    single = Index(D, 40, schema=schema(), **given)
    sharded = ShardedIndex(D, 40, schema=schema(), mesh=mesh, **given)
    exactly = metric != "cosine" or device.type == "cuda"
    same(single.search(torch.ones(1, D), 3), sharded.search(torch.ones(1, D), 3))
    for step in range(12):
        if step == 5:
            single.grow(100)
            sharded.grow(100)
        if step % 4 == 3:
            numbers = draw.choice(60, 9, replace=False)
            gone = [named(n) for n in numbers]
            assert single.delete(gone) == sharded.delete(gone)
        else:  # the first call is of one item: all other ranks are empty
            numbers = draw.choice(60, 1 if step == 0 else 13, replace=False)
            new = items(draw, numbers, named)
            if metric == "cosine":
                new[1][:, 0] += 5
            single.upsert(*new)
            sharded.upsert(*new)
        assert (named(numbers[0]) in single) == (named(numbers[0]) in sharded)
        if step in (0, 1, 4, 7, 11):
            compare(single, sharded, exactly, step)
    held = torch.tensor([sharded.table.rows.count])
    return held.item(), len(sharded)


@pytest.mark.parametrize(
    ("count", "metric", "strings", "codes"),
    [
        (4, "ip", False, None),
        (2, "l2", True, None),
        (3, "cosine", False, None),
        (4, "l2", False, "int8"),
        (1, "ip", True, None),
    ],
)
def test_updates_and_searches_are_those_of_one_index(ranks, count, metric, strings, codes):
    count = min(count, ranks.size)
    found = [held for held in ranks.run(of_updates, count, metric, strings, codes) if held is not None]
    assert len(found) == count
    assert sum(held for held, _ in found) == found[0][1] > 10


def of_floats(rank, world, device):
    """Scores of kernels have the same bits on any number of ranks, and ties go by row."""
    mesh = mesh_of(world, world)
    vectors = torch.randn(50, D, generator=torch.Generator().manual_seed(0))
    vectors[40:45] = vectors[3]
    query = torch.randn(2, D, generator=torch.Generator().manual_seed(1)).half()
    query[1] = 3 * vectors[3]
    answers = []
    for kind in (Index, ShardedIndex):
        index = kind(D, 60, metric="l2", device=device, **({"mesh": mesh} if kind is ShardedIndex else {}))
        index.upsert(range(50), vectors)
        with tigon.use_backend("triton"):
            answers.append(index.search(query, 9))
    same(*answers)
    assert answers[1].ids[1, :6].tolist() == [3, *range(40, 45)]


def test_scores_have_the_bits_of_one_index(ranks):
    ranks.run(of_floats)


def of_links(rank, world, device):
    """Links and their explanation; several vectors a query, reranked."""
    mesh = mesh_of(world, world)
    draw = np.random.default_rng(0)
    new = items(draw, range(50))
    single = Index(D, 50, schema=schema(), device=device)
    sharded = ShardedIndex(D, 50, schema=schema(), device=device, mesh=mesh)
    single.upsert(*new)
    sharded.upsert(*new)
    queries = AttributeEncoder("queries", {"job": "Category"}, [("job", "x"), ("job", "y")])
    values = AttributeEncoder(
        "items", {"kind": "Category", "tags": "Tags"}, [("kind", "a"), ("tags", "t0"), ("tags", "t2")]
    )
    weights = np.array([3, -1, 2, 5], dtype=np.float32)
    links = retrieve.Links(queries, values, np.array([0, 0, 1, 1]), np.array([0, 1, 1, 2]), weights, -1.0)
    query = torch.from_numpy(draw.integers(-2, 3, (3, D))).float()
    given = {"k": 9, "links": links.weigh({"job": ["x", "y", None]}), "alpha": 2.0}
    one, other = single.search(query, **given), sharded.search(query, **given)
    same(one, other)
    assert one.explain() == other.explain()
    assert any(part.edges for part in other.explain()[0])

    several = torch.from_numpy(draw.integers(-2, 3, (3, 2, D))).float()
    for options in ({}, {"combine": "union"}, {"rerank": lambda q, x: -(x.float() ** 2).sum(-1), "candidates": 20}):
        found = [
            retrieve.Retriever(lambda q: q, index).search(several, 5, "kind != 'b'", **options)
            for index in (single, sharded)
        ]
        same(*found)
    found = [retrieve.Retriever(lambda q: q, index)(several[:, 0], 5) for index in (single, sharded)]
    same(*found)
    table = {"id": list(range(50)), "name": [f"n{i}" for i in range(50)]}
    assert one.take(table, "id")["name"] == other.take(table, "id")["name"]
    with pytest.raises(ValueError, match="save_pretrained: index must be an Index, got a ShardedIndex"):
        retrieve.Retriever(lambda q: q, sharded).save_pretrained("never")
    said = str(sharded.explain("kind == 'a'", k=10, queries=2))
    assert said.startswith(f"50 items on {world} ranks, which exchange 320 bytes each; rank {rank}:\n")
    assert "and kind is 'a'" in said
    assert f"rank {rank} of {world}" in repr(sharded)
    assert sharded.warmup(query[:2], k=3, where="kind == 'a'") > 0
    assert sharded.plan().vectors == -(-single.plan().vectors // world)


def test_links_retrievers_and_explanations(ranks):
    ranks.run(of_links)


def of_batch(part: int, parts: int, device, group=None, has_rules=False):
    """in_batch_softmax and its gradients for a part of one batch, in which ids repeat within a part and across."""
    generator = torch.Generator().manual_seed(0)
    query, positive = (torch.randn(20, 16, generator=generator) for _ in range(2))
    ids, log_q = torch.randint(0, 9, (20,), generator=generator), torch.rand(20, generator=generator).log()
    query, positive, ids, log_q = (t.chunk(parts)[part].to(device) for t in (query, positive, ids, log_q))
    if has_rules:  # a line for each query of the rank, of the items of all ranks
        allowed = (torch.rand(20, 20, generator=generator) < 0.7).chunk(parts)[part].to(device)
        ids = retrieve.Negatives(ids, allowed=allowed)
    leaves = query.requires_grad_(), positive.requires_grad_()
    loss = retrieve.in_batch_softmax(*leaves, ids, log_q, scale=2.0, group=group)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def of_batch_on_a_rank(rank, world, device, has_rules):
    return of_batch(rank, world, device, dist.group.WORLD, has_rules)


@pytest.mark.parametrize("has_rules", [False, True])
def test_ranks_together_have_the_loss_of_the_whole_batch(ranks, has_rules):
    """The items of other ranks are negatives, and get their gradients."""
    want, found = of_batch(0, 1, "cpu", has_rules=has_rules), ranks.run(of_batch_on_a_rank, has_rules)
    # Each rank has the mean of its own queries: the mean over ranks, as DDP takes it, is that of all.
    torch.testing.assert_close(sum(loss for loss, *_ in found) / ranks.size, want[0], rtol=1e-4, atol=1e-5)
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([f[i] for f in found]) / ranks.size, want[i], rtol=1e-4, atol=1e-5)


def share_info_nce(part: int, parts: int, device, options, group=None):
    """tigon.losses.info_nce and its gradients for a part of one batch of queries, documents and hard negatives."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(12, 16, generator=generator).chunk(parts)[part].to(device) for _ in range(3)]
    query, positive, negative = (t.requires_grad_() for t in rows)
    loss = info_nce(query, positive, [negative], scale=2.0, group=group, **options)
    return loss.detach(), *torch.autograd.grad(loss, rows)


def share_info_nce_on_a_rank(rank, world, device, options):
    return share_info_nce(rank, world, device, options, dist.group.WORLD)


ALL = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


@pytest.mark.parametrize(
    "options", [{}, {"directions": "symmetric"}, {"directions": ALL}], ids=["", "symmetric", "all"]
)
def test_ranks_together_have_the_in_batch_softmax_of_the_whole_batch(ranks, options):
    want, found = share_info_nce(0, 1, "cpu", options), ranks.run(share_info_nce_on_a_rank, options)
    torch.testing.assert_close(sum(loss for loss, *_ in found) / ranks.size, want[0], rtol=1e-4, atol=1e-5)
    for i in (1, 2, 3):
        torch.testing.assert_close(torch.cat([f[i] for f in found]) / ranks.size, want[i], rtol=1e-4, atol=1e-5)


# --------------------------------------------------------------------------------------------------------------- files


def of_files(rank, world, device, folder, strings, codes):
    """Saved by 2 ranks, with holes; loaded by all, by 3 and by one, which saves in its turn."""
    draw = np.random.default_rng(3)
    two, three = mesh_of(2, world), mesh_of(min(3, world), world)
    whole = mesh_of(world, world) if world > 2 else two
    named = (lambda n: f"ß {n}") if strings else int
    single = Index(D, 60, "float8_e4m3fn", "l2", schema(), device, codes)
    steps = [items(draw, draw.choice(60, 40, replace=False), named) for _ in range(2)]
    gone, more = [named(n) for n in range(0, 60, 7)], items(np.random.default_rng(4), range(55, 60), named)
    for new in steps:
        single.upsert(*new)
    single.delete(gone)
    if two is not None:
        index = ShardedIndex(D, 60, "float8_e4m3fn", "l2", schema(), device, codes, mesh=two)
        for new in steps[:1]:
            index.upsert(*new)
        index.save(folder)  # replaced by the next
        for new in steps[1:]:
            index.upsert(*new)
        index.delete(gone)
        index.save(folder)
    dist.barrier()
    for mesh in (whole, three, two):
        if mesh is not None:
            again = ShardedIndex.load(folder, device, mesh=mesh)
            compare(single, again)
            assert abs(again.table.rows.count - len(again) / again.ranks.count) < 1
            again.upsert(*more)
    alone = Index.load(folder, device)
    compare(single, alone)
    dist.barrier()
    if rank == 0:
        alone.save(folder)
        opened = Index.open(folder, device=device)
        opened.upsert(*more)
        opened.grow(70)
        opened.close()
    dist.barrier()
    again = ShardedIndex.load(folder, device, mesh=whole)  # of one device, with a journal
    compare(Index.load(folder, device), again)
    assert again.capacity == 70
    return sorted(os.listdir(folder))


@pytest.mark.parametrize(("strings", "codes"), [(False, "int8"), (True, None)])
def test_a_folder_is_loaded_by_any_number_of_ranks(ranks, tmp_path, strings, codes):
    found = ranks.run(of_files, str(tmp_path / "jobs.index"), strings, codes)
    assert found[0] == ["snapshot-000003", "tigon.lock"]


def of_failures(rank, world, device, folder):
    """What does not fit is refused on all ranks alike; what fails on one rank ends the call on all."""
    mesh = mesh_of(world, world)
    index = ShardedIndex(D, 20, schema=schema(), device=device, mesh=mesh)
    new = items(np.random.default_rng(0), range(20))
    index.upsert(*new)
    with pytest.raises(ValueError, match=r"embeddings must be finite, got NaN or infinity for id 20"):
        index.upsert([20], torch.full((1, D), torch.nan), {name: values[:1] for name, values in new[2].items()})
    more = items(np.random.default_rng(0), range(20, 22))
    with pytest.raises(ValueError, match=r"2 new items do not fit: the index holds 20 of 20"):
        index.upsert(*more)
    query = torch.ones(1, D)
    for given, said in (
        ({"where": "color == 1"}, "there is no column 'color'"), ({"k": 5000}, "k must be from 1 to 2,048"),
        ({"query": torch.ones(1, 3)}, r"query must be \(queries, 8\)"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            index.search(**({"query": query} | given))
    with pytest.raises(ValueError, match="capacity must be at least 20"):
        index.grow(10)
    with pytest.raises(ValueError, match="codes must be None or 'int8', got 'sign'"):
        ShardedIndex(D, 20, codes="sign", mesh=mesh)
    assert index.delete([999]) == 0
    assert index.search(torch.ones(0, D), 3).scores.shape == (0, 3)

    index.save(folder)
    with pytest.raises(ValueError, match="path must be a folder"):
        index.save(__file__)
    index.delete([3])
    write = disk.write_file

    def fails(path, pieces):
        if path.name == "items-1.safetensors":
            raise OSError(28, "No space left on device")
        return write(path, pieces)

    said = "Index.save: .*(No space left|another rank could not write)"
    with mock.patch.object(disk, "write_file", fails), pytest.raises(OSError, match=said):
        index.save(folder)
    dist.barrier()
    assert sorted(os.listdir(folder)) == ["snapshot-000001", "tigon.lock"]
    dist.barrier()
    opened = Index.open(folder, device=device) if rank == 0 else None  # as a server has it
    dist.barrier()
    with pytest.raises((ValueError, OSError), match=r"is open for writing in another index|another rank could not"):
        index.save(folder)
    if opened is not None:
        opened.close()
    dist.barrier()
    assert len(ShardedIndex.load(folder, device, mesh=mesh)) == 20
    dist.barrier()
    if rank == 0:
        with open(f"{folder}/snapshot-000001/items-1.safetensors", "r+b") as file:
            file.seek(-1, 2)
            last = file.read(1)
            file.seek(-1, 2)
            file.write(bytes([last[0] ^ 1]))
    dist.barrier()
    with pytest.raises(ValueError, match=r"is damaged|another rank could not read"):
        ShardedIndex.load(folder, device, mesh=mesh)
    with pytest.raises(ValueError, match="which holds no snapshot"):
        ShardedIndex.load(f"{folder}.none", device, mesh=mesh)


def of_no_items(rank, world, device, folder, named):
    """An index whose items were all deleted, saved by all ranks."""
    mesh = mesh_of(world, world)
    index = ShardedIndex(D, 20, schema=schema(), device=device, mesh=mesh)
    new = items(np.random.default_rng(0), range(5), named)
    index.upsert(*new)
    index.delete(new[0])
    index.save(folder)
    again = ShardedIndex.load(folder, device, mesh=mesh)
    assert (len(again), new[0][0] in again) == (0, False)
    assert (again.search(torch.ones(1, D), 3).scores == -torch.inf).all()
    again.upsert(*new)
    assert (len(again), len(Index.load(folder, device))) == (5, 0)


@pytest.mark.parametrize("named", [int, str])
def test_an_index_without_items_is_saved_and_loaded(ranks, tmp_path, named):
    ranks.run(of_no_items, str(tmp_path / "jobs.index"), named)


def test_ranks_fail_together(ranks, tmp_path):
    ranks.run(of_failures, str(tmp_path / "jobs.index"))


def of_other_arguments(rank, world, device):
    index = ShardedIndex(D, 20, device=device, mesh=mesh_of(world, world))
    with mock.patch("tigon.retrieve.index.ranks.CHECKS", True):
        index.upsert(range(9), torch.eye(9, D))
        index.search(torch.ones(1, D), 2)
        for call in (
            lambda: index.search(torch.full((1, D), float(rank)), 2), lambda: index.search(torch.ones(1, D), 2 + rank),
            lambda: index.upsert([rank], torch.ones(1, D)), lambda: index.delete([rank]),
        ):  # fmt: skip
            with pytest.raises(ValueError, match="all ranks must make this call with the same arguments"):
                call()
    return index.search(torch.ones(1, D), 3).ids.tolist()


def test_other_arguments_are_found_where_that_is_asked_for(ranks):
    assert ranks.run(of_other_arguments) == [[[0, 1, 2]]] * ranks.size


def test_without_a_process_group_there_is_a_sentence():
    if not dist.is_initialized():
        with pytest.raises(ValueError, match="mesh must have an initialised process group"):
            ShardedIndex(D, 20)
