"""Nothing is patched process-wide: all names of torch, transformers and trl are the same objects before and after.

In a process of its own: what other tests import and patch does not count.
"""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def test_all_names_are_the_same_objects(tmp_path, environment):
    script = Path(__file__).parent / "nothing_patched.py"
    environment = environment | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "TigonCallback: none of" in done.stdout
