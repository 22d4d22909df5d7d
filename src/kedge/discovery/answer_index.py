"""Known answers inside of longer texts, such as a history or notes that quote them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

from kedge.discovery import token_bytes
from kedge.types import SampleId, Tokens

LOOSE_HEAD, LOOSE_TAIL = 1, 2
"""Tokens at a text's two ends that a tokenizer may have joined with what is around it"""
START = 4
"""Tokens of an answer that are looked up"""
MAX_SEARCHED = 8192
"""Tokens of a text, the last ones, that are searched"""
MAX_COMPARED = 2048
"""Comparisons of a place in a prompt with an answer: many answers may begin alike"""


class AnswerIndex:
    """Answers by their tokens but for the first and the last ones; of equal ones the latest. Its owner bounds how many
    there are.
    """

    def __init__(self) -> None:
        self._answers: dict[Tokens, dict[Tokens, SampleId]] = {}
        """By what they start with, then by all of them"""
        self._firsts: Counter[int] = Counter()
        """How many starts begin with a token: most tokens of a prompt are passed over by this alone"""

    def put(self, answer: bytes, sample: SampleId) -> None:
        """Remember a packed answer of at least `START + LOOSE_HEAD + LOOSE_TAIL` tokens."""
        inner = _inner(answer)
        start = inner[:START]
        if start not in self._answers:
            self._firsts[start[0]] += 1
        self._answers.setdefault(start, {})[inner] = sample

    def drop(self, answer: bytes, sample: SampleId) -> None:
        """Forget an answer, unless a later one is equal."""
        inner = _inner(answer)
        start = inner[:START]
        known = self._answers.get(start, {})
        if known.get(inner) != sample:
            return
        del known[inner]
        if not known:
            del self._answers[start]
            self._firsts[start[0]] -= 1
            if not self._firsts[start[0]]:
                del self._firsts[start[0]]

    def equal(self, answer: bytes) -> SampleId | None:
        """Return the known answer that is equal to a packed one but for their ends."""
        inner = _inner(answer)
        return self._answers.get(inner[:START], {}).get(inner)

    def find(self, prompt: bytes) -> Iterator[SampleId]:
        """Yield the answers in a packed prompt, the last one first, of those that begin alike the latest. O(tokens
        searched), and no more than `MAX_COMPARED` comparisons.
        """
        tokens = token_bytes.unpack(prompt)[-MAX_SEARCHED:]
        for at, inner, sample in islice(self._candidates(tokens), MAX_COMPARED):
            end = at + len(inner)
            if end <= len(tokens) and tokens[end - 1] == inner[-1] and tokens[at:end] == inner:
                yield sample

    def _candidates(self, tokens: Tokens) -> Iterator[tuple[int, Tokens, SampleId]]:
        """Yield the places at which a known answer may begin, with that answer."""
        firsts = self._firsts
        for at in [at for at, token in enumerate(tokens) if token in firsts][::-1]:
            for inner, sample in reversed(self._answers.get(tokens[at : at + START], {}).items()):
                yield at, inner, sample


def _inner(answer: bytes) -> Tokens:
    return token_bytes.unpack(token_bytes.cut(answer, LOOSE_HEAD, token_bytes.size(answer) - LOOSE_TAIL))
