"""The helper itself: results by rank, and failures that say where."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from world import RankError, world_of

pytestmark = pytest.mark.xdist_group("distributed")
two = world_of(2)


def add_ranks(rank, world, device, start):
    x = torch.full((2,), float(start + rank), device=device)
    dist.all_reduce(x)
    return {"x": x, "rank": rank, "world": world, "drawn": torch.rand(1)}


def fail_on(rank, world, device, failing):
    if rank == failing:
        raise ValueError("this one")
    dist.barrier()


def crash_on(rank, world, device, place, marker=None):
    if rank == place and not (marker and marker.exists()):
        if marker:
            marker.touch()
        os.abort()
    return rank


def wait_forever(rank, world, device):
    time.sleep(60 if rank == 1 else 0)


def test_results_by_rank(two):
    first, second = two.run(add_ranks, 1)
    assert first["x"].tolist() == second["x"].tolist() == [3.0, 3.0]
    assert (first["rank"], second["rank"], first["world"]) == (0, 1, 2)
    assert torch.equal(first["drawn"], second["drawn"])


def test_a_rank_that_fails(two):
    with pytest.raises(RankError, match=r"(?s)rank 1: Traceback.*in fail_on.*ValueError: this one"):
        two.run(fail_on, 1)
    assert two.run(add_ranks, 0)[1]["x"].tolist() == [1.0, 1.0], "others take the place of those that were ended"


def test_a_rank_that_does_not_end(two):
    started = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 1 had not ended.*in wait_forever"):
        two.run(wait_forever, limit=1)
    assert time.monotonic() - started < 30


def test_a_rank_that_crashes(two, tmp_path):
    place = r"(?s)rank 1: the process ended, status -6.*Fatal Python error.*in crash_on"
    with pytest.warns(UserWarning, match=place):
        assert two.run(crash_on, 1, tmp_path / "once") == [0, 1], "the second run's results"
    with pytest.warns(UserWarning, match=place), pytest.raises(RankError, match=place):
        two.run(crash_on, 1)
