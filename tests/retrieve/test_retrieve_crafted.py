"""Files of an index, of links and of a retriever that were written by somebody else, with right checksums."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tigon.retrieve import Category, Index, Links, Number, Retriever, Schema, Tags
from tigon.retrieve.index.snapshot_manifest import read_manifest, write_manifest
from tigon.retrieve.storage import disk

D, N = 4, 5


@pytest.fixture(params=[False, True], ids=["integers", "strings"])
def folder(request, tmp_path):
    index = Index(D, 9, "float16", "l2", Schema(country=Category(), tags=Tags(3), price=Number()), codes="int8")
    ids = [f"é {n}" for n in range(N)] if request.param else list(range(N))
    table = {"country": [*"abcab"], "tags": [["x"], [], ["y"], None, ["x"]], "price": [1, 2, 3, None, 5]}
    index.upsert(ids, torch.eye(D).repeat(2, 1)[:N], table)
    index.save(tmp_path / "a")
    return tmp_path / "a"


def written(folder, change=lambda content: content, tensors=None):
    """Write the newest snapshot again, changed and sealed."""
    snapshot = sorted(folder.glob("snapshot-*"))[-1]
    content = read_manifest("test", snapshot)
    if tensors is not None:
        save_file(tensors, snapshot / "items.safetensors")
        content["files"] = {"items.safetensors": disk.compute_digest(snapshot / "items.safetensors")}
    content = change(content)
    (snapshot / "manifest.json").unlink()
    write_manifest(snapshot, content)


def test_what_is_not_changed_is_read(folder):
    written(folder, tensors=load_file(folder / "snapshot-000001" / "items.safetensors"))
    assert len(Index.load(folder)) == N


VALUES = [None, True, -1, 0, 1.5, 2**63, "", "x", "int64", "sign", [], {}, {"x": {}}]


def test_manifests_that_say_something_else_are_refused(folder):
    """Each value in place of each, and each left out; or the index is the one that was saved."""
    content = read_manifest("test", folder / "snapshot-000001")
    manifest, wrong = folder / "snapshot-000001" / "manifest.json", 0
    first = Index.load(folder)
    for key in (*content, "shards"):
        for value in (*VALUES, "left out"):
            changed = {name: given for name, given in content.items() if name != key}
            changed |= {} if value == "left out" else {key: value}
            manifest.unlink()
            write_manifest(folder / "snapshot-000001", changed)
            if changed == content:
                continue
            if key == "id" and value in ("x", "int64", "sign"):  # a name
                assert torch.equal(Index.load(folder).embeddings, first.embeddings)
                continue
            with pytest.raises(ValueError, match=r"^Index\.load: .* (is damaged: |has format )"):
                Index.load(folder)
            wrong += 1
    assert wrong > 140


@pytest.mark.parametrize("files", [{"../a": {}}, {"items.safetensors": {}, "more": {}}, {"items-0.safetensors": {}}])
def test_manifests_that_name_other_files_are_refused(folder, files):
    written(folder, lambda content: {**content, "files": files})
    with pytest.raises(ValueError, match="damaged: the files do not form an index"):
        Index.load(folder)


def test_items_that_are_not_of_the_index_are_refused(folder):
    good = load_file(folder / "snapshot-000001" / "items.safetensors")
    strings = "id_ends" in good
    cases = [
        {name: value for name, value in good.items() if name != gone}
        for gone in good
        if gone != "item_ids" or not strings
    ]
    for name, value in good.items():
        other = value.double() if value.is_floating_point() else value.to(torch.int16)
        cases += [{**good, name: changed} for changed in (other, value[:-1].clone(), value[None], value.new_zeros(()))]
    if strings:
        ends = good["id_ends"]
        cases += [
            {**good, "id_ends": ends.flip(0)}, {**good, "id_ends": ends - 1}, {**good, "id_ends": ends * 2**40},
            {**good, "id_bytes": torch.full_like(good["id_bytes"], 0xFF)},
            {**good, "id_bytes": torch.full_like(good["id_bytes"], 0x61)},  # five times the same
        ]  # fmt: skip
    else:
        cases += [
            {**good, "item_ids": torch.zeros(N, dtype=torch.int64)},
            {**good, "item_ids": torch.arange(-1, N - 1)},
        ]
    for tensors in cases:
        written(folder, tensors=tensors)
        with pytest.raises(ValueError, match=r"^Index.load: .* is damaged: "):
            Index.load(folder)
    for content in (b"", b"x", b"\x02" + bytes(7) + b"{}", bytes(8), b"\xff" * 8):
        path = folder / "snapshot-000001" / "items.safetensors"
        path.write_bytes(content)
        written(folder, lambda known, path=path: {**known, "files": {path.name: disk.compute_digest(path)}})
        with pytest.raises(ValueError, match=r"^Index.load: .* is damaged: "):
            Index.load(folder)


def written_as_shard(folder, tensors):
    path = folder / "snapshot-000001" / "items-0.safetensors"
    save_file(tensors, path)
    written(folder, lambda content: {**content, "shards": 1, "files": {path.name: disk.compute_digest(path)}})


def test_files_of_shards_must_hold_each_item_once(folder):
    good = load_file(folder / "snapshot-000001" / "items.safetensors")
    places = torch.arange(N)
    for part in (places, places.flip(0)):
        shard = {**good, "places": part}
        if "id_ends" not in good:
            shard["item_ids"] = good["item_ids"][part]
        written_as_shard(folder, shard)
        assert len(Index.load(folder)) == N
    for part in (places * 0, places - 1, places + 1, places[:3]):
        written_as_shard(folder, {**good, "places": part})
        with pytest.raises(ValueError, match=r"^Index.load: .* is damaged: "):
            Index.load(folder)


def test_a_folder_of_an_older_version_gets_a_sentence(folder):
    written(folder, lambda content: {**{k: v for k, v in content.items() if k != "id"}, "format": 1})
    with pytest.raises(ValueError, match="has format 1, this version of Tigon reads 3: rebuild the index"):
        Index.load(folder)


# ------------------------------------------------------------------------------------------------------------- others


def packed(about):
    return torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)


def test_links_that_were_made_up_are_refused(tmp_path):
    about = {
        "format": 1, "bias": 0.5,
        "queries": {"kinds": {"a": "Category"}, "attributes": [["a", "x"], ["a", "y"]]},
        "items": {"kinds": {"b": "Tags"}, "attributes": [["b", 1]]},
    }  # fmt: skip
    good = {
        "about": packed(about), "query": torch.tensor([0, 1]), "item": torch.tensor([0, 0]), "weight": torch.ones(2),
    }  # fmt: skip
    path = tmp_path / "links"
    save_file(good, path)
    assert len(Links.load(path)) == 2
    sides = [None, [], {}, {"kinds": {}, "attributes": []}, {"kinds": {"b": "Number"}, "attributes": []},
             {"kinds": {"b": ["Tags"]}, "attributes": []}, {"kinds": {"b": "Tags"}, "attributes": [["c", 1]]},
             {"kinds": {"b": "Tags"}, "attributes": [["b", 1], ["b", 1]]},
             {"kinds": {"b": "Tags"}, "attributes": {"b": 1}},
             {"kinds": {"b": "Tags"}, "attributes": [["b"]]}, {"kinds": {"b": "Tags"}, "attributes": [["b", None]]},
             {"kinds": {"b": "Tags"}, "attributes": [[["b"], 1]]}]  # fmt: skip
    changes = [{"about": packed({**about, "items": side})} for side in sides]
    changes += [{"about": packed({**about, "bias": bias})} for bias in (None, "1", True, float("nan"), float("inf"))]
    changes += [{"about": packed({**about, "format": format})} for format in (None, 2, [])]
    changes += [{"about": packed([])}, {"about": packed("x")}, {"about": torch.tensor([0xFF], dtype=torch.uint8)}]
    changes += [{"about": torch.frombuffer(bytearray(b'{"a": "\\ud800"}'), dtype=torch.uint8)}]
    wrong = ([0, 2], [-1, 0], [0], [0.0, 1.0], [[0], [0]])
    changes += [{"query": torch.tensor(value)} for value in wrong]
    changes += [{"weight": value} for value in (torch.ones(2, 1), torch.ones(2).double(), torch.full((2,), torch.nan))]
    save_file(good, path)
    whole = path.read_bytes()
    for change in (*changes, b"", b"no links", b"\x02" + bytes(7) + b"{}", whole[:-9]):
        if isinstance(change, bytes):
            path.write_bytes(change)
        else:
            save_file({**good, **change}, path)
        with pytest.raises(ValueError, match=r"^Links.load: .* is not a file that Links.save wrote: "):
            Links.load(path)
    with pytest.raises(ValueError, match="is missing"):
        Links.load(tmp_path / "none")


def test_a_retriever_whose_files_are_damaged_gets_a_sentence(tmp_path):
    index = Index(D, 9)
    index.upsert([1, 2], torch.eye(2, D))
    Retriever(torch.nn.Linear(3, D), index).save_pretrained(tmp_path / "r")
    config = tmp_path / "r" / "config.json"
    (state,) = (tmp_path / "r").glob("encoder-*")
    known, weights = config.read_bytes(), state.read_bytes()

    def refused(match):
        with pytest.raises(ValueError, match=match):
            Retriever.from_pretrained(tmp_path / "r", torch.nn.Linear(3, D))

    for content in (b"", b"{", b"[]", b"[" * 200_000, b'{"format": 2}', b'{"format": "\\ud800"}', b"\xff"):
        config.write_bytes(content)
        refused("config.json")
    named = {"file": "../x", "sha256": ""}, {"file": state.name, "sha256": 3}, {"file": 1, "sha256": ""}
    for part in ("x", {}, [], *named):
        config.write_text(json.dumps({**json.loads(known), "state": part}))
        refused("config.json is damaged: no encoder file is named")
    config.write_bytes(known)
    for content in (b"", weights[:-1], weights + b"x", weights[:-1] + bytes([weights[-1] ^ 1])):
        state.write_bytes(content)
        refused(f"{state.name} is damaged")
    state.unlink()
    refused(f"{state.name} is missing")
    state.write_bytes(weights)
    assert len(Retriever.from_pretrained(tmp_path / "r", torch.nn.Linear(3, D)).index) == 2
