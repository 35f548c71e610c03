"""What can be set, by flags, environment and file: one table for each command.

Knows no route and starts nothing.

- `config_file`: where values come from: flag, environment, file, default; `--print-config`
- `engine_options`: the flags that `serve` and `chat` share, what they say to the engine, and the other flags of `chat`
- `options`: flags, and the forms of their values
- `serve_options`: the flags of `kvstore serve` and their checked values
"""
