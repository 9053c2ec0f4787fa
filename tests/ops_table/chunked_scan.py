"""Scans by chunks as in transformers, with products in the narrow dtype: eager code for the rows of both scans."""

from __future__ import annotations

import torch


def run_by_document(run, tensors, offsets, initial_state):
    """run(*tensors of a document, its initial state) → (output, state), for each document."""
    starts = offsets.tolist()
    states = [None] * (len(starts) - 1) if initial_state is None else initial_state.split(1)
    parts = [
        run(*(t[:, start:stop] for t in tensors), S)
        for start, stop, S in zip(starts[:-1], starts[1:], states, strict=True)
    ]
    return tuple(torch.cat(t, dim) for t, dim in zip(zip(*parts, strict=True), (1, 0), strict=True))


def run_chunks(q, k, v, g, beta, S, corrects=True):
    """(o, state) of tensors (B, H, T, …); g, beta and the state are wide. corrects: as the delta rule does."""
    wide, narrow = g.dtype, q.dtype
    S = v.new_zeros((*v.shape[:2], k.shape[-1], v.shape[-1]), dtype=wide) if S is None else S.to(wide)
    o = [v[:, :, :0]]
    for start in range(0, q.shape[2], 64):
        qc, kc, vc, gc, bc = (t[:, :, start : start + 64] for t in (q, k, v, g, beta))
        a = gc.cumsum(-1)
        n = a.shape[-1]
        seen = torch.ones(n, n, dtype=torch.bool, device=a.device).tril()
        decay = (a.unsqueeze(-1) - a.unsqueeze(-2)).masked_fill(~seen, -torch.inf).exp()
        x = (vc * bc.unsqueeze(-1)).to(narrow)
        if corrects:
            solve = (kc @ kc.transpose(-1, -2)).to(wide) * decay * bc.unsqueeze(-1)
            eye = torch.eye(n, dtype=wide, device=a.device).expand_as(solve)
            inverse = torch.linalg.solve_triangular(solve, eye, upper=False, unitriangular=True).to(narrow)
            x = inverse @ x - inverse @ (kc * (bc * a.exp()).unsqueeze(-1)).to(narrow) @ S.to(narrow)
        attend = ((qc @ kc.transpose(-1, -2)).to(wide) * decay).to(narrow)
        o.append((qc * a.exp().unsqueeze(-1)).to(narrow) @ S.to(narrow) + attend @ x)
        last = (kc * (a[..., -1:] - a).exp().unsqueeze(-1)).to(narrow)
        S = S * a[..., -1].exp()[..., None, None] + last.transpose(-1, -2) @ x
    return torch.cat(o, 2), S
