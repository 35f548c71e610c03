"""The kinds of facts, and how people tell them, ask for them and correct them.

Every kind has phrasings for training and two sets that are held out, the second in `blind`. `{V}` is the value,
`{A}` the value with its article, `{S}` the subject as the speaker says it ("my sister's name").
"""

from dataclasses import dataclass, replace

from bench.builtin_model.blind import BLIND
from bench.builtin_model.phrases import WRITTEN


@dataclass(frozen=True, slots=True)
class Kind:
    """One thing that can be true of the speaker, e.g. the name of their sister."""

    key: str
    group: str  # the row of the evaluation's table
    value: str  # the argument of `values.make_value`
    subject: str  # "my sister's name"
    tell: tuple[str, ...]
    ask: tuple[str, ...]
    tell_held_out: tuple[str, ...]
    ask_held_out: tuple[str, ...]
    tell_more: tuple[str, ...] = ()  # patterns for `phrases.compose`
    ask_more: tuple[str, ...] = ()
    tell_blind: tuple[str, ...] = ()
    ask_blind: tuple[str, ...] = ()

    @property
    def yours(self) -> str:
        """The subject as the assistant says it: "Your sister's name"."""
        return self.subject.replace("my ", "Your ", 1)


# Phrasings that suit every kind. Each is as likely as all of a kind's own together.
TELL = (
    "{S} is {V}.|{V} is {S}.|I should mention that {S} is {V}.|for your notes, {S} is {V}.|"
    "please remember that {S} is {V}.|you should know that {S} is {V}.|keep in mind that {S} is {V}.|"
    "I want you to know {S}: {V}.|{S}? That is {V}.|I can tell you {S}. It is {V}.|"
    "if you ask me about {S}, it's {V}.|as for {S}, it is {V}.|a note on {S}: it's {V}.|{S}: {V}.|"
    "{S} turns out to be {V}.|{S} is simply {V}.|{S} remains {V}.|{S} is of course {V}.|{S} was always {V}.|"
    "{V} was chosen as {S}.|I would say that {S} is {V}.|they told me that {S} is {V}.|{S} became {V}.|"
    "we decided that {S} is {V}.|it seems that {S} is {V}.|I am sure that {S} is {V}.|{S} equals {V}.|"
    "some people ask about {S}; the answer is {V}.|put {V} on your list as {S}.|take {V} for {S}.|"
    "about {S}: I can say that it's {V}.|it is good to know that {S} is {V}.|I found out that {S} is {V}.|"
    "don't forget {S}, which is {V}.|speaking about {S}, I mean {V}.|store {S} as {V}, please.|"
    "{V}, that is {S}.|here comes {S}: {V}.|when I say {V}, I mean {S}.|{S} is known to be {V}.|"
    "{S} has to be {V}.|{S} will be {V}.|{S} must be {V}.|{S} got to be {V}.|{S} was changed to {V} long ago.|"
    "it was {V} that I took as {S}.|{S} stands at {V}.|for {S} I took {V}.|{S} carries the value {V}.|"
    "I took {V} as {S}.|I have {V} as {S}.|I have had {V} as {S} for years.|{V} has been {S} since last year.|"
    "{V} serves as {S}.|{S} can be given as {V}.|{S} comes down to {V}.|I was told {V} is {S}.|{V} would be {S}."
)
TELL_HELD_OUT = (
    "my notes say that {S} is {V}.|you might want to save that {S} is {V}.|let it be known that {S} is {V}.|"
    "I'd like to add that {S} is {V}.|regarding {S}, the answer would be {V}."
)
ASK = (
    "what is {S}?|what's {S}?|can you tell me {S}?|do you remember {S}?|could you remind me of {S}?|"
    "I forgot {S}. What was it?|remind me, what is {S}?|please tell me {S}.|do you know {S}?|"
    "tell me {S} again.|what did I say {S} was?|what was {S}?|"
    "say {S}, please.|give me {S}.|I want to hear {S}.|I would like to know {S}.|which one is {S}?|"
    "did I tell you {S}? If so, what is it?|somebody wants to know {S}. What should I say?|look up {S}, please.|"
    "I am not sure about {S}. What is it?|have you kept {S}?|what do you know about {S}?|let me hear {S}.|"
    "and {S}?|how about {S}?|I wonder what {S} is.|I have to write {S} here. What is it?|{S}, please.|"
    "I lost {S}. Can you find it?|{S} has slipped my mind.|I don't remember {S}. Please help.|"
    "I do not know {S} any more.|it would help me to hear {S}.|my memory is bad. What is {S}?|"
    "you may remember {S}, I don't.|help me with {S}.|"
    "I must have {S} at once.|could it be that you know {S}?|I ask for {S}.|is there a note about {S}?|{S} again?"
)
ASK_HELD_OUT = (
    "could you look at your notes and tell me {S}?|what have you noted as {S}?|I'd be happy if you told me {S}.|"
    "would you know {S}?|can I have {S}, please?"
)
CORRECT = (
    "actually, {S} is {V}, not {O}.|I made a mistake: {S} is {V}.|sorry, I got that wrong. {S} is {V}.|"
    "correction: {S} is {V}.|{S} has changed. It is {V} now.|I have to correct myself, {S} is {V}.|"
    "{S} is not {O}. It is {V}.|earlier I said {S} was {O}, but it is {V}.|no, {S} is really {V}.|"
    "please update {S} to {V}.|things changed: {S} is now {V}.|{S} is no longer {O}, it's {V}.|"
    "I was wrong, {S} must be {V}.|it is {V} and not {O}, I mean {S}.|my error: {S} has to be {V}, not {O}.|"
    "that was false: {S} is {V} rather than {O}.|there is a change, {S} became {V}.|I mixed it up, {S} would be {V}."
)
CORRECT_HELD_OUT = (
    "hold on, I meant that {S} is {V}.|please replace {S}, the right one is {V}.|"
    "that is out of date: {S} is {V} these days.|oops, I said {O}, but {S} is {V}."
)


