"""Makes seeded conversations: facts are told, corrected and asked for, among small talk.

Pure Python; the caller counts the tokens of a text. A conversation of the split "held_out" uses values and phrasings
that no conversation of "train" contains.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.builtin_model.blind import ASK_BLIND, ASK_LEADS_BLIND, CORRECT_BLIND, LEADS_BLIND, TELL_BLIND
from bench.builtin_model.kinds import (
    ASK,
    ASK_HELD_OUT,
    CORRECT,
    CORRECT_HELD_OUT,
    KINDS,
    TELL,
    TELL_HELD_OUT,
    Kind,
    split,
)
from bench.builtin_model.phrases import ASK_PARTS, CORRECT_PARTS, TELL_PARTS, WRITTEN, compose, opening, vary
from bench.builtin_model.smalltalk import CHATTER, fill, small_talk, system_prompt
from bench.builtin_model.values import HELD_OUT, TRAIN, invented_word, make_value

TOKENS_PER_MESSAGE = 2  # its role and its end
LEADS = (
    "By the way, |Oh, and |Hey, |Well, |So, |Just so you know, |Also, |Listen, |You know, |Another thing: |"
    "One more thing: |Now, |Okay, |And |Right, |Ah, |Hi, |Yes, |Look, |Actually |First of all, |"
    "As you may know, |If you like to know, |This is important: |Just a small thing: |Before we go on, |"
    "While we talk, |Let me think. |"
    "For the record, |I almost forgot: |To be clear, |You asked nothing, but |Please note: |Fun fact: |"
    "Let me add that |"
    "Between us, |To tell the truth, |In my case |Where was I? |My turn: |News: |Here is something: |After all, "
).split("|")
LEADS_HELD_OUT = ("In addition, ", "One detail: ", "Incidentally, ", "Well then, ")
ASK_LEADS = (
    "By the way, |Hey, |Quick question: |One question: |So, |Sorry, |Now, |Okay, |And |Another question: |"
    "Let me ask you: |Please help me, |Say, |Right, |Well, |Ah, |Listen, |Also, |Tell me, |A test: |Think back: |"
    "If you remember, |I need help: |You know, |Something else: |Before we go on, |Be honest, |Next: "
).split("|")
ASK_LEADS_HELD_OUT = ("Excuse me, ", "Alright, ", "Hello again, ", "If I may ask, ")
ALL_LEADS = ((*LEADS, *WRITTEN["leads"]["tell"]), LEADS_HELD_OUT, LEADS_BLIND)
ALL_ASK_LEADS = ((*ASK_LEADS, *WRITTEN["leads"]["ask"]), ASK_LEADS_HELD_OUT, ASK_LEADS_BLIND)
# Every answer begins alike, whether the fact is known or not, so that one look-up ("... name is") decides both.
UNKNOWN = "something I don't know. You haven't told me."
# The share of acknowledgements that repeat the fact, in the words of the answers. It is smaller in training: a model
# that always finds the value in its own words does not learn to look for it in the user's.
REPEATED_SHARE = {TRAIN: 0.45, HELD_OUT: 0.85}
# The share of questions about something that was never told, if a told fact could be asked for.
UNKNOWN_SHARE = {TRAIN: 0.28, HELD_OUT: 0.4}
# Of the phrasings of training: composed of parts, short ones, written ones (and of these the kind's own). Fewer short
# ones (.15) confuse the plain facts that most conversations begin with.
COMPOSED_SHARE, SHORT_SHARE, OWN_SHARE = 0.1, 0.45, 0.6
VARIED_SHARE = 0.2  # of the phrasings of training that name their subject
TAILS = (  # what may follow a fact in training
    " That's it.| I hope you like it.| Isn't that nice?| You know how it is.| I thought you should know.| Okay?|"
    " Thanks.| That is all for now.| Please keep it.| Did you get that?| It is true.| I am serious.|"
    " It took me a while."
).split("|")
ASK_TAILS = (  # what may follow a question in training
    " Thanks.| Please.| I need it now.| It's urgent.| I can't recall it.| My memory is bad today.| Just checking.|"
    " I have to fill in a form.| Somebody asked me.| I hope you kept it.| Be quick.| I'm in a hurry.| No guessing."
).split("|")
ACKNOWLEDGED = (
    "Noted, thank you.", "I will remember that.", "Okay, I will keep that in mind.", "Thank you for telling me.",
)
CORRECTED = ("Thank you, I have changed that.", "Okay, I have corrected it.")


@dataclass(frozen=True, slots=True)
class Asked:
    """One question about a fact: what it is about and which answer is right."""

    kind: Kind
    value: str | None  # None: never told
    corrected: bool
    repeated: bool  # the assistant's acknowledgement contained the value
    told_turn: int  # the turn of the (last) telling; -1 when never told


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of the user and the assistant's reference answer."""

    user: str
    assistant: str
    asked: tuple[Asked, ...] = ()
    told: tuple[tuple[str, str], ...] = ()  # (key of the kind, value)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A whole chat. `turns[k]` depends only on the turns before it."""

    system: str | None
    turns: tuple[Turn, ...]

    def messages(self, num_turns: int | None = None) -> list[dict[str, str]]:
        """Chat messages of the first `num_turns` turns (all of them by default)."""
        found = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns[:num_turns]:
            found.append({"role": "user", "content": turn.user})
            found.append({"role": "assistant", "content": turn.assistant})
        return found


