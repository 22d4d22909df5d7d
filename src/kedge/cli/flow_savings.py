"""What a workflow's prompts would save, for a terminal: prefix caching, role last, and translation."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from kedge.workflow.savings import RunSavings

WAYS = {
    "prefix": ("prefix caching, prompts as they are", "exact"),
    "role_last": ("prefix caching, shared text first and role last", "exact"),
    "translation": ("translation, prompts as they are", "at most; approximate"),
}
CLOSE = 0.1
"""Shares that differ by at most this count as equal: lengths are assumed, and translation's share is a bound."""


def savings_table(savings: RunSavings) -> Table:
    """Return the table of the shares of a run's prompt tokens that each way of serving saves."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("prompt tokens that need not be computed")
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("answers")
    for way, (name, answers) in WAYS.items():
        table.add_row(name, f"{savings.share(way):.0%}", answers)
    return table


def calls_table(savings: RunSavings) -> Table:
    """Return the table of every call's prompt tokens, and how many of them each way of serving saves."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("call", overflow="fold")
    for column in ("prompt tokens", "prefix caching", "role last", "translation"):
        table.add_column(column, justify="right")
    several = any(call.step.turn for call in savings.calls)
    for call in savings.calls:
        name = call.step.agent + (f", turn {call.step.turn + 1}" if several else "")
        counts = (call.prompt, call.prefix, call.role_last, call.translation)
        table.add_row(name, *(f"{count:,}" for count in counts))
    return table


def advice(savings: RunSavings) -> str:
    """Return the advice on what to try first: the exact way wherever it saves as much."""
    as_is, role_last, translation = (savings.share(way) for way in WAYS)
    if max(role_last, translation) <= as_is + CLOSE:
        return "These prompts begin with what they share: plain prefix caching is exact, and as good as it gets here."
    if translation <= role_last + CLOSE:
        return (
            "Put the shared text first and the role last if your agents answer as well that way: plain prefix caching "
            "then saves as much, its answers are exact, and translation is not needed."
        )
    return (
        "Where the shared text can stand first and the role last, plain prefix caching is exact and better: try that "
        "first. Translation is for prompts that have to begin with the role. It computes again the tokens that it "
        "would get wrong, on the bundled model more than half of them; `kedge run` shows how many."
    )


def paragraphs(*texts: str, width: int) -> Iterator[str]:
    """Yield the lines of some paragraphs, at most `width` columns wide."""
    for text in texts:
        yield from textwrap.wrap(text, min(width, 100), break_on_hyphens=False)
