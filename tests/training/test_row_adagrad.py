"""RowAdagrad: the formula in fp64, rows that are touched and those that are not, and state that is saved."""

import copy

import pytest
import torch

from tigon.ops.embedding_bag import embedding_bag
from tigon.training import RowAdagrad

# Steps as learning rates make them: a power of two would hide a factor that is rounded.
OPTIONS = {"lr": 0.03, "eps": 1e-6}


def formula(w, grads, weight_decay=0.0, start=0.0):
    """In fp64, row by row."""
    w, s = w.detach().double().clone(), torch.full((w.shape[0],), start, dtype=torch.float64)
    for g in grads:
        for r, row in enumerate(g.double()):
            if row.any():
                row = row + weight_decay * w[r]
                s[r] += row.square().mean()
                w[r] -= OPTIONS["lr"] * row / (s[r].sqrt() + OPTIONS["eps"])
    return w, s


def sparse(g, duplicates=False):
    rows = g.any(1).nonzero()[:, 0]
    if duplicates:  # halves are exact: their sum is the gradient
        return torch.sparse_coo_tensor(torch.cat((rows, rows))[None], torch.cat((g[rows], g[rows])) / 2, g.shape)
    return torch.sparse_coo_tensor(rows[None], g[rows], g.shape, is_coalesced=True)


def drawn(V, D, device, steps=3):
    w = torch.randn(V, D, device=device)
    grads = [torch.randn(V, D, device=device) * (torch.rand(V, 1, device=device) < 0.4) for _ in range(steps)]
    return w, grads


