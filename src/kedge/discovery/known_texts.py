"""Texts that may be read again, such as answers and what fills slots, found by content or inside longer texts."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple, Self

from kedge.discovery import token_bytes
from kedge.discovery.bounds import LEAST_TOKENS, MAX_BYTES
from kedge.discovery.templates import Occurrence
from kedge.structures.bounded import BoundedDict
from kedge.types import JOINED, SampleId

START = LEAST_TOKENS - 2 * JOINED
"""Tokens of an answer that are looked up, as many as the shortest has in between"""
MAX_SEARCHED = 8192
"""Tokens of a text, the last ones, that are searched, and comparisons with answers: many may begin alike"""


_ENDS = (JOINED, JOINED - 1, JOINED + 1, 0)
"""Tokens before and behind the middle of an answer in a value; first as many as the answer has"""


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
        _, sample = self._answers.get(start, {}).get(inner, (b"", None))
        return sample

    def quoted(self, value: bytes) -> Quoted | None:
        """Return which part of a packed value is an answer: all but what a tokenizer has joined with other text at its
        ends, as the space in `Answer: {answer}`; of its last tokens at most one.
        """
        size = token_bytes.size(value)
        for at in _ENDS:
            known = self._answers.get(token_bytes.cut(value, at, at + START), {})
            for less in _ENDS if known else ():
                if found := known.get(token_bytes.cut(value, at, size - less)):
                    answer, sample = found
                    start, stop = _whole(value, answer, at)
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
    inner = token_bytes.cut(answer, JOINED, token_bytes.size(answer) - JOINED)
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

    def find(self, prompt: bytes, start: int) -> tuple[Occurrence, ...]:
        """Return where texts with a label occur in a packed prompt from token `start` on, the longest ones first come.

        They do not overlap, and are ordered by position. O(prompt x texts), at the speed of memory.
        """
        found: list[Occurrence] = []
        for one in sorted(self._occurrences(prompt, start), key=lambda one: one.start - one.stop):
            if all(one.stop <= other.start or other.stop <= one.start for other in found):
                found.append(one)
        return tuple(sorted(found))

    def _occurrences(self, prompt: bytes, start: int) -> Iterator[Occurrence]:
        for text in self._texts.values():
            size = token_bytes.size(text.tokens)
            at = token_bytes.find(prompt, token_bytes.cut(text.tokens, JOINED, size - JOINED), start + JOINED)
            if at >= 0 and (label := text.label):
                yield Occurrence(*_whole(prompt, text.tokens, at), label)

    def _drop(self, text: KnownText) -> None:
        self.nbytes -= text.nbytes
        if text.sample:
            self.index.drop(text.tokens, text.sample)


def _whole(prompt: bytes, text: bytes, at: int) -> tuple[int, int]:
    """Return how much of a text is in a prompt: its tokens but for the loose ends are at token `at`."""
    size = token_bytes.size(text)
    stop, end = at + size - 2 * JOINED, at + size - JOINED
    before = token_bytes.common_tail(
        [token_bytes.cut(prompt, max(0, at - JOINED), at), token_bytes.cut(text, 0, JOINED)]
    )
    behind = token_bytes.common_head([token_bytes.cut(prompt, stop, end), token_bytes.cut(text, size - JOINED, size)])
    return at - before, stop + behind
