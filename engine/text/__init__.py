"""Text to token ids and back.

Loads no torch; knows neither sessions nor a store.

- `answer_parser`: an answer as reasoning, content and tool calls, while it arrives
- `chat_template`: from messages to token ids, by what the template adds: its text with control tokens, people's text
  without any
- `detokenizer`: the text of one choice, token by token, in whole characters
- `prompts`: checks of prompts, session ids and lengths
- `response_template`: how each family of models writes reasoning and calls: data in `response_templates/`

Decisions:

No template needs code of its own: the text that it puts between turns is found by rendering it with marks.
Templates are rendered in transformers' sandbox, and none comes from a request. Control tokens that a person spells
are encoded as text. The form of answers is data, too: a model's own, or that of the family that its chat template
belongs to.
"""
