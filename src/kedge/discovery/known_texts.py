"""Texts that may be read again, such as answers and what fills slots, found by content or inside longer texts."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple, Self

from kedge.discovery.bounds import LEAST_TOKENS, MAX_BYTES, MAX_LOOKED_AT
from kedge.discovery.found_agents import BLOCK_TOKENS
from kedge.discovery.templates import Occurrence
from kedge.structures import token_bytes
from kedge.structures.bounded import BoundedDict
from kedge.types import SampleId

LOOSE = 2
"""Tokens at either end of a text that a tokenizer may have joined with what is around it"""
START = LEAST_TOKENS - 2 * LOOSE
"""Tokens of an answer that are looked up, as many as the shortest has in between"""
MAX_SEARCHED = 8192
"""Tokens of a text, the last ones, that are searched, and comparisons with answers: many may begin alike"""


_ENDS = (LOOSE, LOOSE - 1, LOOSE + 1, 0)
"""How many tokens of a value are before, or behind, the middle of an answer; tried in this order"""


class Quoted(NamedTuple):
    """The tokens [start, stop) of a value that are an answer's."""

    start: int
    stop: int
    sample: SampleId


class AnswerIndex:
    """Answers by their tokens but for the first and the last ones; of equal ones the latest. Its owner bounds how many
    there are.
    """

    def __init__(self) -> None:
        self._answers: dict[bytes, dict[bytes, tuple[bytes, SampleId]]] = {}
        """By what they start with, then by all of them"""
        self._firsts: Counter[int] = Counter()
        """How many starts begin with a token: most tokens of a prompt are passed over by this alone"""

    def put(self, answer: bytes, sample: SampleId) -> None:
        """Remember a packed answer of at least `LEAST_TOKENS` tokens."""
        start, inner = _middle(answer)
        if start not in self._answers:
            self._firsts.update(token_bytes.unpack(start)[:1])
        self._answers.setdefault(start, {})[inner] = answer, sample

    def drop(self, answer: bytes, sample: SampleId) -> None:
        """Forget an answer, unless a later one is equal."""
        start, inner = _middle(answer)
        known = self._answers.get(start, {})
        if known.get(inner) != (answer, sample):
            return
        del known[inner]
        if not known:
            del self._answers[start]
            self._firsts -= Counter(token_bytes.unpack(start)[:1])

    def equal(self, answer: bytes) -> SampleId | None:
        """Return the known answer that is equal to a packed one but for what a tokenizer may have joined with other
        text at their ends.
        """
        start, inner = _middle(answer)
        return self._answers.get(start, {}).get(inner, (b"", None))[1]

    def quoted(self, value: bytes) -> Quoted | None:
        """Return which tokens of a packed value are a whole answer: all but those that a tokenizer has joined with
        other text at its ends, as the space in `Answer: {answer}`; of its last ones at most one.
        """
        size = token_bytes.size(value)
        for at in _ENDS:
            known = self._answers.get(token_bytes.cut(value, at, at + START), {})
            for less in _ENDS if known else ():
                if found := known.get(token_bytes.cut(value, at, size - less)):
                    answer, sample = found
                    start, stop = _around(value, at, answer, LOOSE)
                    return Quoted(start, stop, sample) if stop >= size - 1 else None
        return None

    def find(self, prompt: bytes) -> Iterator[SampleId]:
        """Yield the answers in a packed prompt, the last one first, of those that begin alike the latest."""
        prompt = prompt[-MAX_SEARCHED * token_bytes.WIDTH :]
        for at, inner, sample in islice(self._candidates(prompt), MAX_SEARCHED):
            if prompt.startswith(inner, at * token_bytes.WIDTH):
                yield sample

    def _candidates(self, prompt: bytes) -> Iterator[tuple[int, bytes, SampleId]]:
        """Yield the places at which a known answer may begin, with that answer."""
        firsts = self._firsts
        for at in [at for at, token in enumerate(token_bytes.unpack(prompt)) if token in firsts][::-1]:
            known = self._answers.get(token_bytes.cut(prompt, at, at + START), {})
            for inner, (_, sample) in reversed(known.items()):
                yield at, inner, sample


def _middle(answer: bytes) -> tuple[bytes, bytes]:
    """Return what is between the loose ends of an answer: its start, and all of it."""
    inner = token_bytes.cut(answer, LOOSE, token_bytes.size(answer) - LOOSE)
    return token_bytes.cut(inner, 0, START), inner


MAX_SAYERS = 2
"""Requests with the same answer, the first ones, that may tell what it is"""


@dataclass(frozen=True, slots=True)
class KnownText:
    """A text, packed."""

    tokens: bytes
    labels: tuple[Callable[[], str], ...]
    """What those who had it first call it, the same for all texts of its kind; "" where that is not known yet"""
    sample: SampleId | None = None
    """The answer that it is"""

    @property
    def label(self) -> str:
        """What it is; "" where that is not known yet."""
        return next(filter(None, (label() for label in self.labels)), "")

    @property
    def nbytes(self) -> int:
        """Bytes of its tokens: those of an answer are kept twice, once in the index."""
        return len(self.tokens) * (2 if self.sample else 1)

    def after(self, other: Self) -> Self:
        """Return this answer, called first what an earlier one with the same text is: agents repeat each other."""
        return replace(self, labels=(*other.labels, *self.labels)[:MAX_SAYERS])


