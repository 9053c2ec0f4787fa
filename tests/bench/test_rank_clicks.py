"""The study of clicks: splits and metrics by hand, fits of all parts that go on, the floor of a step, and the page."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import rank_clicks as script
import torch
from harness import report
from studies.clicks import calibration, data, methods, metrics, page, speed
from studies.rows import Row

from tigon import rank

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
WORDS = ("--seeds", 2, "--points", 2, "--mlp", "16", "--width", 4, "--rank", 4, "--layers", 1, "--batch-size", 128)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Small tables in the forms of all three sets; what is clicked depends on two fields together."""
    root = tmp_path_factory.mktemp("clicks")
    draw = np.random.default_rng(0)
    (root / "frappe").mkdir()
    for file, n in (("validation", 400), ("test", 300)):
        ids = draw.integers(6, size=(n, 10))
        label = np.where((ids[:, 0] + ids[:, 1]) % 3 == 0, 1, -1)
        lines = [
            " ".join([str(y), *(f"{10 * f + i}:1" for f, i in enumerate(row))])
            for y, row in zip(label, ids, strict=True)
        ]
        if file == "test":
            lines[0] = lines[0].replace(f" {ids[0, 0]}:1", " 777:1", 1)
        (root / "frappe" / f"frappe.{file}.libfm").write_text("\n".join(lines) + "\n")
    (root / "ml-100k").mkdir()
    stars = [f"{u}\t{i}\t{1 + (u * i) % 5}\t{880000000 + 5000 * i}" for u in range(1, 11) for i in range(1, 11)]
    for kind, header, lines in (
        ("inter", "user_id:token\titem_id:token\trating:float\ttimestamp:float", stars),
        ("item", "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq",
         [f"{i}\tFilm\t{1990 + i}\tDrama War" for i in range(1, 11)]),
        ("user", "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token",
         [f"{u}\t{20 + u}\tF\twriter\t{10000 * u}" for u in range(1, 11)]),
    ):  # fmt: skip
        (root / "ml-100k" / f"ml-100k.{kind}").write_text("\n".join([header, *lines]) + "\n")
    (root / "adult").mkdir()
    rows = [
        [
            *("abc"[(n + k) % 3] for k in range(len(data.ADULT))),
            *(str(n % (7 + k)) for k in range(6)),
            "<>"[n % 2] + "50K",
        ]
        for n in range(100)
    ]
    header = [*data.ADULT, *data.ADULT_NUMBERS, "income"]
    (root / "adult" / "adult.csv").write_text("\n".join(",".join(row) for row in [header, *rows]) + "\n")
    return root


def test_splits_are_fixed_and_codes_are_those_of_training(folder):
    frappe = data.read(folder, "frappe")
    assert [int((frappe.part == n).sum()) for n in range(3)] == [360, 40, 300]
    assert frappe.codes[frappe.part == data.TEST][0, 0] == 0  # 777 is not in training
    assert all(size == 7 for size in frappe.fields.values())
    again = data.frappe(folder / "frappe")
    assert torch.equal(again.part, frappe.part)
    films, people = data.read(folder, "ml-100k"), data.read(folder, "adult")
    for table in (films, people):
        assert [int((table.part == n).sum()) for n in range(3)] == [70, 10, 20]
    assert films.labels.tolist() == [float((u * i) % 5 >= 3) for u in range(1, 11) for i in range(1, 11)]
    trained = people.numbers[people.part == data.TRAIN]
    assert trained.mean(0).abs().max() < 1e-5
    assert people.labels.sum() == 50
    assert people.codes.amax(0).tolist() < list(people.fields.values())
    with pytest.raises(SystemExit, match=r"--data must hold frappe/frappe.validation.libfm"):
        data.frappe(folder / "nothing" / "frappe")
    with pytest.raises(SystemExit, match="--sets must be of frappe, ml-100k, adult, got 'avazu'"):
        data.read(folder, "avazu")


def test_rows_are_drawn_once_each(folder):
    table = data.read(folder, "adult")
    rows = data.Rows(table, data.TRAIN, CPU)
    batches = list(rows.batches(requests=32, shuffle=torch.Generator().manual_seed(1)))
    assert [len(batch.rows) for batch in batches] == [32, 32, 6]
    assert torch.cat([batch.rows for batch in batches]).sort().values.tolist() == list(range(70))
    first = batches[0]
    assert torch.equal(first.items["age"], rows.numbers[first.rows, 0])
    assert torch.equal(first.items["age bucket"], rows.codes[first.rows, len(data.ADULT)])
    rest = list(rows.batches(requests=32, shuffle=torch.Generator().manual_seed(1), skip=1))
    assert torch.equal(rest[0].rows, batches[1].rows)


