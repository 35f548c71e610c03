"""`kvstore chat`: one conversation in the terminal. Prints the model's output as text, never as markup.

With stdin piped it takes one message per line and ends with it. Ctrl-C stops the answer, not the program.
"""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from kvstore.engine.model.files import check_speaks
from kvstore.engine.outputs import RequestOutput, describe_tiers
from kvstore.engine.progress import tell_in_lines
from kvstore.engine.sampling_params import SamplingParams
from kvstore.errors import ConfigError, RequestError, StoreError
from kvstore.service.settings.engine_options import ChatOptions

if TYPE_CHECKING:
    from rich.console import Console

HELP = """/help  this text
/new   start a new conversation
/quit  leave (so does Ctrl-D)
Ctrl-C stops an answer; at the prompt it clears the line, and leaves when that is empty."""
YOU, MODEL = "you> ", "model> "
TIER_NAMES = {"hbm": "hbm", "cpu": "cpu", "disk": "disk", "remote": "remote", "reencoded": "re-encoded"}
SESSION_CHARS = 128
MAX_SHOWN_CHARS = 1000  # of each message of the exchange that a resumed conversation shows


def run_chat(
    model: str | None,
    engine_arguments: dict[str, Any],
    options: ChatOptions,
    engine_factory: Callable[..., Any] | None = None,
) -> int:
    """Load the model, hold the conversation, return the exit code: 1 when a piped message failed.

    Raises KVStoreError when the model cannot be loaded, ConfigError when an option is wrong.
    """
    params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens)
    tolerate_any_text()
    from rich.console import Console

    tell_in_lines()
    with _loading(Console(stderr=True), model), interruptible():
        if engine_factory is None:
            check_speaks(model, engine_arguments, chats=True)
            from kvstore.engine.engine import Engine  # loads torch, hence here

            engine_factory = Engine
        engine = engine_factory(model, **engine_arguments)
    with engine:
        try:
            conversation = TerminalChat(engine, options, params, Console(soft_wrap=True, highlight=False))
        except RequestError as error:  # the model cannot chat, or not with this system prompt
            raise ConfigError(str(error)) from error
        num_failed = conversation.run(sys.stdin.isatty())
    return 1 if num_failed and not sys.stdin.isatty() else 0


def tolerate_any_text() -> None:
    """Replace bytes that are not text in the terminal's encoding, instead of failing."""
    for stream in (sys.stdin, sys.stdout):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


@contextmanager
def _loading(console: "Console", model: str | None) -> Iterator[None]:
    """A note on stderr while the model loads: a spinner in a terminal, else one line."""
    note = f"loading {model or 'the built-in model'}"
    if console.is_terminal:
        with console.status(note):
            yield
    else:
        print(f"kvstore: {note}", file=sys.stderr, flush=True)
        yield


@contextmanager
def interruptible() -> Iterator[None]:
    """Make Ctrl-C end in KeyboardInterrupt, as a library's import may catch it or raise another error instead."""
    seen = False

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen = True
        raise KeyboardInterrupt

    try:
        with _handling(on_interrupt):
            yield
    finally:
        if seen:
            raise KeyboardInterrupt


def printable(text: str) -> str:
    """The text without control characters, which a terminal would obey. Newlines and tabs stay."""
    return "".join(c for c in text if c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160))


def counted(number: int, what: str) -> str:
    """The number with its noun, in the plural where that is right."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def turn_summary(output: RequestOutput, elapsed_s: float) -> str:
    """One line of a turn's numbers; `elapsed_s` is the time from the message to the end of the answer."""
    usage = output.usage
    counts = {shown: getattr(usage.cached_tokens_details, name) for name, shown in TIER_NAMES.items()}
    given = ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)
    parts = [
        f"prompt {usage.prompt_tokens:,} tokens",
        f"cached {usage.cached_tokens:,}" + (f" ({given})" if given else ""),
        f"computed {usage.prompt_tokens - usage.cached_tokens:,}",
    ]
    if output.ttft_s is not None:
        parts.append(f"TTFT {output.ttft_s * 1000:.0f} ms")
        decode_s, num_decoded = elapsed_s - output.ttft_s, usage.completion_tokens - 1
        if num_decoded > 0 and decode_s > 0:
            parts.append(f"{num_decoded / decode_s:.0f} tok/s")
    if output.finish_reason not in ("stop", None):
        parts.append("stopped at the token limit" if output.finish_reason == "length" else "stopped")
    return "[" + " · ".join(parts) + "]"


