"""The coding rate against its formula, a determinant of d by d a group, in a loop."""

import itertools
import re
from pathlib import Path

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import tigon
from tigon.losses import RowGroups, coding_rate
from tigon.losses import coding_rates as coding

N, D, EPS = 24, 6, 0.3
PAGE = Path(__file__).parents[2] / "docs" / "losses" / "coding-rate.md"


def rows(n=N, d=D, dtype=torch.float64, device="cpu"):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(n + d)).to(device, dtype)


def given(sizes, weights=True, n=N):
    """Groups of these sizes, which overlap and name some rows twice."""
    draw = torch.Generator().manual_seed(len(sizes))
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    members = torch.randint(n, (int(offsets[-1]),), generator=draw)
    return offsets, members, torch.rand(len(members), generator=draw, dtype=torch.float64) if weights else None


def looped(z, groups=None, *, eps, gamma=1.0):
    n, d = z.shape
    eye = torch.eye(d, dtype=z.dtype, device=z.device)
    if groups is None:
        return torch.logdet(eye + gamma * d / (n * eps) * z.T @ z) / 2
    offsets, members, weights = groups
    total = z.sum() * 0
    for start, end in itertools.pairwise(offsets):
        p = torch.zeros(n, dtype=z.dtype, device=z.device)
        p.index_add_(0, members[start:end], torch.ones(end - start).to(p) if weights is None else weights[start:end])
        if t := float(p.sum()):
            total = total + t / (2 * n) * torch.logdet(eye + gamma * d / (t * eps) * z.T @ (p[:, None] * z))
    return total


def both(f, z, upstream=1.7):
    z = z.detach().clone().requires_grad_()
    value = f(z)
    return value.detach(), torch.autograd.grad(value * upstream, z)[0]


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("gamma", [1.0, 0.5])
@pytest.mark.parametrize(("n", "d"), [(1, 1), (24, 6), (6, 24), (7, 7)])  # least, tall, wide, square
def test_all_rows(n, d, gamma, device):
    z = rows(n, d, device=device)
    assert_same(
        both(lambda z: coding_rate(z, eps=EPS, gamma=gamma), z), both(lambda z: looped(z, eps=EPS, gamma=gamma), z)
    )


SIZES = {
    "none": [], "empty": [0, 0], "one": [1], "d": [6, 6], "beyond d": [7, 8, 9, 40], "padded beyond d": [5],
    "all": [0, 1, 2, 3, 4, 5, 6, 7, 0, 17, 1, 33, 0],
}  # fmt: skip


@pytest.mark.parametrize("piece", [1, 2000, None], ids=str)
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_groups(sizes, weights, piece, device, monkeypatch):
    if piece:
        monkeypatch.setattr(coding, "PIECE_BYTES", piece)
    z = rows(device=device)
    groups = tuple(t if t is None else t.to(device) for t in given(sizes, weights))
    right = both(lambda z: looped(z, groups, eps=EPS, gamma=0.8), z)
    prepared = RowGroups(*groups)
    assert len(prepared) == len(sizes)
    raw = groups if weights else groups[:2]
    for of in (prepared, raw):
        assert_same(both(lambda z, of=of: coding_rate(z, of, eps=EPS, gamma=0.8), z), right)


def test_sizes_of_few_groups_go_with_the_next(monkeypatch):
    sizes = torch.tensor([1] * 3 + [0, 2, 4, 4, 16] + [64] * 300 + [4096])
    found = coding._merge_small_sizes(sizes).tolist()
    # The first 64s would make 300 more factors of 4096 × 4096.
    assert found == [64] * 3 + [0, 64, 64, 64, 64] + [64] * 300 + [4096]
    assert coding._merge_small_sizes(sizes[:0]).tolist() == []
    monkeypatch.setattr(coding, "LAUNCHES", ("cuda", "cpu"))
    z, groups = rows(), given(SIZES["all"])
    prepared = RowGroups(*groups)
    assert len(prepared._blocks) == 1
    assert len(prepared.select(torch.tensor([0, 1, 9]))._blocks) == 1
    assert_same(both(lambda z: coding_rate(z, prepared, eps=EPS), z), both(lambda z: looped(z, groups, eps=EPS), z))