def test_metrics_are_those_of_their_definitions():
    draw = np.random.default_rng(0)
    label = (draw.random(200) < 0.4).astype(np.float64)
    p = np.round(0.3 * label + 0.7 * draw.random(200), 1)  # with ties, and with 0 and 1
    pairs = (p[label > 0][:, None] - p[label == 0][None]).ravel()
    assert metrics.auc(p, label) == pytest.approx(np.mean((pairs > 0) + 0.5 * (pairs == 0)))
    inner = np.clip(p, 0.05, 0.95)
    expected = -np.mean(label * np.log(inner) + (1 - label) * np.log(1 - inner))
    assert metrics.log_loss(inner, label) == pytest.approx(expected)
    own, of = torch.from_numpy(draw.random(200)), torch.from_numpy(label)
    assert metrics.ece(own.numpy(), label) == pytest.approx(rank.metrics.ece(own, of), abs=1e-12)
    assert math.isfinite(metrics.log_loss(np.zeros(2), np.ones(2)))


def test_platt_scaling_finds_what_was_done_to_the_logits():
    draw = torch.Generator().manual_seed(0)
    z = 2 * torch.randn(4000, generator=draw, dtype=torch.float64)
    y = (torch.rand(4000, generator=draw, dtype=torch.float64) < z.sigmoid()).double().numpy()
    spoiled = (2 * z + 1).sigmoid().numpy()
    right = calibration.platt(spoiled, y, spoiled)
    assert np.abs(right - z.sigmoid().numpy()).max() < 0.06
    assert metrics.log_loss(right, y) < metrics.log_loss(spoiled, y)


def test_fits_are_recorded_shown_and_gone_on_with(folder, tmp_path, monkeypatch, capsys):
    def run(*more):
        words = ("--data", folder, "--sets", "frappe", "--output", tmp_path, "--device", "cpu", *WORDS, *more)
        monkeypatch.setattr("sys.argv", ["rank_clicks.py", *map(str, words)])
        script.main()
        (path,) = tmp_path.glob("*-rank-clicks.json")
        return path, report.load(path)

    threads = torch.get_num_threads()
    monkeypatch.setattr(methods, "lacks", lambda name, zoo: None)
    monkeypatch.setattr(script, "lacks", lambda name, zoo: "it is not installed" if name == "lightgbm" else None)
    try:
        path, first = run("--methods", "lirank-residual,lirank-dcn,lightgbm", "--seeds", 1, "--epochs", 1)
        said = capsys.readouterr().out
        assert "left out: lightgbm, since it is not installed" in said
        rows = [row for row in first["rows"] if row["part"] == "quality"]
        assert [(row["method"], row["seed"]) for row in rows] == [("lirank-residual", 0), ("lirank-dcn", 0)]
        tried = rows[0]["setting"]["tried"]
        assert rows[0]["validation"]["auc"] == max(point["auc"] for point in tried)
        assert len(tried) == 2
        _, second = run("--methods", "lirank-residual", "--resume", path, "--epochs", 1)
    finally:
        torch.set_num_threads(threads)
    assert second["rows"][: len(first["rows"])] == first["rows"]
    new = [row for row in second["rows"] if row["seed"] == 1]
    assert {row["part"] for row in new} == {"quality", "calibration", "int8"}
    assert all(new[0]["setting"][key] == rows[0]["setting"][key] for key in ("dropout", "lr", "schedule", "most"))
    whole, small = (row["measures"] for row in new if row["part"] == "int8")
    assert small["bytes"] / whole["bytes"] == (4 + 4) / (4 * 4)  # width 4
    assert abs(small["auc"] - whole["auc"]) < 0.01
    none, layer, *_ = (row["measures"] for row in new if row["part"] == "calibration")
    assert none["auc"] == new[0]["measures"]["auc"]
    assert layer["log_loss"] < none["log_loss"]  # one epoch leaves logits near 0
    for part in page.PARTS:  # one of the methods has one seed: nothing is said of it
        assert page.page(tmp_path, part).startswith("|") == (part not in ("speed", "verdict"))
    assert "2 |" in page.page(tmp_path, "quality")
    with pytest.raises(SystemExit, match="--methods must be of lirank-residual"):
        run("--methods", "residual")


