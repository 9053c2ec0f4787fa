"""A linear head and its loss in chunks: between the operators and the losses."""
