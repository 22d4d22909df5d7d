"""Transformers' tokenizers as the `Tokenizer` of the `Engine` contract, with the bytes of single tokens: a tokenizer's
own `decode` shows half a character as U+FFFD.

How a tokenizer treats the beginning of a text is found out when it is loaded: some put a blank there (Llama 2), which
pieces of a longer text must not get.
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple, Self, cast

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from kedge.errors import ModelNotFound, PromptTooLong
from kedge.types import Tokens

_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"


class Spelling:
    """A reader of the vocabulary of a byte-level tokenizer, or of one that writes spaces as U+2581 and bytes as
    <0xNN>.
    """

    def __init__(self, raw: Tokenizer) -> None:
        self._raw = raw
        self._added = {token: added.content for token, added in raw.get_added_tokens_decoder().items()}
        self._is_byte_level = raw.decoder is not None and _has_part(json.loads(raw.decoder.__getstate__()), "ByteLevel")

    def is_byte(self, token: int) -> bool:
        """Return whether a token stands for one byte as <0xNN>, so that its text depends on its neighbours."""
        return not self._is_byte_level and bool(_BYTE.fullmatch(self._raw.id_to_token(token) or ""))

    def __call__(self, token: int) -> bytes:
        """Return the bytes of a token; empty for an id that is not in the vocabulary: models may have more rows than
        tokens.
        """
        if token in self._added:
            return self._added[token].encode()
        text = self._raw.id_to_token(token) or ""
        if self._is_byte_level:
            return b"".join(bytes([_BYTES[one]]) if one in _BYTES else one.encode() for one in text)
        if found := _BYTE.fullmatch(text):
            return bytes.fromhex(found[1])
        return text.replace(_SPACE, " ").encode()


def _has_part(decoder: dict, kind: str) -> bool:
    """Return whether a decoder, given as its state, is of a kind or contains one of that kind."""
    return decoder["type"] == kind or any(_has_part(part, kind) for part in decoder.get("decoders", ()))


class _Encoded(NamedTuple):
    """Token ids, and where in its text each of them ends, in characters."""

    tokens: Tokens
    ends: Sequence[int]


class HFTokenizer:
    """A Transformers tokenizer, see `kedge.engine.base.Tokenizer`."""

    _PROBES = ("Hello", "[x]", "1")
    _LEADS = ("\n", ".", "a")
    """Texts that a piece is put behind, so that it is not the beginning of a text"""

    def __init__(self, inner: PreTrainedTokenizerBase) -> None:
        self.inner = inner
        self.eos_token_id: int | None = inner.eos_token_id
        self.most: int | None = None
        self._raw = raw = inner.backend_tokenizer
        raw.no_truncation()
        raw.no_padding()
        self._spelling = Spelling(raw)
        added = raw.get_added_tokens_decoder()
        self.specials: Mapping[str, int] = {one.content: token for token, one in added.items() if one.special}
        self._special_ids = frozenset(self.specials.values())
        self._marks_beginnings = any(self._encoded(one) != self._behind(raw, one) for one in self._PROBES)
        special = next(iter(self.specials), "")
        after = [self._encoded(special + one).tokens[1:] for one in self._PROBES]
        self._marks_after_special = after == [self._encoded(one).tokens for one in self._PROBES]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Return a folder's tokenizer. Raises `ModelNotFound` where there is none that can be read."""
        try:
            return cls(AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False))
        except (OSError, ValueError) as error:
            raise ModelNotFound("tokenizer", str(path), f"cannot be loaded: {error}") from error

    def encode(self, text: str, *, special: bool = True, inside: bool = False) -> Tokens:
        encoded = self._encoded(text, inside=inside)
        if special or self._special_ids.isdisjoint(encoded.tokens):
            return encoded.tokens
        return self._encoded(text, plain=True, inside=inside).tokens

    def encode_cut(self, text: str, ends: Sequence[int], mark: str) -> list[Tokens]:
        self.measure(text)
        encoded = self._encoded(text)
        if mark in text:
            encoded, ends = self._without_marks(text, encoded, ends, mark)
        reached = list(accumulate(encoded.ends, max))
        cuts = (0, *(bisect_right(reached, end) for end in ends[:-1]), len(encoded.tokens))
        return [encoded.tokens[begin:end] for begin, end in pairwise(cuts)]

    def _without_marks(
        self, text: str, encoded: _Encoded, ends: Sequence[int], mark: str
    ) -> tuple[_Encoded, Sequence[int]]:
        """Return the tokens of `text` without its marks, and where it is to be cut then.

        What is between two special tokens, and has a mark, is encoded again as plain text.
        """
        marks = [found.start() for found in re.finditer(re.escape(mark), text)]
        tokens: list[int] = []
        token_ends: list[int] = []
        begin_token = begin = 0
        for at in (*(at for at, one in enumerate(encoded.tokens) if one in self._special_ids), len(encoded.tokens)):
            last = encoded.ends[at - 1] if at > begin_token else begin
            if bisect_left(marks, begin) == bisect_left(marks, last):
                again = _Encoded(encoded.tokens[begin_token:at], encoded.ends[begin_token:at])
                shift = -bisect_left(marks, begin)
            else:
                is_inside = begin > 0 and not self._marks_after_special
                again = self._encoded(text[begin:last].replace(mark, ""), plain=True, inside=is_inside)
                shift = begin - bisect_left(marks, begin)
            closing = slice(at, at + 1)  # the special token itself
            after = [end - bisect_left(marks, end) for end in encoded.ends[closing]]
            tokens += (*again.tokens, *encoded.tokens[closing])
            token_ends += (*(end + shift for end in again.ends), *after)
            begin_token, begin = at + 1, encoded.ends[at] if after else last
        return _Encoded(tuple(tokens), token_ends), [end - bisect_left(marks, end) for end in ends]

    def _encoded(self, text: str, *, plain: bool = False, inside: bool = False) -> _Encoded:
        raw = self._plain if plain else self._raw
        if inside and self._marks_beginnings:
            return self._behind(raw, text)
        encoded = raw.encode(text, add_special_tokens=False)
        return _Encoded(tuple(encoded.ids), [end for _, end in encoded.offsets])

    def measure(self, text: str) -> None:
        if self.most is None:
            return
        size = 2 * self.most
        while size < len(text):
            count = len(self._raw.encode(text[:size], add_special_tokens=False).ids)
            if count > 2 * self.most:
                raise PromptTooLong.of("prompt_tokens", count * len(text) // size, self.most)
            size *= 2

    def _behind(self, raw: Tokenizer, text: str) -> _Encoded:
        """Return the tokens of `text` behind another text; as it is by itself where no other text keeps apart."""
        for lead in self._LEADS:
            try:
                encoded = raw.encode(lead + text, add_special_tokens=False)
            except Exception:  # noqa: S112 (it has no class of its own) - the vocabulary lacks this lead
                continue
            many = sum(end <= len(lead) for _, end in encoded.offsets)
            if all(begin >= len(lead) for begin, _ in encoded.offsets[many:]):
                return _Encoded(tuple(encoded.ids[many:]), [end - len(lead) for _, end in encoded.offsets[many:]])
        return self._encoded(text)

    @cached_property
    def _plain(self) -> Tokenizer:
        """The same tokenizer for texts that spell out special tokens, which it does not recognise."""
        data = json.loads(self._raw.to_str())
        data["added_tokens"] = [one for one in data["added_tokens"] if not one["special"]]
        vocab, unknown = data["model"]["vocab"], self.inner.unk_token_id
        for name, token in self.specials.items():  # models that choose among all pieces of a text would find it there
            if isinstance(vocab, list) and token < len(vocab) and token != unknown:
                vocab[token][0] = f"\uf8ff{name}"
            elif isinstance(vocab, dict) and token != unknown and name in vocab:
                vocab[f"\uf8ff{name}"] = vocab.pop(name)
        return Tokenizer.from_str(json.dumps(data))

    def decode(self, tokens: Tokens) -> str:
        return cast(str, self._raw.decode(list(tokens), skip_special_tokens=True))

    def plain(self, tokens: Tokens) -> Tokens:
        if self._special_ids.isdisjoint(tokens):
            return tokens
        return tuple(token for token in tokens if token not in self._special_ids)

    def token_bytes(self, token: int) -> bytes:
        return self._spelling(token)

    def is_certain(self, token: int) -> bool:
        return not self._spelling.is_byte(token) and token not in self._special_ids

    def chat(self, system: str | None, user: str) -> str:
        """Render the model's chat template or, where it has none, BOS and the two texts with blank lines between."""
        if self.inner.chat_template is None:
            texts = [text for text in (system, user) if text]
            return (self.inner.bos_token or "") + "\n\n".join(texts) + "\n\n"
        messages = [{"role": "user", "content": user}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        return cast(str, self.inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
