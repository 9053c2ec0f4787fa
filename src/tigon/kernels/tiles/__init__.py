"""Triton functions that several kernels are made of: no file here launches anything.

constants   numbers that kernels share: log₂ e, log 2, the least fp32 number
act         the activations of `tigon.ops.acts`, each with its derivative
cap         the softcap of logits, with its slope
tanh        tanh and its derivative, each to fp32
fold        a running maximum and sum, of which every lane has its own
moments     a row's maximum, Σ exp, Σ exp · log exp and Σ z, in one reading
loss        a row's cross entropy from such statistics
divergence  the terms of KL, reverse KL, JSD and TVD, and log₂ near 1
edges       rows that begin or end between 16-byte boundaries: their body, and the edges beside it
parts       rows that several programs share: which part a program has
pairs       rotary pairs: loaded, turned, stored
ids         ids of rows as keys of a sort
reduce      sums of two tiles in one exchange between warps

A kernel is read together with the functions that it calls: they are inlined, so a function here costs a kernel nothing.
Numbers are fp32 unless a docstring says otherwise: a kernel converts what it loads, and rounds once, where it stores.
Exponentials and logarithms are to the base 2, as the hardware has them.

What more than one file needs stands here under a public name. A function that begins with an underscore belongs to its
file.
"""
