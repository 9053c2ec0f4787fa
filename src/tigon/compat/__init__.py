"""Names of other libraries, over Tigon's own operators, for scripts that change their imports and nothing else."""
