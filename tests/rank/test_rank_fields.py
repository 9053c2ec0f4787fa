"""Fields: what values become, what is fitted, and what is refused."""

import math

import pytest
import torch

pa = pytest.importorskip("pyarrow")

from tigon.data.values import BadValue  # noqa: E402
from tigon.rank import Id, Ids, Number, Ragged, Text, Time  # noqa: E402


def fitted(field, *columns):
    return field.fit([field.values(column) for column in columns])


def test_the_codes_of_an_id_follow_its_vocabulary():
    field = Id(vocab=["b", "a"])
    assert field.rows == 3
    assert field.encode(pa.array(["a", "b", "c", "", None])).tolist() == [2, 1, 0, 0, 0]
    # The same things by their texts, whether a file calls them numbers or not.
    assert Id(vocab=[7, 12]).encode(pa.array(["12", "7", "x"])).tolist() == [2, 1, 0]
    assert Id(vocab=["7", "12"]).encode(pa.array([12.0, math.nan])).tolist() == [2, 0]


def test_a_vocabulary_is_that_of_all_columns_in_its_order():
    assert fitted(Id(), pa.array([30, None, 4]), pa.array([4, 5])).vocab == (4, 5, 30)
    assert fitted(Id(), pa.array(["b", None]), pa.array([1])).vocab == ("1", "b")
    assert fitted(Ids(), pa.array([["b", "a"], None, ["a"]])).vocab == ("a", "b")
    assert fitted(Id(), pa.nulls(2)).rows == 1
    assert fitted(Id(vocab=[1]), pa.array([2])).vocab == (1,)


def test_hashed_codes_do_not_depend_on_what_else_there_is():
    field = Id(hash_rows=1000)
    codes = field.encode(pa.array(["a", "b", None, "a"]))
    assert field.rows == 1001
    assert codes[2] == 0
    assert (codes[[0, 1, 3]] > 0).all()
    assert codes[0] == codes[3] == field.encode(pa.array(["x", "a"]))[1]
    assert Id(hash_rows=1000).encode(pa.array([12])) == field.encode(pa.array(["12"]))
    assert not field.is_open


def test_a_list_keeps_its_last_values():
    field = Ids(vocab=["a", "b", "c"], max=2)
    for kind in (pa.list_(pa.string()), pa.large_list(pa.string())):
        found = field.encode(pa.array([["a", "b", "c"], [], None, ["z", "a"]], kind))
        assert found.lists() == [[2, 3], [], [], [0, 1]]
    sliced = pa.array([["c"], ["a", "b", "c"], ["b"]]).slice(1)
    assert field.encode(sliced).lists() == [[2, 3], [2]]
    assert field.encode(pa.array([[1, 2]], pa.list_(pa.int64(), 2))).lists() == [[0, 0]]
    assert field.encode(pa.nulls(2)).lists() == [[], []]


def test_ragged_rows_are_taken_in_any_order():
    ragged = Ragged(torch.arange(6), torch.tensor([0, 2, 2, 6]))
    assert ragged.take(torch.tensor([2, 0, 1, 2])).lists() == [[2, 3, 4, 5], [0, 1], [], [2, 3, 4, 5]]
    assert ragged.take(torch.tensor([], dtype=torch.int64)).lists() == []
    assert ragged.lengths.tolist() == [2, 0, 4]
    assert ragged.number == 3


@pytest.mark.parametrize("draw", ["normal", "lognormal", "few", "zeros"])
def test_the_quantile_scale_is_about_standard_normal(draw):
    torch.manual_seed(0)
    x = torch.randn(20_000)
    x = {"normal": 50 + 7 * x, "lognormal": (3 * x).exp(), "few": x.round(), "zeros": (x - 1).relu()}[draw]
    field = fitted(Number(), pa.array(x.double().numpy()))
    z = field.encode(pa.array(x.double().numpy()))
    assert z.dtype == torch.float32
    assert abs(float(z.mean())) < 1e-3
    assert abs(float(z.std()) - 1) < 1e-3
    order = x.argsort()
    assert (z[order].diff() >= 0).all()
    assert len(field.knots) <= 258
    if draw in ("normal", "lognormal"):
        # Between knots in proportion, so quantiles are met within a knot's width.
        expected = torch.special.ndtri(torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9], dtype=torch.float64))
        torch.testing.assert_close(z.double().quantile(torch.special.ndtr(expected)), expected, atol=0.02, rtol=0)
    # Beyond what was seen: the ends.
    ends = field.encode(pa.array([-1e9, 1e9]))
    assert ends.tolist() == [z.min(), z.max()]


