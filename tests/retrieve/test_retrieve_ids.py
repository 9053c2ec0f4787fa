"""Numbers by keys against a dict."""

import numpy as np
import pytest

from tigon.retrieve import ids


@pytest.mark.parametrize("few", [0, 5, 4096])  # keys that are looked for in windows of slots
@pytest.mark.parametrize("colliding", [False, True])
def test_a_table_of_keys_against_a_dict(few, colliding, monkeypatch):
    monkeypatch.setattr(ids, "FEW", few)
    if colliding:  # every key wants one of the last three slots, so that windows go round the end
        monkeypatch.setattr(
            ids.IntTable, "_start", lambda self, keys: np.asarray(len(self.values) - 1 - keys % 3, dtype=np.int64)
        )
    rng, table, known = np.random.default_rng(0), ids.IntTable(), {}
    for _ in range(60):
        keys = rng.choice(np.arange(-80, 120), int(rng.integers(0, 60)), replace=False)
        asked = rng.permutation(200) - 80
        assert table.get(asked).tolist() == [known.get(k, -1) for k in asked.tolist()]
        values = np.where(rng.random(len(keys)) < 0.2, -1, rng.integers(0, 1000, len(keys)))
        if rng.random() < 0.5:  # the slots that were found are those that are set
            assert table.get(keys).tolist() == [known.get(k, -1) for k in keys.tolist()]
        table.set(keys, values)
        if rng.random() < 0.5:
            values = values + 1
            table.set(keys, values)
        known.update(zip(keys.tolist(), values.tolist(), strict=True))
    assert table.get(np.array(sorted(known))).tolist() == [known[k] for k in sorted(known)]


def test_texts_of_keys_are_cut_as_they_are_shown():
    known = ids.StringIds()
    texts = ["", "a", "äö", "a longer one", "b"]
    keys = known.keys(texts)
    asked = np.array([[keys[3], -1, keys[0]], [keys[4], keys[2], keys[2]]])
    lengths, whole = known.cut(asked)
    ends = np.cumsum(np.maximum(lengths, 0)).reshape(lengths.shape)
    cut = [
        [None if n < 0 else whole[end - n : end].decode() for n, end in zip(*row, strict=True)]
        for row in zip(lengths.tolist(), ends.tolist(), strict=True)
    ]
    assert cut == known.to_ids(asked).tolist() == [["a longer one", None, ""], ["b", "äö", "äö"]]
