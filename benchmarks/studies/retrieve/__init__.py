"""Retrieval on real data: filters, cold items, links and two towers."""
