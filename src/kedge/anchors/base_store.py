"""Base KV that running workflows share: of placeholder values, and of templates' prefix segments."""

import logging
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import count, takewhile
from typing import NamedTuple

from kedge.errors import ConfigError, PlanError
from kedge.kv.segment import KVSegment
from kedge.structures import token_bytes
from kedge.types import Namespace, RunKey, SampleId, TenantId, Tokens

logger = logging.getLogger(__name__)


class _SampleKey(NamedTuple):
    run: RunKey
    sample: SampleId | None


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
_Part = tuple[_Key, slice]


@dataclass(frozen=True, slots=True)
class KnownBase:
    """Base KV of a placeholder's value."""

    key: tuple[int, int, int]
    """Unique for this base KV in this process"""
    tokens: Tokens
    """Those that it is of: all of the value, or all but its last one"""
    kv: KVSegment
    reader: str = ""
    """The agent, with its template's wording, in whose prompt it was read; empty: it is the producer's"""


@dataclass(slots=True, eq=False)
class StoredBase:
    """Base KV as it is stored, or room that is held for it."""

    serial: int
    """Changes whenever the KV does"""
    nbytes: int
    parts: Mapping[int, KVSegment]
    """That of a template's prefix segments by segment index, or that of a value as number 0; empty until it is there"""
    tokens: Tokens = ()
    """The value's"""
    reader: str = ""
    run: RunKey | None = None
    """The one that has read it last"""
    held_until: int = 0
    """It makes room for nothing else while runs have stored, read or been refused fewer bytes in all"""


@dataclass(frozen=True, slots=True)
class BaseStats:
    """What is stored now."""

    values: int
    templates: int
    nbytes: int