def test_a_fit_that_fails_is_said_and_the_others_go_on(folder, tmp_path, monkeypatch, capsys):
    run = methods.lirank

    def failing(data, seed, setting, *more):
        if setting["dropout"] == 0.2 or seed:
            raise RuntimeError("out of memory")
        return run(data, seed, setting, *more)

    kind = methods.METHODS["lirank-none"]
    monkeypatch.setitem(methods.METHODS, "lirank-none", kind._replace(run=failing, grid=kind.grid[1:3]))
    words = ("--data", folder, "--sets", "adult", "--output", tmp_path, "--device", "cpu", *WORDS, "--epochs", 1)
    monkeypatch.setattr("sys.argv", ["rank_clicks.py", "--methods", "lirank-none", *map(str, words)])
    threads = torch.get_num_threads()
    script.main()
    torch.set_num_threads(threads)
    said = capsys.readouterr().out
    assert said.count("failed: adult, lirank-none, seed 0") == said.count("failed: adult, lirank-none, seed 1") == 1
    assert "RuntimeError: out of memory" in said
    (path,) = tmp_path.glob("*-rank-clicks.json")
    (row,) = (row for row in report.load(path)["rows"] if row["part"] == "quality")
    assert (row["setting"]["dropout"], len(row["setting"]["tried"])) == (0.5, 1)


def test_a_budget_that_is_spent_begins_no_fit(folder, tmp_path, monkeypatch, capsys):
    words = ("--data", folder, "--sets", "adult", "--output", tmp_path, "--device", "cpu", *WORDS, "--budget", 0)
    monkeypatch.setattr("sys.argv", ["rank_clicks.py", "--methods", "lirank-none", *map(str, words)])
    threads = torch.get_num_threads()
    script.main()
    torch.set_num_threads(threads)
    assert "left out, since the budget was spent: 2 fits" in capsys.readouterr().out


def test_what_a_method_lacks_is_said():
    assert methods.lacks("lirank-residual", None) is None
    assert re.search("is installed|is not installed|names no folder", methods.lacks("fuxictr-dcnv2", None))


def test_trees_learn_what_two_fields_say(folder):
    pytest.importorskip("lightgbm")
    table, kind = data.read(folder, "frappe"), methods.METHODS["lightgbm"]
    fit = methods.Fit(4, (16,), 1, 4, 128, 1, 1, 60.0, None, 1)
    found = kind.run(table, 0, kind.grid[0], fit, CPU)
    assert metrics.auc(found.test, table.labels[table.rows(data.TEST)].double().numpy()) > 0.6


# In the place of FuxiCTR's sources: a model in the form of theirs, of its own layers.
ZOO = """
import torch
from fuxictr.pytorch.layers import FeatureEmbedding
from fuxictr.pytorch.models import BaseModel

class DCNv2(BaseModel):
    def __init__(self, feature_map, learning_rate, embedding_dim, **options):
        super().__init__(feature_map, **options)
        self.embedding_layer = FeatureEmbedding(feature_map, embedding_dim)
        self.fc = torch.nn.Linear(feature_map.sum_emb_out_dim(), 1)
        self.compile(options["optimizer"], options["loss"], learning_rate)
        self.reset_parameters()
        self.model_to_device()

    def forward(self, inputs):
        x = self.embedding_layer(self.get_inputs(inputs), flatten_emb=True)
        return {"y_pred": self.output_activation(self.fc(x))}
"""


def test_a_model_of_fuxictr_is_trained_by_its_own_loop(folder, tmp_path):
    pytest.importorskip("fuxictr")
    (tmp_path / "DCNv2" / "src").mkdir(parents=True)
    (tmp_path / "DCNv2" / "src" / "DCNv2.py").write_text(ZOO)
    if why := methods.lacks("fuxictr-dcnv2", tmp_path):
        pytest.skip(why)
    table, kind = data.read(folder, "adult"), methods.METHODS["fuxictr-dcnv2"]
    fit = methods.Fit(4, (8,), 1, 4, 16, 3, 2, 60.0, tmp_path, 1)
    found = kind.run(table, 0, kind.grid[0] | {"lr": 0.01}, fit, CPU)
    assert (len(found.validation), len(found.test)) == (10, 20)
    assert 1 <= found.best <= found.epochs <= 3
    assert found.parameters == 4 * (sum(table.fields.values()) + len(table.number_names)) + 4 * 20 + 1


def test_the_bytes_of_a_step_are_counted_by_hand():
    sizes = speed.Sizes(rows=10, fields=2, width=4, codes=1, rank=3, layers=1, mlp=(5,))
    assert speed.products(sizes) == [(8, 9), (3, 8), (8, 5), (13, 1)]
    weights = (8 * 9 + 9) + (3 * 8 + 8) + (8 * 5 + 5) + (13 + 1)
    assert speed.flops(sizes) == 6 * 10 * (72 + 24 + 40 + 13)
    assert speed.moved(sizes) == {
        "codes": 10 * 2 * 8 * 2,
        "embeddings": 10 * 8 * (4 + 2 + 2) + 2 * (4 + 1) * 8,  # one code a field: two rows
        "attention": 10 * 2 * (4 * 3 + 8 * 3),
        "cross": 10 * 2 * 8 * 10,
        "relu": 10 * 2 * 5 * 5,
        "weights": weights * (6 + 28),
    }
    gated = sizes._replace(gated=True)
    assert speed.products(gated) == [(8, 9), (3, 8), (8, 5), (5, 5), (13, 1)]
    assert speed.moved(gated)["relu"] == 10 * 2 * 5 * 16
    plain = sizes._replace(attention=False)
    assert speed.products(plain) == [(8, 3), (3, 8), (8, 5), (13, 1)]
    assert speed.moved(plain)["attention"] == 0
    assert speed.products(plain._replace(rank=None)) == [(8, 8), (8, 5), (13, 1)]


