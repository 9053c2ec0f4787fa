"""benchmarks/serve_load.py: a tiny run, of a server with fronts, leaves a file that says what was measured."""

import sys

import pytest

from tigon.bench import report

for package in ("starlette", "uvicorn", "httptools", "uvloop", "prometheus_client"):
    pytest.importorskip(package)


@pytest.mark.skipif(sys.platform != "linux", reason="fronts need Linux")
def test_a_tiny_run(script, tmp_path, capsys):
    load = script("serve_load")
    options = "--items 500 --dim 8 -k 3 --share 0.5 --workers 2 --clients 4 --seconds 0.2 --processes 1 --batch 16"
    load.main([*options.split(), "--forms", "json16", "--output", str(tmp_path)])
    (path,) = tmp_path.glob("*-serve.json")
    content = report.load(path)
    (row,) = content["rows"]
    assert (row["items"], row["workers"], row["clients"], row["form"], row["refused"]) == (500, 2, 4, "json16", 0)
    assert row["searches_s"] > 0
    assert 0 < row["p50_ms"] <= row["p99_ms"]
    assert 1 <= row["batch"] <= 4
    assert row["index_us"] > 0
    assert row["fronts_us"] > 0
    assert "searches/s" in report.to_text(content)
    assert "2 fronts" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        load.main(["--forms", "xml"])
