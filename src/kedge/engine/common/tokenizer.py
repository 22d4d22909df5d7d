"""Transformers' tokenizers as the `Tokenizer` of the Engine protocol."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kedge.engine.common.token_bytes import Spelling
from kedge.errors import ModelNotFound
from kedge.types import Tokens


class HFTokenizer:
    """A Transformers tokenizer as the `Tokenizer` of the Engine protocol."""

    def __init__(self, inner: PreTrainedTokenizerBase) -> None:
        self.inner = inner
        self.eos_token_id: int | None = inner.eos_token_id
        self._spelling = Spelling(inner.backend_tokenizer)

    @classmethod
    def load(cls, path: Path) -> HFTokenizer:
        """Return a folder's tokenizer. Raises `ModelNotFound` where there is none that can be read."""
        try:
            return cls(AutoTokenizer.from_pretrained(path, local_files_only=True))
        except (OSError, ValueError) as error:
            raise ModelNotFound("tokenizer", str(path), f"cannot be loaded: {error}") from error

    def encode(self, text: str, *, special: bool = True) -> Tokens:
        return tuple(self.inner.encode(text, add_special_tokens=False, split_special_tokens=not special))

    def decode(self, tokens: Tokens) -> str:
        return cast(str, self.inner.decode(list(tokens), skip_special_tokens=True))

    def token_bytes(self, token: int) -> bytes:
        return self._spelling(token)

    def chat(self, system: str | None, user: str) -> str:
        """Render the model's chat template or, where it has none, BOS and the two texts with blank lines between."""
        if self.inner.chat_template is None:
            texts = [text for text in (system, user) if text]
            return (self.inner.bos_token or "") + "\n\n".join(texts) + "\n\n"
        messages = [{"role": "user", "content": user}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        return cast(str, self.inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
