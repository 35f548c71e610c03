"""The values of the facts: names, places, codes, dates. Seeded, and split in two.

Training sees invented words and one half of the real ones; held-out values are real
words, or numbers whose hash is kept apart, which training never produces.
"""

import random
import zlib
from collections.abc import Callable

TRAIN, HELD_OUT = "train", "held_out"
MONTHS = (
    "January February March April May June July August September October November December"
).split()
ONSETS = "b br c ch d dr f fl g gr h j k kl l m n p pr qu r s sh st t th tr v w y z".split()
VOWELS = "a e i o u ai ea ee ia io ou a e i o u".split()
CODAS = "- - - - l m n nd r rn s t th x ck ll ss ng".split()
SPELLING = "abcdefghijkmnpqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ23456789"

# kind of word: (real words of training, real words held out), separated by commas
WORDS: dict[str, tuple[str, str]] = {
    "person": (
        "Emma, Liam, Olivia, Noah, Sophia, Lucas, Mia, Ethan, Laura, Daniel, Julia, Simon, Nina, Oscar, Clara, "
        "Felix, Ruth, Martin, Alice, Henry, Ingrid, Pedro, Yuki, Ahmed, Fatima, Chen, Priya, Ivan, Elena, Marco, "
        "Greta, Tom, Kate, Jack, Rosa, Peter, Helen, Paul, Susan, Mark, George, Nora, Adam, Lena, Theo, Marta, "
        "Igor, Sofia, Omar, Aisha, Kenji, Mei, Diego, Lucia, Pavel, Anke, Ralph, Judith, Hugo, Iris, Philip, Vera, "
        "Walter, Karen, Robert, Linda, Edward, Monica, Gavin, Tessa, Brian, Celine, Arthur, Fiona, Stefan, Bianca, "
        "Raj, Sunita, Kwame, Amara, Jonas, Freya, Mateo, Ursula, Quinn, Zara, Yusuf, Ximena, William, Nicole",
        "Anna, Benjamin, Charlotte, David, Eleanor, Frank, Hannah, Isabel, James, Katherine, Leo, "
        "Maria, Nathan, Patricia, Quentin, Rachel, Samuel, Theresa, Victor, Wendy, Xavier, Zoe, "
        "Abigail, Bruno, Carmen, Dmitri, Esther, Gustav, Hiroshi, Jasmine, Kofi, Leila, Miguel, Naomi",
    ),
    "surname": (
        "Smith, Jones, Brown, Weber, Rossi, Novak, Keller, Walker, Young, Hill, Silva, Tanaka, Patel, Miller, "
        "Clark, Evans, Moore, Reid, Schmidt, Ferrari, Dubois, Larsen, Ivanov, Suzuki, Nguyen, Costa, Wright, Bell",
        "Anderson, Baker, Campbell, Fischer, Garcia, Harrison, Jensen, Kowalski, Murphy, Okafor",
    ),
    "place": (
        "London, Paris, Berlin, Madrid, Vienna, Prague, Boston, Chicago, Toronto, Sydney, Dublin, Athens, Cairo, "
        "Delhi, Tokyo, Seoul, Lima, Bogota, Helsinki, Warsaw, Milan, Naples, Geneva, Rome, Munich, Lyon, Porto, "
        "Ghent, Bergen, Riga, Kiev, Sofia, Zagreb, Dallas, Houston, Miami, Phoenix, Atlanta, Ottawa, Calgary, "
        "Perth, Auckland, Manila, Hanoi, Mumbai, Karachi, Tunis, Accra, Dakar, Havana, Santiago, Quito, Leeds, "
        "Cardiff, Oxford, Bonn, Basel, Graz, Turin, Palermo, Malaga, Bilbao, Leiden, Odense, Uppsala, Turku, Gdansk",
        "Amsterdam, Barcelona, Copenhagen, Denver, Edinburgh, Florence, Glasgow, Hamburg, Istanbul, "
        "Jakarta, Kyoto, Lisbon, Melbourne, Nairobi, Oslo, Portland, Quebec, Rotterdam, Stockholm, "
        "Tallinn, Utrecht, Valencia, Wellington, York, Zurich, Bristol, Montreal, Seville",
    ),
    "company": (
        "Acme Foods, Delta Bank, Green Valley Farms, Orion Labs, Sunrise Bakery, Metro Transport, Summit Software, "
        "Harbor Press, Golden Gate Hotel, River Tools, Pine Street Clinic, North Star Bank, Blue River Shipping, "
        "Oak Hill School, Silver Moon Records, Grand Central Books, Iron Works, Clear Water Systems, "
        "Happy Cow Dairy, Stone Bridge Hotel, White Horse Inn, Fast Track Couriers, Quantum Optics, "
        "Bright Future Academy, Old Mill Brewery, Royal Theatre, Sea View Resort, Apex Mining, Nova Airlines, "
        "City Library, Urban Gardens",
        "Northwind Traders, Bluebird Airlines, Cedar Hospital, Evergreen Insurance, Lighthouse Media, "
        "Maple Leaf Logistics, Phoenix Energy, Redwood Robotics, Silver Lake Studios, Vertex Motors",
    ),
    "job": (
        "teacher, nurse, baker, carpenter, lawyer, engineer, plumber, gardener, pilot, waiter, painter, writer, "
        "editor, driver, farmer, doctor, banker, singer, tailor, accountant, cook, butcher, postman, cleaner, "
        "sailor, soldier, judge, priest, actor, dancer, musician, model, secretary, manager, cashier, clerk, "
        "director, designer, programmer, scientist, biologist, physicist, historian, professor, tutor, nanny, "
        "maid, guard, policeman, detective, spy, miner, roofer, welder, printer, shoemaker, jeweller, watchmaker, "
        "hunter, fisherman, forester, vet, midwife, pharmacist, therapist, psychologist, economist, consultant, "
        "broker, trader, salesman, receptionist, interpreter, reporter, producer, conductor, composer, sculptor, "
        "potter, weaver, astronaut, stuntman, magician, clown",
        "architect, librarian, electrician, photographer, dentist, journalist, mechanic, translator, "
        "surgeon, florist, barber, chemist, firefighter, geologist, blacksmith, optician",
    ),
    "colour": (
        "red, blue, green, yellow, orange, purple, pink, brown, grey, black, white, dark blue, gold, lime green, "
        "cream, copper, bronze, navy blue, sky blue, light grey, dark red, rose, coral, plum, mint, rust, sand, "
        "olive, scarlet, khaki, charcoal",
        "turquoise, maroon, ivory, violet, magenta, beige, crimson, lavender, olive green, silver, "
        "burgundy, teal, indigo, amber, emerald green",
    ),
    "food": (
        "pizza, pasta, rice, soup, bread, cheese, salad, curry, noodles, tomato soup, fried rice, apple pie, "
        "fish and chips, potatoes, beans, burgers, stew, chicken, omelette, spaghetti, gnocchi, steak, sausages, "
        "meatballs, fried eggs, porridge, toast, sandwiches, chili, lentils, spinach, carrots, mashed potatoes, "
        "chips, popcorn, chocolate cake, ice cream, cheesecake, pudding, bagels, pretzels, kebab, gyros, couscous, "
        "hummus, dal, pad thai, spring rolls, fish soup, clam chowder, onion soup, garlic bread, baked beans, "
        "grilled cheese, roast chicken, duck, lamb chops, oysters, salmon, tuna salad, macaroni, muffins, scones, "
        "cookies, honey toast",
        "lasagna, sushi, pancakes, dumplings, goulash, paella, ramen, tacos, risotto, mushroom pie, "
        "falafel, moussaka, ratatouille, waffles, roast beef, pumpkin soup",
    ),
    "film": (
        "The Matrix, Titanic, Star Wars, The Lion King, Jaws, Toy Story, The Silent River, Alien, Rocky, Frozen, "
        "Gladiator, The Last Train, Avatar, Back to the Future, Forrest Gump, Ghost, Big, Heat, Seven, Speed, "
        "Twister, Babe, The Terminator, The Shining, The Birds, Rear Window, Top Gun, Die Hard, Pulp Fiction, "
        "Fight Club, The Truman Show, Finding Nemo, Cars, Up, Shrek, Mary Poppins, The Sound of Music, "
        "Some Like It Hot, Singin in the Rain, The Third Man, City Lights, Modern Times, Blade Runner, "
        "Interstellar, Gravity, The Martian, Black Swan, Moonlight, Whiplash, The Artist, The Piano, "
        "Out of Africa, Dances with Wolves",
        "Casablanca, Inception, Amelie, Vertigo, Psycho, The Godfather, Goodfellas, Metropolis, "
        "Spirited Away, Jurassic Park, Parasite, Fargo, Chinatown, The Pianist, Memento",
    ),
    "book": (
        "Emma, The Hobbit, Dracula, Moby Dick, Robinson Crusoe, The Time Machine, War and Peace, "
        "Great Expectations, The Old Garden, Little Women, Treasure Island, The Catcher in the Rye, "
        "Lord of the Flies, Brave New World, Hamlet, Macbeth, Faust, Candide, The Iliad, The Jungle Book, "
        "Peter Pan, Heidi, Momo, Ivanhoe, Kim, Emil, Lolita, The Plague, The Stranger, Steppenwolf, "
        "The Name of the Rose, The Da Vinci Code, Gone Girl, The Shining, It, Carrie, Holes, Matilda, "
        "Watership Down, The Secret Garden, Black Beauty, Bleak House, "
        "Hard Times, Silas Marner, The Moonstone",
        "Middlemarch, Frankenstein, Ulysses, Don Quixote, Jane Eyre, The Odyssey, Walden, Dune, "
        "Beloved, The Trial, Pride and Prejudice, Wuthering Heights, Animal Farm, Rebecca",
    ),
    "drink": (
        "coffee, tea, milk, water, apple juice, beer, wine, cola, orange juice, hot chocolate, red wine, "
        "white wine, black tea, mint tea, iced tea, iced coffee, latte, mocha, cocoa, soda, tonic water, "
        "grape juice, carrot juice, milkshake, smoothie, punch, champagne, whisky, gin, rum, vodka, "
        "brandy, sherry, port, mead, ale, stout, lager, sake, buttermilk, oat milk, coconut water, mineral water, "
        "rose tea, chai, root beer, cream soda",
        "lemonade, espresso, cider, green tea, ginger ale, tomato juice, kombucha, cappuccino",
    ),
    "sport": (
        "football, tennis, golf, running, boxing, hockey, rugby, skiing, rowing, table tennis, baseball, softball, "
        "handball, water polo, polo, squash, darts, bowling, curling, biathlon, karate, wrestling, sailing, "
        "diving, gymnastics, long jump, marathon, billiards, snooker, chess boxing, "
        "lacrosse, ice skating, snowboarding, horse riding",
        "badminton, volleyball, cricket, fencing, surfing, swimming, basketball, archery, judo",
    ),
    "animal": (
        "dog, cat, horse, lion, tiger, bear, wolf, rabbit, fox, snake, eagle, goat, sheep, frog, cow, pig, duck, "
        "hen, mouse, rat, camel, lizard, turtle, crab, shark, whale, seal, monkey, gorilla, parrot, swan, stork, "
        "crow, deer, moose, badger, beaver, mole, bat, bee, ant, spider, salmon, trout, llama, panda, koala, "
        "leopard, hippo, rhino",
        "elephant, dolphin, penguin, giraffe, otter, hedgehog, squirrel, octopus, zebra, owl",
    ),
    "fruit": (
        "apple, banana, pear, plum, orange, lemon, peach, grape, lime, melon, fig, date, blackberry, strawberry, "
        "cranberry, grapefruit, tangerine, watermelon, coconut, guava, lychee, passion fruit, quince, currant, "
        "nectarine, avocado, olive, persimmon, mulberry",
        "mango, cherry, apricot, pineapple, raspberry, papaya, blueberry, pomegranate, kiwi",
    ),
    "hobby": (
        "reading, cooking, painting, fishing, hiking, knitting, dancing, singing, chess, sewing, drawing, writing, "
        "baking, running, camping, sailing, skating, juggling, collecting stamps, playing cards, "
        "crosswords, astronomy, yoga, embroidery, model trains, board games, magic tricks, video games, "
        "collecting coins, carving, brewing beer, beekeeping, karaoke, puzzles, travelling",
        "gardening, pottery, photography, birdwatching, origami, woodworking, cycling, climbing",
    ),
    "instrument": (
        "piano, guitar, violin, drums, flute, trumpet, bass, organ, horn, recorder, viola, double bass, keyboard, "
        "harmonica, mandolin, tuba, bassoon, piccolo, xylophone, bagpipes, lute, sitar, cymbals, triangle, bongos, "
        "electric guitar, church organ",
        "cello, saxophone, clarinet, harp, accordion, banjo, trombone, ukulele, oboe",
    ),
    "language": (
        "French, German, Spanish, Italian, Chinese, Russian, Arabic, Dutch, Greek, Turkish, English, Polish, "
        "Czech, Norwegian, Hebrew, Persian, Thai, Vietnamese, Ukrainian, Romanian, Bulgarian, Croatian, Irish, "
        "Icelandic, Latin, Basque, Catalan, Bengali, Urdu, Tamil, Malay, Mongolian, Zulu, Esperanto, Estonian, "
        "Latvian",
        "Portuguese, Japanese, Swedish, Finnish, Hungarian, Korean, Swahili, Danish, Welsh, Hindi",
    ),
    "car": (
        "Toyota Corolla, Ford Focus, Honda Civic, Fiat Punto, Mini Cooper, Audi A4, Opel Corsa, BMW X5, Kia Rio, "
        "Mercedes Benz, Seat Ibiza, Dacia Duster, Citroen C3, Smart, Jaguar, Porsche 911, Ferrari, Lada Niva, "
        "Saab 900, Suzuki Swift, Hyundai i30, Chevrolet Spark, Dodge Ram, Ford Fiesta, Toyota Yaris, Honda Jazz, "
        "Fiat Panda, Audi TT, Trabant, Land Rover",
        "Volkswagen Golf, Tesla Model 3, Skoda Octavia, Volvo V60, Renault Clio, Mazda 6, "
        "Nissan Leaf, Jeep Wrangler, Subaru Forester, Peugeot 208",
    ),
    "allergen": (
        "nuts, milk, eggs, cats, dust, wheat, pollen, fish, soy, dogs, honey, gluten, tomatoes, apples, kiwis, "
        "grass, mould, cheese, chocolate, garlic, onions, nickel, horses, feathers, bee stings, almonds, walnuts, "
        "crab, aspirin, perfume, soap, birch, oranges, carrots, wool, lactose, corn",
        "peanuts, shellfish, strawberries, penicillin, sesame, latex, mustard, celery, wasp stings",
    ),
    "pet": (
        "Max, Bella, Rex, Luna, Charlie, Lucy, Rocky, Molly, Buddy, Daisy, Spot, Tiger, Coco, Felix, Simba, Toby, "
        "Duke, Jack, Sam, Oscar, Misty, Princess, Lady, Snowball, Fluffy, Patch, Rusty, Sandy, Socks, Sugar, "
        "Honey, Cookie, Teddy, Otto, Fritz, Mimi, Kiki, Lulu, Bonnie, Trixie, Pearl, Ruby, Star, Storm, "
        "Thunder, Lucky, Happy, Hazel, Olive, Peanut, Nemo, Zeus",
        "Biscuit, Pepper, Shadow, Ginger, Oliver, Muffin, Nala, Ziggy, Whiskers, Pumpkin, Bandit, "
        "Smokey, Waffles, Clover, Jasper, Marble",
    ),
    "song": (
        "Yesterday, Imagine, Hey Jude, Hello, Thriller, Let It Be, One, Blue Moon, Hotel California, "
        "Wish You Were Here, Purple Rain, Stand by Me, My Way, Layla, Angie, Satisfaction, Help, "
        "Michelle, Let Me Be, Dancing Queen, Fernando, Africa, Jolene, Ring of Fire, Summertime, Moon River, "
        "Heroes, Changes, Creep, Zombie, Halo, Roar, Royals, Shallow, Happy, Believe, Vogue, Faith, "
        "Careless Whisper, Take On Me, The Sound of Silence, Big Yellow Taxi",
        "Yellow Submarine, Wonderwall, Bohemian Rhapsody, Fever, Respect, Waterloo, Hallelujah, Dreams",
    ),
}
PROPER = {"person", "surname", "place", "company", "film", "book", "language", "car", "pet", "song"}
COMPANY_ENDS = ("Foods", "Labs", "Bank", "Systems", "Press", "Hotel", "Tools", "and Sons", "Clinic")
LISTS = {
    kind: {TRAIN: tuple(a.split(", ")), HELD_OUT: tuple(b.split(", "))}
    for kind, (a, b) in WORDS.items()
}
LETTERS = "eeeeeeaaaaaiiiiooootttnnnsssrrrlllhddcuummpppgfbbkyvwzxjq"  # as frequent as they are in names
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
BLENDED = tuple(
    word.lower()
    for kind in LISTS
    for value in LISTS[kind][TRAIN]
    for word in value.split()
    if len(word) > 3 and word.isalpha()
)
ALL_HELD_OUT = frozenset(word for lists in LISTS.values() for word in lists[HELD_OUT])


