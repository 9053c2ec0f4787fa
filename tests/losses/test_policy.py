"""Policy gradients: the formulas on whole logits in fp64, and TRL's own code, whatever the parts."""

import inspect
import re
import textwrap
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from flat import grpo, grpo_reference, rloo
from modes import NothingWaits, Watch
from torch import Tensor

import tigon
from tigon.kernels import dispatch
from tigon.losses import GRPO, Rollout, ValidLengths, inputs, token_loss
from tigon.losses.family import Part, Whole
from tigon.losses.policy import LOSS_TYPES, MODES, kernels
from tigon.losses.policy import grpo_reference as policy_reference
from tigon.losses.policy.batch import make_options
from tigon.losses.policy.family import Policy, PolicyTensors, Prepared

S, T, H, V = 6, 40, 8, 30
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def batch(device="cpu", dtype=torch.float64, S=S, T=T):
    """Completions, one of them without anything that counts, and what a trainer has of them. Padding is NaN."""

    def randn(*shape):
        return torch.randn(shape, device=device, dtype=torch.float64)

    x, weight, bias = randn(S, T, H), randn(V, H), randn(V)
    target = torch.randint(0, V, (S, T), device=device)
    target[:, : T // 5] = -100
    target[S // 3] = -100
    target[S - 1, T // 2 :] = -100
    logp = F.log_softmax(x @ weight.t() + bias, -1)
    logprob = logp.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    mask = target != -100
    # Ratios on both tensors of every bound.
    near = {name: torch.where(mask, logprob + 0.4 * randn(S, T), float("nan")) for name in ("old", "ref", "sampler")}
    return (
        tuple(t.to(dtype).requires_grad_() for t in (x, weight, bias)),
        target,
        randn(S).to(dtype),
        {name: t.to(dtype) for name, t in near.items()},
    )


def grads(loss, leaves):
    return torch.autograd.grad(loss, [t for t in leaves if t.requires_grad], retain_graph=True)


def compare(ours, theirs, leaves, **close):
    """Loss, gradients, and the metrics that both have."""
    torch.testing.assert_close(ours[0].double(), theirs[0].double(), **close)
    for a, b in zip(grads(ours[0], leaves), grads(theirs[0], leaves), strict=True):
        torch.testing.assert_close(a.double(), b.double(), **close)
    for name in theirs[1]:
        torch.testing.assert_close(ours[1][name].double(), theirs[1][name].double(), **close, equal_nan=True)


# Options, and which of old, ref and sampler log-probabilities go with them.
CASES = [
    *(({"loss_type": t}, "old") for t in LOSS_TYPES if t != "dr_grpo"),
    *(({"loss_type": t}, "") for t in ("dapo", "sapo", "cispo", "vespo")),
    ({"loss_type": "dr_grpo", "max_completion_length": 50, "epsilon_high": 0.28}, "old"),
    ({"loss_type": "cispo", "epsilon_high": 1.1}, "old"),
    ({"loss_type": "sapo", "sapo_temperature_pos": 1.3, "sapo_temperature_neg": 0.7}, "old"),
    ({"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_neg": 1.5}, "old"),
    ({"num_items_in_batch": 77.0}, "old"),
    ({"num_items_in_batch": torch.tensor(77)}, "old"),
    ({"delta": 1.5}, "old"),
    *(
        ({"loss_type": t, "importance_sampling_level": "sequence", "epsilon": 0.01}, "old")
        for t in ("grpo", "dapo", "luspo", "cispo", "sapo")
    ),
    *(({"loss_type": "grpo", "importance_sampling_level": level}, "") for level in ("token", "sequence")),
    ({"beta": 0.1}, "old ref"),
    ({"beta": 0.1}, "ref"),
    ({"beta": 0.1, "use_bias_correction_kl": False}, "old ref"),
    ({"beta": 0.1, "importance_sampling_level": "sequence", "loss_type": "grpo"}, "old ref"),
    ({"beta": 0.0}, "ref"),
    ({"entropy_coefficient": 0.3}, "old"),
    ({"entropy_coefficient": torch.tensor(0.3), "loss_type": "grpo", "importance_sampling_level": "sequence"}, "old"),
    ({"top_entropy_quantile": 0.2, "entropy_coefficient": 0.3}, "old"),
    ({"top_entropy_quantile": 0.2, "beta": 0.1, "loss_type": "luspo"}, "old ref"),
    ({"off_policy_mask_threshold": 0.01}, "old"),
    ({"off_policy_mask_threshold": 0.01, "importance_sampling_mode": None}, "old sampler"),
    *(({"importance_sampling_mode": m, "importance_sampling_clip_max": 1.3}, "old sampler") for m in MODES),
    *(({"importance_sampling_mode": m, "importance_sampling_clip_min": 0.8}, "sampler") for m in MODES),
    ({"loss_type": "vespo", "importance_sampling_mode": "token_mask", "beta": 0.2}, "old ref sampler"),
    ({"loss_type": "vespo", "importance_sampling_mode": "token_truncate"}, "sampler"),
    ({"temperature": 0.7, "softcap": 3.0, "scale": 0.5, "loss_type": "bnpo", "entropy_coefficient": 0.1}, "old"),
]


def call(fn, leaves, target, advantages, near, options, which, **more):
    x, weight, bias = leaves
    given = {f"{name}_logprob": near[name] for name in which.split()}
    return fn(x, weight, target, bias=bias, advantages=advantages, **given, **options, **more)


@pytest.mark.parametrize("chunk_bytes", [1, None])  # parts of 128 tokens, some in pieces; one part
@pytest.mark.parametrize(("options", "which"), CASES, ids=str)
def test_formulas(options, which, chunk_bytes):
    leaves, target, advantages, near = batch()
    for A in (advantages, advantages.unsqueeze(1) * torch.rand(S, T).add(0.5).double()):
        ours = call(grpo, leaves, target, A, near, options, which, chunk_bytes=chunk_bytes)
        compare(ours, call(grpo_reference, leaves, target, A, near, options, which), leaves, **EXACT)


@pytest.mark.parametrize("chunk_bytes", [1, None])
@pytest.mark.parametrize("options", [{}, {"epsilon": 0.1, "epsilon_high": 0.3, "entropy_coefficient": 0.2}], ids=str)
def test_rloo_is_its_formula(options, chunk_bytes):
    leaves, target, advantages, near = batch()
    # A sum over tokens: ratios within the bounds, and beyond them.
    near["old"] = near["old"] / 4 + 3 / 4 * call(grpo, leaves, target, advantages, near, {}, "")[1]["logprob"]
    ours = call(rloo, leaves, target, advantages, near, options, "old", chunk_bytes=chunk_bytes)
    config = GRPO(loss_type="grpo", **options)
    x, weight, bias = leaves
    head = tigon.Head(weight, bias)
    theirs = policy_reference(x, head, target, Rollout(advantages, near["old"]), config=config, level="total")
    compare(ours, theirs, leaves, **EXACT)
    assert 0 < ours[1]["clip_ratio/region_mean"] < 1


# known: whether rows that do not count are left out, which changes nothing about a row that counts. In the interpreter
# each case has one of both, its neighbours the other.
EVERY = torch.cuda.is_available()
KNOWN = [(case, known) for case in range(len(CASES)) for known in (True, False) if EVERY or known == case % 2]


@pytest.mark.parametrize(("case", "known"), KNOWN)
def test_kernels(case, known, triton_backend, device):
    """A batch that is one part goes to the kernels of policy losses: their metrics are those of the family, too."""
    options, which = CASES[case]
    options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
    leaves, target, advantages, near = batch(device, S=4, T=24)
    by_token = case % 3 == 0
    A = advantages.unsqueeze(1) * torch.rand(4, 24, device=device).add(0.5).double() if by_token else advantages
    exact = call(grpo_reference, leaves, target, A, near, options, which)
    with tigon.use_backend("torch"):
        metrics = call(grpo, leaves, target, A, near, options, which)[1]
    expected = grads(exact[0], leaves)
    leaves = [t.detach().float().requires_grad_() for t in leaves]
    lengths = ValidLengths(target) if known else [24] * 4
    loss, found = call(grpo, leaves, target, A, near, options, which, lengths=lengths)
    torch.testing.assert_close(loss.double(), exact[0], rtol=1e-4, atol=1e-5)
    assert list(found) == list(metrics)
    for name, value in metrics.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-4, atol=1e-5, equal_nan=True)
    for a, b in zip(grads(loss, leaves), expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("known", ["tokens", "sequences", "nothing"])
def test_kernels_of_rloo(known, triton_backend, device):
    leaves, target, advantages, near = batch(device, S=4, T=24)
    with tigon.use_backend("torch"):
        near["old"] = near["old"] / 8 + 7 / 8 * call(grpo, leaves, target, advantages, near, {}, "")[1]["logprob"]
    old = {"tokens": near["old"], "sequences": near["old"].nansum(1) + 0.05, "nothing": None}[known]
    options = {"advantages": advantages, "old_logprob": old, "epsilon_high": 0.3, "entropy_coefficient": 0.2}
    with tigon.use_backend("torch"):
        exact = rloo(leaves[0], leaves[1], target, bias=leaves[2], **options)
        expected = grads(exact[0], leaves)
    x, weight, bias = [t.detach().float().requires_grad_() for t in leaves]
    ours = rloo(x, weight, target, bias=bias, lengths=[24] * 4, **options)
    torch.testing.assert_close(ours[0].double(), exact[0], rtol=1e-4, atol=1e-5)
    for name, value in exact[1].items():
        torch.testing.assert_close(ours[1][name].double(), value, rtol=1e-4, atol=1e-5, equal_nan=True)
    for a, b in zip(grads(ours[0], (x, weight, bias)), expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-5)


OF_TOKENS = [
    ({}, "old"), ({"beta": 0.1, "delta": 1.2}, "old ref"), ({"loss_type": "cispo", "epsilon_high": 1.1}, "old"),
    ({"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.01, "beta": 0.1}, "old ref"),
    ({"loss_type": "vespo", "importance_sampling_mode": "token_truncate", "off_policy_mask_threshold": 0.01},
     "old sampler"),
]  # fmt: skip


@pytest.mark.parametrize("counted", [0, 2**24])  # the batch's tokens: once for all programs, or by each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("options", "which"), OF_TOKENS, ids=str)
def test_kernels_of_tokens(options, which, dtype, counted, triton_backend, device, monkeypatch):
    """Sequences beyond one block, tensors of the rollout in other dtypes, a boost: slopes without any logits."""
    monkeypatch.setattr(kernels, "COUNTED_ANEW", counted)
    S, T = 3, 2100
    target = torch.where(torch.rand(S, T) < 0.7, 1, -100).to(device)
    target[1] = -100
    mask = target != -100
    logprob, entropy = (torch.where(mask, torch.rand(S, T, device=device), 0.0) for _ in range(2))
    padded = torch.where(mask, 0.0, float("nan"))
    near = [(logprob - 0.3 * torch.randn(S, T, device=device) + padded).to(dtype) for _ in range(3)]
    near = [t if name in which else None for t, name in zip(near, ("old", "ref", "sampler"), strict=True)]
    rollout = Rollout(torch.randn(S, device=device), *near)
    made = make_options(GRPO(**options, entropy_coefficient=0.2), rollout)
    tensors = PolicyTensors(rollout.advantages, *near)
    family = Policy.for_tensors(made, tensors)
    loss, metrics = torch.empty((), device=device), torch.empty(len(family.metrics), device=device)
    slopes = [torch.empty_like(logprob) for _ in range(2)]
    batch = Whole(logprob, entropy, None, None, None, target, -100, tensors, S * T)
    family.launch(batch, loss, metrics, slopes, 64.0)
    family.launch(batch._replace(visited=S * T // 4), short := loss.clone(), metrics.clone(), slopes, 64.0)
    assert short.isnan()

    prepared = family.prepare(tensors, mask, torch.float32)
    own = Prepared._make(t.unsqueeze(1) if t is not None and t.dim() == 1 else t for t in prepared)
    part = Part(None, logprob, entropy, None, None, mask, own)
    expected, found, expected_slopes = token_loss._evaluate_with_slopes(family, part, 64.0)
    torch.testing.assert_close(loss, expected)
    for a, b in zip(slopes, expected_slopes, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(metrics, torch.stack(family.finish(found, prepared, mask)), rtol=1e-5, atol=1e-6)


def test_the_host_makes_few_calls(monkeypatch):
    """Of short completions the host's time is the loss's: as on a GPU, without one."""
    monkeypatch.setattr(dispatch, "why_not_triton", lambda *_: None)
    x, weight, old = torch.empty(16, 4, 64), torch.empty(1000, 64), torch.empty(16, 4)
    x, weight, old = x.to("meta", torch.bfloat16).requires_grad_(), weight.to("meta", torch.bfloat16), old.to("meta")
    target = torch.empty(16, 4, dtype=torch.long, device="meta")
    rollout = Rollout(torch.empty(16, device="meta"), old, old)
    for config in (GRPO(), GRPO(loss_type="grpo", beta=0.1, entropy_coefficient=0.1)):
        with tigon.use_backend("triton"), dispatch.meta_as_gpu(), Watch() as seen:
            loss, _ = tigon.losses.grpo(x, weight.requires_grad_(), target, rollout, config=config)
            torch.autograd.grad(loss, (x, weight))
        assert 20 < seen.calls < 60


# --------------------------------------------------------------------------------------------------------------- TRL


def accelerator():
    return SimpleNamespace(
        num_processes=1, sync_gradients=False, gather=lambda t: t, gather_for_metrics=lambda t: t,
        reduce=lambda t, reduction: t, pad_across_processes=lambda t, dim, pad_index: t,
    )  # fmt: skip


def trl(leaves, target, advantages, near, options, which):
    """The loss of TRL's GRPOTrainer, whole logits in place of its model, and what it logs."""
    module = pytest.importorskip("trl.trainer.grpo_trainer")
    options = dict(options)
    trainer = module.GRPOTrainer
    mask = target != -100
    logp = F.log_softmax(F.linear(*leaves) / options.pop("temperature", 1.0), -1)
    logprob = logp.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    near = {name: torch.where(mask, t, 0.0) for name, t in near.items()}
    inputs = {
        "prompt_ids": target[:, :0], "prompt_mask": target[:, :0], "completion_ids": target,
        "completion_mask": mask.to(logp.dtype), "advantages": advantages,
        "num_items_in_batch": torch.as_tensor(options.pop("num_items_in_batch", mask.sum())),
    }  # fmt: skip
    if "old" in which:
        inputs["old_per_token_logps"] = near["old"]
    if "ref" in which:
        inputs["ref_per_token_logps"] = near["ref"]
    mode = options.pop("importance_sampling_mode", "sequence_mask")
    bounds = options.pop("importance_sampling_clip_max", 3.0), options.pop("importance_sampling_clip_min", None)
    if "sampler" in which:
        inputs["sampling_per_token_logps"] = near["sampler"]
        if mode is not None:
            old = near["old"] if "old" in which else logprob.detach()
            inputs["importance_sampling_ratio"] = trl_ratio(trainer, old, near["sampler"], mask, mode, bounds)
    coefficient = options.pop("entropy_coefficient", 0.0)
    args = {
        "delta": None, "use_bias_correction_kl": True, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
    }  # fmt: skip
    epsilon = options.pop("epsilon", 0.2)
    self = SimpleNamespace(
        aux_loss_enabled=False, top_entropy_quantile=options.pop("top_entropy_quantile", 1.0),
        off_policy_mask_threshold=options.pop("off_policy_mask_threshold", None),
        importance_sampling_level=options.pop("importance_sampling_level", "token"), beta=options.pop("beta", 0.0),
        loss_type=options.pop("loss_type", "dapo"), epsilon_low=epsilon,
        epsilon_high=options.pop("epsilon_high", epsilon), use_vllm="importance_sampling_ratio" in inputs,
        vllm_importance_sampling_correction=True, model=SimpleNamespace(training=False), accelerator=accelerator(),
        current_gradient_accumulation_steps=1, max_completion_length=options.pop("max_completion_length", 1),
        _entropy_bonus_enabled=bool(coefficient), entropy_coef=coefficient, use_adaptive_entropy=False,
        _metrics={"eval": defaultdict(list)}, get_off_policy_mask=trainer.get_off_policy_mask,
        get_gamma_weights=trainer.get_gamma_weights,
        args=SimpleNamespace(**{k: options.pop(k, v) for k, v in args.items()}),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprob, entropy, None),
    )  # fmt: skip
    self.get_high_entropy_mask = trainer.get_high_entropy_mask.__get__(self)
    assert not options
    loss = trainer._compute_loss(self, None, inputs)
    return loss, {name: torch.tensor(values[-1]) for name, values in self._metrics["eval"].items()}


def trl_ratio(trainer, old, sampler, mask, mode, bounds):
    """Its importance ratio, which is a stretch of a long method: the stretch is run."""
    source = inspect.getsource(trainer._generate_and_score_completions)
    found = re.search(r"( +per_token_logps_diff = .*?)\n +# Compute the per-token log prob", source, re.DOTALL)
    if found is None:
        pytest.skip("TRL computes the importance ratio elsewhere")
    self = SimpleNamespace(
        vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_max=bounds[0],
        vllm_importance_sampling_clip_min=bounds[1],
    )  # fmt: skip
    names = {"self": self, "torch": torch, "math": __import__("math"), "mask": mask, "old_per_token_logps": old}
    exec(textwrap.dedent(found[1]), names | {"sampling_per_token_logps": sampler}, places := {})
    return places["vllm_importance_sampling_ratio"]


@pytest.fixture
def double():
    """Numbers that TRL writes out are then as exact as ours."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("options", "which"), [c for c in CASES if "softcap" not in c[0] and c[0] != {"beta": 0.0}], ids=str
)
def test_the_loss_and_the_metrics_of_trl(options, which, double):
    leaves, target, advantages, near = batch()
    for A in (advantages, advantages.unsqueeze(1) * torch.rand(S, T).add(0.5)):
        ours = call(grpo, leaves, target, A, near, options, which, chunk_bytes=1)
        compare(ours, trl(leaves, target, A, near, options, which), leaves, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.2])
@pytest.mark.parametrize("known", ["tokens", "sequences", "nothing"])
def test_rloo_of_trl(known, entropy_coefficient, double):
    module = pytest.importorskip("trl.trainer.rloo_trainer")
    leaves, target, advantages, near = batch()
    mask = target != -100
    logp = F.log_softmax(F.linear(*leaves), -1)
    logprob = logp.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    near["old"] = torch.where(mask, logprob.detach() + 0.1 * torch.randn(S, T), float("nan"))
    old = {"tokens": near["old"], "sequences": near["old"].nansum(1), "nothing": None}[known]
    total = (logprob.detach() * mask).sum(1) if old is None else near["old"].nansum(1)
    self = SimpleNamespace(
        aux_loss_enabled=False, epsilon_low=0.2, epsilon_high=0.3, model=SimpleNamespace(training=True),
        accelerator=accelerator(), _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprob, entropy, None),
    )  # fmt: skip
    theirs = module.RLOOTrainer._compute_loss(self, None, {
        "prompt_ids": target[:, :0], "prompt_mask": target[:, :0], "completion_ids": target,
        "completion_mask": mask.double(), "advantages": advantages, "old_logps": total,
    })  # fmt: skip
    metrics = {name: torch.tensor(values[-1]) for name, values in self._metrics["train"].items()}
    if entropy_coefficient:
        theirs = theirs - entropy_coefficient * (entropy * mask).sum() / mask.sum()
    ours = rloo(leaves[0], leaves[1], target, bias=leaves[2], advantages=advantages, old_logprob=old, epsilon_high=0.3,
                entropy_coefficient=entropy_coefficient, chunk_bytes=1)  # fmt: skip
    compare(ours, (theirs, metrics), leaves, rtol=1e-6, atol=1e-9)  # its shares of clipped sequences are fp32


# ------------------------------------------------------------------------------------------------- what holds besides


def test_a_reference_head_is_its_log_probabilities():
    leaves, target, advantages, near = batch()
    head = torch.randn(S, T, 5).double(), torch.randn(V, 5).double(), torch.randn(V).double()
    logprob = F.log_softmax(F.linear(*head) / 0.9, -1).gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    options = {"beta": 0.1, "temperature": 0.9}
    with_head = call(grpo, leaves, target, advantages, near, options, "old", ref_x=head[0], ref_weight=head[1],
                     ref_bias=head[2], chunk_bytes=1)  # fmt: skip
    compare(
        with_head, call(grpo, leaves, target, advantages, near, options, "old", ref_logprob=logprob), leaves, **EXACT
    )


def test_the_importance_ratio_may_be_given():
    leaves, target, advantages, near = batch()
    ratio = torch.rand(S).double()
    expected = call(grpo, leaves, target, advantages * ratio, near, {"loss_type": "sapo"}, "old")
    for given in (ratio, ratio.unsqueeze(1), ratio.unsqueeze(1).expand(S, T)):
        ours = call(
            grpo, leaves, target, advantages, near, {"loss_type": "sapo"}, "old", importance_sampling_ratio=given
        )
        compare(ours, (expected[0], {}), leaves, **EXACT)
        if given.shape != (S, T):
            assert ours[1]["sampling/importance_sampling_ratio/max"] == ratio.max()


def test_a_sampler_that_does_not_know_a_token():
    leaves, target, advantages, near = batch()
    mode = {"importance_sampling_mode": "token_truncate"}
    near["sampler"] = near["old"].clone()
    expected = call(grpo, leaves, target, advantages, near, mode, "old sampler")
    near["sampler"][0, -3:] = float("nan")
    compare(call(grpo, leaves, target, advantages, near, mode, "old sampler"), expected, leaves, **EXACT)


def test_what_the_metrics_count(double):
    """Without TRL: by hand."""
    x, weight = torch.zeros(2, 2, 1), torch.zeros(4, 1)
    target = torch.tensor([[0, 1], [2, -100]])
    # Every token has probability 1/4. A positive advantage is clipped above, not below; a negative one not above.
    old = -torch.log(4 * torch.tensor([[0.7, 1.5], [1.5, 1.0]]))
    loss, found = grpo(x, weight, target, advantages=torch.tensor([2.0, -3.0]), old_logprob=old)
    torch.testing.assert_close(loss, torch.tensor(-(2 * 0.7 + 2 * 1.2 - 3 * 1.5) / 3))
    third = torch.tensor(1 / 3)
    torch.testing.assert_close(found["clip_ratio/high_mean"], third)
    torch.testing.assert_close(found["clip_ratio/region_mean"], third)
    torch.testing.assert_close(found["clip_ratio/high_max"], torch.tensor(0.5))
    torch.testing.assert_close(found["entropy"], torch.tensor(4.0).log())
    assert found["clip_ratio/low_mean"] == found["clip_ratio/low_min"] == 0


@pytest.mark.parametrize(
    ("options", "advantage", "expected"),
    [
        ({}, 1.0, -1.2),
        ({}, 0.0, 0.0),
        ({}, -1.0, float("inf")),
        ({"delta": 4.0}, -1.0, 4.0),
        ({"beta": 0.1}, 1.0, -1.2),  # a KL of 0, times a ratio that is not infinite
        ({"loss_type": "sapo"}, 1.0, -4.0),
        ({"loss_type": "sapo"}, -1.0, 4 / 1.05),
    ],
    ids=str,
)
def test_a_clipped_ratio_may_be_beyond_fp32(options, advantage, expected, backend, device):
    x, weight = torch.randn(1, 3, 4, device=device), torch.randn(9, 4, device=device, requires_grad=True)
    target, old = torch.tensor([[1, 2, 3]], device=device), torch.full((1, 3), -200.0, device=device)
    advantages = torch.tensor([advantage], device=device)
    if "beta" in options:
        options = options | {"ref_logprob": grpo(x, weight, target, advantages=advantages)[1]["logprob"]}
    loss, _ = grpo(x, weight, target, advantages=advantages, old_logprob=old, **options)
    torch.testing.assert_close(loss, torch.tensor(expected, device=device))
    if loss.isfinite():
        assert not grads(loss, [weight])[0].any()


@pytest.mark.parametrize(
    "options", [{}, {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4}]
)
def test_completions_beyond_65536_tokens(options, device):
    T = 70_000
    x, weight = torch.randn(2, T, 2, device=device), torch.randn(3, 2, device=device)
    target = torch.randint(0, 3, (2, T), device=device)
    target[0, : T - 9] = -100  # only positions that 16 bits do not hold
    advantages = torch.tensor([1.0, -2.0], device=device)
    leaves = x.requires_grad_(), weight.requires_grad_()
    loss, found = grpo(*leaves, target, advantages=advantages, chunk_bytes=2**18, **options)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    expected, theirs = grpo_reference(*exact, target, advantages=advantages.double(), **options)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["logprob"].double(), theirs["logprob"], rtol=1e-5, atol=1e-5)
    for a, b in zip(grads(loss, leaves), grads(expected, exact), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))


@pytest.mark.parametrize("options", [
    {"loss_type": "grpo", "importance_sampling_level": "sequence"}, {"top_entropy_quantile": 0.5},
])  # fmt: skip
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (3, 5)])  # no sequences, no tokens, none that counts
def test_nothing_to_learn_from(shape, options, backend, device):
    x = torch.randn(*shape, H, device=device, requires_grad=True)
    weight = torch.randn(V, H, device=device, requires_grad=True)
    target = torch.full(shape, -100, device=device)
    loss, found = grpo(x, weight, target, advantages=torch.ones(shape[0], device=device), **options)
    assert loss == 0
    assert "loss_type" in options or found["clip_ratio/high_max"].isnan()  # an extreme of no token
    assert all((g == 0).all() for g in grads(loss, (x, weight)))


@pytest.mark.parametrize(("options", "which"), CASES, ids=str)
def test_nothing_waits_for_the_device(options, which, monkeypatch):
    monkeypatch.setattr(inputs, "checked_target", lambda name, target, *_: target)  # on a CPU it looks at the targets
    leaves, target, advantages, near = batch()
    lengths = (target != -100).sum(1).tolist()
    with NothingWaits():
        call(grpo, leaves, target, advantages, near, options, which, lengths=lengths, chunk_bytes=1)


@pytest.mark.parametrize("options", [{}, {"loss_type": "grpo", "importance_sampling_level": "sequence"}])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_numbers_stay_visible_and_where_they_are(value, options):
    leaves, target, advantages, near = batch()
    leaves[0].data[0, -1] = value
    loss, _ = call(grpo, leaves, target, advantages, near, options, "old", chunk_bytes=1)
    assert loss.isnan()
    dx, dweight, _ = grads(loss, leaves)
    assert dx[0, -1].isnan().all()
    assert dweight.isnan().any()
    assert dx[1:].isfinite().all()
    leaves, target, advantages, near = batch()
    advantages[0] = value
    assert not call(grpo, leaves, target, advantages, near, options, "old")[0].isfinite()


@pytest.mark.parametrize(
    ("T", "options"),
    [
        (256, {"num_items_in_batch": 1e6}),  # slopes times probabilities are 3e-8: less than fp16 holds
        (16384, {"num_items_in_batch": 1.0}),  # slopes of 20, not to be multiplied by the tokens there are
        (16384, {"loss_type": "luspo"}),
        (16384, {"loss_type": "grpo"}),  # and of a sequence of one token among long ones
    ],
    ids=str,
)
def test_fp16_gradients_neither_underflow_nor_overflow(T, options):
    S, V = 4, 50
    x, weight = torch.randn(S, T, 2).half().requires_grad_(), torch.randn(V, 2).half().requires_grad_()
    target = torch.randint(0, V, (S, T))
    target[0, 1:] = -100
    advantages = torch.full((S,), 3.0 if T == 256 else 20.0)
    loss, _ = grpo(x, weight, target, advantages=advantages, **options)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected, _ = grpo_reference(*exact, target, advantages=advantages.double(), **options)
    # Scaled as by a GradScaler.
    factor = 1e6 / 64 if T == 256 else 1e-3
    for a, b in zip(grads(factor * loss, (x, weight)), grads(factor * expected, exact), strict=True):
        assert (a.double() - b).norm() < 2e-3 * b.norm()


def test_compiles_whole():
    leaves, target, advantages, near = batch()
    arguments = {"top_entropy_quantile": 0.3, "beta": 0.1, "entropy_coefficient": 0.1}, "ref sampler"
    ours = torch.compile(call, fullgraph=True, backend="aot_eager")(grpo, leaves, target, advantages, near, *arguments)
    compare(ours, call(grpo, leaves, target, advantages, near, *arguments), leaves, **EXACT)


@pytest.mark.parametrize(("options", "sentence"), [
    ({"loss_type": "ppo"}, "grpo: loss_type must be one of 'grpo', .*, got 'ppo'"),
    ({"importance_sampling_level": "word"}, "grpo: importance_sampling_level must be one of 'token', 'sequence', got"),
    ({"importance_sampling_mode": "mask"}, "grpo: importance_sampling_mode must be one of 'token_truncate'"),
    ({"beta": 0.1}, "grpo: beta = 0.1 needs a reference in rollout.ref: log-probabilities, or a Hidden"),
    ({"loss_type": "dr_grpo"}, "grpo: dr_grpo needs a positive max_completion_length, got None"),
    ({"top_entropy_quantile": 1.5}, "grpo: top_entropy_quantile must be from 0 to 1, got 1.5"),
    ({"sapo_temperature_pos": 0.0}, "grpo: sapo's temperatures must be positive, got 0.0 and 1.05"),
    ({"old_logprob": torch.zeros(S)}, r"grpo: rollout.old must be \(S, T\), here S = 6 and T = 40, got \(6,\)"),
    ({"advantages": torch.zeros(5)}, r"grpo: rollout.advantages must be \(S,\) or \(S, T\), here S = 6 .* got \(5,\)"),
    ({"sampler_logprob": torch.zeros(S, T), "loss_type": "vespo"}, "grpo: vespo needs a token-level importance"),
    ({"importance_sampling_ratio": torch.ones(S), "loss_type": "vespo"}, "grpo: vespo needs a token-level rollout"),
    ({"sampler_logprob": torch.zeros(S, T), "importance_sampling_mode": "token_truncate",
      "importance_sampling_clip_max": None}, "grpo: importance_sampling_mode 'token_truncate' needs at least one"),
    ({"sampler_logprob": torch.zeros(S, T), "importance_sampling_clip_min": 4.0}, "clip_min must be less than"),
    ({"target": torch.zeros(S, 3)}, r"grpo: x must be \(S, T, H\) and target \(S, T\), got \(6, 40, 8\) and \(6, 3\)"),
    ({"advantages": torch.zeros(S, device="meta")}, "grpo: rollout.advantages must be on x's device"),
    ({"num_items_in_batch": torch.ones((), device="meta")}, "grpo: config.num_items_in_batch must be on"),
    ({"temperature": 0.0}, "grpo: temperature must be positive, got 0.0"),
], ids=str)  # fmt: skip
def test_what_does_not_fit_gets_a_sentence(options, sentence):
    leaves, target, advantages, _ = batch()
    given = {"x": leaves[0], "weight": leaves[1], "target": target, "advantages": advantages} | options
    with pytest.raises(ValueError, match=sentence):
        grpo(**given)