class TerminalChat:
    def __init__(self, engine: Any, options: ChatOptions, params: SamplingParams, console: "Console") -> None:
        self._engine = engine
        self._options = options
        self._params = params
        self._console = console
        self._num_started = 0
        self._start()

    def _start(self) -> None:
        """Open the conversation that was asked for; later, one whose id has no turns yet."""
        while True:
            suffix = f"-{self._num_started + 1}" if self._num_started else ""
            self._session = self._engine.chat(
                self._options.session[: SESSION_CHARS - len(suffix)] + suffix,
                system=self._options.system,
                truncation=self._options.truncation,
                truncation_reuse=self._options.truncation_reuse,
            )
            self._num_started += 1
            if not suffix or not self._said():
                return

    def _said(self) -> list[dict[str, str]]:
        return [message for message in self._session.messages if message["role"] != "system"]

    def run(self, interactive: bool) -> int:
        """Until the end of the input or /quit. Returns how many turns failed."""
        facts, tiers = self._engine.facts, describe_tiers(self._engine.stats())
        self._dim(f"{facts.model_name}, window {facts.max_model_len:,} tokens, {tiers}; /help for commands")
        self._show_where_it_was()
        num_failed = 0
        for line in _typed_lines() if interactive else _piped_lines():
            message = line.strip()
            if message == "/quit":
                break
            if message == "/help":
                print(HELP)
            elif message == "/new":
                self._start()
                self._dim("a new conversation")
            elif message.startswith("/"):
                self._dim(f"unknown command {message.split()[0]}; known: /help /new /quit")
            elif message:
                num_failed += not self._turn(message)
        return num_failed

    def _show_where_it_was(self) -> None:
        """Show how long a resumed conversation is, and its last exchange."""
        said = self._said()
        if not said:
            return
        num_turns = sum(message["role"] == "user" for message in said)
        self._dim(f"resuming {self._session.session_id} after {counted(num_turns, 'turn')}")
        for message in said[-2:]:
            text = printable(message["content"])
            end = " [...]" if len(text) > MAX_SHOWN_CHARS else ""
            self._dim((YOU if message["role"] == "user" else MODEL) + text[:MAX_SHOWN_CHARS] + end)

    def _turn(self, message: str) -> bool:
        """Run one turn. Returns False when it was refused or could not be stored; the conversation goes on."""
        start_s, was_said = time.perf_counter(), self._session.num_turns > 0
        print(MODEL, end="", flush=True)
        try:
            stopped = self._stream(message)
            if self._options.ttl_s is not None and not was_said and self._session.num_turns:
                self._session.set_ttl(self._options.ttl_s)
        except (RequestError, StoreError) as error:
            print(flush=True)
            print(f"kvstore: {error}", file=sys.stderr)
            return False
        print(flush=True)
        output = self._session.last
        if stopped:
            self._dim("[stopped]")
        elif output is not None:
            self._dim(turn_summary(output, time.perf_counter() - start_s))
        return True

    def _stream(self, message: str) -> bool:
        """Print the answer as it comes. True when Ctrl-C ended it."""
        # Closed here also when our reader is gone: the turn must end before the engine does.
        with _interrupt_flag() as interrupted, closing(self._session.stream(message, self._params)) as pieces:
            for piece in pieces:
                print(printable(piece.text), end="", flush=True)
                if interrupted():
                    return True
        return False

    def _dim(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text(text, style="dim"))


def _typed_lines() -> Iterator[str]:
    """Lines typed at a prompt, with editing and history. Ctrl-D ends them, and so does Ctrl-C on an empty line."""
    typed: Callable[[], str] = str
    with suppress(ImportError):  # not every Python has it; importing it gives input() line editing
        import readline

        typed = readline.get_line_buffer
    while True:
        try:
            yield input(YOU)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            if not typed():
                raise


def _piped_lines() -> Iterator[str]:
    """Lines of a pipe, shown as if typed, so that the output reads as a conversation."""
    for line in sys.stdin:
        if line.strip():
            print(YOU + printable(line.strip()), flush=True)
        yield line


@contextmanager
def _interrupt_flag() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C only sets a flag, so that it never interrupts an engine's step; the second one raises."""
    seen = False

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            raise KeyboardInterrupt
        seen = True

    with _handling(on_interrupt):
        yield lambda: seen


@contextmanager
def _handling(on_interrupt: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    try:
        previous = signal.signal(signal.SIGINT, on_interrupt)
    except ValueError:  # not the main thread: signals do not arrive here
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