def test_the_other_scales():
    x = pa.array([0.0, math.e - 1, None, -(math.e - 1)])
    log = fitted(Number(scale="log"), x)
    assert log.center == pytest.approx(0)
    assert log.spread == pytest.approx(math.sqrt(2 / 3))
    expected = torch.tensor([0, 1, math.nan, -1]) / math.sqrt(2 / 3)
    torch.testing.assert_close(log.encode(x), expected, equal_nan=True)
    plain = Number(scale="none").encode(pa.array([3, None]))
    torch.testing.assert_close(plain, torch.tensor([3, math.nan]), equal_nan=True)


@pytest.mark.parametrize("scale", ["quantile", "log"])
def test_a_constant_and_an_empty_number_are_zero(scale):
    assert fitted(Number(scale=scale), pa.array([4.0, 4.0])).encode(pa.array([4.0])).tolist() == [0]
    none = fitted(Number(scale=scale), pa.nulls(2))
    assert not none.is_open
    assert none.encode(pa.array([0.0])).tolist() == [0]
    assert math.isnan(none.encode(pa.array([None], pa.float64())))


def test_texts_are_kept():
    assert Text().encode(pa.array(["Toy Story", None])) == ["Toy Story", ""]
    assert Text().encode(pa.array([["Toy", "Story"], None, []])) == ["Toy Story", "", ""]
    assert Text().encode(pa.array([1995, None])) == ["1995", ""]


@pytest.mark.parametrize(("factor", "unit"), [(1, "s"), (10**3, "ms"), (10**6, "us"), (10**9, "ns")])
def test_the_unit_of_times_follows_from_their_size(factor, unit):
    column = pa.array([881_250_949 * factor, None])
    field = fitted(Time(), column)
    assert field.unit == unit
    assert field.encode(column).tolist() == [881_250_949_000_000, Time.MISSING]
    floats = column.cast(pa.float64(), safe=False)
    assert fitted(Time(), floats) == field
    assert field.encode(floats)[0] == pytest.approx(881_250_949_000_000)


@pytest.mark.parametrize(
    ("field", "column", "position", "said"),
    [
        (Ids(vocab=[1]), pa.array(["a^b"]), 0, "must be a list of strings or integers, got string"),
        (Ids(vocab=[1]), pa.array([[1.0], [], [2.0, 0.5]]), 2, "must be a list of strings or integers: .*got 0.5"),
    ],
)
def test_a_value_of_another_kind_is_refused(field, column, position, said):
    with pytest.raises(BadValue, match=said) as caught:
        field.encode(column)
    assert caught.value.position == position


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Id(vocab=[1], hash_rows=3), "Id: vocab and hash_rows are mutually exclusive"),
        (lambda: Id(vocab=[1, "a"]), "Id: vocab must hold only strings or only integers, got int, str"),
        (lambda: Id(vocab=[1.5]), "Id: vocab must hold only strings or only integers, got float"),
        (lambda: Id(vocab=["a", "a"]), "Id: vocab must name each value once"),
        (
            lambda: Id(hash_rows=0),
            "Id: hash_rows must be an integer of at least 2 .with 1, .* share a code., got 0",
        ),
        (lambda: Ids(dim=True), "Ids: dim must be a positive integer, got True"),
        (lambda: Ids(max=0), "Ids: max must be a positive integer, got 0"),
        (lambda: Ids(pool="sum"), "Ids: pool must be one of 'mean', 'attention', got 'sum'"),
        (lambda: Number(scale="sqrt"), "Number: scale must be one of 'quantile', 'log', 'none', got 'sqrt'"),
        (lambda: Number(knots=[1, 1], scores=[0, 1]), "Number: knots must rise, with a score each, got 2 and 2"),
        (lambda: Number(knots=[1], scores=[]), "Number: knots must rise, with a score each, got 1 and 0"),
        (lambda: Number(scale="log", center=0, spread=0), "Number: spread must be above 0, got 0"),
        (lambda: Time(unit="min"), "Time: unit must be one of 's', 'ms', 'us', 'ns', got 'min'"),
        (lambda: Id(side="user"), "Id: side must be one of 'context', 'item', 'row', 'action', got 'user'"),
        (lambda: Id(history=True), "Id: history=True is for fields with side 'item', got side 'row'"),
        (lambda: Id().rows, "Id: vocab and hash_rows are both missing; read data with this schema first"),
        (lambda: Ids().encode(pa.array([[1]])), "Ids: vocab and hash_rows are both missing"),
        (lambda: Number().encode(pa.array([1])), "Number: scale 'quantile' is not fitted; read data with this schema"),
    ],
)
def test_a_field_that_makes_no_sense_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()
