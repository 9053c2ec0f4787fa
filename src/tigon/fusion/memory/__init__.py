"""What a training step keeps in memory for its backward pass, and how it keeps less."""
