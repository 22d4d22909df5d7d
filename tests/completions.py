"""Answers with receipts that say where so many prompt tokens came from."""

from itertools import accumulate, pairwise

from kedge.types import Completion, FinishReason, Receipt, ReuseMode, Source, Span


def completion(text: str = "", *, exact: int = 0, translated: int = 0, computed: int = 10) -> Completion:
    sources, counts = (Source.DEVICE, Source.TRANSLATED, Source.COMPUTED), (exact, translated, computed)
    ends = pairwise([0, *accumulate(counts)])
    spans = tuple(
        Span(start, stop, source) for (start, stop), source in zip(ends, sources, strict=True) if stop > start
    )
    receipt = Receipt("r", ReuseMode.TRANSLATE, spans)
    return Completion("r", text, (1,), FinishReason.STOP, receipt, 12345.6, 23456.7)