@pytest.mark.parametrize("kind", ["dense", "rows", "duplicates"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_steps_are_those_of_the_formula(kind, weight_decay, backend, device):
    """Of three tables at once, two of one width; one gradient stays out."""
    tables = [drawn(V, D, device) for V, D in ((40, 16), (130, 16), (7, 100))]
    params = [torch.nn.Parameter(w.clone()) for w, _ in tables]
    idle = torch.nn.Parameter(torch.randn(5, 16, device=device))
    before = idle.detach().clone()
    optimizer = RowAdagrad([*params, idle], weight_decay=weight_decay, initial_accumulator_value=0.2, **OPTIONS)
    for step in range(3):
        for p, (_, grads) in zip(params, tables, strict=True):
            p.grad = grads[step].clone() if kind == "dense" else sparse(grads[step], kind == "duplicates")
        optimizer.step()
    for p, (w, grads) in zip(params, tables, strict=True):
        expected, s = formula(w.cpu(), [g.cpu() for g in grads], weight_decay, 0.2)
        torch.testing.assert_close(p.detach().cpu().double(), expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(optimizer.state[p]["sum"].cpu().double(), s, rtol=1e-6, atol=1e-7)
        assert optimizer.state[p]["sum"].dtype == torch.float32
    assert torch.equal(idle, before)
    assert idle not in optimizer.state


def test_dense_gradients_and_rows_give_the_same_bits(backend, device):
    w, grads = drawn(300, 24, device)
    results = []
    for of in (lambda g: g.clone(), sparse):
        p = torch.nn.Parameter(w.clone())
        optimizer = RowAdagrad([p], weight_decay=0.1, **OPTIONS)
        for g in grads:
            p.grad = of(g)
            optimizer.step()
        results.append((p.detach(), optimizer.state[p]["sum"]))
    for dense, rows in zip(*results, strict=True):
        assert torch.equal(dense, rows)


def test_rows_without_a_gradient_keep_their_bits(backend, device):
    """They do not decay, and eps = 0 makes no NaN of their 0 / 0."""
    w, (g, *_) = drawn(50, 8, device)
    p = torch.nn.Parameter(w.clone())
    p.grad = g
    optimizer = RowAdagrad([p], lr=0.1, eps=0.0, weight_decay=0.5)
    optimizer.step()
    touched = g.any(1)
    assert torch.equal(p[~touched], w[~touched])
    assert (p != w)[touched].all()
    assert optimizer.state[p]["sum"][~touched].abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_is_rounded_once_to_the_nearest(dtype, backend, device):
    w, (g, *_) = drawn(60, 16, device)
    w, g = w.to(dtype), g.to(dtype)
    p = torch.nn.Parameter(w.clone())
    p.grad = sparse(g)
    optimizer = RowAdagrad([p], **OPTIONS)
    optimizer.step()
    expected, s = formula(w.cpu(), [g.cpu()])
    nearest = expected.to(dtype)
    ours = p.detach().cpu()
    # fp32 decides a tie in another way than fp64 at most once in some thousand.
    assert (ours != nearest).sum() <= 2
    assert optimizer.state[p]["sum"].dtype == torch.float32
    torch.testing.assert_close(optimizer.state[p]["sum"].cpu().double(), s, rtol=1e-6, atol=1e-7)


def test_state_comes_back_in_fp32(backend, device):
    w, grads = drawn(30, 8, device)
    w, grads = w.bfloat16(), [g.bfloat16() for g in grads]
    p = torch.nn.Parameter(w.clone())
    optimizer = RowAdagrad([{"params": [p], "lr": 0.5}], lr=0.1)
    p.grad = grads[0]
    optimizer.step()
    saved, q = copy.deepcopy(optimizer.state_dict()), torch.nn.Parameter(p.detach().clone())
    other = RowAdagrad([q], lr=0.1)
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 0.5
    assert torch.equal(other.state[q]["sum"], optimizer.state[p]["sum"])
    p.grad, q.grad = grads[1], grads[1].clone()
    optimizer.step()
    other.step()
    assert torch.equal(p, q)
    assert torch.equal(other.state[q]["sum"], optimizer.state[p]["sum"])


def test_fp64_has_state_of_fp64(device):
    w, grads = drawn(20, 8, device)
    p = torch.nn.Parameter(w.double())
    optimizer = RowAdagrad([p], **OPTIONS)
    for g in grads:
        p.grad = g.double()
        optimizer.step()
    expected, s = formula(w.cpu(), [g.cpu() for g in grads])
    torch.testing.assert_close(p.detach().cpu(), expected)
    torch.testing.assert_close(optimizer.state[p]["sum"].cpu(), s)


def test_bags_and_the_optimizer_fit(backend, device):
    table = torch.nn.Parameter(torch.randn(50, 16, device=device))
    values = torch.randint(0, 9, (6, 4), device=device)
    other, optimizer = torch.nn.Parameter(table.detach().clone()), RowAdagrad([table], lr=0.05)
    dense = RowAdagrad([other], lr=0.05)

    def closure():
        optimizer.zero_grad()
        loss = embedding_bag(values, table, mode="sum", grad="rows").square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    embedding_bag(values, other, mode="sum").square().sum().backward()
    dense.step()
    torch.testing.assert_close(table, other)
    assert optimizer.step(closure) < first


def test_a_graph_that_saved_the_table_is_told(backend, device):
    p = torch.nn.Parameter(torch.randn(4, 8, device=device))
    loss = p.square().sum()
    p.grad = torch.ones_like(p)
    RowAdagrad([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("params", "options", "sentence"),
    [
        ([torch.ones(3)], {}, r"RowAdagrad: params must be float tables \(V, D\), got \(3,\) torch.float32"),
        ([torch.ones(3, 2)], {"lr": -1.0}, r"RowAdagrad: lr must be at least 0 and finite, got -1.0"),
        ([torch.ones(3, 2)], {"eps": float("nan")}, r"RowAdagrad: eps must be at least 0 and finite, got nan"),
        ([{"params": [torch.ones(3, 2)], "weight_decay": -2}], {}, r"weight_decay must be at least 0 and finite"),
    ],
)
def test_bad_options_get_a_sentence(params, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        RowAdagrad(params, **options)