def test_a_step_is_timed_beside_its_floor(tmp_path, monkeypatch):
    words = ("--part", "speed", "--tiny", "--output", tmp_path, "--device", "cpu")
    monkeypatch.setattr("sys.argv", ["rank_clicks.py", *map(str, words)])
    script.main()
    (path,) = tmp_path.glob("*-rank-clicks.json")
    rows = report.load(path)["rows"]
    assert [row["method"] for row in rows][:2] == ["floor", "lirank-residual"]
    floor = rows[0]["measures"]
    assert floor["ms"] == pytest.approx(floor["products_ms"] + floor["bytes_ms"])
    assert all(m["floors"] == m["ms"] / m["floor_ms"] for m in (row["measures"] for row in rows[1:]))
    own = {row["method"]: row["measures"]["floor_ms"] for row in rows[1:]}
    assert own["lirank-residual"] == own["lirank-residual, rank.fit"] == floor["ms"]
    assert own["lirank-residual, gates and batch norm"] > floor["ms"]
    assert "rank.fit" in page.page(tmp_path, "speed")
    assert page.page(tmp_path, "quality") == "No run has been recorded yet."


def test_a_step_of_the_study_is_that_of_fit():
    """The same weights after one step, by the loop and by what is timed."""
    sizes = speed.TINY
    rows = data.Rows(speed.table(sizes, 1), data.TRAIN, CPU)
    timed, fitted = (speed.made(sizes, rows, CPU) for _ in range(2))
    options = rank.FitOptions(
        batch_size=sizes.rows, epochs=1, table_optimizer="row-adagrad", lr=1e-3, warmup=0.0, weight_decay=0.01
    )
    rank.fit(fitted, rows, None, options)
    order = torch.randperm(sizes.rows, generator=torch.Generator().manual_seed(0))
    # Its rate is that of the middle of the run, half of the peak.
    step = speed.lirank_step(timed.train(), rows.batch(order, CPU), CPU, share=0.5)
    step()
    for one, other in zip(timed.parameters(), fitted.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_page_says_whether_the_attention_pays(tmp_path, monkeypatch):
    import docs_pages

    def recorded(**methods):
        setting, rest = {"parameters": 1000}, {"log_loss": 0.3, "ece": 0.1}
        rows = [
            Row("quality", "frappe", seed, method.replace("_", "-"), setting, rest | {"auc": auc}, {}, 1.0)
            for method, aucs in methods.items()
            for seed, auc in enumerate(aucs)
        ]
        report.save(tmp_path / "cpu-rank-clicks.json", report.result("rank-clicks", rows, device=CPU))
        text = (Path(__file__).parents[2] / "docs" / "rank" / "clicks-study.md").read_text()
        about = SimpleNamespace(file=SimpleNamespace(src_uri="rank/clicks-study.md"))
        return docs_pages.on_page_markdown(text, about)

    monkeypatch.setattr(docs_pages, "RESULTS", tmp_path)
    low, high = [0.91, 0.92, 0.93, 0.94, 0.95], [0.96, 0.961, 0.962, 0.963, 0.964]
    shown = recorded(lirank_residual=low, lirank_dcn=low, fuxictr_dcnv2=high)
    assert "does not pay" in shown
    assert "Beside FuxiCTR's DCN-V2, the attention's AUC is significantly higher (p < 0.05) on none and " in shown
    assert "significantly lower on frappe, of frappe." in shown
    assert "| frappe | LiRank, residual − FuxiCTR DCN-V2 | −320.0 | 0.008 |" in shown
    assert "| frappe | **LiRank, residual** | 5 | 0.9300 ± 0.0158 |" in shown
    assert "<!--" not in shown
    shown = recorded(lirank_residual=high, lirank_dcn=low)
    assert "does not pay" not in shown
    assert "significantly higher (p < 0.05) on frappe" in shown


def test_differences_have_the_exact_p_of_all_ways_to_deal_them():
    assert page.p_value([1.0, 2.0, 3.0, 4.0, 5.0], [11.0, 12.0, 13.0, 14.0, 15.0]) == pytest.approx(2 / 252)
    assert page.p_value([1.0, 3.0], [2.0, 2.0]) == 1.0