class BaseStore:
    """A store of at most `max_bytes` of base KV. One owner thread, no locks.

    What a run is still going to read is held: with too little room for all runs under way, each would drop what another
    is about to read, and all would be computed in vain. What comes later finds no room then. All else is dropped, least
    recently used first, and so is what nobody has read for long, as not all runs go on to their end.

    Raises `ConfigError` where `max_bytes` is not positive.
    """

    def __init__(self, max_bytes: int, bytes_per_token: int = 0, patience: int = 16) -> None:
        """Hold what is not read until runs have stored, read or been refused `patience` times the room."""
        if max_bytes <= 0:
            raise ConfigError("anchors.max_base_bytes", max_bytes, "is too small")
        self._max_bytes, self._per_token, self._longest_hold = max_bytes, bytes_per_token, patience * max_bytes
        self._nbytes = self._moved = 0
        """Bytes that are stored or held, and those for runs that were stored, read or refused in all"""
        self._entries: OrderedDict[_Key, StoredBase] = OrderedDict()
        self._readers: dict[tuple[RunKey, Tokens, int], dict[str, _SharedTextKey]] = {}
        """Who has left KV of a text, in order"""
        self._serials = count()

    def put_sample(self, run: RunKey, sample: SampleId, tokens: Tokens, kv: KVSegment) -> None:
        """Keep the base KV that a producer's decoding left. It may lack that of the last token, which was drawn and
        never run through the model.
        """
        self._put(_SampleKey(run, sample), {0: kv}, tokens, run)

    def put_content(
        self, namespace: Namespace, tokens: Tokens, base_context: Tokens, kv: KVSegment, run: RunKey | None = None
    ) -> None:
        """Keep the result of a short prefill of `base_context + tokens`, for every run that has the same value; `run`
        is going to read it.
        """
        self._put(ContentKey(namespace, tokens, base_context), {0: kv}, tokens, run)

    def put_prefix(self, namespace: Namespace, template: str, parts: Mapping[int, KVSegment]) -> None:
        """Keep the base KV of a template's prefix segments by segment index: of all, or of none for want of room."""
        self._put(PrefixKey(namespace, template), parts, ())

    def put_shared_text(self, run: RunKey, text: Tokens, kv: KVSegment, reader: str) -> None:
        """Keep the KV that the prompt of `reader` has of the last tokens of `text`, which it reads from its first value
        on: of another value, or of the template behind one. What is kept of that reader stays, and with it the order
        of readers: a check of its prompt, or a second pass, leaves the text again.
        """
        key = _SharedTextKey(run, text, kv.tokens, reader)
        if key in self._entries:
            return
        earlier = self._readers.get(key[:3], {})
        for one in earlier.values():  # the next reader starts from this one's
            self._entries[one].held_until = 0
        self._put(key, {0: kv}, text[len(text) - kv.tokens :], run, reader)
        if key in self._entries:
            self._readers.setdefault(key[:3], {})[reader] = key

    def hold(self, key: LastingKey, tokens: int, run: RunKey | None) -> bool:
        """Return whether there is room for base KV of so many tokens, that a run is going to read, and keep it until
        that is there. A template's is read by all runs.
        """
        return key in self._entries or self._add(key, StoredBase(0, self._per_token * tokens, {}, run=run))

    def is_expected(self, key: LastingKey) -> bool:
        """Return whether room is kept for base KV that is not there yet."""
        return key in self._entries and not self._entries[key].parts

    def note_read(
        self, run: RunKey, sample: SampleId | None, tokens: Tokens, base_context: Tokens, *, is_last: bool
    ) -> None:
        """Note that a request of a run reads a value; unless it `is_last`, others are going to."""
        if found := self.serving(run, sample, tokens, base_context):
            stored = self._used(found[0])
            stored.run, stored.held_until = run, 0 if is_last else self._moved + self._longest_hold
            self._moved += stored.nbytes

    def shared_text(self, run: RunKey, text: Tokens, size: int, reader: str) -> KnownBase | None:
        """Return the KV of the last `size` tokens of a text that the prompt of the run before `reader`'s has left, also
        once later ones have: what is learned or checked afterwards starts from what its prompt started from.
        """
        readers = self._readers.get((run, text, size), {})
        before = [*takewhile(lambda one: one != reader, readers)]
        if not before:
            return None
        stored = self._used(readers[before[-1]])
        return _entry(stored, slice(0, len(stored.tokens)))

    def find(self, run: RunKey, sample: SampleId | None, tokens: Tokens, base_context: Tokens) -> KnownBase | None:
        """Return base KV of a value: its producer's, if that generated these tokens in this run, with others around
        them or not, else that of equal content. Its producer's may lack the last token.
        """
        found = self.serving(run, sample, tokens, base_context)
        return _entry(self._used(found[0]), found[1]) if found else None

    def serving(self, run: RunKey, sample: SampleId | None, tokens: Tokens, base_context: Tokens) -> _Part | None:
        """Return the key of the base KV that `find` finds, and which part of it is the value's."""
        for key in (_SampleKey(run, sample), ContentKey(run.namespace, tokens, base_context)):
            stored = self._entries.get(key)
            if tokens and stored and stored.parts and (part := _part_of(stored, tokens)):
                return key, part
        return None

    def prefixes(
        self, namespace: Namespace, template: str, segments: Collection[int] = ()
    ) -> Mapping[int, KVSegment] | None:
        """Return base KV of a template's prefix segments by segment index; None if there is none. It is dropped where
        that of one of these `segments` is missing, as earlier versions may have saved it: nothing can be learned by it.
        """
        key = PrefixKey(namespace, template)
        if key not in self._entries or self.is_expected(key):
            return None
        stored = self._used(key)
        if not stored.parts.keys() >= {*segments}:
            logger.warning("base KV of template %s lacks segments, as an earlier version saved it: dropped", template)
            self._drop(key)
            return None
        stored.held_until = self._moved + self._longest_hold
        return stored.parts

    def lasting(self, *, values: bool) -> list[LastingKey]:
        """Return the keys of base KV that outlasts runs, least recently used first: of templates and, if `values`, of
        values.
        """
        kinds = (PrefixKey, ContentKey) if values else (PrefixKey,)
        return [key for key in self._entries if isinstance(key, kinds) and not self.is_expected(key)]

    def stored(self, key: LastingKey) -> StoredBase | None:
        """Return the base KV with this key; None if it has gone."""
        return None if self.is_expected(key) else self._entries.get(key)

    def end_run(self, run: RunKey) -> None:
        """Forget the values that a run's agents produced, and what their prompts left of the texts that they share.
        What else it has read makes room again.
        """
        name = run.run_id  # all entries are looked at, and few have the name
        for key in [key for key, one in self._entries.items() if one.run and one.run.run_id == name and one.run == run]:
            self._entries[key].held_until = 0
            if isinstance(key, _RunKey):
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

    def _put(
        self, key: _Key, parts: Mapping[int, KVSegment], tokens: Tokens, run: RunKey | None = None, reader: str = ""
    ) -> None:
        owned = {index: kv.owned() for index, kv in parts.items()}
        self._drop(key)
        nbytes = sum(kv.nbytes for kv in owned.values())
        self._add(key, StoredBase(next(self._serials), nbytes, owned, tokens, reader, run))

    def _add(self, key: _Key, new: StoredBase) -> bool:
        """Add an entry, held where it is a run's or a template's. Returns False where what would have to make room for
        it is held.
        """
        if new.nbytes > self._max_bytes:
            return False
        is_held = new.run is not None or isinstance(key, PrefixKey)
        self._moved += new.nbytes if is_held else 0
        if (lacking := self._nbytes + new.nbytes - self._max_bytes) > 0:
            loose = self._loose(_tenant(key), new.nbytes)
            if sum(self._entries[one].nbytes for one in loose) < lacking:
                return False
            for one in loose:
                if lacking > 0:
                    lacking -= self._entries[one].nbytes
                    self._drop(one)
        self._entries[key] = new
        self._nbytes += new.nbytes
        if is_held:
            new.held_until = self._moved + self._longest_hold
        return True

    def _loose(self, tenant: TenantId, nbytes: int) -> list[_Key]:
        """Return what is not held, least recently used first, and what others hold beyond their equal shares as long as
        `tenant` has less than its own.
        """
        taken = Counter({tenant: nbytes})
        for key, stored in self._entries.items():
            taken[_tenant(key)] += stored.nbytes
        share = self._max_bytes / len(taken)
        greedy = {one for one, its in taken.items() if taken[tenant] <= share < its}
        return [
            key for key, stored in self._entries.items() if stored.held_until <= self._moved or _tenant(key) in greedy
        ]

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


def _tenant(key: _Key) -> TenantId:
    return (key.run if isinstance(key, _RunKey) else key).namespace.tenant


def _part_of(stored: StoredBase, tokens: Tokens) -> slice | None:
    """Return which of the tokens with stored KV are a value's, wherever they begin: all of it, or all but its last one.
    A prompt may have a part of an answer only, and its tokenizer may have joined the ends with other text.
    """
    known = stored.tokens[: stored.parts[0].tokens]
    for wanted in (tokens, tokens[:-1] or tokens):
        is_first = known[: len(wanted)] == wanted  # as mostly: then nothing has to be packed
        start = 0 if is_first else token_bytes.find(token_bytes.pack(known), token_bytes.pack(wanted))
        if start >= 0:
            return slice(start, start + len(wanted))
    return None


def _entry(stored: StoredBase, part: slice) -> KnownBase:
    kv = stored.parts[0].slice(part.start, part.stop)
    return KnownBase((stored.serial, part.start, kv.tokens), stored.tokens[part], kv, stored.reader)
