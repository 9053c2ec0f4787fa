"""The index: items in rows of memory, searched exactly, on one device or split over several, and its snapshots."""
