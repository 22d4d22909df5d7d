"""Estimates of how many prompt tokens of a workflow need not be computed, from its templates alone.

Three ways of serving are compared on the same calls: prefix caching of the prompts as they are written, prefix caching
of prompts that begin with the text they share and end with the role, and translation. No model runs. The fixed text
is counted with a tokenizer; the lengths of what fills the placeholders are assumptions (`ValueLengths`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kedge.settings import EngineSettings
from kedge.structures.prefixes import chain_of, common_prefix
from kedge.types import AgentId, ReuseMode, ValueKind
from kedge.workflow.graph import Step, Workflow
from kedge.workflow.template import ChatTokenizer, CompiledAgent, Placeholder, compile_agents

BLOCK = EngineSettings().block_size
"""Tokens per block: a prefix cache finds whole blocks only."""
Tokens = tuple[Hashable, ...]


@dataclass(frozen=True)
class ValueLengths:
    """Assumed numbers of tokens of what fills the placeholders.

    `answer` is bounded by an agent's `max_tokens`. `named` goes before the other three; its keys are names of inputs,
    `agent_ID` and `condition_ID`.
    """

    input: int = 200
    answer: int = 200
    tool: int = 50
    named: Mapping[str, int] = field(default_factory=dict)

    def of(self, workflow: Workflow, kind: ValueKind, of: str) -> int:
        """Return the number of tokens of an input, of an agent's answer or of its tool's result."""
        default = {ValueKind.INPUT: self.input, ValueKind.CONDITION: self.tool}.get(kind)
        if default is None:
            default = min(self.answer, workflow.agent(of).max_tokens)
        return self.named.get(value_name(kind, of), default)


def value_name(kind: ValueKind, of: str) -> str:
    """Return the name of a value in `ValueLengths.named`."""
    return of if kind is ValueKind.INPUT else f"{kind}_{of}"


@dataclass(frozen=True)
class CallSavings:
    """The prompt tokens of one call, and how many of them each way of serving would not compute."""

    step: Step
    prompt: int
    prefix: int
    role_last: int
    translation: int
    """An upper bound: tokens that translation would get wrong are computed"""


@dataclass(frozen=True)
class RunSavings:
    """All calls of one run, once earlier runs have filled the cache and the anchor pools."""

    calls: tuple[CallSavings, ...]

    def share(self, way: str) -> float:
        """Return the share of all prompt tokens that `way` (a field of `CallSavings`) would not compute."""
        return sum(getattr(call, way) for call in self.calls) / sum(call.prompt for call in self.calls)


def estimate_savings(
    workflow: Workflow,
    tokenizer: ChatTokenizer,
    lengths: ValueLengths = ValueLengths(),  # noqa: B008 (it is frozen)
) -> RunSavings:
    """Estimate the savings of one run. The calls are served one after the other, in the order of `Workflow.steps`."""
    agents = compile_agents(workflow.agents, tokenizer)
    calls = [_call(workflow, agents, step, lengths, run) for run in range(2) for step in workflow.steps]
    ways = _found(calls), _found(_role_last(calls, workflow)), _translated(calls)
    counts = list(zip(calls, *ways, strict=True))[len(workflow.steps) :]
    return RunSavings(tuple(CallSavings(call.step, len(call.tokens), *found) for call, *found in counts))


# calls ----------------------------------------------------------------------------------------------------------------


class _Value(NamedTuple):
    """What fills a placeholder in one run. Inputs have turn 0."""

    run: int
    kind: ValueKind
    of: str
    turn: int


class _Piece(NamedTuple):
    """A part of a prompt: fixed text (no value), or a value, whose tokens differ from every other's."""

    tokens: Tokens
    value: _Value | None = None


@dataclass(frozen=True)
class _Call:
    step: Step
    pieces: tuple[_Piece, ...]
    answer: _Piece
    reuse: ReuseMode | None

    @property
    def tokens(self) -> Tokens:
        return tuple(token for piece in self.pieces for token in piece.tokens)


