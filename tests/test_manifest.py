"""Folder manifests: which files they refuse, and which they leave alone."""

import json

import pytest

from tigon.files import DamagedFileError
from tigon.manifest import MANIFEST, check_manifest, read_manifest, write_manifest


def test_a_file_that_differs_is_named(tmp_path):
    (tmp_path / "a.json").write_text("{}")
    write_manifest(tmp_path, ["a.json"])
    check_manifest(tmp_path)
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(DamagedFileError, match=r"a\.json has changed since it was written"):
        check_manifest(tmp_path)


@pytest.mark.parametrize("content", [{"name": "a web page", "icons": []}, [1, 2]])
def test_the_manifest_of_another_program_is_left_alone(content, tmp_path):
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / MANIFEST).write_text(json.dumps(content))
    write_manifest(tmp_path, ["a.json"])
    check_manifest(tmp_path)
    assert json.loads((tmp_path / MANIFEST).read_text()) == content


def test_a_damaged_manifest_is_refused(tmp_path):
    for content in ("", "{", '{"files": []}', '{"files": {"a.json": 3}}'):
        (tmp_path / MANIFEST).write_text(content)
        with pytest.raises(DamagedFileError, match=r"manifest\.json"):
            check_manifest(tmp_path)
    with pytest.raises(DamagedFileError, match="is missing"):
        read_manifest(tmp_path / "nowhere")
