"""A type checker finds mistakes in option values and names."""

import textwrap
import typing

import pytest

from tigon.ops.acts import ACTS, Act
from tigon.ops.cross_entropy import REDUCTIONS
from tigon.ops.rms_norm import CASTS

TORCH = """
from typing import Any

class Tensor:
    def long(self) -> Tensor: ...

def randn(*size: int) -> Tensor: ...
def zeros(*size: int) -> Tensor: ...
def __getattr__(name: str) -> Any: ...
"""
CONFIG = """
[mypy]
mypy_path = $MYPY_CONFIG_FILE_DIR
follow_imports = silent
ignore_missing_imports = true
[mypy-torch.*]
follow_imports = skip
[mypy-torch]
follow_imports = silent
[mypy-tigon.compress.*,tigon.graph.*,tigon.integrations.*,tigon.rank.*,tigon.retrieve.*,tigon.training.*]
follow_imports = skip
"""


def test_mypy_finds_wrong_words(tmp_path):
    api = pytest.importorskip("mypy.api")
    snippet, wrong_snippet = tmp_path / "snippet.py", tmp_path / "mistaken.py"
    right = """
    import tigon
    import tigon.nn
    import torch

    x, t = torch.randn(2, 8), torch.zeros(2).long()
    tigon.rms_norm(x, cast="gemma")
    tigon.cross_entropy(x, t, config=tigon.CrossEntropy(reduction="sum"))
    tigon.geglu(x, x, approximate="none")
    tigon.gated_linear(x, x, x, act="relu2")
    tigon.Rope(angles="once")
    tigon.Rope(arithmetic="native")
    tigon.Expert(act="relu")
    tigon.moe_mlp(x, t, x, (x, x), x, config=tigon.Expert(limit=7.0))
    tigon.use_backend("torch")
    tigon.kl_div(x, x, reduction="batchmean")
    tigon.jsd(x, x, reduction="rows")
    tigon.tvd(x, x, reduction="rows")
    tigon.add_rms_norm(x, x, cast="none")
    tigon.gated_mlp(x, x, x, x, act="gelu")
    tigon.linear_cross_entropy(x, x, t, config=tigon.CrossEntropy(reduction="none"))
    tigon.fuse(torch.nn.Linear(8, 8), recompute="mlp")
    tigon.nn.LinearCrossEntropyLoss(tigon.CrossEntropy(label_smoothing=0.1))
    tigon.nn.DPOLoss(tigon.losses.DPO(beta=0.1))
    tigon.losses.grpo(x, x, t, tigon.losses.Rollout(x, old=x))
    """
    wrong = {
        '"gemma"': '"lama"', '"sum"': '"avg"', '"relu2"': '"swish"', '"once"': '"half"', '"mlp"': '"mpl"',
        '"native"': '"bf16"', '"torch"': '"cpu"', '"batchmean"': '"average"', '"rows"': '"row"', '"gelu"': '"gelu_erf"',
        '"none"': '"erf"', '"relu"': '"relu6"',
    }  # fmt: skip
    mistaken = right + "tigon.rope(x, x, x, x, interleaved=True)"
    for word, mistake in wrong.items():
        mistaken = mistaken.replace(word, mistake)
    for option, mistake in {
        "(label_smoothing=0.1)": "(label_smooth=0.1)", "(tigon.losses.DPO(beta=0.1))": "(betta=0.1)",
        "tigon.losses.Rollout(x, old=x)": "x, old=x",
        "config=tigon.Expert(limit=7.0)": "limit=7.0",
    }.items():  # fmt: skip
        assert option in mistaken
        mistaken = mistaken.replace(option, mistake)
    for text, file in ((right, snippet), (mistaken, wrong_snippet)):
        file.write_text(textwrap.dedent(text))
    # torch's own types would take mypy half a minute: this stub has tensors, and everything else is Any.
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.pyi").write_text(TORCH)
    config = tmp_path / "mypy.ini"
    config.write_text(CONFIG)
    options = ["--config-file", str(config), "--cache-dir", str(tmp_path / "cache"), "--no-error-summary"]
    said, _, _ = api.run([*options, str(snippet), str(wrong_snippet)])
    found = [line.partition(":")[0] for line in said.splitlines() if ": error: " in line]
    assert found == [str(wrong_snippet)] * 20, said


def test_types_and_checks_are_of_the_same_words():
    assert CASTS == ("llama", "gemma", "none")
    assert set(REDUCTIONS) == {"none", "mean", "sum"}
    assert typing.get_args(Act) == tuple(ACTS)