def split(text: str) -> tuple[str, ...]:
    return tuple(text.split("|"))


def kind(key: str, group: str, value: str, phrases: tuple[str, str, str, str],
         subject: str = "") -> Kind:
    """A kind from its own phrasings: told, asked, and both again for the held-out split."""
    subject = subject or f"my {key}"
    tell, ask, tell_held_out, ask_held_out = (split(text) for text in phrases)
    made = Kind(key, group, value, subject, tell, ask, tell_held_out, ask_held_out)
    return with_more(made, key, key) if key in WRITTEN else made


def with_more(kind: Kind, name: str, holder: str) -> Kind:
    """The kind with the patterns and the blind phrasings of `name`, {R} being the holder."""
    names = (name, "pet") if kind.group == "pet name" else (name,)
    more = [
        tuple(text.replace("{R}", holder) for one in names for text in WRITTEN[one][way]) for way in ("tell", "ask")
    ]
    blind = [split(text.replace("{R}", holder)) for text in BLIND[name]]
    return replace(kind, tell_more=more[0], ask_more=more[1], tell_blind=blind[0], ask_blind=blind[1])


def family(names: str, group: str, value: str, phrases: tuple[str, str, str, str],
           subject: str) -> list[Kind]:
    """The same kind for several holders ({R}): sister, brother, ..."""
    made = []
    for name in names.split(", "):
        tell, ask, tell_held_out, ask_held_out = (text.replace("{R}", name) for text in phrases)
        about = subject.replace("{R}", name)
        own = (tell, ask, tell_held_out, ask_held_out)
        one = kind(about.removeprefix("my "), group, value, own, about)
        made.append(with_more(one, MORE_OF[phrases], name))
    return made


