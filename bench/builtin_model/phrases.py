"""Phrasings put together from parts, for training: thousands of ways to tell, to ask and to correct.

A pattern's brackets hold alternatives: "[can|could] you tell me {S}?" is two sentences. `{S}`, `{V}` and `{O}` are
the subject, the value and the old value, as in `kinds`; `{Q}` is one of a kind's own questions. A model that has seen
sixty frames tells a question from a statement by its words; one that has seen thousands must check for a value.
"""

import json
import random
import re
import zlib
from pathlib import Path

from bench.builtin_model.values import LISTS, TRAIN, invented_word

CHOICE = re.compile(r"\[([^\[\]]*)\]")

MEMORY = "[memory|notebook|records|files|list|archive|head|papers|data|log]"
PERSON = (
    "[my doctor|my friend|my wife|my husband|a colleague|my lawyer|the office|the teacher|everybody|a woman on the phone|"
    "the form here|my neighbour|the man at the desk|the bank|they|we|people]"
)
GOOD = "[nice|great|kind|good|lovely|wonderful|useful|helpful|fine|perfect|sweet|best|a relief|a pleasure|important]"
GLAD = "[glad|grateful|thankful|pleased|relieved|delighted|very pleased|much obliged|in your debt|so glad]"
MODAL = "[can|could|will|would|are you able to|might]"
GIVE = "[tell|give|show|name|read|send|repeat to|get|bring|write|spell for|recall for|find|look up for|hand]"
GAVE = "[told|gave|showed|named|read|sent|got|brought|wrote|found]"
KNOW = "[know|remember|recall|have|keep|see|still have|happen to know|still remember|really know]"
NEED = (
    "[need|want|require|miss|forgot|lost|seek|would love|am looking for|am after|am asking for|have to know|must know|"
    "have forgotten|can't recall|can't think of|never remember|don't have|no longer know|wish to know|am curious about|"
    "have to say|am asked for|should know|cannot find|keep forgetting|was asked about]"
)
END = "[||||, please| again| now| right away| if you can| for me| once more| one more time| today| at last|, my friend]"

ASK_PARTS = (
    f"{MODAL} you [please ||]{GIVE} me {{S}}{END}?",
    f"{MODAL} you [say|repeat|name|recall|find|state|check|confirm|quote|share|print] {{S}}{END}?",
    f"{MODAL} I [hear|know|get|see|ask for|ask you for|read|learn|have back] {{S}}{END}?",
    f"do you [||still|by chance|perhaps|maybe|even] {KNOW} {{S}}{END}?",
    "[did|had] you [keep|note|save|forget|hear|store|write down|learn] {S}?",
    f"I {NEED} {{S}}{END}.",
    f"I {NEED} {{S}}. [What is it|Do you know it|Can you help|Please help|Which is it|Say it, please|Any idea]?",
    f"it would be {GOOD} [to hear|to know|to have|to see|if I knew|if you said|if you told me|if you gave me] {{S}}{END}.",
    f"[I would be|I'd be|I am|I will be|we'd be] {GLAD} [if|when|once|as soon as] you {GAVE} me {{S}}.",
    f"[look|search|check|dig|go|browse] [in|into|through] your {MEMORY} [and|to] [say|find|tell me|give me|see] {{S}}.",
    "[what|which one] [did|do|had|have] [I|you|we] [say|write|note|write down|save|call|choose|keep|list] [as|for|about|under] {S}?",
    f"what [stands|is written|is said|do you read|did I put|can you find] [in your {MEMORY} |]about {{S}}?",
    f"{PERSON} [asks for|wants|needs|wants to know|asked me about|is asking for|would like|has to have] {{S}}{END}.",
    f"{PERSON} [asks for|wants|needs|asked about] {{S}}. What [should|can|do|shall] I [say|answer|write|tell them]?",
    "[tell|give|name|show|say|recall|repeat|find|read|send|spell|write|quote|state][| me] {S}" + END + ".",
    "[let|make|help] me [hear|know|see|remember|recall|have|find] {S}" + END + ".",
    "[any idea|a word|something|anything|what news|what] about {S}?",
    "what [is|was|may be|might be|could be|would be|exactly is|again is|then is|about] {S}" + "[|| now| then| really| exactly]?",
    "{S} [is what|was what|is which one|was which|is|was|would be]?",
    "{S}[, what is it|, which is it|, do you know it|, tell me|. Which was it|. What was that|. Say it|. Remember it|... what was it]?",
    "is {S} [known to you|in your " + MEMORY + "|something you know|still there|with you|stored somewhere]?",
    "[I wonder|I ask myself|I can't say|I have no idea|nobody knows|it is time to say|now say|guess|think of] what {S} [is|was|may be].",
    "[the question is|my question is|here is my question|I ask you|answer me|now the test|I repeat my question]: what is {S}?",
    f"there is [one thing|something|a thing] I {NEED}: {{S}}.",
    "[we|they|all of us|the two of us] [talked|spoke|chatted] about {S}[| before| earlier]. What [is|was] it?",
    "[a reminder of|a hint about|some help with|the answer for|the entry for|news on] {S}" + "[ would be " + GOOD + "|, please|?| is what I need]",
    "{Q} [I forgot.|I don't know.|Please tell me.|Say it.|Do you know?|Answer me, please.|I can't recall.|You know it.]",
    "[say|tell me|answer|I wonder|think|remember|look|my question|one more|can you say|do you know|help me]: {Q}",
    "{X} {Q}",
)

