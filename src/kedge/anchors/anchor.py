"""Anchors: past values of a placeholder, and how to recognise an equal value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

import torch
from torch import Tensor

from kedge.types import Tokens

AnchorId = NewType("AnchorId", int)
"""Unique in a store and growing: a smaller id was added earlier."""


@dataclass(frozen=True, slots=True)
class Query:
    """A value to be matched: its token ids and one key vector per token."""

    tokens: Tokens
    keys: Tensor
    """float32 [tokens, match_dim]"""
    tolerance: float
    """Relative difference of key vectors up to which they count as equal, since it is rounding."""


@dataclass(slots=True)
class Anchor:
    """A past value. Its base KV is not kept; its offsets lie in the tables of the sites that observed it."""

    id: AnchorId
    tokens: Tokens
    keys: Tensor
    """float32 [tokens, match_dim]"""
    hits: int = 0
    """Requests whose translation used this anchor."""

    @property
    def length(self) -> int:
        """Tokens of the value."""
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of its key vectors."""
        return self.keys.nbytes

    def is_value(self, query: Query) -> bool:
        """Return whether a value has the same token ids and, token by token, the same base keys up to rounding."""
        if self.tokens != query.tokens:
            return False
        difference = torch.linalg.vector_norm(self.keys - query.keys, dim=1)
        allowed = query.tolerance * torch.linalg.vector_norm(query.keys, dim=1)
        return bool((difference <= allowed).all())