def _call(
    workflow: Workflow, agents: Mapping[AgentId, CompiledAgent], step: Step, lengths: ValueLengths, run: int
) -> _Call:
    agent = agents[step.agent]

    def piece(kind: ValueKind, of: str, turn: int) -> _Piece:
        value = _Value(run, kind, of, turn)
        return _Piece(tuple((value, i) for i in range(lengths.of(workflow, kind, of))), value)

    def filled(placeholder: Placeholder) -> _Piece:
        if placeholder.kind is ValueKind.INPUT:
            return piece(placeholder.kind, placeholder.of, 0)
        source = workflow.source(step, placeholder)
        return piece(placeholder.kind, placeholder.of, source.turn) if source else _Piece(())

    rest = zip(map(filled, agent.placeholders), map(_Piece, agent.prefixes[1:]), strict=True)
    pieces = (_Piece(agent.prefixes[0]), *(each for pair in rest for each in pair))
    return _Call(step, pieces, piece(ValueKind.AGENT, step.agent, step.turn), workflow.agent(step.agent).reuse)


# ways of serving ------------------------------------------------------------------------------------------------------


def _match(cache: set[Hashable], tokens: Tokens) -> int:
    """Return the length of the longest prefix that a cache of whole blocks has; the last token is never part of it."""
    chain = chain_of(tokens, BLOCK)
    blocks = next((at for at, block in enumerate(chain) if block not in cache), len(chain))
    return min(BLOCK * blocks, len(tokens) - 1)


def _found(calls: Iterable[_Call]) -> Iterator[int]:
    """Yield for each call how much of its prompt a prefix cache has."""
    cache = set[Hashable]()
    for call in calls:
        yield _match(cache, call.tokens)
        cache.update(chain_of((*call.tokens, *call.answer.tokens), BLOCK))


def _translated(calls: Iterable[_Call]) -> Iterator[int]:
    """Yield for each call how much of its prompt is found or can be translated.

    A prompt enters the prefix cache up to its first translated token. Inputs and results of tools are computed by
    their first reader; answers have KV since they were written.
    """
    cache, known = set[Hashable](), set[_Value | None]()
    for call in calls:
        exact = _match(cache, call.tokens) if call.reuse is not ReuseMode.OFF else 0
        may = call.reuse in (None, ReuseMode.TRANSLATE)
        translated = list(_translatable(call, exact, known)) if may else []
        yield min(exact + sum(stop - start for start, stop in translated), len(call.tokens) - 1)
        cached = call.tokens[: translated[0][0]] if translated else (*call.tokens, *call.answer.tokens)
        cache.update(chain_of(cached, BLOCK))
        known |= {piece.value for piece in (*call.pieces, call.answer)}


def _translatable(call: _Call, exact: int, known: set[_Value | None]) -> Iterator[tuple[int, int]]:
    """Yield the spans behind the exact prefix that can be translated: known values, and the fixed text behind each."""
    at, translates = 0, False
    for piece in call.pieces:
        start, at = max(at, exact), at + len(piece.tokens)
        if piece.value is not None:
            translates = piece.value in known
        if translates and start < at:
            yield start, at


def _role_last(calls: Sequence[_Call], workflow: Workflow) -> Iterator[_Call]:
    """Rewrite the prompts: what all begin with, then the values in one order for all, then the rest of the fixed text.

    Values that only one call reads come after the others.
    """
    head = len(common_prefix([call.pieces[0].tokens for call in calls]))
    readers = Counter(piece.value for call in calls for piece in call.pieces)

    def order(piece: _Piece) -> tuple[object, ...]:
        value = piece.value
        assert value is not None
        names: Sequence[str] = workflow.inputs if value.kind is ValueKind.INPUT else workflow.order
        is_answer = value.kind is not ValueKind.INPUT
        return readers[value] == 1, is_answer, value.turn, names.index(value.of), value.kind

    for call in calls:
        fixed = tuple(token for piece in call.pieces if piece.value is None for token in piece.tokens)
        values = sorted((piece for piece in call.pieces if piece.value), key=order)
        yield replace(call, pieces=(_Piece(fixed[:head]), *values, _Piece(fixed[head:])))