SAY = "[say|think|believe|know|swear|confirm|repeat|promise|hear|see|guess|admit|find|feel|suppose|state|declare|insist|bet|read|hope]"
NOTE = "[note|remember|save|write down|keep|learn|store|mark|record|register|memorise|accept|take in|put down|list|know]"
IS = "[is|is|is|is now|is really|is still|is always|is just|happens to be|would be|has been|has become|was set as|is called|is certainly]"
TOPIC = (
    "[about|concerning|as to|when it comes to|talking of|on the subject of|with respect to|in the matter of|for|"
    "to come back to|now to|a word on|as far as|coming to]"
)
WHEN = "[|||||, you know|, I think|, as always|, of course| since last year|, if that matters| for now|, no joke|, I guess|, believe me| again|, in short]"

TELL_PARTS = (
    f"I [can|must|may|will|would|could|want to|have to] {SAY} that {{S}} {IS} {{V}}{WHEN}.",
    f"I {SAY} [that |]{{S}} {IS} {{V}}{WHEN}.",
    f"{PERSON} [told me|said|wrote|thinks|believes|found|confirmed|explained|decided] that {{S}} {IS} {{V}}.",
    f"it is [true|clear|nice|funny|known|certain|a fact|no secret|useful|my choice|settled|strange|final] that {{S}} {IS} {{V}}{WHEN}.",
    f"[please|kindly|now|do|always|just] {NOTE} [that |]{{S}} {IS} {{V}}{WHEN}.",
    f"you [should|can|must|may|could|will|need to|ought to|have to] {NOTE} that {{S}} {IS} {{V}}.",
    f"{TOPIC} {{S}}, [it|that|this|the answer|the right one|mine|the thing] [is|was|will be|has to be|must be] {{V}}.",
    f"{TOPIC} {{S}}: [it's|I say|I have|I take|we use|I chose|it is|that's|only] {{V}}{WHEN}.",
    f"{NOTE} {{V}} [as|for|under] {{S}}{END}.",
    "{V} [is|was|will be|became|has become|shall be|stays|makes|counts as|has always been] {S}" + WHEN + ".",
    "{S} [is|was|=|means|reads|goes|says|stays|became|shall be|may be called|is listed as|is written as|is said to be] {V}" + WHEN + ".",
    "[I have|I use|I got|we have|they gave me|I picked|I keep|I want|I use only|you see] {V} [as|for] {S}" + WHEN + ".",
    "[there is|here is|this is|that is|now comes|next is|let me give you] {S}[: |, |, which is |, it is |, namely ]{V}.",
    f"[ask|tell|show] {PERSON} and [they|you] will [hear|see|learn|find] that {{S}} {IS} {{V}}.",
    f"[if|when|whenever|should] {PERSON} [ask|asks] for {{S}}, [say|it's|answer|tell them|the answer is|give] {{V}}.",
    "{S}? [It is|That's|It's|Easy, it is|Well,|I say|Of course|Always|Since years it is] {V}.",
    "{X} {S} " + IS + " {V}" + WHEN + ".",
    "[I guess|it's true:|they say|no doubt,|as people know,|what matters:|here it is:|to say it again,|I repeat:|so you know:] {T}",
    "{T} [That is so.|You see?|That's all.|No more, no less.|Mind that.|I like that.|It took time.|Write it down.|Keep it.|So much for that.]",
    "{X} {T}",
    "{S} " + IS + " {V}, [and I am fine with it|but that is a long story|which is good|and that won't change|just as planned|so be it].",
)

