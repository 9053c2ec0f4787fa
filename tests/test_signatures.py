"""Signatures of public functions: a sentence for a keyword that stands elsewhere."""

import pytest
import torch

import tigon

X = torch.randn(2, 4)
Q = torch.randn(1, 2, 2, 4)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: tigon.kl_div(X, X, logits=True), r"kl_div: logits must be passed as temperature=1.*got logits=True"),
        (lambda: tigon.jsd(X, X, labels=X), r"jsd: labels must be passed as mask=labels != .*, got labels=a tensor\.$"),
        (lambda: tigon.tvd(X, X, ignore_index=0), r"tvd: ignore_index must be passed as mask=.*got ignore_index=0\.$"),
        (lambda: tigon.gated_mlp(X, X, X, X.t(), up_bias=None), r"up_bias must be passed as up=\(up_weight, up_bias\)"),
        (lambda: tigon.rope(Q, Q, X, X, angles="once"), r"rope: angles must be .* config=tigon.Rope\(angles=…\), got"),
        (
            lambda: tigon.qk_norm_rope(Q, Q, X[0], X[0], X, X, interleaved=True),
            r"qk_norm_rope: interleaved must be passed as config=tigon.Rope\(interleaved=…\), got interleaved=True\.$",
        ),
        (lambda: tigon.gated_linear(X, X, X, acts="silu"), r"gated_linear: got an unexpected keyword argument 'acts'"),
    ],
)  # fmt: skip
def test_a_keyword_that_stands_elsewhere_gets_a_sentence(call, sentence):
    with pytest.raises(TypeError, match=sentence):
        call()
