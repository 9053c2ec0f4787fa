"""The public names, and the docstrings of losses and metrics: every argument and field is described."""

import inspect
import re

import pytest

from tigon import rank
from tigon.lazy import find_homes

NAMES = [(module, name) for module in (rank.losses, rank.metrics) for name in module.__all__]


def test_the_public_names_are_the_modules():
    assert set(find_homes("tigon.rank")) == set(rank.__all__) >= {"losses", "metrics"}
    public = {name for module in (rank.losses, rank.metrics) for name, value in vars(module).items()
              if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"}  # fmt: skip
    assert public <= {name for _, name in NAMES}


@pytest.mark.parametrize(("module", "name"), NAMES, ids=lambda x: x if isinstance(x, str) else "")
def test_a_name_is_described(module, name):
    value = getattr(module, name)
    doc = inspect.getdoc(value)
    if inspect.isfunction(value):
        arguments = doc.partition("\nArgs:\n")[2].partition("\nReturns: ")[0]
        assert "\nRaises: ValueError " in doc
        parameters = inspect.signature(value).parameters
        assert len(parameters) <= 6
        assert not [one for one in parameters if not re.search(rf"(^    |\. |, ){one}[:,]", arguments, re.MULTILINE)]
    else:
        assert all(re.search(rf"\b{field}\b", doc.partition("\nAttributes:\n")[2]) for field in value._fields)
