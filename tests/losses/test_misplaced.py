"""A keyword that a loss does not have is refused, with the value that has a field of that name."""

import dataclasses
import inspect

import pytest
import torch

import tigon
from tigon import losses

HELD = {"grpo": "Rollout", "rloo": "Rollout", "kto": "Unpaired"}
CONFIGS = {"cpo": "CPO", "dpo": "DPO", "grpo": "GRPO", "kto": "KTO", "orpo": "ORPO", "rloo": "RLOO", "simpo": "SimPO"}


def call(name, **keyword):
    x, weight, target = torch.ones(2, 3, 4), torch.ones(5, 4), torch.zeros(2, 3, dtype=torch.long)
    return getattr(losses, name)(x, weight, target, *((torch.ones(2),) if name in HELD else ()), **keyword)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_sentence_names_the_value(name):
    homes = [("config", getattr(losses, CONFIGS[name])), ("chunks", losses.ChunkOptions), ("head", tigon.Head)]
    if name in HELD:
        homes.append((inspect.getfullargspec(getattr(losses, name)).args[3], getattr(losses, HELD[name])))
    own = set(inspect.signature(getattr(losses, name)).parameters)
    for argument, home in homes:
        fields = home._fields if hasattr(home, "_fields") else [f.name for f in dataclasses.fields(home)]
        for field in set(fields) - own:
            where = rf"{argument}=tigon\.(losses\.)?{home.__name__}\({field}=…\), got {field}=0.25\.$"
            with pytest.raises(TypeError, match=rf"^{name}: {field} must be passed as {where}"):
                call(name, **{field: 0.25})


@pytest.mark.parametrize("name", CONFIGS)
def test_a_word_that_nothing_has(name):
    with pytest.raises(TypeError, match=rf"^{name}: got an unexpected keyword argument 'betta'\.$"):
        call(name, betta=0.1)


@pytest.mark.parametrize(("name", "held"), HELD.items())
def test_what_is_no_rollout_and_no_unpaired_is_refused(name, held):
    x, weight, target = torch.ones(2, 3, 4), torch.ones(5, 4), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=rf"{name}: {held.lower()} must be .*tigon.losses.{held}, got tuple"):
        getattr(losses, name)(x, weight, target, (torch.ones(2), None))


@pytest.mark.parametrize("field", ["ref", "sampler"])
def test_rloo_has_no_reference_and_no_sampler(field):
    x, weight, target = torch.ones(2, 3, 4), torch.ones(5, 4), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=f"rloo: rollout.{field} must be left out: .*, got one"):
        losses.rloo(x, weight, target, losses.Rollout(torch.ones(2), **{field: torch.zeros(2, 3)}))
