"""Triton device functions shared by several kernels: no file here launches anything.

constants   numbers that kernels share: log₂ e, log 2, the lowest fp32 number
act         the activations in `tigon.ops.acts`, each with its derivative
cap         the logit softcap, with its slope
tanh        tanh and its derivative, accurate to fp32
fold        running maximum and sum, kept per lane
moments     a row's maximum, Σ exp, Σ exp · log exp and Σ z, in one pass
loss        a row's cross entropy from such statistics
divergence  the terms of KL, reverse KL, JSD and TVD, and log₂ near 1
edges       rows that begin or end between 16-byte boundaries: aligned body and edges
parts       rows shared by several programs: which part a program owns
pairs       rotary pairs: load, rotate, store
ids         row ids as sort keys
reduce      two tile sums in one exchange between warps
fp8         e4m3 numbers: the largest magnitude, a scale, four tiles joined into words

Read a kernel together with the functions it calls: they are inlined, so a function here costs a kernel nothing.

Values are fp32 unless a docstring says otherwise: a kernel converts on load, and rounds once, on store. Exponentials
and logarithms use base 2, as the hardware does.

Functions that several files use are public. A function with a leading underscore is private to its file.
"""
