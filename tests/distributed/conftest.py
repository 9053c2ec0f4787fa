"""What the tests of several processes find, as the file that the documentation's table is made from."""

import os

# Before torch is imported in the process that the others are forked from: looking for GPUs through the driver would
# leave them without any.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import pytest
from world import GPUS

ROWS = pytest.StashKey[list]()
OUTCOME = pytest.StashKey[pytest.TestReport]()
FILE = os.environ.get("TIGON_TEST_RECORD")


@pytest.fixture
def record(request):
    """record(engine=…, world=…, …) keeps a row; its status, "ok" or "wrong", is added when the test ends."""
    row = {}
    yield row.update
    if row and OUTCOME in request.node.stash:
        row["status"] = "ok" if request.node.stash[OUTCOME].passed else "wrong"
        request.config.stash.setdefault(ROWS, []).append(row)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call":
        item.stash[OUTCOME] = report
    return report


def pytest_sessionfinish(session):
    rows = session.config.stash.get(ROWS, [])
    if FILE and rows:
        import torch
        from harness.report import result, save

        device = torch.device("cuda" if GPUS else "cpu")
        save(FILE, result("composition", [], device=device, gpus=torch.cuda.device_count()) | {"rows": rows})