def is_held_out_number(value: str) -> bool:
    """One in four of the numbers, codes, dates and times is kept out of training."""
    return zlib.crc32(value.encode()) % 4 == 0


def blend(rng: random.Random) -> str:
    """The beginning of one real word and the end of another, as "Torodrid"."""
    first, last = (rng.choice(BLENDED) for _ in range(2))
    return first[: rng.randint(2, max(2, len(first) - 1))] + last[rng.randint(1, len(last) - 2) :]


def invented_word(rng: random.Random, proper: bool, longest: int = 3) -> str:
    """A word without a meaning, made of syllables, of two real words, or of letters."""
    draw = rng.random()
    if draw < 0.4:
        word = blend(rng)
    elif draw < 0.7:
        # Its first letter may be any, so that the model copies rare ones, too.
        word = rng.choice(ALPHABET) + "".join(rng.choice(LETTERS) for _ in range(rng.randint(2, 8)))
    else:
        word = syllables(rng, longest)
    return word.capitalize() if proper else word


def syllables(rng: random.Random, longest: int) -> str:
    """A word of one to three syllables."""
    parts = []
    for _ in range(min(longest, rng.choice((1, 2, 2, 2, 3)))):
        coda = rng.choice(CODAS).strip("-")
        parts.append(rng.choice(ONSETS) + rng.choice(VOWELS) + coda)
    if rng.random() < 0.2:
        parts.insert(0, rng.choice(VOWELS))
    return "".join(parts)


