"""Benchmarks, one script per question, and the demonstration: `python -m bench.NAME` from the checkout.

Nothing imports this package.
"""
