"""Short stories in many wordings, with lines that all begin with `It is`."""

from __future__ import annotations

import random
import re

from .operations import worked
from .problems import Work
from .wordings import chosen, in_words, invented, varied, wordings

_PLURAL = re.compile(r"\b(I|[Ww]e|[Yy]ou|[Tt]hey) (has|is|was|carries|\w+[^s]s)\b")
_ASKED_PLURAL = re.compile(r"\b(does|has|is) (I|we|you|they)\b")


def story(rng: random.Random, work: Work, direct: bool) -> str:
    words, kind = wordings(), rng.random()
    if kind < 0.2:
        return _events(rng, work)
    if kind < 0.78:
        op = rng.choice("+-*/")
        a, b = _story_operands(op, rng)
        text = rng.choice(words["single"][op])
        if op == "-" and "temperature" in text and rng.random() < 0.4:
            a, b = b, a
        text = people(text, rng, a=a, b=b)
        worked(work, a, op, b, direct)
        return varied(text, rng)
    op = rng.choice(list(words["double"]))
    a, b = _story_operands(op[0], rng)
    c = rng.randint(2, 20)
    if op == "+-":
        c = rng.randint(1, a + b)
    elif op == "+*":
        a, b, c = (rng.randint(1, 9) for _ in range(3))
    elif op == "+/":
        c = rng.choice([d for d in range(1, 13) if (a + b) % d == 0])
    elif op == "*-":
        c = rng.randint(1, a * b)
    text = people(rng.choice(words["double"][op]), rng, a=a, b=b, c=c)
    worked(work, worked(work, a, op[0], b, direct), op[1], c, direct)
    return varied(text, rng)


def _events(rng: random.Random, work: Work) -> str:
    """One count that changes once or twice."""
    story, count = wordings()["story"], rng.randint(3, rng.choice((12, 30, 99)))
    text, numbers = rng.choice(story["start"]).replace("{a}", str(count)), rng.choice((1, 1, 2))
    for _ in range(numbers):
        if rng.random() < 0.5 or count < 2:
            change = rng.randint(1, 40)
            event, asked = rng.choice(story["more"]), story["asked"]
            count = work.do("It is", count, "+", change)
        else:
            change = rng.randint(1, count)
            event, asked = rng.choice(story["less"]), story["left"]
            count = work.do("It is", count, "-", change)
        text = text.removesuffix(".") + rng.choice(story["joined"]).format(event.replace("{b}", str(change)))
    if text.startswith(("If", "Suppose")) and rng.random() < 0.5:
        text = text.removesuffix(".") + ", " + rng.choice(asked)
    else:
        text += " " + rng.choice(asked)
    return varied(people(text, rng), rng)


def _story_operands(op: str, rng: random.Random) -> tuple[int, int]:
    if op in "+-":
        a, b = sorted((rng.randint(1, rng.choice((12, 50, 200))) for _ in range(2)), reverse=True)
        return (a, b) if op == "-" else (b, a) if rng.random() < 0.5 else (a, b)
    if op == "*":
        return rng.randint(2, 12), rng.randint(2, rng.choice((12, 12, 60)))
    b = rng.randint(2, 12)
    return b * rng.randint(1, rng.choice((12, 12, 40))), b


def people(text: str, rng: random.Random, **numbers: int) -> str:
    """Fill the slots of a story, and let verbs and sentences begin as they should."""
    world = wordings()["world"]

    def some(name: str) -> str:
        return invented(rng).capitalize() if rng.random() < 0.15 else rng.choice(world[name])

    def somebody() -> str:
        return rng.choice(world["subjects"]) if rng.random() < 0.4 else some("names")

    items = [invented(rng) + "s" if rng.random() < 0.15 else rng.choice(world["items"]) for _ in range(2)]
    things = rng.sample(world["things"], 2)
    spell = rng.random() < 0.12
    texts = {
        name: in_words(number, rng) if spell or (number <= 12 and rng.random() < 0.08) else str(number)
        for name, number in numbers.items()
    }
    pack = rng.choice(world["packs"])
    one = {"boxes": "box", "shelves": "shelf", "classes": "class"}.get(pack, pack.removesuffix("s"))
    lists = {slot: rng.choice(words) for slot, words in wordings()["slots"].items()}
    subject = somebody()
    text = chosen(text, rng).format(
        s=subject, o=some("names"), t=some("names"), i=items[0], j=items[1], n=things[0], m=things[1],
        w=rng.choice(world["places"]), p=pack, p1=one, **lists, **texts,
    )  # fmt: skip
    text = re.sub(r"\bI's\b", "my", _later_pronoun(text, subject, rng) if rng.random() < 0.35 else text)
    text = _PLURAL.sub(lambda found: f"{found[1]} {_base(found[1], found[2])}", text)
    text = _ASKED_PLURAL.sub(lambda found: f"{_base(found[2], found[1])} {found[2]}", text)
    text = re.sub(r" +([.,?])", r"\1", text)
    if rng.random() < 0.85:
        text = re.sub(r"(^|[.?] )([a-z])", lambda found: found[1] + found[2].upper(), text)
    return text


def _later_pronoun(text: str, subject: str, rng: random.Random) -> str:
    """The same with `he`, `she` or `it` for a third person who has been named before."""
    begin, named, rest = text.partition(subject)
    if not named or subject in ("I", "we", "you", "they", "she", "he"):
        return text
    pronoun = rng.choice(("he", "he", "she", "she", "it"))
    own = "its" if pronoun == "it" else "his" if pronoun == "he" else "her"
    rest = rest.replace(f"{subject}'s", own)
    return begin + named + re.sub(rf"\b{re.escape(subject)}\b", pronoun, rest)


def _base(subject: str, verb: str) -> str:
    known = {"has": "have", "is": "am" if subject == "I" else "are", "was": "was" if subject == "I" else "were"}
    return known.get(verb, {"carries": "carry", "does": "do"}.get(verb, verb.removesuffix("s")))
