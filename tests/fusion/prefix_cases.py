"""Models and batches of the tests of shared prefixes."""

import torch
from zoo import build

import tigon

# Plain attention, learned positions, packed projections, windows, latent attention, and a model inside another.
SHARING = ["llama", "gpt2", "phi3", "mistral", "gemma3", "deepseek_v3", "llava"]
EXPERTS = {"deepseek_v3"}  # torch's grouped product has no fp64
WINDOWS = {"mistral", "gemma2", "gemma3"}
LENGTHS = [(17, (5, 9, 1)), (6, (4, 4)), (11, (7,))]


def ids(device, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(3)

    def draw(n):
        return torch.randint(3, 89, (n,), generator=generator).to(device)

    return [draw(n) for n, _ in lengths], [[draw(n) for n in own] for _, own in lengths]


def family(name, device):
    """A model of the zoo, whose windows, if it has any, are shorter than its sequences."""
    model = build(name).to(device, torch.float32 if name in EXPERTS else torch.float64)
    if name in WINDOWS:
        model.config.sliding_window = 8
    return model


def separately(model, prefixes, suffixes):
    """The log-probabilities of all tokens of the suffixes, one sequence a suffix; entropies too."""
    found = []
    for prefix, own in zip(prefixes, suffixes, strict=True):
        for suffix in own:
            sequence = torch.cat([prefix, suffix])[None]
            logits = model(sequence, use_cache=False).logits[0, len(prefix) - 1 : -1]
            logp = logits.float().log_softmax(-1) if logits.dtype != torch.float64 else logits.log_softmax(-1)
            found.append(torch.stack([logp.gather(-1, suffix[:, None])[:, 0], -(logp.exp() * logp).sum(-1)]))
    return torch.cat(found, 1)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(got, want, tolerance):
    assert got.keys() == want.keys()
    largest = max(g.abs().max() for g in want.values())
    for name, g in want.items():
        assert (got[name] - g).abs().max() <= tolerance * largest, name


def shared(device, name="llama", **options):
    model = build(name).to(device)
    tigon.fuse(model, shared_prefix=True, **options)
    return model, tigon.SharedPrefixBatch(*ids(device))
