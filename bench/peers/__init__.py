"""Other engines side by side with ours: `python -m bench.peers`.

- `__main__`: vLLM, llama.cpp or transformers side by side with us: prefill, decode, turns, a restart
- `embedded`: engines embedded in worker processes: the pipe and its two ends
- `llamacpp`: the worker with llama.cpp
- `load`: what is measured of two engines, and in which order
- `ours`: the worker with our engine
- `servers`: engines as servers: ours, vLLM, vLLM with LMCache
- `transformers`: the worker with transformers

Decisions:

Other engines are measured beside ours, with the same token ids, in turns. Each has processes of its own, in the
environment where it is installed. There is a pause between the turns of two sides, because threads spin for a while
after an answer. The files of both are read before the turns after a restart.
"""
