"""Base KV that running workflows share: of placeholder values, and of templates' prefix segments."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count, takewhile
from typing import NamedTuple

from kedge.errors import ConfigError, PlanError
from kedge.kv.segment import KVSegment
from kedge.types import Namespace, RunKey, SampleId, Tokens


class _SampleKey(NamedTuple):
    run: RunKey
    sample: SampleId


class _SharedTextKey(NamedTuple):
    """A value or text that several prompts of a run read: all tokens since the first value, up to its end, how many of
    them are its own, and the agent whose prompt has left its KV.
    """

    run: RunKey
    tokens: Tokens
    size: int
    reader: str


class ContentKey(NamedTuple):
    """A value, or tokens that prompts begin with: then no tokens are before them."""

    namespace: Namespace
    tokens: Tokens
    base_context: Tokens


class PrefixKey(NamedTuple):
    """A template's prefix segments."""

    namespace: Namespace
    template: str


LastingKey = ContentKey | PrefixKey
_RunKey = _SampleKey | _SharedTextKey
_Key = _RunKey | LastingKey


@dataclass(frozen=True, slots=True)
class KnownBase:
    """Base KV of a placeholder's value."""

    key: tuple[int, int]
    """Unique for this base KV in this process"""
    tokens: Tokens
    """Those that it is of: all of the value, or all but its last one"""
    kv: KVSegment
    reader: str = ""
    """The agent, with its template's wording, in whose prompt it was read; empty: it is the producer's"""


@dataclass(frozen=True, slots=True, eq=False)
class StoredBase:
    """Base KV as it is stored."""

    serial: int
    """Changes whenever the KV does"""
    parts: Mapping[int, KVSegment]
    """That of a template's prefix segments by segment index, or that of a value as number 0"""
    tokens: Tokens = ()
    """The value's"""
    reader: str = ""

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


@dataclass(frozen=True, slots=True)
class BaseStats:
    """What is stored now."""

    values: int
    templates: int
    nbytes: int


