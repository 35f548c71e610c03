"""The fast path on a CUDA device in one command: `python -m bench.gpu`.

- `__main__`: the fast path on a CUDA device in one command: its parts, their guards, the budget
- `case`: its shapes, amounts and goals, its rows, time on a device, random weights
- `engines`: prefill, decode, returning turns, overlap, the cost of saving, CUDA graphs
- `kernels`: each kernel beside its torch twin; loads and saves beside plain copies
"""