def invented(rng: random.Random, kind: str) -> str:
    """An invented value that looks like one of `kind`, of one or two words."""
    proper = kind in PROPER
    word = invented_word(rng, proper)
    if kind == "company":
        return f"{word} {rng.choice(COMPANY_ENDS)}" if rng.random() < 0.7 else word
    if kind == "car":
        return f"{word} {rng.choice((invented_word(rng, True), str(rng.randint(2, 900))))}"
    if kind in ("film", "book", "song") and rng.random() < 0.6:
        lead = rng.choice(("The ", "The ", ""))
        return f"{lead}{word} {invented_word(rng, True)}"
    if kind == "place" and rng.random() < 0.15:
        return f"{rng.choice(('Port', 'New', 'Saint', 'Lake'))} {word}"
    if kind in ("food", "colour", "drink", "allergen") and rng.random() < 0.25:
        return f"{word} {rng.choice(LISTS[kind][TRAIN])}"
    return word


def word_value(rng: random.Random, kind: str, split: str) -> str:
    """A value made of words. In training, more than half of such values are invented."""
    if split == HELD_OUT:
        value = rng.choice(LISTS[kind][HELD_OUT])
    else:
        value = rng.choice(LISTS[kind][TRAIN]) if rng.random() < 0.4 else invented(rng, kind)
    if kind == "person" and rng.random() < 0.2:
        value += " " + word_value(rng, "surname", split)
    return value


