"""The page on compression runs as a reader runs it."""

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "compress.md"


def test_the_code_of_the_page_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    import small_model

    small_model.model().save_pretrained("path/to/model")
    small_model.tokenizer().save_pretrained("path/to/model")
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    names = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)
    said = capsys.readouterr().out
    assert "→ bits" in said
    assert float(said.split()[-1]) == pytest.approx(34 / 120)
    before, after = (next(Path(name).glob("*.safetensors")).stat().st_size for name in ("path/to/model", "small"))
    assert after < before
    assert names["small"].config.quantization_config.quant_method == "tigon"
