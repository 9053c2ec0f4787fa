"""Fixtures for searches with other plans than their sizes have."""

import pytest

from tigon.retrieve.scan import coded, launches, plan


@pytest.fixture
def fresh_plans():
    """Tests change the numbers that plans are made of."""
    for planner in (launches._plan_scan, coded._plan_scan):
        planner.cache_clear()
    yield
    for planner in (launches._plan_scan, coded._plan_scan):
        planner.cache_clear()


@pytest.fixture
def small_trees(monkeypatch, fresh_plans):
    """Sets groups of 4 rows, of which so many are picked, and reads codes however small a search is."""

    def set_sizes(places=8, spare=2):
        tile, sizes = plan.Tile(16, 16, 16, 4, 1), plan.Sizes(4, 16, 64, places)
        monkeypatch.setattr(plan, "CODED_BYTES", -(1 << 60))
        monkeypatch.setattr(plan, "choose_sizes", lambda k: sizes)
        monkeypatch.setattr(plan, "choose_coded_sizes", lambda k: sizes)
        monkeypatch.setattr(plan, "SPARE", spare)
        monkeypatch.setattr(plan, "choose_tile", lambda *_, **__: tile)
        monkeypatch.setattr(plan, "TILES_INT8", {16: (tile, tile), 32: (tile, tile)})

    return set_sizes
