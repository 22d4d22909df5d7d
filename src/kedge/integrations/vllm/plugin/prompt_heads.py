"""The KV of what prompts begin with, kept with base KV: vLLM keeps its full blocks only, and may have evicted them."""

from __future__ import annotations

from kedge.anchors.base_store import BaseStore
from kedge.kv.segment import KVSegment
from kedge.reuse.contracts import ReadKV
from kedge.types import GenerateRequest, SampleId, ValueKind

_NO_SAMPLE = SampleId(ValueKind.INPUT, "")
"""For the beginning of a prompt, which is identified by its tokens alone"""


class PromptHeads:
    """The first prefix segments of one rank's prompts."""

    def __init__(self, bases: BaseStore) -> None:
        self._bases = bases

    def find(self, request: GenerateRequest) -> KVSegment | None:
        """Return the KV of a prompt's first segment; None where it is not known, a value or all of the prompt."""
        first = request.segments[0]
        if first.is_placeholder or len(request.segments) == 1:
            return None
        entry = self._bases.find(request.run_key, _NO_SAMPLE, first.tokens, ())
        return entry.kv if entry else None

    def tokens(self, request: GenerateRequest) -> int:
        """Return how many tokens of a prompt are known so."""
        head = self.find(request)
        return head.tokens if head else 0

    def keep(self, request: GenerateRequest, read: ReadKV) -> None:
        """Keep the KV of a computed prompt's first segment, unless it is known."""
        first = request.segments[0]
        if first.tokens and not first.is_placeholder and self.find(request) is None:
            self._bases.put_content(request.namespace, first.tokens, (), read(0, len(first.tokens)))