def digits(rng: random.Random, count: int) -> str:
    return "".join(rng.choice("0123456789") for _ in range(count))


def letters(rng: random.Random, count: int) -> str:
    return "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(count))


def phone(rng: random.Random) -> str:
    return rng.choice((f"555-{digits(rng, 4)}", f"0{digits(rng, 3)} {digits(rng, 6)}", digits(rng, 7)))


def code(rng: random.Random) -> str:
    return rng.choice((f"{letters(rng, 2)}-{digits(rng, 4)}", f"{letters(rng, 1)}{digits(rng, 4)}",
                       f"{letters(rng, 3)}{digits(rng, 3)}"))


def password(rng: random.Random) -> str:
    shapes = (
        f"{invented_word(rng, False, 1)}-{invented_word(rng, False, 2)}-{digits(rng, 2)}",
        f"{invented_word(rng, True)}{digits(rng, 3)}",
        "".join(rng.choice(SPELLING) for _ in range(8)),
    )
    return rng.choice(shapes)


def date(rng: random.Random) -> str:
    month, day = rng.choice(MONTHS), rng.randint(1, 28)
    return rng.choice((f"{month} {day}", f"{day} {month}"))


def clock(rng: random.Random) -> str:
    minutes = rng.choice(("00", "15", "30", "45", "10", "20", "40", "50", digits(rng, 1).rjust(2, "0")))
    return rng.choice((f"{rng.randint(1, 12)}:{minutes} {rng.choice(('am', 'pm'))}",
                       f"{rng.randint(13, 23)}:{minutes}"))


