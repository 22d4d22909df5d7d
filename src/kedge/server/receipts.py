"""Receipts and usage as answers report them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kedge.hints import Hints
from kedge.types import Completion, Source


def receipt(completion: Completion) -> dict[str, Any]:
    """Return where the prompt's tokens came from, and the timings.

    The engine's request ids are left out: their numbers would reveal how much other tenants ask for.
    """
    found = completion.receipt
    return {
        "mode": found.mode,
        "tokens": {source.value: found.tokens(source) for source in Source},
        "preassembled": found.preassembled,
        "misses": [{"segment": miss.segment, "reason": miss.reason} for miss in found.misses],
        "guard": [asdict(note) for note in found.guard],
        "parts_ms": dict(found.parts_ms),
        "ttft_ms": completion.ttft_ms,
        "total_ms": completion.total_ms,
    }


def kedge_field(hints: Hints, completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the field `kedge` of an answer and of a stream's last chunk: a receipt per choice, the hints, and what
    became of each of the client's actions.
    """
    field = {"receipts": [receipt(completion) for completion in completions], "hints": hints.to_dict()}
    return {**field, "actions": [one.to_dict() for one in hints.actions]} if hints.actions else field


def usage(completions: Sequence[Completion], per_prompt: int) -> dict[str, Any]:
    """Return the token counts of a call.

    A prompt counts once for all of its `per_prompt` choices, with the cached tokens of its first choice.
    """
    receipts = [completion.receipt for completion in completions[::per_prompt]]
    prompt_tokens = sum(one.prompt_tokens for one in receipts)
    completion_tokens = sum(len(completion.tokens) for completion in completions)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(one.exact for one in receipts)},
    }
