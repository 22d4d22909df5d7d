"""Templates of agents' prompts, found by laying some of their prompts side by side.

What all of them have at the same place is fixed text. In between are *slots*. A text that is known from elsewhere, such
as another agent's answer, makes a slot by itself; else a slot is what differs between two stretches of fixed text.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from kedge.discovery.bounds import LEAST_TOKENS, MAX_LOOKED_AT
from kedge.structures import token_bytes

_ANSWER = "answer."
"""What the labels of answers begin with"""
MIN_FIXED = 2
"""Tokens of fixed text between two slots, at least: what is shorter would be found inside of values"""
MAX_WINDOWS = 512
"""Places in what differs where fixed text is looked for"""


def answers_of(name: str) -> str:
    """Return the label of an agent's answers."""
    return f"{_ANSWER}{name}"


def is_answer(label: str) -> bool:
    """Return whether a label is that of an agent's answers."""
    return label.startswith(_ANSWER)


def agent_of(label: str) -> str:
    """Return the name of the agent whose answers, or whose values, have a label."""
    return label.removeprefix(_ANSWER).partition(".")[0]


class Occurrence(NamedTuple):
    """A known text in a prompt: tokens [start, stop)."""

    start: int
    stop: int
    label: str
    """What the text is, the same in all prompts of an agent"""
    is_part: bool = False
    """Whether it is a part of that text"""


class Example(NamedTuple):
    """A prompt, packed, with the known texts in it by position. They do not overlap."""

    prompt: bytes
    known: tuple[Occurrence, ...] = ()


@dataclass(frozen=True, slots=True)
class Slot:
    """A place that every prompt fills, and the fixed text after it."""

    label: str
    """What fills it; "" where that is known from nowhere else"""
    first: bytes
    """What filled it in the first example"""
    after: bytes = b""
    """The fixed text between it and the next slot, or the end of the prompt"""


class Filled(NamedTuple):
    """A slot that a prompt fills with tokens [start, stop)."""

    slot: Slot
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """The fixed text that every prompt begins with, packed, and the slots after it."""

    head: bytes
    slots: tuple[Slot, ...]

    def fill(self, prompt: bytes) -> list[Filled] | None:
        """Return what fills the slots in a packed prompt; None where it does not follow the template."""
        if not prompt.startswith(self.head):
            return None
        at, filled = token_bytes.size(self.head), []
        for slot in self.slots:
            if slot is not self.slots[-1]:
                stop = token_bytes.find(prompt, slot.after, at + 1)
            else:
                is_end = prompt.endswith(slot.after)
                stop = token_bytes.size(prompt) - token_bytes.size(slot.after) if is_end else -1
            if stop <= at:
                return None
            filled.append(Filled(slot, at, stop))
            at = stop + token_bytes.size(slot.after)
        return filled


def learn(examples: Sequence[Example]) -> PromptTemplate | None:
    """Return the template that examples follow; None where they are equal or begin with nothing in common."""
    texts = [[one for one in each.known if not _is_fixed(one, each.prompt, examples)] for each in examples]
    examples = [Example(each.prompt, tuple(known)) for each, known in zip(examples, texts, strict=True)]
    sequences = [[one.label for one in example.known] for example in examples]
    in_all = [one for one in sequences[0] if all(each.count(one) == 1 for each in sequences)]
    orders = [[one for one in each if one in in_all] for each in sequences]
    labels = [label for at, label in enumerate(in_all) if all(order[at] == label for order in orders)]
    rows = [_split(example, labels) for example in examples]
    parts, room = list[_Part](), iter(range(MAX_LOOKED_AT))
    for column in zip(*rows, strict=True):
        known = [one for one in column if isinstance(one, Slot)]
        parts += [known[0]] if known else _aligned([one for one in column if isinstance(one, bytes)], room)
    head, *rest = _merged(parts)
    if not rest or not isinstance(head, bytes):
        return None
    after = (*(one for one in rest if isinstance(one, bytes)), b"")
    slots = [one for one in rest if isinstance(one, Slot)]
    return PromptTemplate(head, tuple(replace(slot, after=after[at]) for at, slot in enumerate(slots)))


def _is_fixed(one: Occurrence, prompt: bytes, examples: Iterable[Example]) -> bool:
    """Return whether all examples have a part of an answer: there answers repeat what prompts say."""
    part = token_bytes.cut(prompt, one.start, one.stop)
    return one.is_part and all(token_bytes.find(each.prompt, part) >= 0 for each in examples)


