"""Tables of impressions: their schema, their readers, and the batches that are made of them."""
