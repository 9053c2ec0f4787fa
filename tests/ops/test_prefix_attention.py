"""prefix_attention beside sequences that each have a prefix of their own, and PrefixLayout."""

import pytest
import torch

import tigon
from tigon.ops.prefix_attention import prefix_attention_reference

RAGGED = [5, 0, 17, 3], [[3, 1, 7], [2, 4], [1], [9, 9, 1, 2]]
SINGLE = [6, 0, 19], [[1] * 5, [1], [1] * 8]
ONE_EACH = [4, 9], [[11], [6]]


def draw(layout, H=4, G=2, D=16, dtype=torch.float64, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(layout.rows, heads, D, generator=generator).to(device, dtype) for heads in (H, G, G)]


def one_by_one(q, k, v, layout, scale=None, softcap=None, window=None):
    """Each suffix as a sequence with a prefix of its own, by a loop over tokens."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    outputs = torch.empty_like(q)

    def read(i, keys, first):
        keys = keys[max(0, first - window + 1) :] if window else keys
        z = torch.einsum("hd,jhd->hj", q[i], k[keys]) * scale
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        outputs[i] = torch.einsum("hj,jhd->hd", z.softmax(-1), v[keys])

    p, s = 0, layout.prefix_rows
    for length, suffixes in zip(layout.prefix_lengths, layout.suffix_lengths, strict=True):
        prefix = list(range(p, p + length))
        for i in prefix:
            read(i, prefix[: i - p + 1], i - p)
        for n in suffixes:
            for i in range(s, s + n):
                read(i, prefix + list(range(s, i + 1)), length + i - s)
            s += n
        p += length
    return outputs


@pytest.mark.parametrize("options", [{}, {"scale": 0.7}, {"softcap": 1.5}, {"window": 6}, {"window": 1}], ids=str)
@pytest.mark.parametrize("lengths", [RAGGED, SINGLE, ONE_EACH], ids=["ragged", "single", "one each"])
def test_the_reference_is_a_loop_over_tokens(lengths, options):
    layout = tigon.PrefixLayout(*lengths)
    q, k, v = draw(layout)
    torch.testing.assert_close(
        prefix_attention_reference(q, k, v, layout, **options), one_by_one(q, k, v, layout, **options)
    )


def test_across_reads_all_tokens_of_the_others():
    layout = tigon.PrefixLayout([3, 2], [[2, 1, 3], [2, 2]])
    q, k, v = draw(layout, H=1, G=1)
    o = tigon.prefix_attention(q, k, v, layout, across="suffixes")
    # Row 6 is the second token of the first suffix of the first request, whose suffixes are rows 5 to 10.
    keys = [0, 1, 2, 5, 6, 7, 8, 9, 10]
    torch.testing.assert_close(o[6, 0], (k[keys, 0] @ q[6, 0] / 4).softmax(-1) @ v[keys, 0])
    # Its first token does not read the second.
    keys.remove(6)
    torch.testing.assert_close(o[5, 0], (k[keys, 0] @ q[5, 0] / 4).softmax(-1) @ v[keys, 0])


def test_gradients_of_a_prefix_are_the_sum_of_those_of_its_copies():
    lengths, suffixes = [5, 3], [[3, 1, 4], [2, 2]]
    layout = tigon.PrefixLayout(lengths, suffixes)
    inputs = [t.requires_grad_() for t in draw(layout)]
    up = torch.randn(layout.suffix_rows, 4, 16, dtype=torch.float64)
    o = tigon.prefix_attention(*inputs, layout)[layout.prefix_rows :]
    got = torch.autograd.grad(o, inputs, up)
    s, p, total = 0, 0, 0.0
    for length, own in zip(lengths, suffixes, strict=True):
        for n in own:
            start = layout.prefix_rows + s
            q, k, v = (torch.cat((t[p : p + length], t[start : start + n])) for t in inputs)
            heads = (t.transpose(0, 1) for t in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
            alone = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(0, 1)
            total = total + (alone[length:] * up[s : s + n]).sum()
            s += n
        p += length
    for a, b in zip(got, torch.autograd.grad(total, inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_across_with_one_suffix_is_none(backend, device):
    layout = tigon.PrefixLayout(*ONE_EACH, device=device)
    q, k, v = draw(layout, device=device, dtype=torch.float32)
    one, other = (tigon.prefix_attention(q, k, v, layout, across=across) for across in ("none", "suffixes"))
    torch.testing.assert_close(one, other)


def outputs_and_gradients(lengths, rows, options, device, dtype=torch.bfloat16):
    """Of the suffixes' rows: outputs, and gradients of q, k and v. `rows`: which drawn numbers each suffix row gets."""
    layout = tigon.PrefixLayout(*lengths, device=device)
    P = layout.prefix_rows
    drawn = [torch.randn(400, h, 16, generator=torch.Generator().manual_seed(h + i)) for i, h in enumerate((4, 2, 2))]
    up = torch.randn(400, 4, 16, generator=torch.Generator().manual_seed(9)).to(device, dtype)
    rows = torch.tensor([*range(300, 300 + P), *rows])
    q, k, v = (t[rows].to(device, dtype).requires_grad_() for t in drawn)
    o = tigon.prefix_attention(q, k, v, layout, **options)
    gradients = torch.autograd.grad(o, (q, k, v), up[rows.to(device)])
    return [t.detach()[P:] for t in (o, *gradients)]


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"window": 30}], ids=str)
@pytest.mark.parametrize("length", [1, 7, 70])
def test_a_suffix_does_not_depend_on_its_neighbours(length, options, device, triton_backend):
    """Bit for bit, wherever it stands among short and long ones."""
    own = list(range(200, 200 + length))
    alone = outputs_and_gradients(([70], [[length]]), own, options, device)
    for before, after in (([1], [1]), ([3, 1, 9], [66]), ([90, 5], []), ([1] * 70, [2])):
        first, n = sum(before), sum(before) + sum(after)
        rows = [*range(first), *own, *range(100, 100 + sum(after))]
        got = outputs_and_gradients(([70], [[*before, length, *after]]), rows, options, device)
        for one, other in zip(got, alone, strict=True):
            assert len(one) == n + length
            assert torch.equal(one[first : first + length], other)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("groups", [2, 8])
