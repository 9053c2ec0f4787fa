"""Links: learned weights between attributes of queries and attributes of items, which a search adds to its scores."""
