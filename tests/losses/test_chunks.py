"""The chunk loop's arithmetic: how many rows, in which order, how many of them."""

import importlib
from dataclasses import replace

import flat
import pytest
import torch

import tigon
from tigon.losses import inputs
from tigon.losses.head.chunks import Chunks, Gradients, ValidCount, to_scalar
from tigon.losses.head.head import Projection, append_bias
from tigon.ops.linear.chunk_size import CHUNK_BYTES, CPU_CHUNK_BYTES, FROZEN_CHUNK_BYTES, chunk_budget, chunk_rows
from tigon.ops.linear.padded_product import class_blocks, empty_logits

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [0, 1, 127, 128, 129, 1000, 8192, 32768, 100_003])
@pytest.mark.parametrize("row_bytes", [2, 256_512, 10**9])
@pytest.mark.parametrize("budget", [1, 2**20, 2**30])
def test_chunks_keep_the_budget_and_are_balanced(rows, row_bytes, budget):
    size = chunk_rows(rows, row_bytes, budget)
    assert 1 <= size <= max(rows, 1)
    assert size * row_bytes <= budget or size <= 128
    if 0 < size < rows:
        assert size % 128 == 0
        count = -(-rows // size)
        # No more chunks than the budget asks for, and a last one that is not a sliver.
        most = max(128, budget // row_bytes // 128 * 128)
        assert count <= -(-rows // most)
        assert count * size - rows < count * 128


def test_budget(monkeypatch):
    monkeypatch.delenv("TIGON_CHUNK_BYTES", raising=False)
    assert chunk_budget(CPU) == CPU_CHUNK_BYTES
    assert chunk_budget(torch.device("cuda")) == CHUNK_BYTES
    assert chunk_budget(torch.device("cuda"), frozen=True) == FROZEN_CHUNK_BYTES
    monkeypatch.setenv("TIGON_CHUNK_BYTES", "12345")
    assert chunk_budget(CPU) == 12345
    assert chunk_budget(CPU, 99) == 99
    monkeypatch.setenv("TIGON_CHUNK_BYTES", "1G")
    with pytest.raises(ValueError, match="TIGON_CHUNK_BYTES must be a whole number of bytes, got '1G'"):
        chunk_budget(CPU)


def walk(num_valid, budget=1, rows=300):
    x, weight = torch.randn(rows, 8), torch.randn(11, 8)
    target = torch.randint(0, 11, (rows,))
    target[::3] = -100
    chunks = Chunks(Projection(x, weight, None), target, -100, num_valid, budget)
    return x, weight, target, chunks


@pytest.mark.parametrize("num_valid", [None, 200])
def test_every_valid_row_is_visited_once_with_its_logits(num_valid):
    x, weight, target, chunks = walk(num_valid)
    seen = torch.zeros(chunks.visited, dtype=torch.long)
    for chunk in chunks:
        torch.testing.assert_close(chunk.logits, chunk.x @ weight.t())
        seen[chunk.rows] += 1
    assert seen.min() == seen.max() == 1
    assert chunks.visited == (num_valid or 300)
    assert len({chunk.logits.data_ptr() for chunk in chunks}) == 1  # one buffer
    order = torch.arange(300) if chunks.index is None else chunks.index
    assert set(order.tolist()) >= set((target != -100).nonzero().flatten().tolist())
    assert torch.equal(x[order], torch.cat([c.x for c in chunks]))
    assert torch.equal(chunks.scatter_to_batch(torch.ones(chunks.visited)) == 1, (target != -100) | (num_valid is None))


@pytest.mark.parametrize("room_rows", [128, 200, 256, 400])  # the last chunk stays; it alone again; two; all
@pytest.mark.parametrize("rows", [None, slice(40, 300), torch.arange(299, 20, -1)], ids=str)
def test_backwards_computes_again_what_the_room_no_longer_holds(rows, room_rows, monkeypatch):
    x, weight, _, chunks = walk(None)
    if rows is not None:
        chunks = chunks.subset(rows, 128)
    order = torch.arange(300) if rows is None else torch.arange(300)[rows]
    room = torch.full((room_rows, 11), float("nan"))
    seen = [chunk.start for chunk in chunks.iterate_forward(room)]
    computed = []
    compute = chunks.compute
    monkeypatch.setattr(chunks, "compute", lambda *span: computed.append(span[0]) or compute(*span))
    back = []
    for chunk in chunks.iterate_backward(room):
        torch.testing.assert_close(chunk.logits, x[order[chunk.rows]] @ weight.t())
        assert torch.equal(torch.arange(300)[chunk.at], order[chunk.rows])
        back.append(chunk.start)
    assert back == seen[::-1]
    # As many of the last chunks as fit the room together are not computed again.
    fit = [start for start in seen if chunks.visited - start <= room_rows]
    assert computed == [start for start in back if start not in fit]


def test_the_last_chunk_that_the_caller_holds_is_not_gathered_again(monkeypatch):
    *_, chunks = walk(200)
    room = torch.empty(128, 11)
    *_, last = chunks.iterate_forward(room)
    gathered = []
    with_logits = chunks.with_logits
    monkeypatch.setattr(chunks, "with_logits", lambda *of: gathered.append(of[0]) or with_logits(*of))
    assert next(iter(back := chunks.iterate_backward(room, last))) is last
    assert [chunk.start for chunk in back] == gathered == [0]


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("num_valid", [None, 200, 0])
@pytest.mark.parametrize("missing", [None, 0, 1, 2])
def test_gradients_are_the_products_of_all_chunks(missing, num_valid, add):
    x, weight, target, chunks = walk(num_valid)
    visited = torch.ones(300, dtype=torch.bool) if num_valid is None else (target != -100) & (num_valid > 0)
    dlogits = torch.where(visited.unsqueeze(1), torch.randn(300, 11), 0.0)
    before = torch.full_like(weight, 2.0 if add else float("nan"))
    places = [torch.full_like(x, float("nan")), [before], torch.full((11,), float("nan"))]
    if missing is not None:
        places[missing] = None
    gradients = Gradients(chunks, *places, add)
    assert gradients
    for chunk in chunks:
        chunk.logits.copy_(dlogits[chunk.at])
        gradients.add(chunk)
    gradients.finish()
    expected = dlogits @ weight, [dlogits.t() @ x + (2.0 if add else 0.0)], dlogits.sum(0)
    for place, right in zip(places, expected, strict=True):
        if place is not None:
            torch.testing.assert_close(place, right, rtol=1e-4, atol=1e-4)
    assert not Gradients(chunks, None, None, None)


def test_valid_count(device):
    labels = torch.tensor([[1, -100, 3], [-100, 5, 6]], device=device)
    assert int(ValidCount(labels)) == 4
    assert int(ValidCount(labels, shift=True)) == 3
    assert int(ValidCount(labels, ignore_index=5)) == 5
    assert list(range(6))[: ValidCount(labels)] == [0, 1, 2, 3]


NUMBERS = [
    *(2, 0.3, float("inf"), torch.tensor(2), torch.tensor([0.3])),
    *(torch.tensor(0.3, dtype=torch.float64), torch.tensor(0.3, requires_grad=True)),
]


@pytest.mark.parametrize("value", NUMBERS, ids=str)
def test_scalar(value, device):
    expected = torch.as_tensor(value, dtype=torch.float32).item()
    given = [value]
    if isinstance(value, torch.Tensor):
        given.append(value.to(device))
    for number in given:
        found = to_scalar(number, device, torch.float32)
        assert (found.shape, found.dtype, found.device.type) == ((), torch.float32, device.type)
        assert not found.requires_grad
        assert found.item() == expected


@pytest.mark.gpu
def test_numbers_of_the_host_and_starting_a_count_do_not_wait(device):
    labels = torch.randint(0, 9, (64, 64), device=device)
    ValidCount(labels)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ValidCount(labels)
        for value in NUMBERS:
            to_scalar(value, device, torch.float32)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("V", [1, 8, 100, 257, 1025])
def test_rows_of_logits_begin_where_wide_loads_do(V, dtype):
    torch.use_deterministic_algorithms(True)  # what is not written holds NaN
    try:
        logits = empty_logits(3, V, torch.empty(0), dtype)
    finally:
        torch.use_deterministic_algorithms(False)
    assert logits.shape == (3, V)
    assert logits.dtype == dtype
    assert logits.stride(1) == 1
    assert logits.stride(0) * dtype.itemsize % 16 == 0 or V * dtype.itemsize < 16
    assert logits.stride(0) < V + (64 if V >= 1024 else 16 // dtype.itemsize)
    # On a CPU torch's products may read what is behind a row.
    assert not logits.as_strided((3, logits.stride(0) - V), logits.stride(), V).any()


def test_classes_that_no_wide_load_reads_are_multiplied_apart():
    for V, dtype in ((50304, torch.bfloat16), (50257, torch.float64), (1001, torch.bfloat16)):
        blocks = class_blocks(V, dtype)
        assert blocks[0].start == 0
        assert blocks[-1].stop == V
    assert len(class_blocks(50304, torch.bfloat16)) == 1
    first, last = class_blocks(50257, torch.bfloat16)
    assert first.stop == last.start == 50240


@pytest.mark.parametrize("loss", ["cross entropy", "logprob", "grpo", "distill"])
def test_multiplying_the_last_classes_apart_changes_nothing(loss, backend, device, monkeypatch):
    """Against one product, with a bias and an adapter; the last classes are targets, too."""
    S, T, H, V = 2, 70, 16, 1029
    x = torch.randn(S, T, H, device=device, requires_grad=True)
    weight = torch.randn(V, H, device=device, requires_grad=True)
    bias = torch.randn(V, device=device, requires_grad=True)
    target = torch.randint(0, V, (S, T), device=device)
    target[:, ::3] = V - 1
    lora = torch.ones(2, H, device=device), torch.randn(V, 2, device=device), 0.1

    def call():
        if loss == "cross entropy":
            return flat.linear_cross_entropy(x, weight, target, bias=bias, chunk_bytes=1)
        if loss == "logprob":
            return flat.linear_logprob(x, weight, target, bias=bias, lora=lora, chunk_bytes=1).logprob.square().sum()
        if loss == "grpo":
            advantages = torch.arange(S, device=device) - 1.0
            return flat.grpo(x, weight, target, bias=bias, advantages=advantages, chunk_bytes=1)[0]
        teacher = x.detach() * 1.1, weight.detach()
        return flat.distill(x, weight, *teacher, bias=bias, teacher_bias=bias.detach(), chunk_bytes=1)[0]

    def results():
        value = call()
        return value.detach(), *torch.autograd.grad(value, (x, weight, bias))

    assert len(class_blocks(V, x.dtype)) == 2
    apart = results()
    for name in ("losses.head.head", "losses.linear_logprob", "ops.linear.weight_gradient"):
        module = importlib.import_module(f"tigon.{name}")
        monkeypatch.setattr(module, "class_blocks", lambda V, dtype: [slice(0, V)])
    for a, b in zip(apart, results(), strict=True):
        # A GPU's library multiplies matrices of other sizes in another order: squares of sums differ by more than sums.
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 50])
@pytest.mark.parametrize("V", [1000, 1001, 1025, 1029, 5, 1])
@pytest.mark.parametrize("bias", [False, True])
def test_wide_logits_of_narrow_factors_fill_their_columns_alone(V, rows, bias, device):
    """fp32 logits of a bf16 head, in rows with room between them, in one product or in two."""
    x, weight = (torch.randn(n, 24, device=device).bfloat16() for n in (rows, V))
    b = torch.randn(V, device=device).bfloat16() if bias else None
    room = torch.full((rows, V + 7), 7.0, device=device)
    for out in (empty_logits(rows, V, x, torch.float32), room[:, :V]):
        Projection.cast(x, weight, b, torch.bfloat16).logits(x, out)
        exact = x.double() @ weight.double().t() + (0.0 if b is None else b.double())
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-4)
    assert (room[:, V:] == 7.0).all()


@pytest.mark.parametrize("V", [1000, 2500, 1001, 30, 5])
def test_logits_with_a_bias_are_rounded_once(V, device):
    """Of any number of classes. A product and a bias that are rounded one after the other differ in a third of them."""
    x, weight = (torch.randn(n, 24, device=device).bfloat16() for n in (50, V))
    bias = torch.randn(V, device=device).bfloat16()
    exact = (x.double() @ weight.double().t() + bias.double()).bfloat16()
    head = Projection.cast(x, weight, bias, torch.bfloat16)
    for of in (head, replace(head, both=append_bias(weight, bias))):
        out = empty_logits(50, V, x, torch.bfloat16)
        assert (of.logits(x, out) != exact).float().mean() < 0.02


@pytest.mark.parametrize("trained", [True, False])
def test_the_losses_know_whether_their_head_is_frozen(trained, monkeypatch):
    """All of them ask for the budget with it: under adapters the head is frozen."""
    asked = []

    def budget(*args, frozen=False, **options):
        asked.append(frozen)
        return chunk_budget(*args, **options)

    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(10, 8, requires_grad=trained)
    target = torch.randint(10, (6,))
    monkeypatch.setattr(inputs, "chunk_budget", budget)
    tigon.linear_cross_entropy(x, weight, target)
    tigon.linear_logprob(x, weight, target)
    tigon.losses.orpo(x.view(2, 3, 8), weight, target.view(2, 3))
    tigon.losses.distill(x, weight, tigon.losses.Hidden(x.detach(), weight.detach()))
    assert asked == [not trained] * 4