_Part = bytes | Slot
"""Fixed text, or a slot"""


def _split(example: Example, labels: Sequence[str]) -> list[_Part]:
    """Return a prompt cut at the texts with these labels: other text and slots in turn."""
    parts: list[_Part] = []
    at = 0
    for one in example.known:
        if one.label in labels:
            parts.append(token_bytes.cut(example.prompt, at, one.start))
            parts.append(Slot(one.label, token_bytes.cut(example.prompt, one.start, one.stop)))
            at = one.stop
    parts.append(token_bytes.cut(example.prompt, at, token_bytes.size(example.prompt)))
    return parts


def _aligned(texts: Sequence[bytes], room: Iterator[int], passes: int = 2) -> Iterator[_Part]:
    """Yield the fixed text and the slots of texts that are at the same place of all prompts.

    `room` is for so many stretches of fixed text between slots. The parts that those make of the texts are looked at in
    the next of the `passes`: what stands twice in the whole may stand once in a part.
    """
    if len(set(texts)) == 1:
        yield texts[0]
        return
    shortest = min(map(token_bytes.size, texts))
    head = token_bytes.common_head(texts)
    tail = min(token_bytes.common_tail(texts), shortest - head)
    if head + tail == shortest:  # one of them has nothing in between: a token of fixed text becomes its value
        head, tail = (head, tail - 1) if tail else (max(0, head - 1), 0)
    yield token_bytes.cut(texts[0], 0, head)
    between = [token_bytes.cut(text, head, token_bytes.size(text) - tail) for text in texts]
    stretches = list(_stretches(between, room)) if passes else []
    for starts, stops in pairwise([[0] * len(texts), *stretches, [token_bytes.size(text) for text in between]]):
        parts = [token_bytes.cut(*one) for one in zip(between, starts, stops, strict=True)]
        yield from _aligned(parts, room, passes - 1) if stretches else [Slot("", parts[0])]
    yield token_bytes.cut(texts[0], token_bytes.size(texts[0]) - tail, token_bytes.size(texts[0]))


def _stretches(texts: Sequence[bytes], room: Iterator[int]) -> Iterator[list[int]]:
    """Yield where in each text fixed text begins, in the same order: `LEAST_TOKENS` tokens that all have once."""
    shortest = min(texts, key=len)
    ends = max(0, token_bytes.size(shortest) - LEAST_TOKENS + 1)
    starts = range(1, ends, 1 + ends // MAX_WINDOWS)
    found = [_once(text, {token_bytes.cut(shortest, at, at + LEAST_TOKENS) for at in starts}) for text in texts]
    before = [0] * len(texts)
    for places in sorted([one.get(window, -1) for one in found] for window in found[0]):
        rows = list(zip(texts, before, places, strict=True))
        if any(place <= last for _, last, place in rows):
            continue
        if len({token_bytes.cut(*row) for row in rows}) > 1:  # else it goes on with the same fixed text
            if next(room, None) is None:
                return
            yield places
        before = places


def _once(text: bytes, wanted: Collection[bytes]) -> dict[bytes, int]:
    """Return where in a text those of the `wanted` `LEAST_TOKENS` tokens are that it has, -1 for more than once."""
    found: dict[bytes, int] = {}
    for at in range(token_bytes.size(text) - LEAST_TOKENS + 1):
        if (window := token_bytes.cut(text, at, at + LEAST_TOKENS)) in wanted:
            found[window] = -1 if window in found else at
    return found


def _merged(parts: Iterable[_Part]) -> list[_Part]:
    """Join fixed text with fixed text, and slots with too little between them; the first label is kept."""
    merged: list[_Part] = []
    for part in parts:
        before = merged[-1] if merged else b""
        if isinstance(part, bytes):
            merged[-1:] = [before + part] if isinstance(before, bytes) else [before, part]
        elif isinstance(before, Slot):
            merged[-1] = _joined(before, b"", part)
        elif token_bytes.size(before) < MIN_FIXED and len(merged) > 1 and isinstance(slot := merged[-2], Slot):
            merged[-2:] = [_joined(slot, before, part)]
        else:
            merged.append(part)
    return [one for one in merged if one]


def _joined(slot: Slot, between: bytes, other: Slot) -> Slot:
    return Slot(slot.label or other.label, slot.first + between + other.first)