WRONG = (
    "[sorry|wait|no|oh no|my fault|pardon|stop|my mistake|well|careful|an error|a change|news|an update|"
    "I was wrong|I mixed that up|forget what I said|listen|not so fast|let me fix that|I need to change something]"
)
CORRECT_PARTS = (
    f"{WRONG}[,|:|. In fact|. Now|, but] {{S}} [is|is now|is really|should be|must be|was meant to be|has become|turned into|ought to be] {{V}}.",
    f"{WRONG}[,|:|.] {{S}} [isn't|is not|was never|can't be|is no longer|was not] {{O}}[, it is |, but |. It's |; it's |, rather ]{{V}}.",
    "[please|kindly|now|do] [change|correct|fix|switch|set|amend|edit|revise] {S} [to|into|so that it is] {V}.",
    "[please|kindly|now|do] [change|correct|fix|switch] {S} from {O} to {V}.",
    "[not|never|no more|forget] {O}[: |, |; ]{S} [is|is now|should be|became|must be] {V}.",
    "{S} [used to be|was|had been] {O}[, now it is |, but it is now |; today it is |, but has become |, and is now ]{V}.",
    "[earlier|before|last time|a moment ago] I [said|told you|wrote|gave] {O}[, but |; |, though ]{S} [is|should be|is really] {V}.",
    "[since|as of] [today|yesterday|now|this week|Monday] {S} [is|will be|has become] {V}[||, not {O}| instead of {O}| in place of {O}].",
    "it [should|must|has to|ought to] be {V}[, not {O},| and not {O}|] [for|as] {S}.",
)


def written(kept: bool) -> dict[str, dict[str, tuple[str, ...]]]:
    """The patterns of `phrasings.json`, each written by itself: those to learn from, or one in ten that is kept back."""
    every = json.loads(Path(__file__).with_name("phrasings.json").read_text())
    return {
        name: {
            way: tuple(one for one in some if (zlib.crc32(one.encode()) % 10 == 0) == kept)
            for way, some in ways.items()
        }
        for name, ways in every.items()
    }


WRITTEN = written(False)


def compose(rng: random.Random, pattern: str) -> str:
    """One sentence of a pattern: picks one alternative of each innermost bracket until none is left."""
    while found := CHOICE.search(pattern):
        pattern = pattern[: found.start()] + rng.choice(found[1].split("|")) + pattern[found.end() :]
    return pattern


# Common words that may precede a sentence without changing what it tells or asks.
WORDS = (
    "well so now then maybe yes and but while after before today tomorrow here there once again still just really quite "
    "very true false old new good bad long short small big first last next other same every some no more less only even "
    "also never often always soon later early late far near high low hot cold open closed right left fast slow time day "
    "week year morning evening night world house street city water fire tree light word line page book letter story part "
    "side hand eye head heart friend child man woman people life work game music art science money food air sea road door"
).split()


VALUE_WORDS = {word for kind in LISTS for value in LISTS[kind][TRAIN] for word in value.lower().split()}
WRITTEN_WORDS = sorted(
    {
        word
        for ways in WRITTEN.values()
        for patterns in ways.values()
        for pattern in patterns
        for word in re.findall(r"(?<![\w{'])[a-z']{2,}(?![\w}])", pattern)
    }
    - VALUE_WORDS
)


def vary(rng: random.Random, frame: str) -> str:
    """A frame that names its subject, with some of its other words lost or replaced by any.

    So the model learns that subject and value decide, whatever the words beside them are.
    """
    share, said = rng.uniform(0.05, 0.5), []
    for word in frame.split(" "):
        core = word.strip(".,:;?!")
        if "{" in word or not core or rng.random() >= share:
            said.append(word)
        elif rng.random() < 0.75:
            other = rng.choice(WRITTEN_WORDS) if rng.random() < 0.85 else invented_word(rng, False)
            said.append(word.replace(core, other))
    return " ".join(said)


def opening(rng: random.Random) -> str:
    """One to five words before a sentence, with a punctuation mark."""
    said = " ".join(rng.choice(WORDS) for _ in range(rng.choice((1, 1, 2, 2, 3, 4, 5))))
    return said.capitalize() + rng.choice((",", ",", ":", ".", " -", "?", "!"))
