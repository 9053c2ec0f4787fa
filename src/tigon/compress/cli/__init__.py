"""The command `tigon compress`."""