def test_what_has_weight_0_is_no_member():
    offsets, members, weights = given([3, 4, 2, 3])
    weights[[0, 4, 5, 7, 8]] = 0  # some of two groups, all of the third
    z = rows()
    right = both(lambda z: looped(z, (offsets, members, weights), eps=EPS), z)
    assert_same(both(lambda z: coding_rate(z, (offsets, members, weights), eps=EPS), z), right)
    weights[:] = 0
    value, dz = both(lambda z: coding_rate(z, (offsets, members, weights), eps=EPS), z)
    assert value == 0
    assert (dz == 0).all()


def test_labels_are_groups_of_rows():
    labels = torch.arange(N) * 7 % 5 * 100
    z = rows()
    order = labels.argsort(stable=True)
    offsets = torch.tensor([0, *labels.unique(return_counts=True)[1]]).cumsum(0)
    right = both(lambda z: looped(z, (offsets, order, None), eps=EPS), z)
    for of in (labels, labels.int(), RowGroups.from_labels(labels)):
        assert_same(both(lambda z, of=of: coding_rate(z, of, eps=EPS), z), right)
    # One label is all rows; no label is none, and n counts those without one.
    torch.testing.assert_close(coding_rate(z, labels * 0, eps=EPS), coding_rate(z, eps=EPS))
    assert coding_rate(z, torch.full((N,), -1), eps=EPS) == 0
    half = torch.where(torch.arange(N) < N // 2, 3, -100)
    torch.testing.assert_close(coding_rate(z, half, eps=EPS), coding_rate(z[: N // 2], eps=EPS) / 2)


def test_some_of_the_groups():
    sizes = SIZES["all"]
    offsets, members, weights = given(sizes)
    which = torch.tensor([9, 0, 4, 4, 11, 9])
    taken = RowGroups(offsets, members, weights).select(which)
    assert len(taken) == 6
    of = torch.cat([torch.arange(offsets[j], offsets[j + 1]) for j in which])
    alone = torch.tensor([0, *(sizes[j] for j in which)]).cumsum(0), members[of], weights[of]
    z = rows()
    right = both(lambda z: looped(z, alone, eps=EPS), z)
    assert_same(both(lambda z: coding_rate(z, taken, eps=EPS), z), right)
    twice = taken.select(torch.tensor([0, 3]))
    right = coding_rate(z, RowGroups(offsets, members, weights).select(torch.tensor([9, 4])), eps=EPS)
    torch.testing.assert_close(coding_rate(z, twice, eps=EPS), right)
    assert coding_rate(z, taken.select(torch.tensor([], dtype=torch.long)), eps=EPS) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_inputs_are_computed_in_fp32_or_fp64(dtype, device):
    z = rows(64, 16, device=device).to(dtype)
    groups = tuple(t.to(device) for t in given([0, 3, 9, 50, 1], n=64))
    wide, dwide = both(lambda z: looped(z, groups, eps=EPS), z.double())
    with torch.autocast(device.type, dtype=torch.bfloat16):
        value, dz = both(lambda z: coding_rate(z, groups, eps=EPS), z)
    assert (value.dtype, dz.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(value.double(), wide, rtol=1e-6, atol=0)
    rounding = torch.finfo(dtype).eps
    # On a GPU the small groups go with the one of 50, more than there are columns, whose fp32 gradient is less exact.
    near = max(rounding, 4e-6 if device.type == "cuda" else 1e-6)
    torch.testing.assert_close(dz.double(), dwide, rtol=rounding, atol=near * float(dwide.abs().max()))
    assert dz.abs().max() > 0
    exact = coding_rate(z, groups, eps=EPS, dtype=torch.float64)
    assert exact.dtype == torch.float64
    torch.testing.assert_close(exact, wide, rtol=1e-12, atol=0)


@pytest.mark.parametrize("sizes", [None, [0, 1, 3, 9, 4]], ids=["all rows", "groups"])
def test_gradients(sizes):
    groups = None if sizes is None else RowGroups(*given(sizes, n=10))
    z = rows(10, 4).requires_grad_()
    assert gradcheck(lambda z: coding_rate(z, groups, eps=EPS), z)
    with tigon.use_backend("torch"):
        assert gradgradcheck(lambda z: coding_rate(z, groups, eps=EPS), z)
    (dz,) = torch.autograd.grad(coding_rate(z, groups, eps=EPS), z, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dz.sum().backward()


def test_repeated_eigenvalues():
    """Orthogonal rows of one length, where a gradient by eigenvectors divides by 0: a z / (1 + a ‖z‖²) each."""
    a = 4 / (4 * EPS)
    _, dz = both(lambda z: coding_rate(z, eps=EPS), 2 * torch.eye(4, dtype=torch.float64), upstream=1.0)
    torch.testing.assert_close(dz, 2 * a / (1 + 4 * a) * torch.eye(4, dtype=torch.float64), rtol=1e-14, atol=1e-15)
    value, dz = both(lambda z: coding_rate(z, eps=EPS), torch.zeros(5, 4))
    assert value == 0
    assert (dz == 0).all()


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)], ids=str)
def test_nothing_has_rate_0(shape):
    labels = torch.zeros(shape[0], dtype=torch.long)
    for groups in (None, labels):
        value, dz = both(lambda z, groups=groups: coding_rate(z, groups, eps=EPS), torch.ones(shape))
        assert value == 0
        assert dz.shape == shape


def test_a_nan_is_seen_in_its_groups():
    z = rows()
    z[5, 2] = torch.nan
    offsets, members = torch.tensor([0, 3, 6]), torch.tensor([0, 5, 7, 1, 2, 3])
    value, dz = both(lambda z: coding_rate(z, (offsets, members), eps=EPS), z)
    assert value.isnan()
    assert dz[[0, 5, 7]].isnan().all()
    assert dz[[1, 2, 3]].isfinite().all()
    assert dz[[1, 2, 3]].abs().min() > 0
    assert coding_rate(z, eps=EPS).isnan()
    apart = torch.where(torch.arange(N) == 5, -1, 0)
    assert coding_rate(z, apart, eps=EPS).isfinite()


def test_a_matrix_without_a_factor_is_nan_and_fp64_has_one():
    z = torch.ones(8, 16) + 1e-4 * rows(8, 16, torch.float32)
    value, dz = both(lambda z: coding_rate(z, eps=1e-9), z)
    assert value.isnan()
    assert dz.isnan().all()
    assert coding_rate(z, eps=1e-9, dtype=torch.float64).isfinite()
    # Equal rows, and every step exact: the second pivot is 0, whose logarithm is −∞ and not NaN.
    assert coding_rate(torch.ones(8, 16), eps=2.0**-25).isnan()


def test_memory_is_that_of_a_piece(monkeypatch):
    """Thousands of groups of hundreds of members: 98 MiB of rows in all, and 1 MiB of everything at a time."""
    seen, solved = [], coding._solve

    def watched(y, gradient):
        seen.append((y.numel() + min(y.shape[1:]) ** 2 * len(y)) * y.element_size())
        return solved(y, gradient)

    monkeypatch.setattr(coding, "PIECE_BYTES", 2**20)
    monkeypatch.setattr(coding, "_solve", watched)
    groups = given([150, 250] * 2000, weights=False, n=500)
    coding_rate(rows(500, 24, torch.float32).requires_grad_(), groups[:2], eps=EPS).backward()
    assert sum(seen) > 98 * 2**20
    assert max(seen) < 2**20


def test_bits_strides_and_inputs(device):
    groups = RowGroups(*given(SIZES["all"])).to(device)
    z = rows(device=device).T.contiguous().T
    before = z.clone()
    first, second = (both(lambda z: coding_rate(z, groups, eps=EPS), z) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert torch.equal(z, before)


def test_inside_a_compiled_graph():
    groups = RowGroups(*given(SIZES["all"]))
    compiled = torch.compile(
        lambda z: coding_rate(2 * z, groups, eps=EPS) - coding_rate(2 * z, eps=EPS), backend="eager", fullgraph=True
    )
    plain = both(lambda z: coding_rate(2 * z, groups, eps=EPS) - coding_rate(2 * z, eps=EPS), rows())
    torch.testing.assert_close(both(compiled, rows()), plain)


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    groups = RowGroups(*given(SIZES["all"])).to("cuda")
    z = rows(device="cuda").requires_grad_()
    (coding_rate(z, groups, eps=EPS) - coding_rate(z, eps=EPS)).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        (coding_rate(z, groups, eps=EPS) - coding_rate(z, eps=EPS)).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


Z = torch.ones(4, 2)
ONE = torch.tensor([0, 2]), torch.tensor([0, 1])
TAKEN = RowGroups(*ONE)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: coding_rate(Z, eps=0), "coding_rate: eps must be positive, got 0."),
        (lambda: coding_rate(Z, eps=float("nan")), "coding_rate: eps must be positive, got nan."),
        (lambda: coding_rate(Z, eps=1, gamma=-1.0), "coding_rate: gamma must be positive, got -1.0."),
        (lambda: coding_rate([1], eps=1), "coding_rate: z must be a tensor, got list."),
        (lambda: coding_rate(Z[0], eps=1), "coding_rate: z must be (n, d) floats, got (2,) torch.float32."),
        (lambda: coding_rate(Z.long(), eps=1), "coding_rate: z must be (n, d) floats, got (4, 2) torch.int64."),
        (
            lambda: coding_rate(Z, eps=1, dtype=torch.bfloat16),
            "coding_rate: dtype must be torch.float32, torch.float64 or None, got torch.bfloat16.",
        ),
        (
            lambda: coding_rate(Z, torch.zeros(3).long(), eps=1),
            "coding_rate: groups must be (4,) labels, one per row of z, got (3,).",
        ),
        (lambda: coding_rate(Z, Z[:, 0], eps=1), "labels must be 1-d integers, got (4,) torch.float32."),
        (
            lambda: coding_rate(Z, "all", eps=1),
            "groups must be tigon.losses.RowGroups, labels (n,) or (offsets, members, weights), got str.",
        ),
        (lambda: coding_rate(Z[:1], ONE, eps=1), "groups must have members below 1, the rows of z, got 1."),
        (
            lambda: coding_rate(Z, RowGroups.from_labels(torch.zeros(5).long()), eps=1),
            "coding_rate: groups must have 4 labels, one per row of z, got 5.",
        ),
        (
            lambda: coding_rate(Z, TAKEN.to("meta"), eps=1),
            "coding_rate: groups must be on z's device cpu, got meta.",
        ),
        (
            lambda: RowGroups(torch.tensor([0, 3]), ONE[1]),
            "RowGroups: offsets must rise from 0 to 2, the number of members, got [0, 3].",
        ),
        (lambda: RowGroups(torch.tensor([0, 3, 2]), ONE[1]), "must rise from 0 to 2, the number of members, got ["),
        (lambda: RowGroups(ONE[1][:0], ONE[1][:0]), "offsets must rise from 0 to 0, the number of members, got []."),
        (lambda: RowGroups(ONE[0], torch.tensor([0, -1])), "RowGroups: members must be rows, 0 or more, got -1."),
        (lambda: RowGroups(ONE[0], Z), "RowGroups: members must be 1-d integers, got (4, 2) torch.float32."),
        (lambda: RowGroups(*ONE, torch.ones(3)), "weights must be (2,) floats, one for each member, got (3,)"),
        (lambda: RowGroups(*ONE, torch.tensor([1, -1.0])), "weights must be finite and not negative, got -1.0 at 1."),
        (lambda: RowGroups(*ONE, torch.tensor([torch.nan, 1])), "must be finite and not negative, got nan at 0."),
        (lambda: RowGroups(*ONE, torch.ones(2, requires_grad=True)), "weights must not require a gradient"),
        (lambda: TAKEN.select(torch.tensor([0, 1])), "RowGroups: which must lie in [0, 1), the groups, got 1."),
        (lambda: TAKEN.select(torch.tensor([-1])), "RowGroups: which must lie in [0, 1), the groups, got -1."),
    ],
)  # fmt: skip
def test_bad_input_gets_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        call()
