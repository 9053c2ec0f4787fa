"""Mixtures whose own code runs every expert on every token: only the chosen experts run in a fused model."""

import pytest
import torch
from torch import nn

import tigon

transformers = pytest.importorskip("transformers")
from tigon.fusion.parts.dense_experts import recognize_dense_experts  # noqa: E402

Llama4TextMoe = transformers.models.llama4.modeling_llama4.Llama4TextMoe


@pytest.mark.parametrize(("chosen", "by_kernels"), [(1, True), (2, False)])
def test_a_mixture_that_runs_every_expert_on_every_token(chosen, by_kernels, request, device):
    """Llama 4 scales each expert's input by a score that is zero but for those chosen: only these have to run."""
    if by_kernels:
        request.getfixturevalue("triton_backend")
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=16, vocab_size=64,
        intermediate_size=16, intermediate_size_mlp=24, num_local_experts=4, num_experts_per_tok=chosen,
        interleave_moe_layer_step=1,
    )  # fmt: skip
    moe = Llama4TextMoe(config).to(device)
    x = torch.randn(2, 7, 32, device=device, requires_grad=True)
    with torch.no_grad():
        for p in moe.parameters():
            p.normal_(0, 0.3)

    def step():
        y, logits = moe(x)
        return y.detach(), logits.detach(), *torch.autograd.grad(y.square().sum(), [x, *moe.parameters()])

    plain = step()
    with torch.autocast(device.type, torch.bfloat16):
        narrow = moe(x)[0]
    with tigon.fuse(moe), torch.autocast(device.type, torch.bfloat16):
        torch.testing.assert_close(moe(x)[0], narrow, rtol=0.05, atol=0.1)
    with tigon.fuse(moe) as fusion:
        for ours, theirs in zip(step(), plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5 * theirs.abs().max().item())
        assert fusion.report().calls == {"experts": 1, "mlp": 1}
        moe.experts.act_fn = nn.GELU()
        other = step()
        assert fusion.report().calls["experts"] == 1, "a formula that no longer holds"
    for ours, theirs in zip(step(), other, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5 * theirs.abs().max().item())


@pytest.mark.parametrize("change", ["weight after", "all scores", "bias"])
def test_mixtures_that_need_every_expert_keep_their_code(change):
    class Moe(Llama4TextMoe):
        def forward(self, hidden_states):
            x = hidden_states.reshape(-1, self.hidden_dim)
            scores, logits = self.router(x)
            if change == "all scores":
                scores = logits.sigmoid()
            rows = x.repeat(scores.shape[1], 1)
            weights = scores.transpose(0, 1).reshape(-1, 1)
            y = self.experts(rows) * weights if change == "weight after" else self.experts(rows * weights)
            y = y + (0.1 if change == "bias" else 0.0)
            return self.shared_expert(x) + y.view(scores.shape[1], *x.shape).sum(0), logits

    config = transformers.Llama4TextConfig(hidden_size=32, intermediate_size=16, num_local_experts=4)
    assert recognize_dense_experts(Moe(config)) is None
