"""Values of placeholders that a client wrote (`kedge.bindings`)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from kedge.checks import require_text
from kedge.engine.base import Tokenizer
from kedge.errors import RequestError
from kedge.types import SampleId
from kedge.workflow.template import Placeholder, Value


def value_of(tokenizer: Tokenizer, placeholder: Placeholder, text: str) -> Value:
    """Return the value that `text` is. Its sample is named by its tokens, so that equal texts are one sample.

    Special tokens that are spelled out in `text` are read as plain text. Raises `RequestError` for invalid Unicode.
    """
    require_text(f"kedge.bindings.{placeholder.name}", text, may_be_empty=True)
    tokens = tokenizer.encode(text, special=False) if text else ()
    digest = hashlib.blake2b(repr(tokens).encode(), digest_size=12).hexdigest()
    return Value(tokens, SampleId(placeholder.kind, placeholder.of, placeholder.turns_back, digest))


def require_known(bindings: Mapping[str, str], placeholders: Sequence[Placeholder]) -> None:
    """Raise `RequestError` for a binding that none of the placeholders reads."""
    names = {placeholder.name for placeholder in placeholders}
    for name in bindings:
        if name not in names:
            raise RequestError("kedge.bindings", name, f"the agent reads only {', '.join(sorted(names)) or 'nothing'}")
