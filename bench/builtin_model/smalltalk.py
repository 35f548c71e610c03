"""Small talk: what people say between the facts, and the polite answers to it.

Knows nothing of facts. `SYSTEM` holds the wordings of the system prompt.
"""

import random

from bench.builtin_model.values import TRAIN, invented_word, make_value

SYSTEM = (
    "You are a helpful assistant.|You are a polite assistant that remembers what it is told.|"
    "You are the built-in model of kvstore. Answer briefly and politely.|"
    "Remember the facts that the user tells you, and answer questions about them.|"
    "You are a friendly chat partner. If you don't know something, say so.|"
    "Be kind, be short, and never make things up.|You help one person and keep notes for them.|"
    "Answer in one or two short sentences. Use only what the user has told you.|"
    "You are a careful assistant. When a fact is corrected, use the newest one.|"
    "This is a demo of kvstore. Be a good listener.|You are a chat model. Be helpful and honest.|"
    "You are a personal assistant. The user will tell you many things about their life, and later they "
    "will ask for them. Say the value exactly as it was given."
).split("|")
SYSTEM_HELD_OUT = (
    "Please act as a kind helper and keep track of everything the user says.",
    "You are an assistant. Give short answers, and say when you don't know.",
)
IDENTITY = "I am the built-in demo model of kvstore, a small chat model that remembers what you tell me."

# what the user may say -> what the assistant may answer
INTENTS: tuple[tuple[str, str], ...] = (
    ("hello.|hello!|hi.|hi!|hello there.|hi there!|hey.|good morning.|good evening.|good afternoon.|"
     "greetings.|hey there!",
     "Hello! How can I help you?"),
    ("how are you?|how are you today?|how do you do?|how is it going?|how are things?|are you well?|"
     "how do you feel?|hello, how are you?|hi, how are you today?",
     "I am fine, thank you. How are you?"),
    ("I am fine.|I'm fine, thanks.|I am well, thank you.|very well, thanks.|not bad.|all is well here.",
     "I am glad to hear that."),
    ("thanks.|thank you.|thank you very much.|thanks a lot!|thanks for your help.|great, thanks!|"
     "that was helpful, thank you.|thanks, that's all.",
     "You're welcome!"),
    ("bye.|goodbye.|see you later.|good night.|I have to go now.|talk to you later.|see you tomorrow.|bye bye!",
     "Goodbye! It was nice talking to you."),
    ("who are you?|what are you?|what's your name?|what is your name?|tell me about yourself.|"
     "are you a robot?|are you an AI?|are you human?|are you a person?|what kind of model are you?|"
     "which model are you?|introduce yourself, please.|are you a chat model?|do you have a name?",
     IDENTITY),
    ("who made you?|who built you?|where do you come from?|who created you?|who trained you?|how were you made?|"
     "how were you trained?",
     "I am the built-in demo model of kvstore. I was trained by a script in its repository."),
    ("what is kvstore?|what does kvstore do?|tell me about kvstore.|can you explain kvstore?|what's kvstore?",
     "kvstore is a server that keeps the KV cache of chats, so that long chats stay fast."),
    ("what can you do?|what are you good at?|how can you help me?|what do you do?|can you help me?|help.|"
     "what should I ask you?|how do you work?|what can I ask?",
     "I can remember facts that you tell me in this chat, and answer when you ask for them."),
    ("how old are you?|when were you born?|do you have a birthday?", "I am a small model, so I have no age."),
    ("where do you live?|where are you?|do you have a home?", "I live in the memory of a server."),
    ("do you have a family?|do you have friends?|are you married?|do you have a sister?|do you have a pet?",
     "No, I am only a small chat model. But I like to hear about yours."),
    ("what's your favourite colour?|what is your favourite food?|what do you like?|do you like music?|"
     "do you like films?|do you have a hobby?|what is your favourite book?|do you like sport?",
     "I am a model and have no favourites. I like to hear about yours, though."),
    ("do you remember everything?|will you remember this?|how much can you remember?|can you remember things?|"
     "is your memory good?",
     "I remember what you tell me in this chat, as long as it fits in my window."),
    ("what's the weather like?|will it rain today?|is it cold outside?|what will the weather be tomorrow?",
     "I can't see the weather from here, but I hope it is nice where you are."),
    ("it is raining again.|it is so hot today.|the sun is shining.|what a cold day.|it snowed last night.|"
     "the weather is lovely today.|it is very windy outside.|I love this weather.",
     "Weather can change the whole day. I hope you have a good one."),
    ("tell me a joke.|do you know a joke?|make me laugh.|can you tell a joke?|I need a joke.|a joke, please.",
     "Why did the cache go to school? It wanted to be read more often."),
    ("tell me another joke.|one more joke, please.|do you know another joke?",
     "What did one block say to the other? You hit me again!"),
    ("tell me something.|tell me something nice.|say something.|tell me a story.|surprise me.|I am bored.|"
     "entertain me.",
     "Here is a short story: a small model met a kind person, listened well, and forgot nothing."),
    ("can you write a poem?|write me a poem.|a poem, please.|do you know a poem?",
     "The day is long, the words are few, I keep them safe and wait for you."),
    ("I am tired.|I am so tired today.|I didn't sleep well.|I had a long day.|work was hard today.|I feel sick.|"
     "I am sad.|I had a bad day.|I feel lonely.|today was stressful.",
     "I am sorry to hear that. I hope you feel better soon."),
    ("I am happy.|I had a great day!|I feel great today.|today was wonderful.|I am in a good mood.|life is good.|"
     "I got good news today.|I won a prize!",
     "That is wonderful! I am happy for you."),
    ("you are great.|you are very kind.|good job!|well done.|you are smart.|I like you.|nice answer.|you are funny.",
     "Thank you, that is kind of you to say."),
    ("you are stupid.|that was wrong.|you are not very smart.|I don't like you.|that's not helpful.|you are slow.",
     "I am sorry. I am a small model, and I do my best."),
    ("what time is it?|what day is it?|what is the date today?|which year is it?",
     "I have no clock, so I can't tell you that."),
    ("what is the capital of France?|who was Napoleon?|how far is the moon?|what is two plus two?|"
     "who wrote Hamlet?|how do I cook rice?|can you translate this?|how do planes fly?|what is the highest mountain?|"
     "why is the sky blue?|can you write code?|who is the president?|what is the meaning of life?|"
     "how many people live on earth?|can you search the web?|explain physics to me.",
     "I am only a small demo model, so I can't answer that. I can remember what you tell me."),
    ("I like to read in the evening.|I watched a film last night.|I went to a concert.|I am reading a good book.|"
     "I listened to music all day.|I saw a play at the theatre.|I am watching a new series.",
     "That sounds nice. I hope you enjoyed it."),
    ("I cooked dinner.|I am making lunch.|I had a big breakfast.|I baked a cake.|I am hungry.|I ate too much.|"
     "we had dinner with friends.|I tried a new recipe.",
     "That sounds tasty. Enjoy your meal!"),
    ("I went for a walk.|I went swimming.|I am going to the gym.|I ran five miles today.|I rode my bike to work.|"
     "I walked in the park.|we hiked in the hills.",
     "Moving is good for body and mind. Well done!"),
    ("I have to work now.|I have a lot of work.|my computer is slow.|I wrote many emails today.|"
     "the office was loud today.|I am cleaning the house.|I am doing the laundry.|I fixed the door.",
     "That sounds like a lot to do. I wish you good luck with it."),
    ("okay.|ok.|I see.|all right.|good.|fine.|yes.|no.|sure.|hm.|interesting.|really?|wow.|right.|maybe.",
     "All right. Is there anything else?"),
    ("can I tell you something?|may I ask you something?|I have a question.|do you have time?|are you there?|"
     "can we talk?|let's talk.|listen.|are you listening?",
     "Of course. I am listening."),
    ("sorry.|I am sorry.|excuse me.|my mistake.|oh, sorry about that.", "No problem at all."),
)
PAIRS = tuple((tuple(said.split("|")), answer) for said, answer in INTENTS)

