"""Who stays and what comes early: conversations, the order of eviction, what was learned of returns, the waiting order.

Decides with names, counts and times alone; knows no tier and no tensor.

- `categories`: what is known of a conversation that rests: its answers, gaps and turns
- `conversation`: which requests belong together
- `file`: what was learned, between two starts
- `lookahead`: the waiting order: what to read ahead, what to protect
- `planner`: load, compute, or both from two ends, from measured rates
- `policies`: the order of conversations: `fifo`, `lru`, `return`, `auto`; pins and times to live
- `prefixes`: what first prompts have in common, and when others come back to it
- `return_model`: when conversations return: life tables, and what an idle one is worth
- `steering`: these tied together, for all tiers
"""
