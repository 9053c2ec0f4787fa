"""The gated delta rule in plain PyTorch: the specification, token by token, and the CPU path, chunk by chunk."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels import autocast_device, is_captured, is_concrete

# Tokens per chunk: products inside a chunk grow with its square, steps of the state fall.
CHUNK = 64
EPS = 1e-6


def recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, scale: float | None = None, normalize: bool = False,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The definition, a token at a time: (o, state after the last token)."""
    q, k, v, g, beta, S = _widen(q, k, v, g, beta, scale, normalize, initial_state)
    o = []
    for t in range(q.shape[2]):
        key, decayed = k[:, :, t], S * g[:, :, t, None, None].exp()
        change = beta[:, :, t, None] * (v[:, :, t] - torch.einsum("bhk,bhkv->bhv", key, decayed))
        S = decayed + key.unsqueeze(-1) * change.unsqueeze(-2)
        o.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], S))
    return torch.stack(o, 1) if o else v.transpose(1, 2), S


def gated_delta_rule_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, scale: float | None = None, normalize: bool = False,
    initial_state: Tensor | None = None, offsets: Tensor | None = None, return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    with torch.autocast(autocast_device(q.device.type), enabled=False):
        q_, k_, v_, g_, beta_, S = _widen(q, k, v, g, beta, scale, normalize, initial_state, offsets)
        o, S = run_documents(q_, k_, v_, g_, beta_, S, offsets)
        o = o.transpose(1, 2).to(v.dtype).contiguous()
        return (o, S.contiguous()) if return_state else o


def run_documents(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, offsets: Tensor | None, corrects: bool = True
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o, last states) of tensors (B, H, T, …) that have one dtype, g perhaps a wider one.

    corrects: whether values are corrected, as the delta rule does, or added as they are.
    """
    if not is_concrete(q) or is_captured(q):
        return _run_at_once(q, k, v, g, beta, S, offsets, corrects)
    if offsets is None:
        return _run_chunks(q, k, v, g, beta, S, corrects)
    parts = []
    for d, (start, stop) in enumerate(pairwise(offsets.tolist())):
        q_d, k_d, v_d, g_d, beta_d = (t[:, :, start:stop] for t in (q, k, v, g, beta))
        parts.append(_run_chunks(q_d, k_d, v_d, g_d, beta_d, S[d : d + 1], corrects))
    return torch.cat([part[0] for part in parts], 2), torch.cat([part[1] for part in parts])


def _widen(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None, normalize: bool,
    initial_state: Tensor | None, offsets: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return q, k, v, g and beta as (B, H, T, …), and the first states, in fp32, or in fp64 for fp64."""
    wide = torch.promote_types(q.dtype, torch.float32)
    heads = v.shape[2] // q.shape[2]
    q, k, v, g, beta = (t.to(wide).transpose(1, 2) for t in (q, k, v, g, beta))
    if normalize:
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + EPS) for t in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    q, k = (t.repeat_interleave(heads, 1) for t in (q, k))
    if initial_state is None:
        documents = v.shape[0] if offsets is None else offsets.shape[0] - 1
        initial_state = v.new_zeros((documents, v.shape[1], k.shape[-1], v.shape[-1]))
    return q, k, v, g, beta, initial_state.to(wide)


def _run_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, corrects: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Chunk by chunk: all products inside chunks at once, then the states in their order."""
    T = q.shape[2]
    if not T:
        return v, S
    # A key of zeros with beta 0 and g 0 changes nothing.
    q, k, v = (F.pad(t, (0, 0, 0, -T % CHUNK)).unflatten(2, (-1, CHUNK)) for t in (q, k, v))
    g, beta = (F.pad(t, (0, -T % CHUNK)).unflatten(2, (-1, CHUNK)) for t in (g, beta))
    sums = g.cumsum(-1)
    solve, attend = _make_matrices(q, k, sums, beta, corrects)
    first, last = sums.exp().to(q).unsqueeze(-1), (sums[..., -1:] - sums).exp().to(q).unsqueeze(-1)
    # What each token's value would be without the state, and how the state enters.
    values, readers = _solve(solve, v), None if solve is None else _solve(solve, k * first)
    queries, keys, fade = q * first, k * last * beta.unsqueeze(-1), sums[..., -1].exp().to(q)[..., None, None]
    o = []
    for n in range(q.shape[2]):
        x = values[:, :, n] if readers is None else values[:, :, n] - readers[:, :, n] @ S
        o.append(queries[:, :, n] @ S + attend[:, :, n] @ x)
        S = S * fade[:, :, n] + keys[:, :, n].transpose(-1, -2) @ x
    return torch.cat(o, 2)[:, :, :T], S


def _run_at_once(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, offsets: Tensor | None, corrects: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """All tokens as a single chunk: a graph must hold for all lengths and offsets, and has no loop over them."""
    sums = g.double().cumsum(-1)  # over all documents: their differences cancel
    if offsets is None:
        solve, attend = _make_matrices(q, k, sums, beta, corrects)
        first, last = sums.exp().to(q), (sums[..., -1:] - sums).exp().to(q)
        x = v if solve is None else _solve(solve, v - (k * first.unsqueeze(-1)) @ S)
        o = (q * first.unsqueeze(-1)) @ S + attend @ x
        fade = g.sum(-1).exp().to(q)[..., None, None]
        return o, S * fade + (k * (last * beta).unsqueeze(-1)).transpose(-1, -2) @ x
    row = torch.arange(q.shape[2], device=q.device, dtype=offsets.dtype)
    document = torch.searchsorted(offsets.contiguous(), row, right=True) - 1
    solve, attend = _make_matrices(q, k, sums, beta, corrects, document[:, None] == document)
    before = F.pad(sums, (1, 0))[..., offsets]  # the sum before each document, and behind the last
    first = (sums - before[..., document]).exp().to(q)
    last = (before[..., document + 1] - sums).exp().to(q)
    own = S[document].transpose(0, 1).unsqueeze(0)  # (1, H, T, K, V)
    x = v
    if solve is not None:
        x = _solve(solve, v - torch.einsum("bhtk,bhtkv->bhtv", k * first.unsqueeze(-1), own))
    o = torch.einsum("bhtk,bhtkv->bhtv", q * first.unsqueeze(-1), own) + attend @ x
    member = (document == torch.arange(S.shape[0], device=q.device)[:, None]).to(q)
    added = torch.einsum("dt,bhtk,bhtv->dhkv", member, k * (last * beta).unsqueeze(-1), x)
    fade = before.diff(dim=-1).exp().to(q)[0].transpose(0, 1)
    return o, S * fade[..., None, None] + added


def _solve(solve: Tensor | None, x: Tensor) -> Tensor:
    return x if solve is None else torch.linalg.solve_triangular(solve, x, upper=False, unitriangular=True)


def _make_matrices(
    q: Tensor, k: Tensor, sums: Tensor, beta: Tensor, corrects: bool, same: Tensor | None = None
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """Return how tokens' values depend on one another, and the outputs on them. same: which tokens share a document."""
    T = q.shape[-2]
    seen = torch.ones((T, T), dtype=torch.bool, device=q.device).tril()
    seen = seen if same is None else seen & same
    # Masked before the exponential: above the diagonal sums are positive and could overflow.
    decay = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(~seen, -torch.inf).exp().to(q)
    decay = decay * beta.unsqueeze(-2)
    return (k @ k.transpose(-1, -2)) * decay if corrects else None, (q @ k.transpose(-1, -2)) * decay