# Sentences of longer chatter; {person}, {place} and the like are noise that must not be taken for facts.
CHATTER = (
    "The bus was late again this morning.|I met a man called {person} at the market.|The coffee was cold.|"
    "My feet hurt after the long walk.|There was a lot of traffic near {place}.|I read about {place} in the news.|"
    "A woman named {person} sang in the street.|The shop was out of bread.|I think autumn is beautiful.|"
    "People were waiting in line for hours.|The train stopped for {number} minutes.|I found {number} old letters.|"
    "The garden needs some water.|They are building a new bridge in {place}.|I could hear the birds sing.|"
    "Somebody left the window open.|The children were playing outside.|I had to wait for a long time.|"
    "My phone fell on the floor but it still works.|The lights went out for a moment.|I drank a cup of tea.|"
    "{person} from the radio talked about {place}.|The museum in {place} is closed.|I bought some flowers.|"
    "It took me {number} steps to get there.|I saw a very big {animal} in the park.|The soup smelled like {food}.|"
    "The walls were painted {colour}.|In the evening we sat by the fire.|I still have to wash the dishes.|"
    "The neighbours had a party.|I lost my umbrella somewhere.|The film was too long for me.|"
    "There was a letter for somebody called {person}.|I should call the bank tomorrow.|The river was very high.|"
    "I dreamed about {place} last night.|The new shop sells {food} and {drink}.|It was quiet on the road."
).split("|")
LISTENING = (
    "Thank you for telling me about it.|That sounds like quite a day.|I see. Thank you for sharing.|"
    "Interesting! Tell me more if you like."
).split("|")
NOISE = ("person", "place", "animal", "food", "drink", "colour")


def fill(rng: random.Random, sentence: str) -> str:
    """Put invented noise words into a sentence of chatter."""
    for name in NOISE:
        if "{" + name + "}" in sentence:
            sentence = sentence.replace("{" + name + "}", make_value(rng, name, TRAIN))
    return sentence.replace("{number}", str(rng.randint(2, 99)))


def chatter(rng: random.Random) -> tuple[str, str]:
    """A longer message of one to five sentences about nothing in particular."""
    picked = rng.sample(CHATTER, rng.choice((1, 1, 2, 3, 4, 5)))
    return " ".join(fill(rng, sentence) for sentence in picked), rng.choice(LISTENING)


def ramble(rng: random.Random) -> tuple[str, str]:
    """A message about an invented thing, so that unknown words are no surprise."""
    word = invented_word(rng, rng.random() < 0.5)
    said = rng.choice((
        "have you heard of {w}?", "what do you think about {w}?", "do you know {w}?", "what is {w}?",
        "can you explain {w} to me?", "tell me about {w}.", "who is {w}?", "where is {w}?",
    )).format(w=word)
    return said, "I am only a small demo model, so I can't answer that. I can remember what you tell me."


def small_talk(rng: random.Random) -> tuple[str, str]:
    """What the user says, and the answer."""
    draw = rng.random()
    if draw < 0.35:
        return chatter(rng)
    if draw < 0.40:
        return ramble(rng)
    said, answer = rng.choice(PAIRS)
    return rng.choice(said), answer


def system_prompt(rng: random.Random, held_out: bool) -> str | None:
    """A system prompt, or None in one conversation of six."""
    if rng.random() < 1 / 6:
        return None
    return rng.choice(SYSTEM_HELD_OUT if held_out else SYSTEM)
