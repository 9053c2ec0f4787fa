"""One rank's rows, and the directory of all ranks' rows, which every rank keeps.

Global row r is row r // ranks on rank r % ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tigon.data.values import Ints
from tigon.retrieve.filters.schema import Schema
from tigon.retrieve.index.format import VectorFormat
from tigon.retrieve.index.ranks import Ranks
from tigon.retrieve.index.rows import ItemDirectory, spare_rows
from tigon.retrieve.index.table import RowTable
from tigon.retrieve.index.writer import ItemWriter
from tigon.retrieve.transfer import is_run


class Shard(ItemWriter):
    """Writes items to a sharded index: chooses global rows, and writes this rank's rows."""

    def __init__(self, table: RowTable, directory: ItemDirectory, ranks: Ranks) -> None:
        super().__init__(table)
        self._whole, self.ranks = directory, ranks

    @property
    def directory(self) -> ItemDirectory:
        """Each item's global row."""
        return self._whole

    def select_own(self, rows: Ints) -> Ints:
        """Select this rank's rows from global rows."""
        own: Ints = rows[rows % self.ranks.count == self.ranks.own] // self.ranks.count
        return own

    def place(self, rows: Ints, keys: Ints, vectors: Tensor, words: Ints, replaced: Ints) -> None:
        hidden = self.select_own(replaced)
        if is_run(rows):
            own: Any = slice(int((self.ranks.own - rows[0]) % self.ranks.count), None, self.ranks.count)
            own_vectors = vectors[own]
        else:
            own = np.flatnonzero(rows % self.ranks.count == self.ranks.own)
            own_vectors = vectors[torch.from_numpy(own).to(vectors.device)]
        if len(own_vectors):
            self.table.write(rows[own] // self.ranks.count, keys[own], own_vectors, words[:, own], hidden)
        elif len(hidden):
            self.table.hide(hidden)
        self._publish(rows, replaced)

    def hide(self, rows: Ints) -> None:
        own = self.select_own(rows)
        if len(own):
            self.table.hide(own)
        self._publish(rows[:0], rows)

    def _publish(self, shown: Ints, hidden: Ints) -> None:
        self._whole.rows.mark(shown, hidden)
        self._whole.rows.publish(shown, hidden)

    def extend(self, rows: int) -> None:
        self.table.grow(-(-rows // self.ranks.count))
        self._whole.rows.extend(rows)


def allocate_shard(format: VectorFormat, capacity: int, schema: Schema, ranks: Ranks) -> Shard:
    """Allocate free rows for this rank's share of the capacity."""
    directory = ItemDirectory(capacity, capacity + spare_rows(capacity))
    own = -(-directory.rows.total // ranks.count)
    return Shard(RowTable(format, ItemDirectory(own, own), schema, ranks.device), directory, ranks)
