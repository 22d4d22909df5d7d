"""Conversations as chains of 512-token blocks, with integers for prefix hashes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from kedge.bench.sessions.records import BLOCK, TraceRecord
from kedge.structures.prefixes import common_prefix

MAX_TOKENS = 200_000
"""Conversations with a longer prompt are left out, as in the reference: no engine of the usual limits serves them."""


@dataclass(frozen=True, slots=True)
class TraceTurn:
    """A request of a conversation with its prompt as a chain of full blocks: same integer, same whole prefix."""

    record: TraceRecord
    chain: tuple[int, ...]
    fixed_blocks: int
    """Leading blocks that tool definitions and system prompt fill; what all of an agent's prompts begin with where the
    trace has no sizes of these but ids that match across conversations."""


Conversation = Sequence[TraceTurn]


def conversations(
    records: Iterable[TraceRecord], max_tokens: int | None = MAX_TOKENS, block: int = BLOCK
) -> list[Conversation]:
    """Group a trace by conversation, in order of their first requests, in blocks of `block` tokens.

    The id of a coarse block is that of its last fine one, which is exact since ids are hashes of whole prefixes. Ids of
    different conversations never match, except: tool definitions of the same size are assumed to be the same text, and
    so are system prompts of the same size behind them.
    """
    groups: dict[str, list[TraceRecord]] = {}
    for record in records:
        groups.setdefault(record.conversation, []).append(record)
    kept = [one for one in groups.values() if max_tokens is None or max(r.tokens for r in one) <= max_tokens]
    numbers: dict[Hashable, int] = {}
    found: list[Conversation] = [list(_turns(one, numbers, block)) for one in kept]
    return _with_common_prompts(found) if found and found[0][0].record.is_shared else found


def _turns(records: Sequence[TraceRecord], numbers: dict[Hashable, int], block_size: int) -> Iterator[TraceTurn]:
    """Yield the turns of a conversation; `numbers` has the integers of all blocks so far."""
    space = None if records[0].is_shared else records[0].conversation
    fixed: dict[int, Hashable] = {}
    for record in records:
        fixed.update(_fixed_keys(record))
        coarse = list(record.ids(block_size // record.block_size))
        chain = tuple(numbers.setdefault(fixed.get(block, (space, block)), len(numbers)) for block in coarse)
        yield TraceTurn(record, chain, sum(block in fixed for block in coarse))


def _fixed_keys(record: TraceRecord) -> Mapping[int, Hashable]:
    """Return what the blocks of tool definitions and system prompt are known by across conversations."""
    if not record.tools_tokens:
        return {}
    tools, system, size = record.tools_tokens, record.system_tokens, record.block_size
    return {
        block: ("tools", tools, at) if (at + 1) * size <= tools else ("system", tools, system, at)
        for at, block in enumerate(islice(record.ids(), (tools + system) // size))
    }


def _with_common_prompts(found: Sequence[Conversation]) -> list[Conversation]:
    """Set the fixed blocks of every turn to those that all prompts of its agent begin with."""
    common: dict[str, tuple[int, ...]] = {}
    for turn in (turn for one in found for turn in one):
        agent = turn.record.agent
        common[agent] = common_prefix([common.get(agent, turn.chain), turn.chain])
    return [[replace(turn, fixed_blocks=len(common[turn.record.agent])) for turn in one] for one in found]
