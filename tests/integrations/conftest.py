"""A process that a launcher started, alone."""

import pytest


@pytest.fixture
def launched(process_group, monkeypatch):
    """What accelerate takes for a distributed run on the CPU, so that it wraps models in DDP."""
    from accelerate.state import AcceleratorState, PartialState

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "ACCELERATE_USE_CPU": "true"}.items():
        monkeypatch.setenv(name, value)
    AcceleratorState._reset_state()
    PartialState._reset_state()
    yield process_group
    AcceleratorState._reset_state()
    PartialState._reset_state()
