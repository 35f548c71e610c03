"""`kvstore chat`: one conversation in the terminal. Prints the model's output as text, never as markup.

With stdin piped it takes one message per line and ends with it. Ctrl-C stops the answer, not the program. A stored
conversation is never changed but by its next turn: what goes back goes on in a fork.
"""

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from os.path import expanduser
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from kvstore.engine.model.files import check_speaks
from kvstore.engine.outputs import RequestOutput, describe_tiers
from kvstore.engine.progress import tell_in_lines
from kvstore.engine.sampling_params import SamplingParams
from kvstore.errors import ConfigError, RequestError, SessionExistsError, StoreError
from kvstore.service.command.prompt import YOU, piped, printable, typed
from kvstore.service.settings.engine_options import ChatOptions
from kvstore.service.settings.options import UsageError, suggestion

if TYPE_CHECKING:
    from rich.console import Console

    from kvstore.engine.text.chat_template import Message

QUIT = "/quit"
KEYS = """/quit or Ctrl-D leaves. Enter sends, Alt-Enter begins another line. Ctrl-C stops an answer; at the prompt it
clears what is typed, and leaves when that is nothing."""
MODEL = "model> "
SETTINGS = (
    "temperature", "max_tokens", "seed", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip
SESSION_CHARS = 128
MAX_SHOWN_CHARS = 1000  # of each message of the exchange that a resumed conversation shows


def run_chat(model: str | None, engine_arguments: dict[str, Any], options: ChatOptions) -> int:
    """Load the model, hold the conversation, return the exit code: 1 when a piped message failed.

    Raises KVStoreError when the model cannot be loaded, ConfigError when an option is wrong.
    """
    params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens)
    tolerate_any_text()
    from rich.console import Console

    tell_in_lines()
    with _loading(Console(stderr=True), model), interruptible():
        engine = open_engine(model, **engine_arguments)
    with engine:
        try:
            conversation = TerminalChat(engine, options, params, Console(soft_wrap=True, highlight=False))
        except RequestError as error:  # the model cannot chat, or not with this system prompt
            raise ConfigError(str(error)) from error
        num_failed = conversation.run(sys.stdin.isatty())
    return 1 if num_failed and not sys.stdin.isatty() else 0


def open_engine(model: str | None, **arguments: Any) -> Any:
    check_speaks(model, arguments, chats=True)
    from kvstore.engine.engine import Engine  # loads torch, hence here

    return Engine(model, **arguments)


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


