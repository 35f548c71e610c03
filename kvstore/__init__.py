"""kvstore: blocks, tiers, transfers and policies of a tiered KV cache. Never imports engine.

Torch is loaded only by the modules that move tensors, never by importing this package.
"""
