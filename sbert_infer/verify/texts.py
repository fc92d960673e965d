"""Texts to compare a server with: short ones of several scripts, and long ones of known lengths."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

SHORT = """\
The harvest was brought in before the first storm of September.
How long may an opened jar of honey be kept?
She repaired the clock with a spring from an old music box.
The bridge carries two railway lines and a footpath.
A list can be sorted in place or copied into a new one.
Prices for copper rose to 9,480 dollars a tonne in April.
The dog barked once and went back to sleep.
Which vaccines are recommended before a journey to the tropics?
Several pages of the manuscript are missing or damaged by water.
He signed the contract without reading the last paragraph.
Am Abend wurde es über dem See plötzlich ganz still.
La boulangerie ferme à midi le dimanche.
El tren nocturno llega a la costa antes del amanecer.
Wczoraj wieczorem padał śnieg w całych górach.
Вечером в порту зажглись первые огни.
Το πλοίο φεύγει από το λιμάνι στις έξι.
المكتبة مفتوحة حتى الساعة الثامنة مساء.
अगली बस दस मिनट में आएगी।
明天下午有雨，请带伞。
この橋は百年前に建てられました。
도서관은 월요일에 문을 닫습니다.
Yarın sabah erkenden yola çıkacağız.
""".splitlines()

# In tokens: beyond limits that servers cut texts to. Attention over 5,000 takes about 1 GB.
_LENGTHS = (100, 200, 300, 450, 700, 1200, 2500, 5000)


def long_texts(count_tokens: Callable[[str], int], limit: int) -> list[str]:
    """Return texts of about these lengths, as far as the model takes them whole."""
    wanted = [length for length in _LENGTHS if length < limit] + ([limit] if limit < max(_LENGTHS) else [])
    return [_up_to(length, number, count_tokens) for number, length in enumerate(wanted)]


def over_limit(count_tokens: Callable[[str], int], limit: int) -> list[str]:
    """Return a text of half as many tokens again as the model takes; none if those are many."""
    return [_up_to(limit * 3 // 2 + 16, 3, count_tokens)] if limit < max(_LENGTHS) else []


def _up_to(tokens: int, number: int, count_tokens: Callable[[str], int]) -> str:
    """Return sentences, from this one on, that have at most so many tokens together."""

    def first(count: int) -> str:
        return " ".join(SHORT[at % 10] for at in range(number, number + count))

    most = range(1, tokens // 5 + 1)  # sentences, each of which has more tokens than 5
    return first(bisect_right(most, tokens, key=lambda count: count_tokens(first(count)))) or SHORT[6]


def shorten(text: str, width: int = 60) -> str:
    """Return the beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width - 1]}…"


def by_cosine(texts: Sequence[str], cosines: Sequence[float], most: int) -> list[dict[str, object]]:
    """Return the texts with the lowest cosines, the worst first."""
    worst = sorted(range(len(texts)), key=lambda row: cosines[row])[:most]
    return [{"cosine": round(float(cosines[row]), 7), "text": shorten(texts[row])} for row in worst]
