"""Tigon inside the trainers that people use: one module for each host, imported by its name."""