def test_a_block_that_one_tile_masks_rounds_as_where_another_does_not(width, groups):
    """A suffix of several tiles: its neighbours decide where they are cut, and so which of its blocks are masked."""
    draw = torch.Generator().manual_seed(0)
    drawn = [torch.randn(700, heads, width, generator=draw).bfloat16().cuda() for heads in (8, groups, groups, 8)]

    def computed(before, after):
        rows = [*range(333), *range(640, 640 + sum(before)), *range(400, 600), *range(660, 660 + sum(after))]
        layout = tigon.PrefixLayout([333], [[*before, 200, *after]], device="cuda")
        q, k, v, do = (t[rows] for t in drawn)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        o = tigon.prefix_attention(*leaves, layout)
        first = 333 + sum(before)
        return [t[first : first + 200] for t in (o.detach(), *torch.autograd.grad(o, leaves, do))]

    alone = computed([], [])
    for before, after in (([1], [1]), ([3, 1, 9], [30]), ([7, 5], []), ([1] * 17, [2])):
        for got, expected in zip(computed(before, after), alone, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
def test_small_tiles_round_as_large_ones_do(width):
    """A request of few tokens has tiles of 64 rows; beside a long one, the same request has tiles of 128."""
    draw = torch.Generator().manual_seed(0)
    drawn = [torch.randn(900, heads, width, generator=draw).bfloat16().cuda() for heads in (4, 4, 4, 4)]

    def computed(after):
        layout = tigon.PrefixLayout([333, *[40] * bool(after)], [[30, 1, 2], *[after] * bool(after)], device="cuda")
        assert layout.short(1) != bool(after)
        rows = [*range(333), *range(400, 440 if after else 400), *range(500, 533 + sum(after))]
        q, k, v, do = (t[rows] for t in drawn)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        o = tigon.prefix_attention(*leaves, layout)
        first = 333 + 40 * bool(after)
        return [t[first : first + 33] for t in (o.detach(), *torch.autograd.grad(o, leaves, do))]

    for got, expected in zip(computed([128, 128]), computed([]), strict=True):
        assert torch.equal(got, expected)


def test_permuted_suffixes_give_permuted_results(device, triton_backend):
    lengths, order = [5, 1, 40, 2, 33], [3, 0, 4, 2, 1]
    starts = [0, 5, 6, 46, 48]
    straight = outputs_and_gradients(([37], [lengths]), range(81), {}, device)
    rows = [r for i in order for r in range(starts[i], starts[i] + lengths[i])]
    permuted = outputs_and_gradients(([37], [[lengths[i] for i in order]]), rows, {}, device)
    for one, other in zip(permuted, straight, strict=True):
        assert torch.equal(one, other[torch.tensor(rows, device=device)])


def test_views_of_a_packed_projection_are_read_where_they_lie(device, triton_backend):
    layout = tigon.PrefixLayout(*RAGGED, device=device)
    packed = torch.randn(layout.rows, 8, 16, device=device)
    views = packed[:, :4], packed[:, 4:6], packed[:, 6:]
    copies = [t.contiguous() for t in views]
    assert torch.equal(tigon.prefix_attention(*views, layout), tigon.prefix_attention(*copies, layout))


def test_tables_of_tiles_are_made_once(device, triton_backend):
    layout = tigon.PrefixLayout(*RAGGED, device=device)
    q, k, v = draw(layout, device=device, dtype=torch.float32)
    tigon.prefix_attention(q, k, v, layout)
    made = {key: t.data_ptr() for key, t in layout._tiles.items()}
    assert made
    tigon.prefix_attention(q, k, v, layout)
    assert {key: t.data_ptr() for key, t in layout._tiles.items()} == made


# ----------------------------------------------------------------------------------------------------------- layout


def test_offsets_positions_and_predictors():
    layout = tigon.PrefixLayout([2, 3], [[1, 2], [2]])
    assert (layout.requests, layout.suffixes) == (2, 3)
    assert (layout.rows, layout.prefix_rows, layout.suffix_rows) == (10, 5, 5)
    assert layout.cu_prefix.tolist() == [0, 2, 5]
    assert layout.cu_suffix.tolist() == [0, 1, 3, 5]
    assert layout.request.tolist() == [0, 0, 1]
    assert layout.positions.tolist() == [0, 1, 0, 1, 2, 2, 2, 3, 3, 4]
    assert layout.predictor.tolist() == [1, 1, 6, 4, 8]
    assert layout.positions.dtype == layout.predictor.dtype == layout.request.dtype == torch.int64


def test_few_rows_want_small_tiles():
    assert tigon.PrefixLayout([9] * 3, [[1] * 30, [2], [60]]).short(1)
    assert not tigon.PrefixLayout([9] * 3, [[1] * 30, [2], [60]]).short(8)
    assert not tigon.PrefixLayout([9], [[128]]).short(1)


def test_an_empty_prefix_predicts_nothing():
    layout = tigon.PrefixLayout([2, 0], [[1], [2]])
    assert layout.positions.tolist() == [0, 1, 2, 0, 1]
    with pytest.raises(ValueError, match=r"every prefix must have a token for predictor, got .* request 1: nothing"):
        _ = layout.predictor


def test_to_another_device_and_back():
    layout = tigon.PrefixLayout([2], [[1, 2]])
    assert layout.to("cpu") is layout
    moved = layout.to("meta")
    assert moved.positions.is_meta
    assert moved.suffix_lengths == layout.suffix_lengths


@pytest.mark.parametrize(
    ("prefixes", "suffixes", "sentence"),
    [
        ([2, 3], [[1]], r"suffix_lengths must hold a list for each of the 2 prefixes, got 1\.$"),
        (torch.tensor([2]), [[1]], r"prefix_lengths must be a list of ints on the host, got a tensor on cpu\.$"),
        ([2], torch.tensor([[1]]), r"suffix_lengths must be a list of lists of ints, got a tensor on cpu\.$"),
        ([2], [torch.tensor([1])], r"suffix_lengths\[0\] must be a list of ints on the host, got a tensor on cpu\.$"),
        ([torch.tensor(2)], [[1]], r"prefix_lengths\[0\] must be an int on the host, got a tensor on cpu\.$"),
        ([2], [1], r"suffix_lengths\[0\] must be a list of ints on the host, got int\.$"),
        ([2.0], [[1]], r"prefix_lengths\[0\] must be an int on the host, got float\.$"),
        ([-1], [[1]], r"prefix_lengths\[0\] must be at least 0, got -1\.$"),
        ([2, 2], [[1], [3, 0]], r"suffix_lengths\[1\]\[1\] must be at least 1, got 0\.$"),
        ([2], [[]], r"suffix_lengths\[0\] must have at least one length, got an empty list\.$"),
        ([], [], r"prefix_lengths must have at least one length, got an empty list\.$"),
    ],
)  # fmt: skip
def test_a_bad_layout_gets_a_sentence(prefixes, suffixes, sentence):
    with pytest.raises(ValueError, match=r"^PrefixLayout: " + sentence):
        tigon.PrefixLayout(prefixes, suffixes)


def test_bad_options_get_a_sentence():
    layout = tigon.PrefixLayout([2], [[1, 2]])
    q, k, v = draw(layout)
    bad = [
        ((q, k, v, [2]), {}, r"layout must be a tigon.PrefixLayout, got list\."),
        ((q[:4], k[:4], v[:4], layout), {}, r"layout must count the rows of q, 4, got one of 5 rows\."),
        ((q, k, v, layout.to("meta")), {}, r"layout must lie on q's device cpu, got meta: make it with"),
        ((q[0], k, v, layout), {}, r"q must be \(N, H, D\) floats, got \(4, 16\)"),
        ((q, k[:, :, :8], v, layout), {}, r"k must be \(N, G, D\) beside q \(5, 4, 16\), .* got \(5, 2, 8\)"),
        ((q, k.repeat(1, 2, 1)[:, :3], v, layout), {}, r"k must be \(N, G, D\) .*got \(5, 3, 16\)"),
        ((q, k, v[:, :1], layout), {}, r"v must have k's shape \(5, 2, 16\), got \(5, 1, 16\)"),
        ((q, k.float(), v, layout), {}, r"k must be torch.float64 on cpu, as q is, got torch.float32"),
        ((q, k, v, layout), {"across": "all"}, r"across must be 'none' or 'suffixes', got 'all'\."),
        ((q, k, v, layout), {"scale": 0.0}, r"scale must be positive, got 0.0\."),
        ((q, k, v, layout), {"softcap": -1.0}, r"softcap must be positive or None, got -1.0\."),
        ((q, k, v, layout), {"window": 0}, r"window must be a positive int or None, got 0\."),
    ]
    for inputs, options, sentence in bad:
        with pytest.raises(ValueError, match=r"^prefix_attention: " + sentence):
            tigon.prefix_attention(*inputs, **options)


def test_autocast_computes_in_its_dtype_as_torch_does(device):
    layout = tigon.PrefixLayout(*ONE_EACH, device=device)
    inputs = [t.requires_grad_() for t in draw(layout, device=device, dtype=torch.float32)]
    with torch.autocast(device.type, torch.bfloat16):
        o = tigon.prefix_attention(*inputs, layout)
    assert o.dtype == torch.bfloat16
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(o.sum(), inputs))
