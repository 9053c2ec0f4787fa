"""Triton functions that several kernels are made of: no file here launches anything.

act         the activations of `tigon.ops.acts`, each with its derivative

A kernel is read together with the functions that it calls: they are inlined, so a function here costs a kernel nothing.
"""
