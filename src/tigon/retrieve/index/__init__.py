"""The index: items in memory rows, searched exactly, on one device or sharded over several, and its snapshots."""
