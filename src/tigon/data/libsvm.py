"""libsvm and libfm files: each line has a label, optionally `qid:N`, and `index:value` for nonzero features.

Source: https://www.csie.ntu.edu.tw/~cjlin/libsvm, https://www.libfm.org
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tigon.data.values import Malformed

ENDINGS = (".libsvm", ".svm", ".svmlight", ".libfm")
# Up to this feature count, each feature becomes a column.
DENSE = 1024


def read(path: Path) -> Any:
    """Columns `label`, `qid` if present, and the features in one of three layouts.

    If every line has the same number of features, all with value 1, and each position has a separate index range
    (one-hot fields): integer columns `field_0`, `field_1`, …. Otherwise, up to 1024 features: float columns
    `feature_INDEX`, 0 if absent from a line. Otherwise: `features`, lists with the indices, plus `values` unless all
    are 1.

    Raises: Malformed for an invalid line.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    lines = pa.array(path.read_text(encoding="utf-8").splitlines(), pa.large_string())
    lines = pc.utf8_trim_whitespace(pc.replace_substring_regex(lines, pattern="#.*", replacement=""))
    lines = lines.filter(pc.greater(pc.utf8_length(lines), 0))
    words = pc.utf8_split_whitespace(lines)
    columns: dict[str, Any] = {"label": _floats(pc.list_element(words, 0) if len(words) else pa.array([], pa.string()))}
    counts = np.array(words.value_lengths().cast("int64"))
    row = np.repeat(np.arange(len(words)), counts)
    first = np.append(True, row[1:] != row[:-1]) if len(row) else np.zeros(0, bool)
    pairs = words.flatten().filter(pa.array(~first))
    row = row[~first]
    parts = pc.split_pattern(pairs, ":", max_splits=1)
    if (short := np.array(parts.value_lengths().cast("int64")) != 2).any():
        raise Malformed(f"a line must be a label and index:value pairs, got {pairs[int(short.argmax())].as_py()!r}")
    names, values = (pc.list_element(parts, side) if len(parts) else pa.array([], pa.string()) for side in (0, 1))
    query = np.array(pc.equal(names, "qid"))
    if query.any():
        if (np.bincount(row[query], minlength=len(words)) != 1).any():
            raise Malformed("either every line or none must have one qid")
        columns["qid"] = values.filter(pa.array(query))
    index = _floats(names.filter(pa.array(~query))).astype(np.int64)
    return pa.table({**columns, **_features(index, _floats(values.filter(pa.array(~query))), row[~query], len(words))})


def _floats(texts: Any) -> npt.NDArray[np.float64]:
    import pyarrow as pa

    try:
        return np.array(texts.cast(pa.float64()))
    except pa.ArrowInvalid as error:
        raise Malformed(f"labels, indices and values must be numbers: {str(error).splitlines()[0]}") from None


def _features(
    index: npt.NDArray[np.int64], value: npt.NDArray[np.float64], row: npt.NDArray[np.int64], rows: int
) -> dict[str, Any]:
    import pyarrow as pa

    counts = np.bincount(row, minlength=rows)
    ones = bool((value == 1).all())
    width = int(counts[0]) if rows else 0
    if ones and width and (counts == width).all():
        fields = index.reshape(rows, width)
        low, high = fields.min(0), fields.max(0)
        if (high[:-1] < low[1:]).all():
            return {f"field_{place}": fields[:, place] for place in range(width)}
    seen = np.unique(index)
    if len(seen) <= DENSE and not ones:
        dense = np.zeros((len(seen), rows))
        dense[np.searchsorted(seen, index), row] = value
        return {f"feature_{i}": dense[place] for place, i in enumerate(seen)}
    offsets = pa.array(np.append(0, counts.cumsum()), pa.int64())
    columns = {"features": pa.LargeListArray.from_arrays(offsets, pa.array(index))}
    if not ones:
        columns["values"] = pa.LargeListArray.from_arrays(offsets, pa.array(value))
    return columns
