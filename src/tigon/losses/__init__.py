"""Losses that never build the logits: one loop over chunks of rows (`chunked`), one file per family on top of it."""