NAMED = (
    "my {R} is called {V}.|I have a {R} named {V}.|I have a {R} called {V}.|my {R} goes by {V}.|"
    "the name of my {R} is {V}.|{V} is what my {R} is called.|everybody calls my {R} {V}.|"
    "my {R}, {V}, is very kind.|I talked to my {R} {V} today.|you would like my {R} {V}.",
    "what is my {R} called?|what is the name of my {R}?|who is my {R}?|how is my {R} called?|"
    "do you remember what my {R} is called?|what do I call my {R}?",
    "my {R} answers to the name {V}.|I have known my {R} {V} for a long time.|we gave my {R} the name {V}.",
    "what should I call my {R}?|do you still know how my {R} is called?|tell me the name of my {R}.",
)
FAVOURITE = (
    "I like {V} best, it's my favourite {R}.|of all things, {V} is the {R} I like most.|"
    "the {R} I like most is {V}.|my favourite {R} has always been {V}.|I love {V}, my favourite {R}.|"
    "no {R} is better than {V}.|the best {R} for me is {V}.|if I had to pick a {R}, it would be {V}.",
    "which {R} do I like most?|what {R} do I like best?|which {R} is my favourite?|"
    "do you know which {R} I love?|what is the {R} I like most?",
    "I can't get enough of {V}, it is my favourite {R}.|among every {R} there is, I prefer {V}.",
    "what would you say is my favourite {R}?|which {R} do I prefer?",
)
CODE = (
    "the {R} I use is {V}.|I set my {R} to {V}.|I chose {V} as my {R}.|my new {R} is {V}.|"
    "use {V} as my {R}.|they gave me the {R} {V}.|note my {R}, it is {V}.|save this {R} for me: {V}.",
    "which {R} do I use?|what {R} did I give you?|what {R} did I choose?|which {R} is mine?|"
    "can you look up my {R}?",
    "for the {R} I always enter {V}.|someone gave me a new {R}, namely {V}.",
    "what do I have to enter as my {R}?|which {R} belongs to me?",
)
TRAVEL = (
    "I have the {R} {V}.|the {R} on my ticket is {V}.|I was given {R} {V}.|my ticket says {R} {V}.|"
    "they gave me {R} {V}.|the {R} for me is {V}.|it says here that my {R} is {V}.",
    "which {R} do I have?|which {R} is mine?|what {R} was I given?|which {R} did I get?",
    "I have been assigned {R} {V}.|the {R} they wrote down for me is {V}.",
    "what was the {R} again, the one for me?|do you still have my {R}?",
)
DATE = (
    "my {R} is on {V}.|I have my {R} on {V}.|the date of my {R} is {V}.|my {R} falls on {V}.|"
    "on {V} it is my {R}.|{V} is the day of my {R}.|I am waiting for {V}, the day of my {R}.",
    "when is my {R}?|on what day is my {R}?|what is the date of my {R}?|which day is my {R}?|"
    "do you remember when my {R} is?",
    "everyone will come to my {R} on {V}.|that {R} of mine is going to be on {V}.",
    "what day should I keep free for my {R}?|tell me the day of my {R}.",
)
TIME = (
    "my {R} is at {V}.|my {R} starts at {V}.|I have my {R} at {V}.|the time of my {R} is {V}.|"
    "at {V} I have my {R}.|my {R} is planned for {V}.|I must be ready for my {R} at {V}.",
    "when is my {R}?|at what time is my {R}?|what is the time of my {R}?|what time does my {R} start?|"
    "do you remember when my {R} is?",
    "don't let me be late, my {R} is at {V}.|we agreed on {V} for my {R}.",
    "what time did we agree on for my {R}?|at which hour is my {R}?",
)
MORE_OF = {NAMED: "named", FAVOURITE: "favourite", CODE: "code", TRAVEL: "travel", DATE: "date", TIME: "time"}
FAMILY = "sister, brother, mother, father, daughter, son, cousin, aunt, uncle"
OTHERS = "best friend, boss, neighbour, doctor, teacher, roommate, colleague, coach"
PETS = "dog, cat, parrot, rabbit, hamster, horse"

NAME = kind("name", "own name", "person", (
    "I am {V}.|I'm {V}.|I am called {V}.|people call me {V}.|you can call me {V}.|call me {V}.|"
    "hello, I'm {V}.|my friends call me {V}.|this is {V} speaking.|they named me {V}.",
    "who am I?|what am I called?|how do people call me?|do you know who I am?|what do you call me?",
    "you are talking to {V}, that is my name.|my full name reads {V}.",
    "can you still say my name?|do you recall what I am called?"))
