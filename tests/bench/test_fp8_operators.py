"""The FP8 operators' timings: every row runs, on small sizes."""

import json

import fp8_operators
import pytest

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture
def fresh_compiler(monkeypatch):
    """Compiled code takes seconds to make, and is another file's to test."""
    monkeypatch.setattr(fp8_operators.torch, "compile", lambda f: f)


def test_every_row_is_timed(tmp_path, capsys):
    path = tmp_path / "fp8.json"
    assert fp8_operators.main(["--quick", "--output", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {row["name"] for row in rows} == {
        "rows", "norm_rows", "gated_rows", "gated_gradient", "transpose", "columns", "fold", "weight", "linear",
        "projections", "gated_mlp",
    }  # fmt: skip
    for row in rows:
        assert row["floor_ms"] > 0
        assert all(ms > 0 for ms in row["ms"].values())
        assert set(row["failures"]) <= {"torchao"}
        assert any(name.startswith("tigon") for name in row["ms"])
    assert "| rows |" in capsys.readouterr().out


def test_eager_code_rounds_as_the_kernels_do():
    """Up to the scale, which the kernels make a power of two."""
    x = fp8_operators.torch.randn(8, 64)
    data, scale = fp8_operators.round_eagerly(x)
    assert ((data.float() * scale - x).norm() / x.norm()).item() == pytest.approx(0.027, rel=0.15)


def test_only_named_rows_are_timed(capsys):
    fp8_operators.main(["--quick", "fold"])
    assert "| fold |" in capsys.readouterr().out
