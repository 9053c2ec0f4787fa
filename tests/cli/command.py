"""What the tests of the command line share: its environment, its result, and the losses that a run has written."""

import json
import os
from pathlib import Path


def environment(**changes):
    # One thread: results do not depend on how many cores the machine has, and two test processes do not fight for them.
    plain = {
        k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "TIGON_BACKEND", "RANK", "WORLD_SIZE")
    }
    return {**plain, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200", **changes}


class Result:
    def __init__(self, done):
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr

    def problem(self, *words, code=2):
        """Assert that the command ended with one sentence that has these words, and return it."""
        assert self.code == code, (self.code, self.out, self.err)
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("tigon: ")
        for word in words:
            assert word in lines[0], lines[0]
        return lines[0]

    def ok(self):
        assert self.code == 0, (self.code, self.out, self.err)
        assert "Traceback" not in self.err
        return self


def losses(output):
    """The loss of each step; of one that was computed twice, the last."""
    found = {}
    for line in (Path(output) / "metrics.jsonl").read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut off by a kill
        if "loss" in row:
            found[row["step"]] = row["loss"]
    return found
