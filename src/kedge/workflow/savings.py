"""Estimates of how many prompt tokens of a workflow need not be computed, from its templates alone.

Three ways of serving are compared on the same calls: prefix caching of the prompts as they are written, prefix caching
of prompts that begin with the text they share and end with the role, and translation. No model runs. The fixed text
is counted with a tokenizer; the lengths of what fills the placeholders are assumptions (`ValueLengths`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from kedge.settings import EngineSettings
from kedge.structures.prefixes import common_prefix
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


class _PrefixCache:
    """The whole blocks of all token sequences so far."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, Tokens], int] = {}

    def match(self, tokens: Sequence[Hashable]) -> int:
        """Return the length of the longest prefix that is cached; the last token is never part of it."""
        node, found = 0, 0
        for block in _blocks(tokens):
            child = self._children.get((node, block))
            if child is None:
                break
            node, found = child, found + BLOCK
        return min(found, len(tokens) - 1)

    def add(self, tokens: Sequence[Hashable]) -> None:
        node = 0
        for block in _blocks(tokens):
            node = self._children.setdefault((node, block), len(self._children) + 1)


def _blocks(tokens: Sequence[Hashable]) -> Iterator[Tokens]:
    return (tuple(tokens[at : at + BLOCK]) for at in range(0, len(tokens) - BLOCK + 1, BLOCK))


def _found(calls: Iterable[_Call]) -> Iterator[int]:
    """Yield for each call how much of its prompt a prefix cache has."""
    cache = _PrefixCache()
    for call in calls:
        yield cache.match(call.tokens)
        cache.add((*call.tokens, *call.answer.tokens))


def _translated(calls: Iterable[_Call]) -> Iterator[int]:
    """Yield for each call how much of its prompt is found or can be translated.

    A prompt enters the prefix cache up to its first translated token. Inputs and results of tools are computed by
    their first reader; answers have KV since they were written.
    """
    cache, known = _PrefixCache(), set[_Value | None]()
    for call in calls:
        exact = cache.match(call.tokens) if call.reuse is not ReuseMode.OFF else 0
        may = call.reuse in (None, ReuseMode.TRANSLATE)
        translated = list(_translatable(call, exact, known)) if may else []
        yield min(exact + sum(stop - start for start, stop in translated), len(call.tokens) - 1)
        cache.add(call.tokens[: translated[0][0]] if translated else (*call.tokens, *call.answer.tokens))
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


# role last ------------------------------------------------------------------------------------------------------------


def _role_last(calls: Sequence[_Call], workflow: Workflow) -> list[_Call]:
    """Rewrite the prompts: what all begin with, then the values in one order for all, then the rest of the fixed text.

    A value keeps the words in front of it that all of its readers have there ("Question:"). Values that only one call
    reads come after the others.
    """
    head = len(common_prefix([call.pieces[0].tokens for call in calls]))
    readers = Counter(piece.value for call in calls for piece in call.pieces)
    before: dict[tuple[ValueKind, str], list[Tokens]] = {}
    for call in calls:
        for tokens, piece in _pairs(call, head):
            if piece.value and readers[piece.value] > 1:
                before.setdefault((piece.value.kind, piece.value.of), []).append(tokens[::-1])
    labels = {of: len(common_prefix(found)) for of, found in before.items()}

    def order(value: _Value) -> tuple[object, ...]:
        names: Sequence[str] = workflow.inputs if value.kind is ValueKind.INPUT else workflow.order
        is_answer = value.kind is not ValueKind.INPUT
        return readers[value] == 1, is_answer, value.turn, names.index(value.of), value.kind

    return [_reordered(call, head, labels, order) for call in calls]


def _pairs(call: _Call, head: int) -> Iterator[tuple[Tokens, _Piece]]:
    """Yield every value with the fixed text in front of it, without the first `head` tokens of the prompt."""
    for i in range(1, len(call.pieces), 2):
        yield call.pieces[i - 1].tokens[head if i == 1 else 0 :], call.pieces[i]


def _reordered(
    call: _Call, head: int, labels: Mapping[tuple[ValueKind, str], int], order: Callable[[_Value], Any]
) -> _Call:
    values, rest = list[tuple[_Value, Tokens]](), Tokens()
    for tokens, piece in _pairs(call, head):
        cut = len(tokens) - (labels.get((piece.value.kind, piece.value.of), 0) if piece.value else 0)
        rest += tokens[:cut]
        if piece.value:
            values.append((piece.value, tokens[cut:] + piece.tokens))
    last = call.pieces[-1].tokens[head if len(call.pieces) == 1 else 0 :]
    shared = tuple(_Piece(tokens) for _, tokens in sorted(values, key=lambda each: order(each[0])))
    return replace(call, pieces=(_Piece(call.pieces[0].tokens[:head]), *shared, _Piece(rest + last)))