class KnownTexts:
    """The texts of one namespace, found by their content or inside of prompts. One thread owns it."""

    def __init__(self) -> None:
        self._texts: BoundedDict[bytes, KnownText] = BoundedDict(on_evicted=lambda _, text: self._drop(text))
        self.index, self.nbytes = AnswerIndex(), 0
        """Answers by what is in the middle of them; bytes of all texts"""

    def put(self, text: KnownText) -> None:
        """Remember a text, as what it was known as first: as a value until it is an answer."""
        if token_bytes.size(text.tokens) < LEAST_TOKENS:
            return
        known = self._texts.get(text.tokens)
        if text.sample or known is None:
            self.nbytes += text.nbytes - (known.nbytes if known else 0)
            self._texts[text.tokens] = text.after(known) if known and known.sample else text
        if text.sample:
            self.index.put(text.tokens, text.sample)
        while self.nbytes > MAX_BYTES:
            self._drop(self._texts.popitem(last=False)[1])

    def quoted(self, value: bytes, *, is_answer: bool) -> Quoted | None:
        """Return which tokens of a packed value are an answer. Where a value should be one (`is_answer`), they may be a
        part of one of the last answers, and of no other: what follows its reasoning, its code, its beginning.
        """
        size, whole = token_bytes.size(value), self.index.quoted(value)
        if whole or not is_answer or size < BLOCK_TOKENS:
            return whole
        inner, found = token_bytes.cut(value, LOOSE + 1, size - LOOSE), list[Quoted]()
        for text in self._last_answers():
            if (at := token_bytes.find(text.tokens, inner)) >= 0 and text.sample:
                found.append(Quoted(*_around(value, LOOSE + 1, text.tokens, at), text.sample))
        return found[0] if len(found) == 1 and found[0].stop >= size - 1 else None

    def find(self, prompt: bytes, start: int) -> tuple[Occurrence, ...]:
        """Return where texts with a label occur in a packed prompt from token `start` on: whole ones, of these the
        longest first, then parts of answers.

        They do not overlap, and are ordered by position. Of texts with one label parts count only where none is there
        as a whole, and the longest of them: agents say some things in all their answers. O(prompt x texts), at the
        speed of memory.
        """
        found: list[Occurrence] = []
        for texts in (self._wholes(prompt, start), self._parts(prompt, start)):
            for one in sorted(texts, key=lambda one: one.start - one.stop):
                is_told = one.is_part and any(one.label == other.label for other in found)
                if not is_told and all(one.stop <= other.start or other.stop <= one.start for other in found):
                    found.append(one)
        return tuple(sorted(found))

    def _wholes(self, prompt: bytes, start: int) -> Iterator[Occurrence]:
        """Yield where texts, but for their ends, are in a prompt first."""
        for text in self._texts.values():
            place = token_bytes.find(prompt, _middle(text.tokens)[1], start + LOOSE)
            if place >= 0 and (label := text.label):
                yield Occurrence(*_around(prompt, place, text.tokens, LOOSE), label)

    def _parts(self, prompt: bytes, start: int) -> Iterator[Occurrence]:
        """Yield the longest part of each of the last answers that is in a prompt."""
        stop = token_bytes.size(prompt) - LEAST_TOKENS + 1
        places = {token_bytes.cut(prompt, at, at + LEAST_TOKENS): at for at in range(start, stop)}
        for text in self._last_answers():
            first = last = end = 0
            for at in range(0, token_bytes.size(text.tokens) - LEAST_TOKENS + 1, LEAST_TOKENS):
                place = places.get(token_bytes.cut(text.tokens, at, at + LEAST_TOKENS))
                if place is not None and at >= end:  # else it is in the part before
                    part = _around(prompt, place, text.tokens, at)
                    end = at + part[1] - place
                    first, last = max((first, last), part, key=lambda one: one[1] - one[0])
            if last - first >= BLOCK_TOKENS and (label := text.label):
                yield Occurrence(max(first, start), last, label, is_part=True)

    def _last_answers(self) -> Iterator[KnownText]:
        return islice((one for one in reversed(self._texts.values()) if one.sample), MAX_LOOKED_AT)

    def _drop(self, text: KnownText) -> None:
        self.nbytes -= text.nbytes
        if text.sample:
            self.index.drop(text.tokens, text.sample)


def _around(text: bytes, at: int, other: bytes, place: int) -> tuple[int, int]:
    """Return which tokens around number `at` of a text are also around number `place` of another."""
    back, ahead = min(at, place), min(token_bytes.size(text) - at, token_bytes.size(other) - place)
    pairs = (text, at), (other, place)
    before = token_bytes.common_tail([token_bytes.cut(one, here - back, here) for one, here in pairs])
    behind = token_bytes.common_head([token_bytes.cut(one, here, here + ahead) for one, here in pairs])
    return at - before, at + behind