NUMBERS: dict[str, Callable[[random.Random], str]] = {
    "age": lambda rng: str(rng.randint(6, 99)),
    "size": lambda rng: str(rng.randint(30, 52)),
    "small": lambda rng: str(rng.randint(2, 999)),
    "room": lambda rng: rng.choice((str(rng.randint(100, 999)), f"{rng.choice('ABCD')}{rng.randint(10, 499)}")),
    "pin": lambda rng: digits(rng, rng.choice((4, 4, 4, 6))),
    "phone": phone,
    "code": code,
    "flight": lambda rng: f"{letters(rng, 2)}{rng.randint(10, 9999)}",
    "seat": lambda rng: f"{rng.randint(1, 48)}{rng.choice('ABCDEF')}",
    "password": password,
    "date": date,
    "time": clock,
}


def make_value(rng: random.Random, kind: str, split: str) -> str:
    """A value of `kind` that belongs only to `split`."""
    if kind in LISTS:
        value = word_value(rng, kind, split)
        while split == TRAIN and any(part in ALL_HELD_OUT for part in (value, *value.split())):
            value = word_value(rng, kind, split)
        return value
    value = NUMBERS[kind](rng)
    while is_held_out_number(value) != (split == HELD_OUT):
        value = NUMBERS[kind](rng)
    return value
