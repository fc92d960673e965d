"""Sentences made from a known meaning: who does what, where and when.

A scene has one idea for each slot. An idea has several wordings and a more general one, so that one
sentence can paraphrase, entail or contradict another, and their similarity can be computed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["CONTRADICTION", "ENTAILMENT", "NEUTRAL", "Idea", "Pair", "Scene", "make_nli", "make_scenes", "make_sts"]

ENTAILMENT, NEUTRAL, CONTRADICTION = 0, 1, 2


class Idea(NamedTuple):
    """Wordings of one idea, and a more general one."""

    wordings: tuple[str, ...]
    general: str


class Pair(NamedTuple):
    """Two sentences with a similarity from 0 to 5, or with a label."""

    left: str
    right: str
    score: float


Scene = tuple[Idea, ...]  # one idea per slot


def _ideas(lines: str) -> tuple[Idea, ...]:
    """Parse one idea per line: its wordings, then the general one after a colon."""
    rows = (line.rsplit(":", 1) for line in lines.strip().split("\n"))
    return tuple(
        Idea(tuple(part.strip() for part in wordings.split("/")), general.strip()) for wordings, general in rows
    )


WHO = _ideas("""
a man / a guy / a gentleman : a person
a woman / a lady : a person
a nurse / a hospital worker : a person
a carpenter / a woodworker : a person
a student / an undergraduate : a person
a boy / a little lad : a child
a girl / a young lass : a child
a toddler / a very small kid : a child
two friends / a pair of buddies : some people
an old couple / two elderly partners : some people
a team of players / several athletes : some people
""")
WHAT = _ideas("""
playing the guitar / strumming a guitar : making music
playing the piano / sitting at the keys of a grand piano : making music
singing a song / performing a tune aloud : making music
cooking soup / preparing a broth : making food
baking bread / putting a loaf into the oven : making food
slicing an onion / cutting up some vegetables : making food
riding a bike / cycling : moving
running / jogging at a good pace : moving
dancing / swaying to a rhythm : moving
climbing a ladder / going up the rungs : moving
reading a novel / absorbed in a book : reading
studying a newspaper / going through the headlines : reading
sleeping / taking a nap : resting
lying in a hammock / relaxing in a hanging net : resting
painting a fence / putting colour on some boards : working
repairing a roof / fixing broken tiles : working
""")
WHERE = _ideas("""
in the park / on a public lawn : outdoors
on the beach / by the sea : outdoors
in the mountains / high up in the hills : outdoors
in a garden / among flower beds : outdoors
in the kitchen / beside the stove : indoors
in a classroom / at school : indoors
in a warehouse / inside a storage hall : indoors
in a hotel lobby / at the reception of an inn : indoors
""")
WHEN = _ideas("""
in the morning / shortly after sunrise : by day
at noon / in the middle of the day : by day
late at night / long after dark : when others sleep
before dawn / while it is still dark : when others sleep
""")
SLOTS = (WHO, WHAT, WHERE, WHEN)
WEIGHTS = (1.25, 2.25, 1.0, 0.5)  # of the slots in a similarity; their sum is 5
RELATED = 0.4  # share of the weight for different ideas with the same general one


def make_scenes(seed: int) -> Iterator[Scene]:
    """Yield random scenes without end."""
    rng = random.Random(seed)  # noqa: S311 - it must be repeatable
    while True:
        yield tuple(rng.choice(ideas) for ideas in SLOTS)


def make_sts(num_pairs: int, seed: int) -> list[Pair]:
    """Make pairs of different sentences with none to all slots changed, and their similarity."""
    rng = random.Random(seed)  # noqa: S311
    scenes = make_scenes(seed)
    pairs: list[Pair] = []
    while len(pairs) < num_pairs:
        scene = next(scenes)
        changed = rng.sample(range(len(SLOTS)), rng.randint(0, len(SLOTS)))
        other = tuple(rng.choice(SLOTS[slot]) if slot in changed else idea for slot, idea in enumerate(scene))
        pair = Pair(_say(scene, rng), _say(other, rng), similarity(scene, other))
        if pair.left != pair.right:
            pairs.append(pair)
    return pairs


def similarity(one: Scene, other: Scene) -> float:
    """Similarity of two scenes, from 0 (nothing in common) to 5 (the same)."""
    shares = [1 if a == b else RELATED if a.general == b.general else 0 for a, b in zip(one, other, strict=True)]
    return round(sum(weight * share for weight, share in zip(WEIGHTS, shares, strict=True)), 2)


def make_nli(num_scenes: int, seed: int) -> list[Pair]:
    """Make an entailment, a neutral sentence and a contradiction for each scene."""
    rng = random.Random(seed)  # noqa: S311
    pairs = []
    for (who, what, *details), _ in zip(make_scenes(seed), range(num_scenes), strict=False):
        told, untold = rng.sample(details, 2)  # where and when, in either order
        scene = (who, what, told)
        premise = _say(scene, rng)
        pairs += [
            Pair(premise, _say(_general(scene[: rng.randint(2, 3)], 0.2, rng), rng), ENTAILMENT),
            Pair(premise, _say((*_general((who, what), 0.5, rng), untold), rng), NEUTRAL),
            Pair(premise, _say(_unlike(scene, rng), rng), CONTRADICTION),
        ]
    return pairs


def _general(ideas: Scene, share: float, rng: random.Random) -> Scene:
    """Replace a share of the ideas by their general wording."""
    return tuple(Idea((idea.general,), idea.general) if rng.random() < share else idea for idea in ideas)


def _unlike(scene: Scene, rng: random.Random) -> Scene:
    """Replace one to all ideas of a scene by ones that contradict them."""
    changed = rng.sample(range(len(scene)), rng.randint(1, len(scene)))
    return tuple(rng.choice(_contradicting(idea)) if slot in changed else idea for slot, idea in enumerate(scene))


def _contradicting(idea: Idea) -> list[Idea]:
    """List the ideas of the same slot that contradict an idea, even in general."""
    return [other for other in next(ideas for ideas in SLOTS if idea in ideas) if other.general != idea.general]


def _say(ideas: Scene, rng: random.Random) -> str:
    """Make a sentence with random wordings; the last clause may come first."""
    who, what, *rest = (rng.choice(idea.wordings) for idea in ideas)
    verb = "are" if who.startswith(("two", "some ", "several", "a pair", "a team")) else "is"
    clauses = [f"{who} {verb} {what}", *rest]
    if rest and rng.random() < 0.3:
        clauses = [f"{rest[-1]},", clauses[0], *rest[:-1]]
    sentence = " ".join(clauses)
    return f"{sentence[0].upper()}{sentence[1:]}."
