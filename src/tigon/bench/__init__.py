"""Benchmarks against eager PyTorch, `torch.compile` and the peers, in one run, as multiples of the hardware's floor.

cases    what is measured: a table of operators, their shapes, bytes, FLOPs and implementations
inputs   what goes into a case, and the right answer in fp64
runner   how: correctness against fp64, interleaved timing, peak memory
sweep    drawn cases instead of chosen ones: ranges says from what, ahead compiles, verdicts says who is first
models   one training step of a whole model, each side in a process of its own
report   rows as text, JSON and Markdown
plots    rows as bar charts
"""