@dataclass(slots=True)
class Maker:
    """The state of one conversation while it is being made."""

    rng: random.Random
    split: str
    ask_once: bool
    dense: bool = False  # one type of value, hardly any small talk
    crowded: bool = False  # most messages tell several facts
    blind: bool = False  # with the second set of phrasings that is held out
    pool: list[Kind] = field(default_factory=list)
    known: dict[str, Asked] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)  # keys asked for since they were told
    small_share: float = 0.2
    turn: int = 0

    def __post_init__(self) -> None:
        self.pool = self.rng.sample(KINDS, self.rng.randint(6, 26))
        self.small_share = self.rng.uniform(0.03, 0.45)
        if self.dense:
            first = self.rng.choice(self.pool)
            akin = [kind for kind in KINDS if kind.value == first.value]
            self.pool = [*akin, *self.rng.sample(KINDS, max(2, 5 - len(akin)))]
            self.small_share = 0.04

    def next_turn(self) -> Turn:
        """One more turn, of a random kind that the state allows."""
        untold = [kind for kind in self.pool if kind.key not in self.known]
        askable = self.askable()
        if self.rng.random() < self.small_share:
            turn = Turn(*small_talk(self.rng))
        elif untold and (len(self.known) < 2 or self.rng.random() < 0.40):
            turn = self.tell(untold)
        elif self.known and self.rng.random() < 0.13:
            turn = self.correct()
        elif not askable or self.rng.random() < UNKNOWN_SHARE[self.split]:
            turn = self.ask_unknown()
        else:
            turn = self.ask(askable)
        self.turn += 1
        return turn

    def askable(self) -> list[Asked]:
        """Facts that may be asked for, in the order in which they were told."""
        facts = sorted(self.known.values(), key=lambda fact: fact.told_turn)
        if not self.ask_once:
            return facts
        return [f for f in facts if f.kind.key not in self.done and self.turn - f.told_turn >= 3]

    def phrase(self, train: tuple[str, ...], held_out: tuple[str, ...], blind: tuple[str, ...]) -> str:
        return self.rng.choice(train if self.split == TRAIN else blind if self.blind else held_out)

    def learnt(self, parts: tuple[str, ...], short: str, written: tuple[str, ...], own: tuple[str, ...],
               own_written: tuple[str, ...]) -> str:
        """A phrasing of training: composed of parts, a short one, or a written one; general or the kind's own."""
        draw, is_own = self.rng.random(), bool(own) and self.rng.random() < OWN_SHARE
        if draw < COMPOSED_SHARE:
            text = self.rng.choice(parts)
            for name in ("{Q}", "{T}"):
                text = text.replace(name, self.rng.choice((*own, *own_written))) if name in text else text
        elif draw < COMPOSED_SHARE + SHORT_SHARE:
            text = self.rng.choice(own if is_own else split(short))
        else:
            text = self.rng.choice(own_written if is_own and own_written else written)
        text = compose(self.rng, text).replace("{X}", opening(self.rng))
        is_frame = "{S}" in text and "{O}" not in text
        return vary(self.rng, text) if is_frame and self.rng.random() < VARIED_SHARE else text

    def telling(self, kind: Kind) -> str:
        if self.split == TRAIN:
            return self.learnt(TELL_PARTS, TELL, WRITTEN["general"]["tell"], kind.tell, kind.tell_more)
        if self.rng.random() < 0.4:
            return self.phrase(split(TELL), split(TELL_HELD_OUT), split(TELL_BLIND))
        return self.phrase(kind.tell, kind.tell_held_out, kind.tell_blind or split(TELL_BLIND))

    def asking(self, kind: Kind) -> str:
        if self.split == TRAIN:
            return self.learnt(ASK_PARTS, ASK, WRITTEN["general"]["ask"], kind.ask, kind.ask_more)
        if self.rng.random() < 0.4:
            return self.phrase(split(ASK), split(ASK_HELD_OUT), split(ASK_BLIND))
        return self.phrase(kind.ask, kind.ask_held_out, kind.ask_blind or split(ASK_BLIND))

    def led(self, text: str, leads: tuple[tuple[str, ...], ...], value: str = "") -> str:
        """A sentence with or without an opening. Its first letter is written as people do."""
        if self.split == TRAIN and self.rng.random() < 0.15:
            return f"{fill(self.rng, self.rng.choice(CHATTER))} {text[0].upper() + text[1:] if not value else text}"
        if self.split == TRAIN and self.rng.random() < 0.1:  # any word may open a sentence
            return f"{invented_word(self.rng, True)}{self.rng.choice((', ', ': ', ' and '))}{text}"
        if self.rng.random() < 0.4:
            return self.phrase(*leads) + text
        if (value and text.startswith(value)) or self.rng.random() < 0.05:
            return text
        return text[0].upper() + text[1:]

    def remember(self, kind: Kind, value: str, corrected: bool, repeated: bool) -> None:
        self.known[kind.key] = Asked(kind, value, corrected, repeated, self.turn)
        self.done.discard(kind.key)

    def tell(self, untold: list[Kind]) -> Turn:
        """One to three facts in one message, up to four in a crowded conversation."""
        counts = (1, 1, 2, 2, 2, 2, 2, 3, 3, 4) if self.crowded else (1, 1, 1, 1, 1, 1, 2, 2, 2, 3)
        count = min(len(untold), self.rng.choice(counts))
        repeated = self.rng.random() < REPEATED_SHARE[self.split]
        said, answers, told = [], [], []
        for kind in self.rng.sample(untold, count):
            value = make_value(self.rng, kind.value, self.split)
            text = fill_in(self.telling(kind), kind, value)
            said.append(self.led(text, ALL_LEADS, value))
            answers.append(f"{kind.yours} is {value}.")
            told.append((kind.key, value))
            self.remember(kind, value, False, repeated)
        if self.split == TRAIN and self.rng.random() < 0.12:
            said.append(self.rng.choice(TAILS).strip())
        answer = "Got it. " + " ".join(answers) if repeated else self.rng.choice(ACKNOWLEDGED)
        return Turn(" ".join(said), answer, told=tuple(told))

    def correct(self) -> Turn:
        """A fact that was told gets a new value."""
        fact = self.rng.choice(sorted(self.known.values(), key=lambda one: one.told_turn))
        kind, old = fact.kind, fact.value or ""
        value = old
        while value == old:
            value = make_value(self.rng, kind.value, self.split)
        repeated = self.rng.random() < REPEATED_SHARE[self.split]
        if self.split == TRAIN:
            text = self.learnt(CORRECT_PARTS, CORRECT, WRITTEN["correct"]["tell"], (), ())
        else:
            text = self.phrase(split(CORRECT), split(CORRECT_HELD_OUT), split(CORRECT_BLIND))
        text = fill_in(text, kind, value, old)
        self.remember(kind, value, True, repeated)
        answer = f"Thank you for the correction. {kind.yours} is {value}." if repeated else self.rng.choice(CORRECTED)
        return Turn(self.led(text, ALL_LEADS), answer, told=((kind.key, value),))

    def question(self, kind: Kind) -> str:
        text = fill_in(self.asking(kind), kind, "-")
        said = self.led(text, ALL_ASK_LEADS)
        return said + self.rng.choice(ASK_TAILS) if self.split == TRAIN and self.rng.random() < 0.1 else said

    def unknown(self) -> Asked:
        """Something that was never told; half of the time it is akin to something that was."""
        groups = {fact.kind.group for fact in self.known.values()}
        rest = [kind for kind in KINDS if kind.key not in self.known]
        akin = [kind for kind in rest if kind.group in groups]
        if akin and self.rng.random() < 0.5:
            rest = akin
        return Asked(self.rng.choice(rest), None, False, False, -1)

    def answer(self, asked: Asked) -> str:
        return f"{asked.kind.yours} is {UNKNOWN if asked.value is None else asked.value + '.'}"

    def ask_unknown(self) -> Turn:
        asked = self.unknown()
        return Turn(self.question(asked.kind), self.answer(asked), (asked,))

    def ask(self, askable: list[Asked]) -> Turn:
        """A question about one fact, or about two at once."""
        fresh = [fact for fact in askable if fact.kind.key not in self.done]
        if self.split == TRAIN and fresh and self.rng.random() < 0.6:  # an answer is not yet in the model's own words
            askable = fresh
        first = askable[0] if self.rng.random() < (0.4 if self.split == TRAIN else 0.25) else self.rng.choice(askable)
        picked = [first]
        if self.rng.random() < 0.1:
            others = [fact for fact in askable if fact is not first] or [self.unknown()]
            picked.append(self.unknown() if self.rng.random() < 0.2 else self.rng.choice(others))
        self.done.update(one.kind.key for one in picked)
        said = " ".join(self.question(one.kind) for one in picked)
        return Turn(said, " ".join(self.answer(one) for one in picked), tuple(picked))


