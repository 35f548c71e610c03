"""What a person says in `kvstore chat`: messages typed at a prompt, or lines of a pipe. Knows no conversation."""

import sys
from collections.abc import Iterable, Iterator, Sequence

YOU, MORE = "you> ", "...> "


def typed(said: Iterable[str], commands: Sequence[str]) -> Iterator[str]:
    """Messages typed at a prompt: Enter sends, Alt-Enter begins another line, and what is pasted is one message.

    said: earlier messages, which the arrow keys bring back as they do later ones. commands: what Tab completes. Ctrl-D
    ends the iteration. Ctrl-C clears what is typed, and raises KeyboardInterrupt where that is nothing.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()
    keys.add("enter")(lambda event: event.current_buffer.validate_and_handle())
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    session: PromptSession[str] = PromptSession(
        YOU, multiline=True, prompt_continuation=MORE, key_bindings=keys, history=InMemoryHistory(list(said)),
        completer=WordCompleter(list(commands), sentence=True), complete_while_typing=False,
    )  # fmt: skip
    while True:
        try:
            yield session.prompt()
        except EOFError:
            return
        except KeyboardInterrupt:
            if not session.default_buffer.text:
                raise


def piped() -> Iterator[str]:
    """Lines of a pipe, shown as if typed, so that the output reads as a conversation."""
    for line in sys.stdin:
        if line.strip():
            print(YOU + printable(line.strip()), flush=True)
        yield line


def printable(text: str) -> str:
    """The text without control characters, which a terminal would obey. Newlines and tabs stay."""
    return "".join(c for c in text if c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160))
