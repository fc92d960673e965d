"""Texts to probe a model with: all lengths, many languages and subjects, and odd characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

SENTENCES = """\
The ferry left the harbour ten minutes late because of the fog.
She has been learning to play the cello since last winter.
A small brown dog sleeps under the kitchen table.
Interest rates rose by a quarter of a point in March.
The committee will publish its findings at the end of the year.
How do I reset the password of an account I can no longer open?
Water boils at a lower temperature on top of a mountain.
Two men are carrying a wardrobe up a narrow staircase.
The patient was given 250 mg of the drug twice a day for six weeks.
No significant difference between the two groups was found (p = 0.37).
He scored the winning goal in the last minute of extra time.
Add the flour, stir well, and let the dough rest for an hour.
The old bridge was closed to traffic in 1987 and never reopened.
Which of these laptops has the longest battery life?
A function that calls itself is called recursive.
The connection was reset by the server before the request was complete.
Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.
The novel tells the story of three sisters in a town by the sea.
Please find attached the invoice for the services delivered in May.
I can't believe how quickly the children have grown!
The tenant shall return the keys no later than the last day of the lease.
It was raining so hard that the gutters overflowed.
Several bees were found at the edge of the lavender field.
The new tram line runs from the airport to the old town in 25 minutes.
Gradient descent finds a minimum by taking small steps downhill.
My flight was cancelled, what are my rights as a passenger?
A violinist in a red dress plays on an empty square.
The volcano has been quiet for more than four hundred years.
They painted the fence green, although nobody had asked them to.
Sales fell 12 % in the third quarter, worse than analysts had expected.
The telescope recorded a faint signal from a galaxy ten billion light years away.
Why does bread go stale faster in the fridge?
Turn left at the lights, then take the second street on the right.
The court dismissed the appeal for lack of evidence.
A mixture of copper and tin is harder than either metal.
He was born in a village near Kraków and emigrated as a child.
Children under twelve must be accompanied by an adult.
The bakery on the corner sells the best cinnamon rolls in town.
Migrating cranes rest in the marshes for a few days each autumn.
An index speeds up reading from a table and slows down writing to it.
Is it safe to take ibuprofen together with blood thinners?
The orchestra tuned while the last of the audience found their seats.
The river froze over completely for the first time in a decade.
We measured the resistance of each sample at three temperatures.
Nobody knew where the key was, least of all its owner.
The museum is free on the first Sunday of each month.
Compile the program with optimisation turned on and run it again.
A good night's sleep helps the memory to settle what was learnt.
The minister denied that any such meeting had taken place.
These shoes are too small; do you have them in size 43?
A hash table finds a key in constant time on average.
The glacier has lost a third of its volume since 1950.
He knocked twice, waited, and pushed the door open.
Lightning struck the church tower shortly after midnight.
The vaccine protects against four strains of the virus.
You can return unopened goods within fourteen days of delivery.
In chess, the bishop moves diagonally over any number of squares.
The film was praised for its photography and criticised for its length.
A crowd had gathered in front of the parliament building.
My grandmother kept her letters in a tin box under the bed.
Der Zug nach Hamburg fährt heute von Gleis sieben ab.
Die Katze schläft den ganzen Tag auf dem warmen Ofen.
Le marché a lieu chaque samedi sur la place de la mairie.
Elle a oublié son parapluie dans le train ce matin.
El vuelo sale a las ocho y media de la mañana.
¿Dónde está la biblioteca más cercana?
Il gatto dorme sul divano vicino alla finestra.
A praia fica a dez minutos a pé do hotel.
De winkel is op zondag gesloten.
Pociąg do Gdańska odjeżdża za pięć minut.
Lampan i hallen har gått sönder igen.
Поезд отправляется с третьего пути через десять минут.
Η βιβλιοθήκη είναι κλειστή τη Δευτέρα.
القطار يغادر المحطة في الساعة التاسعة صباحا.
הספרייה סגורה ביום שישי אחר הצהריים.
यह रेलगाड़ी सुबह नौ बजे चलती है।
图书馆星期一不开门。
駅まで歩いて十分ぐらいかかります。
기차는 아홉 시에 출발합니다.
Tàu sẽ rời ga lúc chín giờ sáng.
Tren her sabah dokuzda kalkıyor.
""".splitlines()

# What people write besides: code, markup, numbers, and letters that few models know well.
BESIDES = (
    "UPPER lower MiXeD",
    "3.14159, 1e-7, 0x2f, 1 000 000, ½",
    "naïve café — “quoted” … ‘single’",
    "nai\u0308ve, decomposed: e\u0301, A\u030a, o\u0302\u0323",
    "def f(x):\n    return {k: v**2 for k, v in x.items() if v != 0}",
    "<div class='a'>&amp;&nbsp;https://example.org/p?q=1#frag</div>",
    "क्षत्रिय ไทยไม่มีช่องว่าง ភាសាខ្មែរ ქართული",
    "𠜎𠜱𠝹 한국어조선말 ㄱㄴㄷ",
)

ODD = (
    "",
    " \t\n ",
    "?",
    "a",
    "🚀🔥 emoji 👩‍👩‍👧‍👦 family 🇫🇮 flag 👍🏽 tone",
    "zero\u200bwidth\u200dspaces\ufeff and soft\u00adhyphens",
    "left \u202eright-to-left override\u202c left",
    "control \x07 bell \x1b[31m escape \x7f delete \x00 nul",
    "private \ue000\U000f0000 unassigned \u0378 noncharacter \uffff",
    "ﬁ ligature, ＦＵＬＬ ＷＩＤＴＨ, ①②③, ℌ𝔢𝔩𝔩𝔬",
    "x" * 300,
    "¡¿§¶†‡•※‽⁂⸮",
    "[CLS] [SEP] <s> </s> <pad> [MASK] [UNK]",
)

_ODD = frozenset(ODD)

# Kernels change at multiples of a vector or a tile, so a length matters by its remainder and by
# which side of such an edge it is on: all remainders are among the short lengths, and of the long
# ones those beside the edges tell as much as all of them, at a fifth of the time.
EVERY_LENGTH_TO = 64
EDGES = ((32, 256), (128, 512))  # beside each multiple of the first, up to the second
MAX_PROBE_LENGTH = 8192  # texts of tens of thousands of tokens would take hours and find nothing more


def lengths_to_probe(shortest: int, longest: int) -> list[int]:
    """Every length up to 64 tokens, then those beside edges, powers of two and the limit."""
    lengths = set(range(shortest, EVERY_LENGTH_TO + 1))
    for step, end in EDGES:
        lengths |= {edge + beside for edge in range(step, end + 1, step) for beside in (-1, 0, 1)}
    lengths |= {2**power for power in range(10, MAX_PROBE_LENGTH.bit_length())}
    return sorted(length for length in {*lengths, longest} if shortest <= length <= longest)


def is_odd(text: str) -> bool:
    """Whether `text` is one that nobody writes: most 8-bit models know such texts less well."""
    return text in _ODD


def probe_texts(count_tokens: Callable[[Sequence[str]], list[int]], max_length: int) -> list[str]:
    """A text of each length to probe up to `max_length`, a longer one, odd ones and natural ones.

    `count_tokens` gives the number of tokens of each text, special ones included, without
    truncation.
    """
    max_length = min(max_length, MAX_PROBE_LENGTH)
    shortest = count_tokens(["a"])[0]
    fillers = _one_token_words(count_tokens)
    lengths = lengths_to_probe(shortest, max_length)
    exact = [_text_of(length, index, fillers, count_tokens) for index, length in enumerate(lengths)]
    too_long = " ".join([*SENTENCES, *fillers]) + f" {fillers[0]}" * max_length
    return [*exact, too_long, *ODD, *BESIDES, *SENTENCES]


def _one_token_words(count_tokens: Callable[[Sequence[str]], list[int]]) -> list[str]:
    """Words that take one token each, to fill a text up to an exact length."""
    words = sorted({word for sentence in SENTENCES[:60] for word in sentence.split() if word.isalpha()})
    one_more = count_tokens(["a a"])[0] + 1
    counts = count_tokens([f"a a {word}" for word in words])
    return [word for word, count in zip(words, counts, strict=True) if count == one_more] or ["a"]


def _text_of(length: int, seed: int, fillers: list[str], count_tokens: Callable[[Sequence[str]], list[int]]) -> str:
    """Sentences in an order chosen by `seed`, then single words, up to `length` tokens."""
    text, tokens = "", 0
    for step in range(len(SENTENCES)):
        longer = f"{text} {SENTENCES[(seed + step * 7) % len(SENTENCES)]}".strip()
        count = count_tokens([longer])[0]
        if count > length:
            break
        text, tokens = longer, count
    if not text:  # the first word may take another number of tokens than one after a space
        text, tokens = "a", count_tokens(["a"])[0]
    words = [fillers[(seed + step) % len(fillers)] for step in range(length - tokens)]
    return " ".join([text, *words]).strip()
