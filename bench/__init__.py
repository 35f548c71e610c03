"""Benchmarks, one script per question: `python -m bench.NAME` from the checkout. Nothing imports this package."""
