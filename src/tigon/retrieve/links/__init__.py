"""Links: learned weights between query attributes and item attributes, which a search adds to its scores."""
