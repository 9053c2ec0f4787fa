"""Operators, one file each: formula, public function, reference, kernels, launches, autograd.

The public names are `tigon.NAME`.
"""