HOME = kind("home town", "home town", "place", (
    "I live in {V}.|I am living in {V}.|my home is in {V}.|I moved to {V}.|I have a flat in {V}.|"
    "my house is in {V}.|I live in a place called {V}.|home for me is {V}.|we live in {V} now.",
    "where do I live?|in which town do I live?|where is my home?|what town do I live in?|"
    "which city do I live in?|do you remember where I live?",
    "I settled down in {V} and live there.|the place where I live is {V}.",
    "do you know which place I live in?|what is the name of the town where I live?"))
BIRTHPLACE = kind("birthplace", "birthplace", "place", (
    "I was born in {V}.|I come from {V}, I was born there.|the town I was born in is {V}.|"
    "I was born in a town called {V}.|the place of my birth is {V}.|{V} is where I was born.",
    "where was I born?|in which town was I born?|in which city was I born?|what is the place of my birth?|"
    "do you remember where I was born?",
    "I was a baby in {V}, where I was born.|it was in {V} that I was born.",
    "tell me where I was born.|what is the name of the town where I was born?"))
HOLIDAY = kind("holiday destination", "holiday", "place", (
    "I am going on holiday to {V}.|we will spend our holiday in {V}.|I booked a holiday in {V}.|"
    "my next holiday will be in {V}.|I am flying to {V} for my holiday.|this year I go to {V} on holiday.",
    "where am I going on holiday?|where will I spend my holiday?|where did I book my holiday?|"
    "what place do I go to on holiday?",
    "this summer my holiday is in {V}.|I can't wait for my holiday in {V}.",
    "which place did I choose for my holiday?|where am I off to on holiday?"))
EMPLOYER = kind("employer", "employer", "company", (
    "I work for {V}.|I work at {V}.|I am employed by {V}.|I have a job at {V}.|the company I work for is {V}.|"
    "I started working for {V}.|my company is called {V}.|I have been with {V} for years.",
    "who do I work for?|where do I work?|which company do I work for?|what is the name of my company?|"
    "what company do I work at?",
    "these days {V} is the company I work for.|I have signed a contract with {V}, my new employer.",
    "what is the company that I work for?|at which company do I work?"), "my employer")
JOB = kind("job", "job", "job", (
    "I work as {A}.|I am {A} by trade.|I have a job as {A}.|for a living, I work as {A}.|I earn my money as {A}.|"
    "I became {A} years ago.|I found a job as {A}.|my work is being {A}.",
    "what do I do for a living?|what do I work as?|what kind of work do I do?|what work do I do?|"
    "do you remember what I do for a living?",
    "I have been working as {A} for ten years.|the work I do is that of {A}.",
    "as what do I work?|could you say what job I have?"))
AGE = kind("age", "age", "age", (
    "I am {V} years old.|I'm {V} years old.|I turned {V} this year.|I just turned {V}.|"
    "I have been {V} years old for a while.|I will stay {V} for some months.|at {V} years I feel well.",
    "how old am I?|do you know how old I am?|how many years old am I?|can you say how old I am?",
    "you can write that I am {V} years old.|I have lived for {V} years, that is my age.",
    "at what age am I?|tell me how old I am."))
ALLERGY = kind("allergy", "allergy", "allergen", (
    "I am allergic to {V}.|I have an allergy to {V}.|{V} makes me ill, I am allergic.|"
    "my allergy is against {V}.|I can't have {V}, I am allergic.|my doctor says I am allergic to {V}.",
    "what am I allergic to?|which allergy do I have?|what is it that I am allergic to?|"
    "do you remember what I am allergic to?",
    "please no {V} for me, I am allergic.|I found out that I am allergic to {V}.",
    "to what am I allergic?|what should nobody give me because of my allergy?"))
HOBBY = kind("hobby", "hobby", "hobby", (
    "in my free time I enjoy {V}.|I spend my free time on {V}.|my main hobby is {V}.|"
    "{V} is my hobby.|for fun I do {V}.|after work I do {V} as a hobby.",
    "what do I do in my free time?|what do I do for fun?|which hobby do I have?|what do I enjoy as a hobby?",
    "nothing makes me happier than my hobby, {V}.|I have found a new hobby: {V}.",
    "could you tell me which hobby I have?|what is it I do as a hobby?"))