def counted(number: int, what: str) -> str:
    """The number with its noun, in the plural where that is right."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def turn_summary(output: RequestOutput, elapsed_s: float) -> str:
    """One line of a turn's numbers; `elapsed_s` is the time from the message to the end of the answer."""
    usage = output.usage
    counts = asdict(usage.cached_tokens_details)
    given = ", ".join(f"{name} {count:,}" for name, count in counts.items() if count).replace("reenc", "re-enc")
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
        self._num_ids = 0
        self._start(options.system)

    def _start(self, system: str | None) -> None:
        """Open the conversation that was asked for; later, one whose id has no turns yet."""
        while True:
            is_first = not self._num_ids
            self._session = self._engine.chat(
                self._next_id(),
                system=system,
                truncation=self._options.truncation,
                truncation_reuse=self._options.truncation_reuse,
            )
            if is_first or not self._said():
                return

    def _next_id(self) -> str:
        """The id that was asked for; later, with a number behind it."""
        self._num_ids += 1
        suffix = f"-{self._num_ids}" if self._num_ids > 1 else ""
        return self._options.session[: SESSION_CHARS - len(suffix)] + suffix

    @property
    def _system(self) -> str | None:
        return next((message["content"] for message in self._session.messages if message["role"] == "system"), None)

    def _said(self) -> "list[Message]":
        return [message for message in self._session.messages if message["role"] != "system"]

    def run(self, interactive: bool) -> int:
        """Until the end of the input or /quit. Returns how many turns failed."""
        facts, tiers = self._engine.facts, describe_tiers(self._engine.stats())
        self._dim(f"{facts.model_name}, window {facts.max_model_len:,} tokens, {tiers}; /help for commands")
        self._show_where_it_was()
        num_failed = 0
        said = [message["content"] for message in self._said() if message["role"] == "user"]  # texts, in a terminal's
        for line in typed(said, (*COMMANDS, QUIT)) if interactive else piped():
            message = line.strip()
            if message == QUIT:
                break
            if message.startswith("/"):
                num_failed += not self._carried_out(message)
            elif message:
                num_failed += not self._turn(message)
        return num_failed

    def _carried_out(self, command: str) -> bool:
        """Returns False when it failed; the conversation goes on."""
        name, *rest = command.split(maxsplit=1)
        try:
            if name not in COMMANDS:
                raise UsageError(f"unknown command {name}{suggestion(name, (*COMMANDS, QUIT))}")
            return COMMANDS[name][2](self, rest[0] if rest else "") is not False
        except (RequestError, StoreError, UsageError) as error:
            print(f"kvstore: {error}", file=sys.stderr)
            return False

    def _show_where_it_was(self) -> None:
        """Show how long a resumed conversation is, and its last exchange."""
        said = self._said()
        if not said:
            return
        num_turns = sum(message["role"] == "user" for message in said)
        self._dim(f"resuming {self._session.session_id} after {counted(num_turns, 'turn')}")
        if self._options.system not in (None, self._system):
            print("kvstore: a session keeps its system prompt; --system is for a new one", file=sys.stderr)
        for message in said[-2:]:
            text = printable(message["content"])
            end = " [...]" if len(text) > MAX_SHOWN_CHARS else ""
            self._dim((YOU if message["role"] == "user" else MODEL) + text[:MAX_SHOWN_CHARS] + end)

    def _turn(self, message: "str | Sequence[Message]") -> bool:
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

    def _stream(self, message: "str | Sequence[Message]") -> bool:
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

    # -- commands: each takes what stands behind its name ------------------------------------------------------------
    def help(self, _: str) -> None:
        for name, (takes, about, _method) in COMMANDS.items():
            print(f"{f'{name} {takes}':<20}{about}")
        print(KEYS)

    def new(self, _: str) -> None:
        self._start(self._system)
        self._dim("a new conversation")

    def system(self, text: str) -> None:
        if text:
            self._start(text)
            self._dim("a new conversation with this system prompt")
        else:
            self._dim(self._system or "there is no system prompt")

    def retry(self, _: str) -> bool:
        said = self._without_last_turn()
        if self._params.greedy:
            self._dim("at temperature 0 the answer is the same again; /set temperature 0.7 changes that")
        return self._turn(said)

    def undo(self, _: str) -> None:
        self._without_last_turn()

    def _without_last_turn(self) -> "list[Message]":
        """Go on in a fork without it; returns what it was asked. Raises RequestError where there is none."""
        before, messages = self._session, self._said()
        answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise RequestError("there is no turn yet in this conversation")
        if len(answers) == 1:
            self._start(self._system)
        else:
            self._fork(before.num_turns - 1)
        self._dim(f"in {self._session.session_id}, without the last turn; {before.session_id} stays as it was")
        return messages[answers[-2] + 1 if len(answers) > 1 else 0 : answers[-1]]

    def _fork(self, num_turns: int) -> None:
        while True:
            with suppress(SessionExistsError):
                self._session = self._session.fork(self._next_id(), num_turns)
                return

    def save(self, name: str) -> None:
        path, messages = Path(expanduser(name)), self._session.messages  # Path's own raises without such a user
        if path.suffix == ".json":
            known = {"session_id": self._session.session_id, "model": self._engine.facts.model_name}
            text = json.dumps({**known, "messages": messages}, ensure_ascii=False, indent=2) + "\n"
        elif path.suffix == ".md":
            text = "\n".join(f"## {message['role']}\n\n{message['content'] or ''}\n" for message in messages)
        else:
            raise UsageError(f"/save takes a file that ends in .json or .md, not {name!r}")
        try:
            with path.open("x", encoding="utf-8", errors="replace") as file:
                file.write(text)
        except FileExistsError:
            raise UsageError(f"{path} is there already; give another name") from None
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from None
        self._dim(f"{counted(len(messages), 'message')} in {path}")

    def set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if name and name not in SETTINGS:
            raise UsageError(f"there is no setting {name!r}{suggestion(name, SETTINGS)}")
        if value:
            self._params = replace(self._params, **{name: _value_of(value.strip())})
        for shown in SETTINGS if not name else (name,):
            value = getattr(self._params, shown)
            self._dim(f"{shown} {'none' if value is None else value}")


COMMANDS: dict[str, tuple[str, str, Callable[[TerminalChat, str], bool | None]]] = {  # what it takes, what it does
    "/help": ("", "this text", TerminalChat.help),
    "/new": ("", "start a new conversation", TerminalChat.new),
    "/system": ("[TEXT]", "start one with this system prompt; alone, show the present one", TerminalChat.system),
    "/retry": ("", "answer the last message again, in a fork", TerminalChat.retry),
    "/undo": ("", "go on without the last turn, in a fork", TerminalChat.undo),
    "/save": ("FILE", "write the conversation to a new file, NAME.json or NAME.md", TerminalChat.save),
    "/set": ("[NAME VALUE]", "set how answers are sampled; alone, list all that can be set", TerminalChat.set),
}


def _value_of(text: str) -> Any:
    """SamplingParams refuses what is none of its own."""
    if text == "none":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


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
