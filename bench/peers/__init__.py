"""Other engines side by side with ours: `python -m bench.peers`.

- `__main__`: vLLM, llama.cpp or transformers side by side with us: prefill, decode, turns, a restart
- `embedded`: both embedded in worker processes: the pipe and its two ends
- `llamacpp`: the workers
- `load`: what is measured of two engines, and in which order
- `ours`: the workers
- `servers`: both as servers: ours, vLLM, vLLM with LMCache
- `transformers`: the workers

Decisions:

Other engines are measured beside ours: the same token ids, in turns, each in processes of its own and in the
environment where somebody installed it. There is a pause before the other side's turn, whose threads spin on for a
while after an answer, and the files of both are read before the turns after a restart.
"""