class BaseStore:
    """A store of at most `max_bytes` of base KV; beyond that the least recently used is dropped. One owner thread, no
    locks.

    Raises `ConfigError` where `max_bytes` is not positive.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes <= 0:
            raise ConfigError("anchors.max_base_bytes", max_bytes, "is too small")
        self._max_bytes, self._nbytes = max_bytes, 0
        self._entries: OrderedDict[_Key, StoredBase] = OrderedDict()
        self._readers: dict[tuple[RunKey, Tokens, int], dict[str, _SharedTextKey]] = {}
        """Who has left KV of a text, in order"""
        self._serials = count()

    def put_sample(self, run: RunKey, sample: SampleId, tokens: Tokens, kv: KVSegment) -> None:
        """Keep the base KV that a producer's decoding left. It may lack that of the last token, which was drawn and
        never run through the model.
        """
        self._put(_SampleKey(run, sample), 0, kv, tokens)

    def put_content(self, namespace: Namespace, tokens: Tokens, base_context: Tokens, kv: KVSegment) -> None:
        """Keep the result of a short prefill of `base_context + tokens`, for every run that has the same value."""
        self._put(ContentKey(namespace, tokens, base_context), 0, kv, tokens)

    def put_prefix(self, namespace: Namespace, template: str, index: int, kv: KVSegment) -> None:
        """Keep the base KV of the prefix segment that is number `index` of a template's segments."""
        self._put(PrefixKey(namespace, template), index, kv, ())

    def put_shared_text(self, run: RunKey, text: Tokens, kv: KVSegment, reader: str) -> None:
        """Keep the KV that the prompt of `reader` has of the last tokens of `text`, which it reads from its first value
        on: of another value, or of the template behind one. What is kept of that reader stays, and with it the order
        of readers: a check of its prompt, or a second pass, leaves the text again.
        """
        key = _SharedTextKey(run, text, kv.tokens, reader)
        if key in self._entries:
            return
        self._put(key, 0, kv, text[len(text) - kv.tokens :], reader)
        if key in self._entries:
            self._readers.setdefault(key[:3], {})[reader] = key

    def shared_text(self, run: RunKey, text: Tokens, size: int, reader: str) -> KnownBase | None:
        """Return the KV of the last `size` tokens of a text that the prompt of the run before `reader`'s has left, also
        once later ones have: what is learned or checked afterwards starts from what its prompt started from.
        """
        readers = self._readers.get((run, text, size), {})
        before = [*takewhile(lambda one: one != reader, readers)]
        if not before:
            return None
        stored = self._used(readers[before[-1]])
        return _entry(stored, stored.tokens)

    def find(self, run: RunKey, sample: SampleId, tokens: Tokens, base_context: Tokens) -> KnownBase | None:
        """Return base KV of a value: its producer's, if that generated these tokens (or more) in this run, else that of
        equal content. Its producer's may lack the last token.
        """
        least = max(1, len(tokens) - 1)
        for key in (_SampleKey(run, sample), ContentKey(run.namespace, tokens, base_context)):
            stored = self._entries.get(key)
            if stored and stored.tokens[: len(tokens)] == tokens and stored.parts[0].tokens >= least:
                return _entry(self._used(key), tokens)
        return None

    def prefixes(self, namespace: Namespace, template: str) -> Mapping[int, KVSegment] | None:
        """Return base KV of a template's prefix segments by segment index; None if there is none."""
        key = PrefixKey(namespace, template)
        return self._used(key).parts if key in self._entries else None

    def lasting(self, *, values: bool) -> list[LastingKey]:
        """Return the keys of what is not of a single run, least recently used first: of the base KV of templates and,
        if `values`, of values.
        """
        kinds = (PrefixKey, ContentKey) if values else (PrefixKey,)
        return [key for key in self._entries if isinstance(key, kinds)]

    def stored(self, key: LastingKey) -> StoredBase | None:
        """Return the base KV with this key; None if it has gone."""
        return self._entries.get(key)

    def end_run(self, run: RunKey) -> None:
        """Forget the values that a run's agents produced, and what their prompts left of the texts that they share."""
        for key in [key for key in self._entries if isinstance(key, _RunKey) and key.run == run]:
            self._drop(key)

    def clear(self) -> None:
        """Forget all base KV."""
        for key in [*self._entries]:
            self._drop(key)

    def stats(self) -> BaseStats:
        """Return a snapshot of the figures."""
        templates = sum(isinstance(key, PrefixKey | _SharedTextKey) for key in self._entries)
        return BaseStats(len(self._entries) - templates, templates, self._nbytes)

    def check_integrity(self) -> None:
        """Raise `PlanError` where the sum of bytes is wrong, or more than allowed."""
        real = sum(stored.nbytes for stored in self._entries.values())
        if real != self._nbytes:
            raise PlanError("nbytes", self._nbytes, f"{real} are stored")
        if real > self._max_bytes:
            raise PlanError("nbytes", real, f"{self._max_bytes} are allowed")

    def _put(self, key: _Key, index: int, kv: KVSegment, tokens: Tokens, reader: str = "") -> None:
        known = self._entries[key].parts if isinstance(key, PrefixKey) and key in self._entries else {}
        stored = StoredBase(next(self._serials), {**known, index: kv.owned()}, tokens, reader)
        self._drop(key)
        self._entries[key] = stored
        self._nbytes += stored.nbytes
        while self._nbytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def _used(self, key: _Key) -> StoredBase:
        """Return an entry, marked as most recently used."""
        self._entries.move_to_end(key)
        return self._entries[key]

    def _drop(self, key: _Key) -> None:
        if stored := self._entries.pop(key, None):
            self._nbytes -= stored.nbytes
        if isinstance(key, _SharedTextKey) and (readers := self._readers.get(key[:3])):
            readers.pop(key.reader, None)
            if not readers:
                del self._readers[key[:3]]


def _entry(stored: StoredBase, tokens: Tokens) -> KnownBase:
    kv = stored.parts[0].slice(0, len(tokens))
    return KnownBase((stored.serial, kv.tokens), tokens[: kv.tokens], kv, stored.reader)
