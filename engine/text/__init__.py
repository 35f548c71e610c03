"""Text on its way to token ids and back.

Loads no torch; knows requests, but neither sessions nor a store.

- `chat_template`: from messages to token ids by what the template adds
- `detokenizer`: text of an answer, token by token, in whole characters
- `output_processor`: what callers see of running requests: text, stop strings, usage
- `prompts`: checks of prompts, session ids and lengths
"""
