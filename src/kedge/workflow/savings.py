"""Estimates of how many prompt tokens of a workflow need not be computed, from its templates alone.

Three ways of serving are compared on the same calls: prefix caching of the prompts as they are written, prefix caching
of prompts that begin with the text they share and end with the role, and translation. No model runs. The fixed text
is counted with a tokenizer; the lengths of what fills the placeholders are assumptions (`ValueLengths`).
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice

from kedge.checks import MAX_COUNT
from kedge.settings import EngineSettings
from kedge.structures.prefixes import cached_length, chain_of, common_prefix
from kedge.types import ReuseMode, SampleId, Segment, Tokens, ValueKind
from kedge.workflow.graph import Step, Workflow
from kedge.workflow.template import ChatTokenizer, Value, compile_agents

BLOCK = EngineSettings().block_size
"""Tokens per block: a prefix cache finds whole blocks only."""


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
    calls = _calls(workflow, tokenizer, lengths)
    ways = _found(calls), _found(_role_last(calls, workflow)), _translated(calls)
    counts = list(zip(calls, *ways, strict=True))[len(workflow.steps) :]
    return RunSavings(tuple(CallSavings(call.step, len(call.tokens), *found) for call, *found in counts))


@dataclass(frozen=True)
class _Call:
    step: Step
    segments: tuple[Segment, ...]
    answer: Tokens
    reuse: ReuseMode | None

    @property
    def tokens(self) -> Tokens:
        return tuple(chain.from_iterable(one.tokens for one in self.segments))


def _calls(workflow: Workflow, tokenizer: ChatTokenizer, lengths: ValueLengths) -> list[_Call]:
    """Return the calls of two runs. Every token of a value differs from all others, and is beyond any vocabulary."""
    agents, fresh, calls = compile_agents(workflow.agents, tokenizer), count(MAX_COUNT + 1), []
    for _ in range(2):
        known: dict[SampleId | None, Tokens] = {None: ()}

        def value(sample: SampleId | None, known: dict[SampleId | None, Tokens] = known) -> Value:
            if sample is not None and sample not in known:
                known[sample] = tuple(islice(fresh, lengths.of(workflow, sample.kind, sample.of)))
            return Value(known[sample], sample)

        for step in workflow.steps:
            agent = agents[step.agent]
            segments = agent.fill({one: value(workflow.sample(step, one)) for one in agent.placeholders})
            calls.append(_Call(step, segments, value(step.sample()).tokens, workflow.agent(step.agent).reuse))
    return calls


# ways of serving ------------------------------------------------------------------------------------------------------


def _match(cache: set[Hashable], tokens: Tokens) -> int:
    """Return the length of the longest prefix that a cache of whole blocks has; the last token is never part of it."""
    return min(BLOCK * cached_length(chain_of(tokens, BLOCK), cache), len(tokens) - 1)


def _found(calls: Iterable[_Call]) -> Iterator[int]:
    """Yield for each call how much of its prompt a prefix cache has."""
    cache = set[Hashable]()
    for call in calls:
        yield _match(cache, call.tokens)
        cache.update(chain_of((*call.tokens, *call.answer), BLOCK))


def _translated(calls: Iterable[_Call]) -> Iterator[int]:
    """Yield for each call how much of its prompt is found or can be translated.

    A prompt enters the prefix cache up to its first translated token. Inputs and results of tools are computed by
    their first reader; answers have KV since they were written.
    """
    cache, known = set[Hashable](), set[Tokens]()
    for call in calls:
        exact = _match(cache, call.tokens) if call.reuse is not ReuseMode.OFF else 0
        may = call.reuse in (None, ReuseMode.TRANSLATE)
        translated = list(_translatable(call, exact, known)) if may else []
        yield min(exact + sum(stop - start for start, stop in translated), len(call.tokens) - 1)
        cached = call.tokens[: translated[0][0]] if translated else (*call.tokens, *call.answer)
        cache.update(chain_of(cached, BLOCK))
        known |= {call.answer, *(one.tokens for one in call.segments if one.is_placeholder)}


def _translatable(call: _Call, exact: int, known: set[Tokens]) -> Iterator[tuple[int, int]]:
    """Yield the spans behind the exact prefix that can be translated: known values, and the fixed text behind each."""
    at, translates = 0, False
    for one in call.segments:
        start, at = max(at, exact), at + len(one.tokens)
        if one.is_placeholder:
            translates = one.tokens in known
        if translates and start < at:
            yield start, at


def _role_last(calls: Sequence[_Call], workflow: Workflow) -> Iterator[_Call]:
    """Rewrite the prompts: what all begin with, then the values in one order for all, then the rest of the fixed text.

    Values that only one call reads come after the others.
    """
    head = len(common_prefix([one.tokens for call in calls for one in call.segments[:1]]))
    readers = Counter(one.tokens for call in calls for one in call.segments)

    def order(one: Segment) -> tuple[object, ...]:
        assert one.sample is not None
        kind, of, turn, _ = one.sample
        names: Sequence[str] = workflow.inputs if kind is ValueKind.INPUT else workflow.order
        return readers[one.tokens] == 1, kind is not ValueKind.INPUT, turn, names.index(of), kind

    for call in calls:
        fixed = tuple(chain.from_iterable(one.tokens for one in call.segments if not one.is_placeholder))
        values = sorted((one for one in call.segments if one.is_placeholder), key=order)
        yield replace(call, segments=(Segment(fixed[:head], "head"), *values, Segment(fixed[head:], "role")))
