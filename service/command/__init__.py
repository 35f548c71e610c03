"""The `kvstore` command and the demonstration.

Starts without torch; each command imports what it needs.

- `plan/`: `kvstore plan`
- `cli`: the `kvstore` command: its commands and exit codes, and variables that are misspelt
- `completion`: `kvstore completion`: scripts for shells
- `doctor`: `kvstore doctor`: whether a conversation is found again after a restart
- `prompt`: what is typed or piped into `kvstore chat`
- `progress`: how far something that takes its time has come, on stderr
- `store`: `kvstore stats`, `evict`, `verify`, `compact`, `sessions`
- `store_tables`: what commands on a store print for a person
- `terminal`: `kvstore chat`: streams answers, shows what each turn cost
- `vllm_config`: `kvstore vllm-config`: the flags under which vLLM keeps its KV in our store
"""
