"""Impression tables: schema, readers, and batches."""
