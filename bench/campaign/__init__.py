"""A crash test that adds up over time: random faults, and each answer compared with an engine that caches nothing.

- `__main__`: the command: rounds until the time is over, what is known between them, the report
- `reference`: what an engine without tiers answers, each prompt alone and computed anew
- `rounds`: one round, from its script: who talks, what befalls the servers, what must be true afterwards
- `servers`: `kvstore serve` and redis-server as processes that are killed, stopped, ended and started again
- `talks`: conversations as their clients were told, and the clients
"""
