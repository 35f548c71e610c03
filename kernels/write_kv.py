"""New keys and values into the paged HBM cache, by slot mapping. One torch operation per cache on every device."""

from kernels.reference import write_kv

__all__ = ["write_kv"]
