"""Labels that some rows have no value of: what is read, what losses, metrics and posteriors leave out."""

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")

from tigon import rank
from tigon.rank.data.summary import summarize
from tigon.rank.evaluation.score import compare_scores
from tigon.rank.training.fit import LOSSES, objective_loss

ROLES = rank.Roles(request="request", labels=("click", "long = dwell > 20"), weight="weight")
FIELDS = {"banner": rank.Id(vocab=tuple(range(6))), "size": rank.Number(scale="none")}
SCHEMA = rank.Schema(ROLES, FIELDS)


def table(rows=240):
    draw = np.random.default_rng(0)
    banner, size = draw.integers(0, 6, rows), draw.normal(size=rows)
    click = ((banner % 2 == 0) ^ (draw.random(rows) < 0.2)).astype(float)
    dwell = np.exp(3 + size + 0.3 * draw.normal(size=rows))
    dwell[draw.random(rows) < 0.5] = np.nan
    dwell[:6] = np.nan  # of the first request all
    click[-4:] = np.nan
    dwell[-4:] = [5.0, 30.0, 30.0, 5.0]
    return {"request": np.arange(rows) // 6, "banner": banner, "size": size, "click": click, "dwell": dwell,
            "weight": draw.integers(1, 4, rows).astype(float)}  # fmt: skip


def taken(rows, kept):
    return {name: values[kept] for name, values in rows.items()}


def known(label, rows):
    """The rows with a value of a label, as a table of that label alone."""
    role = {"click": "click", "long": "long = dwell > 20"}[label]
    schema = rank.Schema(rank.Roles(request="request", labels=(role,), weight="weight"), FIELDS)
    return rank.Impressions.read(taken(rows, ~np.isnan(rows["click" if label == "click" else "dwell"])), schema=schema)


def ranker(**options):
    torch.manual_seed(0)
    return rank.LiRank(SCHEMA, rank.LiRankConfig(4, "none", mlp=(8,), norm="none", gate=False, **options))


def test_missing_values_are_read_and_counted():
    rows = table()
    data = rank.Impressions.read(rows, schema=SCHEMA)
    gaps = int(np.isnan(rows["dwell"]).sum())
    assert data.notes == [
        "Label 'click' has no value in 4 of 240 rows: its loss and metrics skip these rows.",
        f"Label 'long' has no value in {gaps} of 240 rows: its loss and metrics skip these rows.",
    ]
    batch = data.batch(torch.arange(len(data)))
    assert batch.partial == {"click", "long"}
    assert batch.label_mask("long").tolist() == (~np.isnan(rows["dwell"])).tolist()
    assert batch.label_mask("nothing") is None
    assert data.batch(torch.arange(1)).to("cpu").label_mask("long").tolist() == [False] * 6
    assert summarize(data)["labels"]["long"] == pytest.approx(
        np.mean(rows["dwell"][~np.isnan(rows["dwell"])] > 20), abs=1e-4
    )
    whole = rank.Impressions.read(taken(rows, slice(6, 12)) | {"dwell": [1.0] * 6}, schema=SCHEMA)
    assert whole.batch(torch.arange(1)).label_mask("long") is None


def test_a_row_must_have_a_value_of_one_label():
    rows = table()
    rows["click"][3] = np.nan
    with pytest.raises(
        ValueError, match="row 3 of the impressions has no value for any label, click, long; a row must"
    ):
        rank.Impressions.read(rows, schema=SCHEMA)
    one = rank.Schema(rank.Roles(request="request", labels=("click",)), FIELDS)
    with pytest.raises(ValueError, match=r"'click' .label.*row 3: must be 0 or 1, got a missing value"):
        rank.Impressions.read(rows, schema=one)
    # Rows to score need none.
    assert rank.Impressions.read(rows, schema=one, labelled=False).rows == 240


