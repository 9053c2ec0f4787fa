"""varlen_attention: documents apart from one another, and the tables of tiles that the device makes."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import tigon
from tigon.kernels import graph_capture
from tigon.ops import offsets as offsets_module
from tigon.ops.varlen_attention import reference, tiles, varlen_attention_reference

LENGTHS = [5, 0, 17, 1, 40]
OPTIONS = [{}, {"softcap": 2.0}, {"window": 20, "sinks": True}, {"causal": False}]


def draw(N, H=4, G=2, D=16, dtype=torch.bfloat16, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(N, heads, D, generator=generator).to(device, dtype) for heads in (H, G, G, H)]


def count_up(lengths, device="cpu", dtype=torch.int32):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype, device=device)


def compute(tensors, lengths, options, device):
    """o, dq, dk and dv, and with sinks dsinks."""
    q, k, v, do = tensors
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    options = dict(options)
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-2, 2, q.shape[1], device=device).requires_grad_()
        leaves.append(options["sinks"])
    o = tigon.varlen_attention(*leaves[:3], count_up(lengths, device), **options)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def test_the_reference_is_attention_of_each_document_alone(monkeypatch):
    q, k, v, _ = draw(sum(LENGTHS), dtype=torch.float64)
    offsets = count_up(LENGTHS)
    got = tigon.varlen_attention(q, k, v, offsets, scale=0.3)
    parts, whole = [], []
    for start, stop in itertools.pairwise(offsets.tolist()):
        heads = [t[start:stop].transpose(0, 1) for t in (q, *(t.repeat_interleave(2, 1) for t in (k, v)))]
        parts.append(F.scaled_dot_product_attention(*heads, is_causal=True, scale=0.3).transpose(0, 1))
        whole.append(F.scaled_dot_product_attention(*heads, scale=0.3).transpose(0, 1))
    torch.testing.assert_close(got, torch.cat(parts))
    torch.testing.assert_close(tigon.varlen_attention(q, k, v, offsets, scale=0.3, causal=False), torch.cat(whole))
    # Traced, all rows at once, since a graph cannot depend on the offsets.
    options = {"window": 3, "softcap": 2.0, "sinks": torch.randn(4, dtype=torch.float64)}
    expected = varlen_attention_reference(q, k, v, offsets, **options)
    monkeypatch.setattr(reference, "is_concrete", lambda t: False)
    torch.testing.assert_close(varlen_attention_reference(q, k, v, offsets, **options), expected)
    torch.testing.assert_close(varlen_attention_reference(q, k, v, offsets, scale=0.3, causal=False), torch.cat(whole))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_document_does_not_depend_on_its_neighbours(options, device, triton_backend):
    """Bit for bit, wherever the document stands, and whatever the others hold."""
    own = draw(70, device=device, seed=1)
    alone = compute(own, [70], options, device)[:4]
    for before, after in (([1], [3, 0, 0]), ([3, 0, 90], [66]), ([], [200])):
        around = draw(sum(before) + sum(after), device=device)
        first = sum(before)
        rows = [torch.cat((t[:first], mine, t[first:])) for t, mine in zip(around, own, strict=True)]
        got = compute(rows, [*before, 70, *after], options, device)
        for one, other in zip(got, alone, strict=False):
            assert torch.equal(one[first : first + 70], other)


def test_what_is_not_finite_stays_in_its_document(device, backend):
    tensors = draw(sum(LENGTHS), dtype=torch.float32, device=device)
    clean = compute(tensors, LENGTHS, {}, device)
    for t, value in zip(tensors, (torch.nan, torch.inf, torch.nan, torch.inf), strict=True):
        t[5:22] = value  # the third document
    for got, expected in zip(compute(tensors, LENGTHS, {}, device), clean, strict=True):
        others = (torch.arange(len(got)) < 5) | (torch.arange(len(got)) >= 22)
        assert torch.equal(got[others], expected[others])
        assert not got[5:22].isfinite().any()


def test_documents_are_suffixes_without_a_prefix(device, triton_backend):
    """The same numbers by prefix_attention, to the roundings of another order."""
    lengths = [n for n in LENGTHS if n]
    tensors = draw(sum(lengths), dtype=torch.float32, device=device)
    layout = tigon.PrefixLayout([0], [lengths], device=device)
    leaves = [t.clone().requires_grad_() for t in tensors[:3]]
    o = tigon.prefix_attention(*leaves, layout)
    expected = [o.detach(), *torch.autograd.grad(o, leaves, tensors[3])]
    for got, one in zip(compute(tensors, lengths, {}, device), expected, strict=True):
        torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-5)


def test_a_sink_that_cannot_be_chosen_changes_no_bit(device, triton_backend):
    q, k, v, _ = draw(sum(LENGTHS), device=device)
    offsets = count_up(LENGTHS, device)
    never = torch.full((4,), -torch.inf, device=device)
    assert torch.equal(tigon.varlen_attention(q, k, v, offsets, sinks=never), tigon.varlen_attention(q, k, v, offsets))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_autocast_computes_in_its_dtype_as_torch_does(dtype, device):
    inputs = [t.requires_grad_() for t in draw(sum(LENGTHS), dtype=torch.float32, device=device)[:3]]
    with torch.autocast(device.type, torch.bfloat16):
        o = tigon.varlen_attention(*inputs, count_up(LENGTHS, device, dtype))
    assert o.dtype == torch.bfloat16
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(o.sum(), inputs))


# ------------------------------------------------------------------------------------------------------------ tables


def expected_tiles(offsets, size, kind):
    """The tiles of all documents, those with the most other tiles to read first, in the order of the documents."""
    found = []
    for start, stop in itertools.pairwise(offsets.tolist()):
        cut = [[n, min(n + size, stop), start, stop, 0, 0] for n in range(start, stop, size)]
        levels = range(len(cut)) if kind != "keys" else reversed(range(len(cut)))
        found += zip(levels, cut, strict=True)
    return [tile for _, tile in sorted(found, key=lambda pair: -pair[0])]


@pytest.mark.parametrize(
    "lengths",
    [[37], LENGTHS, [0, 0, 9, 0], [700, 3, 41], [*range(70), 0, 500, *[1] * 60]],
    ids=["one", "several", "empty", "more tiles than a block", "more documents than a block"],
)
def test_tables_hold_each_tile_once_and_long_ones_first(lengths, device, triton_backend):
    offsets = count_up([*lengths, 0, 0], device)
    sizes = 16, 5, 8
    made = tiles.find_tiles(offsets, sum(lengths), sizes)
    for kind, size in zip(tiles.KINDS, sizes, strict=True):
        table = made[tiles.KINDS.index(kind), : sum(lengths) // size + len(offsets) - 1].tolist()
        expected = expected_tiles(offsets, size, kind)
        assert table[: len(expected)] == expected
        assert all(start == stop for start, stop, *_ in table[len(expected) :])


WRONG = ([0, 9, 4, 40], [2, 9, 40], [0, 9, 39], [0, 9, 50], [0, -3, 40], [0, 50, 40])


def test_wrong_offsets_give_nan_and_read_nothing_outside(device, triton_backend, monkeypatch):
    """As on a GPU, where nobody looks."""
    monkeypatch.setattr("tigon.ops.offsets.is_concrete", lambda t: False)
    leaves = [t.requires_grad_() for t in draw(40, device=device)[:3]]
    for wrong in WRONG:
        offsets = torch.tensor(wrong, device=device)
        for table in tiles.find_tiles(offsets, 40, (16, 16, 16)).flatten(0, 1).tolist():
            assert 0 <= table[0] <= table[1] <= 40
            assert 0 <= table[2] <= table[3] <= 40
        for causal in (True, False):
            o = tigon.varlen_attention(*leaves, offsets, causal=causal)
            assert all(t.isnan().all() for t in (o, *torch.autograd.grad(o, leaves, torch.ones_like(o))))


def test_layers_share_the_tables_of_their_offsets(device, triton_backend, monkeypatch):
    made = []
    make = tiles._varlen_tiles
    monkeypatch.setattr(tiles, "_varlen_tiles", lambda *args: made.append(args[1:]) or make(*args))
    q, k, v, _ = draw(40, device=device)
    offsets = count_up([30, 10], device)
    for _ in range(3):
        tigon.varlen_attention(q, k, v, offsets)
    assert len(made) == 1
    offsets.copy_(count_up([4, 36], device))  # the same tensor with other documents
    other = tigon.varlen_attention(q, k, v, offsets)
    assert len(made) == 2
    assert torch.equal(other, tigon.varlen_attention(q, k, v, count_up([4, 36], device)))
    offsets.data = count_up([22, 18], device)  # other memory, without another version
    assert torch.equal(tigon.varlen_attention(q, k, v, offsets), tigon.varlen_attention(q, k, v, offsets.clone()))
    # Each capture makes tables of its own. A capture without a number shares none, and so do calls after a capture:
    # a replay may write the offsets.
    for capture, more in ((17, 1), (18, 1), (None, 2), (0, 2)):
        monkeypatch.setattr(offsets_module, "find_capture", lambda t, capture=capture: capture)
        before = len(made)
        for _ in range(2):
            tigon.varlen_attention(q, k, v, offsets)
        assert len(made) == before + more
    assert offsets in offsets_module._made
    count = len(offsets_module._made)
    del offsets
    assert len(offsets_module._made) == count - 1


@pytest.mark.gpu
def test_captured_calls_run_with_other_documents(device, triton_backend, monkeypatch):
    tensors = draw(300, device=device)
    offsets, others = (count_up(lengths, device) for lengths in ([100, 7, 193, 0], [1, 250, 40, 9]))
    static = offsets.clone()
    leaves = [t.requires_grad_() for t in tensors[:3]]
    made = []
    make = tiles._varlen_tiles
    monkeypatch.setattr(tiles, "_varlen_tiles", lambda *args: made.append(args[1:]) or make(*args))

    def step(offsets):
        o = leaves[0]
        for _ in range(2):  # two layers
            o = tigon.varlen_attention(o, *leaves[1:], offsets)
        return [o.detach(), *torch.autograd.grad(o, leaves, tensors[3])]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(static)
    assert len(made) == 1 + (1 if graph_capture._load_runtime() else 2)
    for given in (others, offsets):
        static.copy_(given)
        graph.replay()
        for got, expected in zip(results, step(given.clone()), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.gpu
def test_offsets_that_a_replay_writes_are_read_anew(device, triton_backend):
    q, k, v, _ = draw(300, device=device)
    lengths = torch.tensor([100, 7, 193], device=device)
    offsets = torch.zeros(4, dtype=torch.long, device=device)
    offsets[1:] = lengths.cumsum(0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tigon.varlen_attention(q, k, v, offsets)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        offsets[1:] = lengths.cumsum(0)
        tigon.varlen_attention(q, k, v, offsets)
    for given in ([1, 250, 49], [299, 0, 1]):
        lengths.copy_(torch.tensor(given))
        graph.replay()
        assert torch.equal(tigon.varlen_attention(q, k, v, offsets), tigon.varlen_attention(q, k, v, offsets.clone()))
