"""What the client makes of a core's news, by a core that says what the test wants."""

from kvstore import SamplingParams
from kvstore.blocks.ids import Lineage
from kvstore.engine.client.messages import Facts
from kvstore.engine.client.requests import CoreClient
from kvstore.engine.core.news import Ended, Said, Update
from kvstore.errors import EngineDiedError


class SaysIt:
    """A `Core`."""

    facts = Facts("none", 256, 256, 16, 1, 160, b"", b"", {})
    life, state, is_reader = 0, "running", True

    def __init__(self) -> None:
        self.news = []

    def check_open(self):
        """It is open."""

    def submit(self, prompts):
        """It computes nothing."""

    def take_news(self):
        return self.news


def test_blocks_beyond_what_was_said_are_not_named():
    """The core may have gone on behind a stop string."""
    core = SaysIt()
    client = CoreClient(core, None)
    handle = client.submit([5] * 30, SamplingParams())
    chain = [bytes([number]) * 32 for number in range(4)]
    core.news = [Update("request-0", [Said(0, 7), Said(0, 8, "length")], Ended(chain=chain, lineage=Lineage(b"r")))]
    client.receive()
    assert handle.done and list(handle.chain) == chain[:2] and handle.lineage == Lineage(b"r")
    assert (handle.output.token_ids, handle.output.usage.completion_tokens, client.has_work) == ([7, 8], 2, False)


def test_choices_of_a_core_that_is_gone_are_aborted():
    core, error = SaysIt(), EngineDiedError("gone")
    client = CoreClient(core, None)
    handle = client.submit([5] * 30, SamplingParams(n=2))
    core.news = [Update("request-0", [Said(1, 7)])]
    client.receive()
    core.news = [Update("request-0", [], Ended(error=error))]
    client.receive()
    assert handle.done and handle.error is error and handle.chain == () and not client.has_work
    assert [(choice.token_ids, choice.finish_reason) for choice in handle.output.choices] == [
        ([], "abort"), ([7], "abort")
    ]  # fmt: skip
    assert handle.output.usage.completion_tokens == 1
