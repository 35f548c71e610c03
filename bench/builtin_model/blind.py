"""Phrasings that nobody looks at while the training is made: a second held-out set, for the evaluation alone.

The errors on `kinds`' held-out phrasings were sorted when training phrasings were written. No error on these was, and
no phrasing of training may be one of them. `{V}`, `{A}`, `{S}`, `{O}` and `{R}` as in `kinds`.
"""

TELL_BLIND = (
    "just for the file: {S} is {V}.|can you make a note? {S} is {V}.|in case it comes up, {S} is {V}.|"
    "{S}, if you were wondering, is {V}.|oh right, {S}... that would be {V}.|I don't think I said it yet, but {S} is {V}.|"
    "one thing about me: {S} is {V}.|the answer to {S} is {V}."
)
ASK_BLIND = (
    "remind me about {S}, would you?|what did I tell you about {S}?|I can't for the life of me remember {S}.|"
    "any chance you remember {S}?|so what was {S} then?|{S} - do you have that?|I'm drawing a blank on {S}.|"
    "mind telling me {S}?"
)
CORRECT_BLIND = (
    "scratch that, {S} is {V}.|I take that back: {S} is {V}, not {O}.|turns out {S} isn't {O} but {V}.|"
    "about {S}: I gave you {O}, it should have been {V}.|make that {V} for {S}."
)
LEADS_BLIND = ("Anyway, ", "Oh, before I forget: ", "Funny you ask, ", "While I'm at it, ")
ASK_LEADS_BLIND = ("Um, ", "Hi again, ", "I was wondering: ", "Just checking, ")

# of single kinds and of families of kinds: (told, asked for)
BLIND = {
    "named": (
        "I've got a {R}, {V} is the name.|you haven't met my {R} {V} yet.|{V}'s my {R}, by the way.",
        "what's my {R} called again?|my {R}'s name escapes me.|who did I say my {R} was?",
    ),
    "favourite": (
        "if you ask me, {V} is the best {R} ever.|I'd pick {V} over any other {R}.|my go-to {R} is {V}.",
        "what's the {R} I like best?|what {R} would I pick?|which {R} did I say I love?",
    ),
    "code": (
        "the {R}'s {V}, don't lose it.|to get in I need the {R}, {V}.|I just got my {R}: {V}.",
        "what's that {R} of mine?|I need the {R}, quick.|what was the {R} I gave you?",
    ),
    "travel": (
        "looks like I've got {R} {V}.|I'm booked on {R} {V}.|it's {R} {V} for me.",
        "what {R} am I on?|remind me which {R} I've got.|what's my {R} again?",
    ),
    "date": (
        "my {R}'s on {V}.|save the date: my {R} is {V}.|I'm nervous about my {R} on {V}.",
        "when's my {R} again?|what date did I give you for my {R}?|when did I say my {R} is?",
    ),
    "time": (
        "my {R}'s at {V}.|I've got my {R} at {V}, remember.|I can't talk long, my {R} is at {V}.",
        "when's my {R} again?|what time did I say my {R} is?|what time do I have to be at my {R}?",
    ),
    "name": (
        "the name's {V}.|I'm {V}, nice to meet you.|you're chatting with {V}.",
        "what's my name again?|do you still remember my name?|who are you talking to?",
    ),
    "home town": (
        "I'm based in {V}.|these days I live over in {V}.|I've been living in {V} since spring.",
        "where am I based?|where do I live again?|what town is my home in?",
    ),
    "birthplace": (
        "I'm originally from {V}, that's where I was born.|I was born over in {V}.|my parents lived in {V} when I was born.",
        "where was I born again?|what's the town I was born in?|where am I originally from?",
    ),
    "holiday destination": (
        "we're off to {V} on holiday.|I'm spending my holiday in {V} this time.|our holiday is all booked: {V}.",
        "where are we off to on holiday?|where's my holiday this year?|where did I say I'd go on holiday?",
    ),
    "employer": (
        "I've got a job with {V}.|my pay comes from {V}, I work there.|I just started at {V}, my new employer.",
        "who's my employer again?|what firm do I work for?|where did I say I work?",
    ),
    "job": (
        "I'm {A}, if you want to know what I do.|by day I'm {A}.|I make my living as {A}.",
        "what's my job again?|what did I say I do for work?|what do I do all day at work?",
    ),
    "age": (
        "I'm {V}, in years that is.|I've just had my birthday, I'm {V} now.|I was {V} on my last birthday.",
        "how old did I tell you I was?|what's my age again?|how old am I by now?",
    ),
    "allergy": (
        "I can't eat or touch {V}, I'm allergic.|keep {V} away from me, it's an allergy.|I've been allergic to {V} since I was small.",
        "what's my allergy again?|what did I say I'm allergic to?|is there something I'm allergic to?",
    ),
    "hobby": (
        "I'm really into {V} these days, it's my hobby.|my weekends are all about {V}.|I took up {V} as a hobby.",
        "what's my hobby again?|what am I into?|what do I like to do on weekends?",
    ),
    "instrument": (
        "I've been playing the {V} since school.|I picked up the {V} last year.|I'm a {V} player.",
        "what instrument did I say I play?|what do I play again?|which instrument did I pick up?",
    ),
    "language": (
        "I've been learning {V} for a year now.|I'm brushing up on my {V}.|I'm taking {V} lessons.",
        "what language did I say I'm learning?|what am I learning again?|which language are my lessons in?",
    ),
    "car": (
        "I get around in a {V}.|I've got a {V} parked outside.|we just bought ourselves a {V}.",
        "what car did I say I have?|what's my car again?|what do I get around in?",
    ),
    "shoe size": (
        "I'm a size {V} in shoes.|shoes? I'm always a {V}.|{V} is what I wear, shoes I mean.",
        "what's my shoe size again?|what size shoe am I?|what size did I say for shoes?",
    ),
    "lucky number": (
        "{V} has always been lucky for me.|my lucky number's {V}.|I swear by the number {V}.",
        "what's my lucky number again?|what number did I say is lucky?|which number do I swear by?",
    ),
}