INSTRUMENT = kind("instrument", "instrument", "instrument", (
    "I play the {V}.|I am learning to play the {V}.|the instrument I play is the {V}.|"
    "I have played the {V} for years.|in the band I play the {V}.|I practise the {V} every day.",
    "which instrument do I play?|what instrument do I play?|what do I play in the band?|"
    "do you remember which instrument I play?",
    "at home I play the {V} a lot, it's my instrument.|I can play one instrument, the {V}.",
    "what instrument can I play?|tell me the instrument that I play."))
LANGUAGE = kind("language", "language", "language", (
    "I am learning {V}.|I started to learn {V}.|I take a class to learn {V}.|the language I learn is {V}.|"
    "I study {V} in the evening.|I am trying to learn a language, {V}.",
    "which language am I learning?|what language do I learn?|what language am I trying to learn?|"
    "which language do I study?",
    "I spend my evenings learning {V}.|the new language I am learning is {V}.",
    "tell me the language I am learning.|what language have I been learning?"))
CAR = kind("car", "car", "car", (
    "I drive a {V}.|I own a {V}.|my car is a {V}.|I bought a {V} as my car.|the car I have is a {V}.|"
    "my new car is a {V}.|I go to work in my car, a {V}.",
    "which car do I drive?|what car do I have?|what kind of car do I drive?|which car is mine?|"
    "what do I drive?",
    "my family drives a {V}, a good car.|the car that I drive is a {V}.",
    "do you know what car I drive?|what is the car that I own?"))
SHOE = kind("shoe size", "shoe size", "size", (
    "I wear shoes in size {V}.|I take size {V} in shoes.|my shoes are size {V}.|I need shoes in size {V}.|"
    "my feet need shoe size {V}.|I always buy shoes in size {V}.",
    "what size are my shoes?|which shoe size do I wear?|what size of shoes do I need?|"
    "which size of shoes do I wear?",
    "size {V} is the shoe size I need.|my shoes have to be size {V}.",
    "what shoe size do I take?|which size do my shoes have?"))
LUCKY = kind("lucky number", "lucky number", "small", (
    "the number {V} brings me luck.|I always bet on {V}, my lucky number.|{V} is a lucky number for me.|"
    "my lucky number has always been {V}.|I believe {V} is my lucky number.|for luck I use the number {V}.",
    "which number brings me luck?|which number is lucky for me?|what number do I think is lucky?|"
    "which lucky number do I have?",
    "I was lucky with the number {V}, it is mine.|my number for good luck is {V}.",
    "what is the number that brings me luck?|which number do I call lucky?"))

KINDS: tuple[Kind, ...] = (
    NAME, HOME, BIRTHPLACE, HOLIDAY, EMPLOYER, JOB, AGE, ALLERGY, HOBBY, INSTRUMENT, LANGUAGE, CAR,
    SHOE, LUCKY,
    *family(FAMILY, "family name", "person", NAMED, "my {R}'s name"),
    *family(OTHERS, "friend's name", "person", NAMED, "my {R}'s name"),
    *family(PETS, "pet name", "pet", NAMED, "my {R}'s name"),
    *(one for word in ("colour", "food", "film", "book", "drink", "sport", "animal", "fruit", "song")
      for one in family(word, f"favourite {word}", word, FAVOURITE, "my favourite {R}")),
    *family("PIN code, locker code, door code, alarm code", "PIN or code", "pin", CODE, "my {R}"),
    *family("wifi password, email password", "password", "password", CODE, "my {R}"),
    *family("phone number, office number", "phone number", "phone", CODE, "my {R}"),
    *family("booking code, member code, customer code", "booking code", "code", CODE, "my {R}"),
    *family("flight number", "flight number", "flight", TRAVEL, "my {R}"),
    *family("seat number", "seat number", "seat", TRAVEL, "my {R}"),
    *family("room number, office room", "room number", "room", TRAVEL, "my {R}"),
    *family("bus number, house number", "bus or house number", "small", TRAVEL, "my {R}"),
    *family("birthday", "birthday", "date", DATE, "my {R}"),
    *family("wedding, exam, driving test", "other date", "date", DATE, "my {R} date"),
    *family("meeting, train, dentist appointment, yoga class", "time", "time", TIME, "my {R} time"),
)
