"""The store under engines that people already run. Each module imports its host, and nothing else here does.

- `vllm_cpu`: vLLM's tiered offloading on its CPU backend
"""