@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_of_a_label_is_that_of_its_rows(loss):
    rows, made = table(), ranker()
    data, options = rank.Impressions.read(rows, schema=SCHEMA), rank.FitOptions(loss=loss, label_weights={"long": 0.5})
    got = objective_loss(made, data.batch(torch.arange(len(data))), options)
    want = 0.0
    for label, weight in (("click", 1.0), ("long", 0.5)):
        own = known(label, rows)
        batch = own.batch(torch.arange(len(own)))
        want = want + weight * LOSSES[loss](
            made(batch)[label], batch.labels[label], batch.offsets, weights=batch.weights
        )
    torch.testing.assert_close(got, want)
    # A batch without a value of a label has no loss of it.
    first = data.batch(torch.arange(1))
    alone = LOSSES[loss](made(first)["click"], first.labels["click"], first.offsets, weights=first.weights)
    torch.testing.assert_close(objective_loss(made, first, options), alone)


def test_metrics_are_of_the_rows_with_a_value():
    rows, made = table(), ranker().eval()
    found = rank.evaluate(rank.score(made, rank.Impressions.read(rows, schema=SCHEMA)), at=(2,), draws=5)
    for label in ("click", "long"):
        own = known(label, rows)
        scored = rank.score(ranker().eval(), rank.Impressions.read(rows, schema=SCHEMA))
        kept = ~scored.labels[label].isnan()
        alone = scored.take(kept)._replace(labels={label: scored.labels[label][kept]})
        assert alone.rows.shape[0] == own.rows
        assert rank.evaluate(alone, at=(2,), draws=5).labels[label] == found.labels[label]
    gaps = int(np.isnan(rows["dwell"]).sum())
    assert f"long: {gaps} of 240 rows have no value: left out" in found.notes
    assert all(one.value == one.value for names in found.labels.values() for one in names.values())


def test_posteriors_anchors_and_calibration_leave_rows_out():
    rows = table()
    data = rank.Impressions.read(rows, schema=SCHEMA)
    made = ranker(calibrate=True, towers={"a": ["click"], "b": ["long"]}).eval()
    both = rank.Explorer.fit(made, data).precision
    part = rank.Impressions.read(taken(rows, ~np.isnan(rows["dwell"])), schema=SCHEMA)
    torch.testing.assert_close(rank.Explorer.fit(made, part).precision["long"], both["long"])
    assert not torch.allclose(rank.Explorer.fit(made, part).precision["click"], both["click"])
    # The head of a label that no row has a value of is held by nothing.
    none = rank.Impressions.read(
        {**rows, "click": np.nan_to_num(rows["click"]), "dwell": np.full(240, np.nan)}, schema=SCHEMA
    )
    fisher = rank.FisherPrior.estimate(made, none, rank.BatchOptions(10)).fisher
    assert float(fisher["towers.heads.0.weight"].sum()) > 0
    assert float(fisher["towers.heads.1.weight"].sum()) == 0
    with pytest.raises(ValueError, match="data must have values for label 'long', got none in 240 rows"):
        rank.calibrate(made, none)
    rank.calibrate(made, data)
    own = {label: layer.weight.clone() for label, layer in zip(made.labels, made.isotonic, strict=True)}
    rank.calibrate(made, rank.Impressions.read(taken(rows, ~np.isnan(rows["dwell"])), schema=SCHEMA))
    torch.testing.assert_close(made.isotonic[1].weight, own["long"])
    assert set(compare_scores(made, rank.quantize_tables(made), data).auc) == {"click", "long"}


def test_a_fit_learns_from_rows_without_a_value_of_one_label():
    pytest.importorskip("accelerate")
    data = rank.Impressions.read(table(), schema=SCHEMA)
    train, val = data.split(by="request", fraction=0.2)
    made = ranker()
    fitted = rank.fit(made, train, val, rank.FitOptions(epochs=8, batch_size=8, lr=0.05, patience=8))
    assert all(row["loss"] == row["loss"] for row in fitted.history)
    found = rank.evaluate(rank.score(made, train)).labels
    assert found["click"]["auc"].value > 0.7
    assert found["long"]["auc"].value > 0.85
