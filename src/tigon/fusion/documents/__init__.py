"""Packed batches: rows of whole documents, whose attention runs without a dense mask."""