def fill_in(text: str, kind: Kind, value: str, old: str = "") -> str:
    """A phrasing with its subject and its values."""
    article = ("an " if value[0] in "aeiou" else "a ") + value
    for name, content in (("{S}", kind.subject), ("{V}", value), ("{A}", article), ("{O}", old)):
        text = text.replace(name, content)
    return text


def turn_tokens(turn: Turn, count_tokens: Callable[[str], int]) -> int:
    return count_tokens(" " + turn.user) + count_tokens(turn.assistant) + 2 * TOKENS_PER_MESSAGE


def make_conversation(seed: int | str, split: str = TRAIN, *, max_tokens: int = 1024,
                      count_tokens: Callable[[str], int], ask_once: bool = False,
                      dense: bool = False, crowded: bool = False, blind: bool = False) -> Conversation:
    """A conversation whose rendering has nearly `max_tokens` tokens, and not more.

    With `ask_once`, no fact is asked for twice or within three turns of its telling, so that an answer is never a copy
    of an earlier one, as the evaluation needs. With `dense`, its facts are of one type and small talk is rare, as in
    the beginning of training. With `crowded`, most messages that tell a fact tell several. With `blind`, its phrasings
    are of the second set that is held out.
    """
    rng = random.Random(f"{split}/{seed}")
    maker = Maker(rng, split, ask_once, dense, crowded, blind)
    system = system_prompt(rng, split == HELD_OUT)
    used = 1 + (count_tokens(" " + system) + TOKENS_PER_MESSAGE if system else 0)
    turns: list[Turn] = []
    while True:
        turn = maker.next_turn()
        used += turn_tokens(turn, count_tokens)
        if used > max_tokens:
            return Conversation(system, tuple(turns))
        turns.append(turn)


def plain_conversation(seed: int | str) -> Conversation:
    """Two facts in the plainest words, at the beginning of a conversation, then a question about each.

    Most conversations begin like this. Phrasings are those of training, values are held out.
    """
    rng = random.Random(f"plain/{seed}")
    told, asked = [], []
    for kind in rng.sample(KINDS, 2):
        value = make_value(rng, kind.value, HELD_OUT)
        tell, ask = rng.choice(("{S} is {V}.", *kind.tell[:2])), rng.choice(("what is {S}?", kind.ask[0]))
        said, question = (text[0].upper() + text[1:] for text in (fill_in(one, kind, value) for one in (tell, ask)))
        told.append(Turn(said, f"Got it. {kind.yours} is {value}.", told=((kind.key, value),)))
        fact = Asked(kind, value, False, True, len(told) - 1)
        asked.append(Turn(question, f"{kind.yours} is {value}.", (fact,)))
    return Conversation(system_prompt(rng, True), (*told, *asked))
