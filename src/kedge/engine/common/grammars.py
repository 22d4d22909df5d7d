"""Answers that follow a grammar, by llguidance: before each token, which tokens may come next.

Grammars are in llguidance's variant of Lark, where `%json {…}` stands for texts that a JSON schema accepts.
"""

from __future__ import annotations

import math
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kedge.checks import MAX_GRAMMAR, brief
from kedge.errors import InvalidGrammar
from kedge.structures.bounded import BoundedDict
from kedge.types import TenantId

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from kedge.engine.common.tokenizer import HFTokenizer

KEY = "grammar"
NEGATIVE = re.compile(r"(?<=[\s:,\[])-\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([\d.]+)')
EXCERPT = re.compile(r"\n\s*\d+ \|")


class GrammarState:
    """How far one answer has come in its grammar. One thread owns it."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def is_over(self) -> bool:
        """Whether nothing more may come."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> bytes:
        """Return which tokens may come next: one bit per token of the vocabulary, lowest bit first.

        After the grammar's end these are the tokens that end an answer. Raises `InvalidGrammar` where the grammar has
        become too complex to go on.
        """
        mask = bytes(self._matcher.compute_bitmask())
        self._check()
        return mask

    def take(self, token: int) -> None:
        """Go on by a token. Raises `InvalidGrammar` for one that is not allowed."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            why = self._matcher.get_error().partition("\n")[0]  # without llguidance's inner state
            raise InvalidGrammar(KEY, "…", f"cannot go on, as where a schema refers to itself without an end: {why}")


class Grammars:
    """Grammars of one model's answers. Any thread may use it."""

    def __init__(self, tokenizer: HFTokenizer, eos: Iterable[int], vocab_size: int) -> None:
        """Build it; `eos` are the tokens that end an answer, `vocab_size` is the number of logits."""
        self._tokenizer, self._eos, self._vocab_size = tokenizer, sorted(eos), vocab_size
        self._wrapped: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._kept: BoundedDict[TenantId, OrderedDict[str, LLMatcher]] = BoundedDict(64)

    def begin(self, grammar: str, tenant: TenantId = TenantId("default")) -> GrammarState | None:  # noqa: B008
        """Return the state of an answer that has not begun; None for "", which every answer conforms to.

        Raises `InvalidGrammar` for a grammar that cannot be read, a model whose answers no token ends, and where
        llguidance is missing. A large schema takes seconds.
        """
        if not grammar:
            return None
        with self._lock:
            matcher = self._kept.use(tenant, OrderedDict).get(grammar)
        if matcher is None:
            matcher = self._compile(grammar)
            with self._lock:  # for the tenant alone: others would tell by the time that it was there
                kept = self._kept.use(tenant, OrderedDict)
                kept[grammar] = matcher
                while sum(map(len, kept)) > MAX_GRAMMAR:
                    kept.popitem(last=False)
        return GrammarState(matcher.deep_copy())

    def _compile(self, grammar: str) -> LLMatcher:
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise InvalidGrammar(KEY, brief(grammar), "needs llguidance (pip install 'kedge[server]')") from None
        if any(float(found[0]) <= -(2.0**63) for found in NEGATIVE.finditer(grammar)):  # llguidance's stack overflows
            raise InvalidGrammar(KEY, brief(grammar), "has a number that is too small: they must be above -2**63")
        # llguidance builds a state for each remainder, of all conditions on a number together; zeros cost little
        multiples = {found[1].replace(".", "").strip("0")[:19] or 1 for found in MULTIPLE.finditer(grammar)}
        if math.lcm(*map(int, multiples)) > 4096:
            raise InvalidGrammar(KEY, brief(grammar), "has `multipleOf`s without a common multiple up to 4096")
        matcher = LLMatcher(self._wrap(), LLMatcher.grammar_from_lark(grammar), log_level=0)
        if matcher.is_error():
            # llguidance's text without the excerpt of the grammar that follows it
            reason = " ".join(EXCERPT.split(matcher.get_error())[0].split())
            raise InvalidGrammar(KEY, brief(grammar), f"cannot be read: {reason}")
        tried = GrammarState(matcher.deep_copy())
        for _ in range(4):  # the first tokens show where no answer has an end
            if not tried.is_over:
                bits = int.from_bytes(tried.allowed(), "little")
                tried.take((bits & -bits).bit_length() - 1)
        return matcher

    def _wrap(self) -> LLTokenizer:
        """Return the tokenizer as llguidance reads it; made once, as that takes up to a second."""
        from llguidance.hf import from_tokenizer

        with self._lock:
            if self._wrapped is None:
                if not self._eos:
                    raise InvalidGrammar(KEY, "…", "this model has no token that ends an answer")
                self._wrapped = from_tokenizer(self._tokenizer.inner, n_vocab=self._vocab_size, eos_token=self._eos)
        return self._wrapped
