"""File readers: errors for damaged files name the damage in a sentence."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tigon import files


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is not JSON: Expecting value, line 1"),
        (b'{"a": 1', "is not JSON"),
        (b"[1]", "must hold an object, got a list"),
        (b"null", "must hold an object, got nothing"),
        (b'{"b": 1}', "lacks a"),
        (b'{"a": "\\ud800"}', "is not UTF-8 text"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"[" * 200_000, "nests too deeply"),
        (b'{"a": ' + b"1" * 10_000 + b"}", "is not JSON: Exceeds the limit"),
        (b'{"a": "' + b"x" * 2000 + b'"}', "is larger than 1,000 bytes"),
    ],
)
def test_damaged_json_is_named(tmp_path, content, sentence):
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(files.DamagedFileError, match=r"record\.json") as caught:
        files.read_json(path, required=["a"], largest=1000 if b"xx" in content else files.LARGEST_JSON)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_whole_json_is_read(tmp_path):
    path = tmp_path / "record.json"
    value = {"a": [1, 2.5, None, True], "é": "\U0001f600"}
    path.write_text(json.dumps(value))
    assert files.read_json(path, required=["a"]) == value
    with pytest.raises(files.DamagedFileError, match=r"nothing\.json is missing"):
        files.read_json(tmp_path / "nothing.json")
    with pytest.raises(files.DamagedFileError, match="must hold an integer, got true or false"):
        files.parse_json("true", "a body", kind=int)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("a: [1", "is not valid YAML, line 1"),
        ("[" * 20_000, "nests too deeply"),
        ("- a", "must hold an object, got a list"),
        ("a: !!python/object:os.system x", "is not valid YAML"),
    ],
)
def test_damaged_yaml_is_named(tmp_path, content, sentence):
    path = tmp_path / "fit.yaml"
    path.write_text(content)
    with pytest.raises(files.DamagedFileError, match=sentence):
        files.read_yaml(path)


def test_damaged_tensors_are_named(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.randn(4, 4), "bias": torch.randn(4)}, path)
    whole = path.read_bytes()
    digest = files.compute_sha256(path)
    assert set(files.read_tensors(path, required=["weight"], sha256=digest)) == {"weight", "bias"}
    with pytest.raises(files.DamagedFileError, match="lacks scale"):
        files.read_tensors(path, required=["scale", "bias"])
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(files.DamagedFileError, match="the checksum differs from the recorded checksum"):
        files.read_tensors(path, sha256=digest)
    for content in [
        b"",
        whole[:-1],
        whole[:20],
        whole + b"0",
        b"\0" * len(whole),
        b"\xff" * 8 + whole[8:],
        whole.replace(b"F32", b"F99"),
    ]:
        path.write_bytes(content)
        with pytest.raises(files.DamagedFileError, match="is damaged: not a complete safetensors file"):
            files.read_tensors(path)
    path.unlink()
    with pytest.raises(files.DamagedFileError, match="is missing"):
        files.read_tensors(path)


def test_a_state_that_does_not_fit_changes_nothing():
    module = torch.nn.Linear(4, 4)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = {"weight": torch.zeros(4, 4), "bias": torch.zeros(4)}
    for wrong, sentence in [
        ({"weight": state["weight"]}, "lacks bias"),
        ({**state, "scale": torch.zeros(1)}, "has scale, which the model does not have"),
        ({**state, "bias": torch.zeros(5)}, r"bias must have shape \(4,\), got \(5,\)"),
    ]:
        with pytest.raises(files.DamagedFileError, match=sentence):
            files.load_state(module, wrong, "model.safetensors")
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    files.load_state(module, state, "model.safetensors")
    assert not module.weight.any()
