"""The prompts of `experiments.retrieval`: facts hidden in a text, or a list of lines, and the questions about them."""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from models import Tokenizer

_CITIES = """London Paris Berlin Madrid Rome Vienna Prague Dublin Oslo Athens Cairo Tokyo Delhi Moscow Lima Boston
Denver Dallas Geneva Lisbon Warsaw Sydney Havana Toronto"""
_NAMES = "Alice Bob Carol David Emma Frank Grace Henry Irene Jack Kate Louis Mary Nora Oscar Peter Rose Simon"
_THINGS = """apple river stone tiger cloud bread table horse glass wheel garden silver winter butter castle candle
forest hammer island jacket ladder lemon mirror monkey needle orange pencil pepper pillow rabbit rocket saddle shadow
spider spring sugar ticket turtle velvet window yellow basket bridge button camera carpet cherry coffee"""
_FRUITS = "apple lemon cherry orange banana grape peach melon plum mango"
_COLOURS = "red blue green yellow purple orange brown white black pink"
CITIES, NAMES, THINGS, FRUITS, COLOURS = (
    tuple(words.split()) for words in (_CITIES, _NAMES, _THINGS, _FRUITS, _COLOURS)
)


@dataclass(frozen=True)
class Fact:
    """A statement `<sentence> <value>.` whose sentence is also the question."""

    sentence: str  # {key} is replaced
    keys: Sequence[str]
    values: Sequence[str]


@dataclass(frozen=True)
class Question:
    """Asked after the context: the answer and what it competes with follow the prompt."""

    depth: float  # of the fact in the context, 0 at its start
    prompt: tuple[int, ...]
    answer: str
    distractors: tuple[str, ...]

    @property
    def candidates(self) -> tuple[str, ...]:
        """The answer first."""
        return (self.answer, *self.distractors)


@dataclass(frozen=True)
class Context:
    tokens: tuple[int, ...]
    questions: tuple[Question, ...]  # one at each depth


Make = Callable[[Tokenizer, Sequence[int], int, int, random.Random], Context]
NUMBERS = tuple(str(i) for i in range(1000, 10000))
DISTRACTORS = 4


def _statement(tokenizer: Tokenizer, sentence: str, value: str, end: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(the question, the whole statement); encoded in the parts in which it is asked and answered."""
    question = tuple(tokenizer.encode(sentence))
    return question, (*question, *tokenizer.encode(" " + value), *tokenizer.encode(end))


def needles(facts: Sequence[Fact]) -> Make:
    """As many facts as depths, each of another kind, at equal distances in the text; which is where is drawn."""

    def make(tokenizer: Tokenizer, text: Sequence[int], length: int, depths: int, draw: random.Random) -> Context:
        drawn = [facts[i % len(facts)] for i in range(depths)]
        draw.shuffle(drawn)
        made, used = [], set()
        for fact in drawn:
            key = draw.choice([key for key in fact.keys if key not in used])
            value, *others = draw.sample([value for value in fact.values if value not in used], 1 + DISTRACTORS)
            used |= {key, value}
            made.append((_statement(tokenizer, "\n" + fact.sentence.format(key=key), value, ".\n"), value, others))
        room = length - sum(len(whole) for (_, whole), _, _ in made)
        if not 0 < room <= len(text):
            raise ValueError(
                f"--length={length} with {depths} facts leaves {room} tokens for the text, and it has {len(text)}; "
                "pass another length, fewer --depths or a longer --text"
            )
        tokens: list[int] = []
        questions, before = [], 0
        for i, ((question, whole), value, others) in enumerate(made):
            at = round(room * (i + 0.5) / depths)
            tokens += [*text[before:at], *whole]
            before = at
            questions.append(Question((i + 0.5) / depths, question, value, tuple(others)))
        return Context((*tokens, *text[before:room]), tuple(questions))

    return make


def _keys(fact: Fact, draw: random.Random) -> Iterator[str]:
    """Every key once, then pairs of keys, which are only drawn where the keys do not fill a context."""
    yield from draw.sample(list(fact.keys), len(fact.keys))
    pairs = [" ".join(pair) for pair in itertools.permutations(fact.keys, 2)]
    yield from draw.sample(pairs, len(pairs))


def lines(fact: Fact, begin: str = "\n") -> Make:
    """Lines of one kind with different keys fill the length; those nearest to the depths are asked for, and the values
    of other lines are what the answer competes with."""

    def make(tokenizer: Tokenizer, text: Sequence[int], length: int, depths: int, draw: random.Random) -> Context:
        tokens: list[int] = []
        made: list[tuple[tuple[int, ...], str]] = []
        used: set[str] = set()
        for key in _keys(fact, draw):
            value = draw.choice([value for value in fact.values if value not in used])
            question, whole = _statement(tokenizer, begin + fact.sentence.format(key=key), value, "")
            if len(tokens) + len(whole) > length:
                break
            tokens += whole
            made.append((question, value))
            used.add(value)
        else:
            raise ValueError(f"--length={length} is more than lines with different keys fill; pass a shorter one")
        if len(made) < max(depths, DISTRACTORS + 1):
            raise ValueError(f"--length={length} holds {len(made)} lines; pass a longer one, or fewer --depths")
        questions = []
        for i in range(depths):
            question, value = made[int(len(made) * (i + 0.5) / depths)]
            others = draw.sample([other for _, other in made if other != value], DISTRACTORS)
            questions.append(Question((i + 0.5) / depths, question, value, tuple(others)))
        return Context(tuple(tokens), tuple(questions))

    return make


FAMILIES: dict[str, Make] = {
    "needles": needles(
        [
            Fact("The special magic number for {key} is", CITIES, NUMBERS),
            Fact("The favourite fruit of {key} is the", NAMES, FRUITS),
            Fact("The password of the {key} gate is", THINGS, THINGS),
            Fact("The secret meeting of the {key} club takes place in the city of", THINGS, CITIES),
            Fact("The treasure of {key} lies in the old box whose colour is", NAMES, COLOURS),
        ]
    ),
    "lines": lines(Fact("line {key}: REGISTER_CONTENT is", THINGS, NUMBERS)),
}


def contexts(
    name: str, tokenizer: Tokenizer, text: Sequence[int], *, length: int, depths: int, count: int, seed: int
) -> list[Context]:
    """`count` contexts of a family, of about `length` tokens, each with other facts and another part of the text."""
    made = []
    for i in range(count):
        draw = random.Random(f"{name} {length} {seed} {i}")
        start = draw.randrange(max(len(text) - length, 1))
        made.append(FAMILIES[name](tokenizer, text[start : start + length], length, depths, draw))
    return made
