"""Phrasings put together from parts, for training: thousands of ways to tell, to ask and to correct.

A pattern's brackets hold alternatives: "[can|could] you tell me {S}?" is two sentences. `{S}`, `{V}` and `{O}` are
the subject, the value and the old value, as in `kinds`; `{Q}` is one of a kind's own questions. A model that has seen
sixty frames tells a question from a statement by its words; one that has seen thousands must check for a value.
"""

import random
import re

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

# More ways in the words of single kinds and of families of kinds: (told, asked for).
MORE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "named": ((
        "my {R} [has the name|bears the name|was named|listens to|was christened|is simply|is nobody but|signs as] {V}.",
        "[this is|meet|here comes|say hello to|I live with|I miss|greetings from|I wrote to|I think of] my {R}[,| ]{V}.",
        "{V} is [the name of my {R}|how we call my {R}|my {R}|my one {R}|how my {R} is known|short for nothing, my {R} is just so called].",
        "[we|people|they|all of us|my parents|friends] [call|named|greet|address] my {R} [||as ]{V}.",
        "[yesterday|today|last week|in May|on Sunday] my {R} {V} [came by|was ill|had a party|was here|went home|made me laugh].",
        "I [have|had|found|love|visit|see] a {R}[,|;| and] [the name is|it is|whose name is|by the name of] {V}.",
    ), (
        "[what|which] name does my {R} [have|bear|use|go by]?",
        "how [do|did|would] [I|we|people|they] [call|name|address] my {R}?",
        "[say|spell|repeat|give] the name [of|for] my {R}.",
        "my {R} has [a|some] name. [Which|What is it|Which one]?",
        "I [met|saw|called|need to write to] my {R}, [but what was the name|by what name|whose name is what]?",
    )),
    "favourite": ((
        "[I adore|I am fond of|I always choose|I always take|nothing beats|I dream of|give me|I would die for] {V}[, |: |; ]my [first|top|dearest|favourite] {R}.",
        "{V} is [the {R} for me|my sort of {R}|the finest {R}|the {R} of my heart|the only {R} I want|the {R} I love|my number one {R}].",
        "[as a|as my|for a] {R}[,| ] I [take|like|pick|want|choose|favour] {V} [most|best|above all|first|every time].",
        "my [top|best|dearest|number one|most loved] {R} [is|was always|remains|must be] {V}.",
        "when I think of a {R} I [love|like|want], I think of {V}.",
        "[I tried them all, but|believe me,|for years] {V} [is|was|stays] the {R} I [like|love|want] [best|most].",
    ), (
        "[which|what] {R} is [dear to me|the best for me|my top one|the one I love|number one for me|the one for me]?",
        "[which|what] {R} do I [love|adore|favour|pick|take|want|dream of] [most|best|above all|first]?",
        "the {R} I [love|like|favour|adore][|, what is it|, which one| is what]?",
        "[name|say|tell me] the {R} [that |]I [love|like|favour|choose] [most|best].",
        "[guess|do you know|remember] [which|what] {R} I [like|love|would pick|would take].",
    )),
    "code": ((
        "[write|type|put in|dial|take|give] {V}[, it is| as| for|; that's] my {R}.",
        "my {R} [reads|goes|was set to|was changed to|consists of|has to be typed as|is spelt] {V}.",
        "[the office|the bank|the system|a letter|my phone|the web page] [gave|showed|sent|issued] me {V} [as|for] my {R}.",
        "{V} [opens it, it is|works as|is good as|is set as|was printed as|is the new|is all of] my {R}.",
        "[I memorised|I wrote down|I learned|I keep|I got|I made up] {V}[, | as |: ]my {R}.",
        "[the|that] {R} of mine [is|was|reads|stays] {V}.",
    ), (
        "[which|what] {R} [works for me|did they give me|did I set|did I pick|was sent to me|is right for me|did I mention]?",
        "I have to [type|dial|give|show|write] my {R}[. What is it| now, help me|, which one|. Tell me]?",
        "[find|read|show|spell|dial|type] [me |]my {R}.",
        "how does my {R} [go|read|begin and end]?",
        "[with|by] which {R} do I [get in|log in|call|enter|pass]?",
    )),
    "travel": ((
        "[I am in|I sit in|I look for|mine is|I took|I booked|look for me at|go to] {R} {V}.",
        "[they told me|the lady said|it is printed here|the screen shows|I read here|the mail says]: {R} {V}.",
        "{R} {V} is [mine|for me|what I have|what I got|the one I need|on my paper|reserved for me].",
        "[the number|the place] of my {R}[, that| ] is {V}.",
        "my {R} [reads|was changed to|will be|shows|is marked] {V}.",
        "{V} is [printed|written|shown|given] as my {R}.",
    ), (
        "[which|what] {R} [is for me|did they give me|do I need|must I look for|was on my paper|did I book|is printed there]?",
        "[where do I find my|tell me my|read out my|look at my|show me the] {R}[| I have| for me].",
        "I need to find my {R}. [Which is it|What was it|Do you know]?",
        "the {R} [I got|I have|for me][, what was it| was which|, which one|]?",
    )),
    "date": ((
        "[mark|note|keep free|save|remember] {V}[, it is|, that is|: it's|;] my {R}.",
        "my {R} [comes on|was set for|takes place on|will be on|was moved to|is due on|happens on|is fixed for] {V}.",
        "[they|we|I] [set|fixed|chose|picked|moved] my {R} [to|for|on] {V}.",
        "{V}[, that's| is when I have| is the date of| is all about| will bring| means] my {R}.",
        "[see you|I'll be away|no work for me|I have no time] on {V}, [because of|for it's|that's] my {R}.",
    ), (
        "[which|what] [day|date] [did I set for|is fixed for|is set for|brings|was it, for|do I have for] my {R}?",
        "when [will|does|should|do I have|shall I have|exactly is] my {R}[| be| come| happen| take place]?",
        "my {R} [comes when|is when|is on which day|happens on what day|has which date]?",
        "[name|give me|say|write down] the [day|date] of my {R}.",
        "how long until my {R}, on [which|what] [day|date] is it?",
    )),
    "time": ((
        "[be there|call me|wake me|come|see you|I leave] at {V}[, |; |: ][it's|that is|for] my {R}.",
        "my {R} [begins at|was set for|was moved to|is fixed for|comes at|opens at|is due at|will be at] {V}.",
        "[they|we|I] [set|fixed|moved|put|booked] my {R} [to|for|at] {V}.",
        "{V}[, that's| is when I have| is the hour of| is the time for| means] my {R}.",
        "[set the clock|wait for me|be quiet] at {V}, [when I have|because of|that is] my {R}.",
    ), (
        "[which|what] [time|hour] [did I set for|is fixed for|was it, for|do I have for|is right for] my {R}?",
        "when [will|does|should|do I have|exactly is|must I be at] my {R}[| start| begin| be]?",
        "my {R} [begins when|is when|starts at what time|is at which hour]?",
        "[name|give me|say|write down] the [time|hour] of my {R}.",
    )),
    "name": ((
        "[the name is|my name's|I go by|I answer to|I sign as|everyone knows me as|I was named|it's me,|say hello to] {V}.",
        "{V} [is what I am called|is me|here|is my name|am I|is how they call me|it is, that's me].",
        "[mother|father|my boss|the world|everyone] [calls|named|knows] me [||as ]{V}.",
        "[good day|hello|hi|pleased to meet you][,|.] [I am|I'm|my name is|this is] {V}.",
    ), (
        "[what|which] name [do I have|do I go by|did I give you|is mine|did I tell you]?",
        "how [should|do|would|will] you [call|address|greet] me?",
        "[say|spell|write] my name.",
        "[remember|know|tell me|guess] who I am[.|?]",
    )),
    "home town": ((
        "I [stay|dwell|have lived|have my home|am at home|own a house|rent a room|found a home] in {V}.",
        "[you find me|my family lives|we have our house|my door is|my bed stands] in {V}.",
        "{V} is [where I live|my town|where my house is|where I have a home|the town I call home].",
    ), (
        "[where|in what city|in which place] [is my house|do I stay|am I at home|do we live|can one find me]?",
        "[which|what] [town|city|place] [do I call home|is home to me|am I living in]?",
    )),
    "birthplace": ((
        "my life [began|started] in {V}, [where I was born|the town of my birth].",
        "[my mother|my parents] had me in {V}[| many years ago].",
        "{V} is [my place of birth|where my life began|the town of my birth|where I came into the world].",
        "[I came into the world|I first saw the sun|my first home was] in {V}, [I was born there|as a baby].",
    ), (
        "[where|in what place|in which town] [did my life begin|did I come into the world|did my mother have me|was I as a baby]?",
        "[what|which] [town|city|place] was I born in?",
    )),
    "holiday destination": ((
        "[we go|I travel|I fly|we drive|I sail|off we go] to {V} [on|for our|for my|for the] holiday.",
        "[my|our] holiday [will be|takes place|was booked|is planned] in {V}.",
        "{V} is [where I go on holiday|my holiday place|where my next holiday is|our place for the holiday].",
    ), (
        "[where|to which place|to what town] [do I travel|do I fly|will I go|are we going|is my trip] [on|for the|for my] holiday?",
        "[what|which] place [is my holiday in|will I see on holiday|did I pick for the holiday]?",
    )),
    "employer": ((
        "I [am with|joined|serve|earn my money at|was hired by|do my job at|have a desk at] {V}.",
        "{V} [pays me|hired me|is where I work|gave me work|is my boss's company|employs me].",
        "[my firm|the firm I work for|my work place|the place I work at] [is|is called|has the name] {V}.",
    ), (
        "[which|what] [firm|company|business] [pays me|hired me|employs me|do I serve|did I join]?",
        "who [pays me|hired me|employs me|gives me work]?",
    )),
    "job": ((
        "I [am|was trained as|earn my living as|was hired as|started as|make money as|serve as] {A}.",
        "[my trade|my profession|what I do for a living|my daily work] is [that of|to be|being] {A}.",
        "[people pay me|they hired me|I am paid] [to be|to work as|as] {A}.",
        "[all my life|since school|for years now] I [have been|was|am] {A}.",
    ), (
        "[what|which] [trade|profession|work|task] [do I have|is mine|pays my bills|do I do|did I learn]?",
        "how do I [earn my money|make a living|earn my living|spend my working day]?",
        "[what|who] am I [by trade|at work|by profession]?",
    )),
    "age": ((
        "I [am|turned|have turned|will soon be|just became|have reached] {V}[| years old| years of age].",
        "[my years are|I count|I have lived] {V}[| years].",
        "{V} is [how old I am|the number of my years|my age in years].",
    ), (
        "how [old|many years old] [am I|did I say I am|was I]?",
        "[what|which] age [am I|do I have|did I tell you]?",
    )),
    "allergy": ((
        "[{V} makes me ill|{V} makes me sneeze|I get ill from {V}|my body can't take {V}|I must avoid {V}], [I am allergic|it's my allergy].",
        "[watch out|careful|no], I [am allergic to|have an allergy to|can't have] {V}.",
        "{V} is [what I am allergic to|bad for me, I am allergic|the thing I have an allergy to].",
    ), (
        "[what|which thing] [makes me ill|must I avoid|am I allergic to|can't I have] [as an allergy|because of my allergy|with my allergy]?",
        "to what [do I have|did I mention] an allergy?",
    )),
    "hobby": ((
        "[in my free time|on weekends|after work|at night|for fun] I [do|enjoy|love|am busy with|like] {V}.",
        "{V} is [my hobby|what I do for fun|my pastime|how I relax|what fills my free time].",
    ), (
        "[what|which thing] do I do [in my free time|on weekends|after work|to relax|as a pastime]?",
        "[which|what] [hobby|pastime] [is mine|did I pick|fills my free time|do I love]?",
    )),
    "instrument": ((
        "I [practise|study|love to play|own and play|took up|perform on] the {V}.",
        "the {V} is [my instrument|what I play|the instrument I play|the instrument I know].",
        "[on stage|in school|with friends|each night] I [play|played] the {V}.",
    ), (
        "[which|what] instrument [do I own|is mine|do I practise|did I learn|do I know]?",
        "what [music|do I] [do I make and on which instrument|play on stage]?",
    )),
    "language": ((
        "I [take lessons in|practise|try to speak|read books in|am a student of|want to speak] {V}, [the language I learn|I am learning it].",
        "{V} is [the language I learn|the language I study|what I learn in class].",
    ), (
        "[which|what] language [do I practise|am I a student of|did I start|do I take lessons in|is it that I learn]?",
        "[in|of] which language [do I take a class|am I a student]?",
    )),
    "car": ((
        "[I have|I got|we own|I park|I take|I sold my bike for|my garage holds] a {V}[, my car|; it's my car|, it's the car I drive].",
        "the {V} [outside|in front of the house|over there] is [mine|my car|the car I drive].",
    ), (
        "[which|what] [car|kind of car] [is parked there, mine|do I own|did I buy|do I take to work|belongs to me]?",
        "[what car|which car] am I [driving|the owner of]?",
    )),
    "shoe size": ((
        "[my feet are|I have feet of|boots fit me in|buy me shoes in|for shoes it is|I tried shoes and took] size {V}.",
        "{V} is [my size in shoes|the size of my shoes|what fits my feet].",
    ), (
        "[which|what] size [fits my feet|do my feet have|of boots fits me|should my shoes be|is right for my feet]?",
        "how [big|large] are my [shoes|feet]?",
    )),
    "lucky number": ((
        "[I trust in|I always play|I won with|my charm is] the number {V}[, it is lucky| for luck|, my lucky one].",
        "{V} is [my lucky number|the number I trust|the number that brings me luck|lucky for me].",
    ), (
        "[which|what] number [do I trust|do I play for luck|did I win with|is lucky, for me|has luck for me]?",
    )),
}


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


def opening(rng: random.Random) -> str:
    """One to five words before a sentence, with a punctuation mark."""
    said = " ".join(rng.choice(WORDS) for _ in range(rng.choice((1, 1, 2, 2, 3, 4, 5))))
    return said.capitalize() + rng.choice((",", ",", ":", ".", " -", "?", "!"))
