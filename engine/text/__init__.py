"""Text to token ids and back.

Loads no torch; knows neither sessions nor a store.

- `answer_parser`: an answer as reasoning, content and tool calls, while it arrives
- `call_arguments`: what holds a model to the form of its calls; grammars for arguments that are no JSON
- `chat_template`: from messages to token ids, by what the template adds: its text with control tokens, people's text
  without any
- `clearing`: what clients no longer want of a history in its prompt, cleared in steps that pay
- `compiler`: compiles grammars over a model's tokens, in a thread of its own
- `grammar`: grammars from what a request wants its answer to match
- `histories`: the ids of a history that comes as text, around those of known answers
- `language`: how a model speaks: its template, the parser of its answers, their text, token by token
- `prompts`: what callers say, checked: prompts, messages, tools, variables of the template, lengths
- `response_template`: how each family of models writes reasoning and calls: data in `response_templates/`

Decisions:

No template needs code of its own: the text that it puts between turns is found by rendering it with marks.
Templates are rendered in transformers' sandbox, and none comes from a request. Control tokens that a person spells
are encoded as text. The form of answers is data, too: a model's own, or that of the family that its chat template
belongs to.

Grammars are compiled by llguidance, which bounds every step of its work, in a thread that lets the steps go on; the
prompt waits unscheduled. Its table of a model's tokens holds the interpreter's lock for 2.5 s at 131,000 tokens, so it
is made before the first step. One grammar spans the whole answer, also where only parts of it are constrained.
"""
