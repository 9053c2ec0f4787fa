"""Tigon inside other trainers: one module for each host, imported by the host's name."""
