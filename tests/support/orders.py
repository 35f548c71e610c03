"""An order of conversations for tests of eviction."""

from kvstore.policy.conversation import Conversation


class ByValue:
    """An order by a value that the test gives: the smallest goes first."""

    def __init__(self) -> None:
        self.values: dict[int, float] = {}
        self.members: set[Conversation] = set()

    def add(self, conversation):
        self.members.add(conversation)

    def discard(self, conversation):
        self.members.discard(conversation)

    def __contains__(self, conversation):
        return conversation in self.members

    def value(self, conversation):
        return self.values.get(conversation.number, conversation.number), conversation.use

    def first(self):
        return min(self.members, key=self.value, default=None)


def talk(number: int, use: int = 0) -> Conversation:
    return Conversation(number, number, 0.0, 0.0, use)
