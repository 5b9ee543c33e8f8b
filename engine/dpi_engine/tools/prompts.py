"""Real text for load generation: sentences put together from parts, so any number of distinct prompts costs nothing."""

from __future__ import annotations

import random

SUBJECTS = (
    "The harbour master",
    "A retired teacher",
    "My neighbour's daughter",
    "The night train",
    "An old cartographer",
    "The committee",
    "Every gardener in the valley",
    "The museum's youngest guide",
    "A careful engineer",
    "The baker on the corner",
)
VERBS = (
    "had always believed that",
    "explained to the visitors why",
    "wrote in a long letter that",
    "could not remember whether",
    "was surprised to learn how",
    "kept asking the others if",
    "noticed one morning that",
    "insisted, against all advice, that",
)
CLAUSES = (
    "the river would freeze before the end of November",
    "copper wires carry a signal faster than the wind carries a voice",
    "bread tastes better when the dough has rested for a day",
    "the library keeps its oldest maps in the cellar",
    "bees find their way home even after a storm",
    "the price of salt decided the fate of the whole town",
    "a bridge is only as strong as the ground it stands on",
    "the stars look brighter from the top of the quarry",
    "nobody repaired the clock after the fire",
    "a good question is worth more than a quick answer",
)
LINKS = ("Meanwhile,", "For that reason,", "Years later,", "Even so,", "In the end,", "To be fair,", "As it happened,")


def text(rng: random.Random, words: int) -> str:
    """About `words` words of English prose, at least that many."""
    parts: list[str] = []
    count = 0
    while count < words:
        sentence = f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(CLAUSES)}."
        if parts:
            sentence = f"{rng.choice(LINKS)} {sentence[0].lower()}{sentence[1:]}"
        parts.append(sentence)
        count += len(sentence.split())
    return " ".join(parts)
