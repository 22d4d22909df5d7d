"""What is found out about plain requests: which agent asks, and which of its prompt's text others have or will read."""

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b

from kedge.discovery import bounds
from kedge.discovery.bounds import EXAMPLES, MAX_AGENTS, MAX_BYTES, MAX_LOOKED_AT, MAX_OF_ONE, MAX_VALUES, SHORT
from kedge.discovery.found_agents import BLOCK_TOKENS, LEAST_SHARE, FoundAgent, FoundAgents, grouped
from kedge.discovery.known_texts import KnownText, KnownTexts, Quoted
from kedge.discovery.report import PlainTotals, Served
from kedge.discovery.runs import FoundRun, FoundRuns, TextsOfRuns
from kedge.discovery.templates import Example, Filled, Occurrence, PromptTemplate, Slot, answers_of, is_answer, learn
from kedge.policies.fixed_prompts import MAX_BLOCKS, SharedHeads
from kedge.structures import token_bytes
from kedge.structures.bounded import BoundedDict
from kedge.structures.prefixes import chain_of
from kedge.types import AgentId, RequestId, RunId, SampleId, Segment, ValueKind, WorkflowId


class TemplateReviews:
    """Templates of one namespace that are learned once more, from prompts in which more of the text is known.

    An agent's first prompts are often read before it is known whose answers they quote: those agents are not found yet,
    or their first answers are too short to be looked for. What all answers begin with is then taken for fixed text. One
    thread owns it.
    """

    def __init__(self, texts: KnownTexts) -> None:
        self._texts = texts
        self._examples: BoundedDict[AgentId, list[Example]] = BoundedDict(MAX_LOOKED_AT)
        """Prompts with answers that their agent's template has no slot for"""

    def take(self, agent: FoundAgent, prompt: bytes) -> PromptTemplate | None:
        """Look at a packed prompt, where it is time to. Returns a template with more answers than the agent's has."""
        if not _is_due(agent.calls) or len(prompt) * MAX_LOOKED_AT > MAX_BYTES:
            return None
        example, known = Example(prompt, self._texts.find(prompt, agent.head)), _answers(agent.templates[0].slots)
        if not _answers(example.known) - known:
            return None
        examples = self._examples.use(agent.id, list)
        examples.append(example)
        if len(examples) < EXAMPLES:
            return None
        del self._examples[agent.id]
        template = learn(examples)
        return template if template and len(_answers(template.slots)) > len(known) else None


def _is_due(calls: int) -> bool:
    """Return whether an agent's prompt after so many calls is one of the first after they doubled."""
    return calls >= EXAMPLES and calls - (1 << calls.bit_length() - 1) < EXAMPLES


def _answers(texts: Iterable[Slot | Occurrence]) -> set[str]:
    """Return the labels of those that are answers."""
    return {one.label for one in texts if is_answer(one.label)}


SEVERAL = RunId("")
"""Several runs, of which it is not known which one goes on"""
CONTEXT_START, CONTEXT_END = 4, 12
"""Tokens of a template's beginning, and of its text before a value, in which the value's base KV is computed"""


@dataclass(frozen=True, slots=True)
class Found:
    """What was found out about a request. Everything in it follows from the tokens of one namespace."""

    agent: AgentId
    team: WorkflowId
    """Agents that read each other's texts"""
    run: FoundRun
    """The calls that it belongs to"""
    segments: tuple[Segment, ...]
    """The prompt, cut into fixed text and values"""
    produces: SampleId | None
    """The answer, where other agents of the team read such answers"""
    shared: int
    """Tokens of values that others had or read before"""


Around = tuple[bytes, bytes, bool]
"""What all values with one label have in common: the packed tokens before a value in its base KV, those that stand for
it in the template itself, and whether a template begins with the former and goes on with the value"""


@dataclass(eq=False, slots=True)
class _Request:
    """A request, until it is answered or no longer needed as an example."""

    prompt: bytes
    chain: tuple[Hashable, ...]
    ends: list[list[int]] = field(default_factory=list)
    """Blocks that are ends of fixed prompts, in groups"""
    agent: FoundAgent | None = None
    run: FoundRun | None = None
    produces: SampleId | None = None


class _Prompts:
    """Prompts in the order in which they came: as many as there is room for, the others are forgotten."""

    def __init__(self) -> None:
        self._requests: deque[_Request] = deque()
        self._nbytes = 0

    def keep(self, asked: _Request) -> _Request:
        """Return a copy of a request that has its prompt as long as there is room."""
        self._requests.append(kept := replace(asked))
        self._nbytes += len(asked.prompt)
        while len(self._requests) > MAX_AGENTS or self._nbytes > MAX_BYTES:
            gone = self._requests.popleft()
            self._nbytes -= len(gone.prompt)
            gone.prompt, gone.chain = b"", ()
        return kept

    def drop(self, asked: _Request) -> None:
        self._requests.remove(asked)
        self._nbytes -= len(asked.prompt)

    def alike(self, at: int, block: Hashable) -> list[_Request]:
        """Return the distinct prompts that have this block as their number `at`."""
        alike = {one.prompt: one for one in self._requests if len(one.chain) > at and one.chain[at] == block}
        return list(alike.values())


class Discovery:
    """Finds agents, their templates and the text that they share in the requests of one namespace. One thread owns it.

    What is not sure is not used: a prompt has an agent and values only where it follows a template exactly, and a
    template is learned from prompts that differ. Memory is bounded by the limits of this module.
    """

    def __init__(self) -> None:
        self._heads, self.texts = SharedHeads(MAX_BLOCKS), KnownTexts()
        self.runs, self.totals = FoundRuns(), PlainTotals()
        self._agents, self._reviews = FoundAgents(), TemplateReviews(self.texts)
        self.agents: Mapping[AgentId, FoundAgent] = self._agents.by_id
        """Those that are known now"""
        self._ends: BoundedDict[Hashable, RunId | None] = BoundedDict(MAX_VALUES)
        """The last block of a prompt -> the run of those that end with it, or `SEVERAL`; None where it is not known"""
        self._texts_of_runs = TextsOfRuns(self.runs.__contains__)
        self._examples, self._unnamed = _Prompts(), _Prompts()
        """Prompts that a template may be learned from, and those of agents that are not known yet"""
        self._tries: BoundedDict[Hashable, int] = BoundedDict(MAX_AGENTS)
        self._asked: BoundedDict[RequestId, _Request] = BoundedDict(MAX_VALUES)
        self._labels: BoundedDict[str, Around] = BoundedDict(MAX_VALUES)
        """Decided when a label is first seen, or seen again after it was forgotten"""
        self._read: BoundedDict[int, None] = BoundedDict(MAX_VALUES)
        """Hashes of values"""

    def arrive(self, request_id: RequestId, tokens: Sequence[int], now: float) -> Found | None:
        """Return what is found out about a request that arrives at `now`, in seconds.

        None for a session's next turn, and where nothing is known.
        """
        found = self._find(request_id, tokens, now)
        self.totals.count(len(tokens), found.shared if found else None)
        return found

    def _find(self, request_id: RequestId, tokens: Sequence[int], now: float) -> Found | None:
        chain = tuple(chain_of(tokens, BLOCK_TOKENS))
        asked = self._asked[request_id] = _Request(token_bytes.pack(tokens), chain)
        if not chain:
            return None
        ends = [one for one in chain[:-1] if one in self._ends and not self._heads.is_head(one)]
        if ends:  # it goes on where an earlier prompt ended
            self.totals.turns += 1
            asked.run = self.runs.resume(run) if (run := self._ends[ends[0]]) else None
            return None
        self._ends.use(chain[-1], lambda: None)
        self._heads.observe(chain, hash(tuple(tokens[len(chain) * BLOCK_TOKENS :])))
        filled = self._fill(asked)
        if not filled or self._begins_longer(asked):
            self._examples.keep(asked)
            if asked.ends and self._learn(asked, asked.ends[0][0]):
                filled = self._fill(asked)
        return self._found(request_id, asked, filled, now) if filled and asked.agent else None

    def ended(
        self, request_id: RequestId, answer: Sequence[int], now: float, served: Served | None = None
    ) -> FoundRun | None:
        """Take the answer to a request, which others may read, and where its prompt came from; without tokens it was
        not answered.

        Returns the run that the request belonged to, None where there is none.
        """
        asked = self._asked.pop(request_id, None)
        if asked is None:
            return None
        if served is not None:
            self.totals.served(served)
        if answer:
            sample = asked.produces or _answer_of(AgentId("?"), request_id)
            text = token_bytes.pack(answer)
            if asked.run is not None:
                self._texts_of_runs.answered(sample, asked.run.id, self.texts.index.equal(text))
            named = replace(asked, prompt=b"", chain=()) if asked.agent else self._unnamed.keep(asked)
            self.texts.put(KnownText(text, (partial(self._label_of, named),), sample))
        if asked.run is not None:
            self.runs.ended(asked.run, now)
        return asked.run

    # agents ---------------------------------------------------------------------------------------------------

    def _fill(self, asked: _Request) -> list[Filled] | None:
        """Return how a prompt fills a template of the agent with the longest beginning that it has."""
        asked.ends = grouped(self._heads.find(asked.chain))
        asked.agent, filled = self._agents.fill(asked.prompt, asked.chain, asked.ends) or (asked.agent, None)
        return filled

    def _begins_longer(self, asked: _Request) -> bool:
        """Return whether a prompt begins like others for longer than its agent's do: then that is several agents."""
        if asked.agent is None:
            return False
        known = asked.agent.head
        return (asked.ends[0][0] + 1) * BLOCK_TOKENS >= known + max(SHORT, LEAST_SHARE * known)

    def _label_of(self, asked: _Request) -> str:
        """Return what the answer to a request is called; "" as long as it is not known which agent's it was."""
        if asked.agent is None:
            self._fill(asked)
        return self._answers_of(asked.agent.current) if asked.agent else ""

    def _answers_of(self, agent: FoundAgent) -> str:
        """Return what an agent's answers are called."""
        labels = [answers_of(name) for name in agent.names]
        return next((label for label in labels if label in self._labels), labels[0])

    def _learn(self, asked: _Request, at: int) -> bool:
        """Learn a template of the agent whose fixed prompt ends with block `at`, as soon as there are enough examples.

        Returns whether there is a new one. Where examples have none, it is tried again when there are twice as many.
        """
        examples = self._examples.alike(at, asked.chain[at])[-EXAMPLES:]
        if len(examples) < EXAMPLES:
            return False
        block, head = asked.chain[at], (at + 1) * BLOCK_TOKENS
        tries = self._tries[block] = self._tries.use(block, lambda: 0) + 1
        if tries & (tries - 1):
            return False
        template = learn([Example(one.prompt, self.texts.find(one.prompt, head)) for one in examples])
        if template is None:
            return False
        agent = self._agents.learned(template, block, head)
        self._tries.pop(block, None)
        self._use(template, agent)
        for one in examples:
            self._examples.drop(one)
            for filled in agent.templates[0].fill(one.prompt) or ():
                self._keep_value(one.prompt, filled, None)
        return True

    def _use(self, template: PromptTemplate, agent: FoundAgent) -> None:
        """Let an agent have a new template."""
        # Slots without a label are the agent's own.
        slots = (replace(one, label=one.label or f"{agent.id}.{at}") for at, one in enumerate(template.slots))
        template = PromptTemplate(template.head, tuple(slots))
        agent.templates = [template, *agent.templates][:MAX_OF_ONE]
        self._use_labels(template.head, template.slots)

    def _use_labels(self, start: bytes, slots: Iterable[Slot]) -> None:
        """Remember what stands around the slots of a template, which begins with `start`, as used now."""
        context, first = start, True
        for slot in slots:
            around = context, token_bytes.cut(slot.first, 0, CONTEXT_START), first
            self._labels.use(slot.label, lambda: around)  # noqa: B023
            before = slot.after[-CONTEXT_END * token_bytes.WIDTH :]
            context, first = token_bytes.cut(start, 0, CONTEXT_START) + before, False

    # what it says ---------------------------------------------------------------------------------------------

    def _found(self, request_id: RequestId, asked: _Request, filled: Sequence[Filled], now: float) -> Found:
        agent = asked.agent
        assert agent is not None
        quoted = (self.texts.quoted(_value(asked.prompt, one), is_answer=is_answer(one.slot.label)) for one in filled)
        values = list(zip(filled, quoted, strict=True))
        shared = sum(self._keep_value(asked.prompt, *one) for one in values)
        if self._answers_of(agent) in self._labels:
            asked.produces = _answer_of(agent.id, request_id)
        agent.calls += 1
        agent.prompt_tokens += token_bytes.size(asked.prompt)
        agent.shared_tokens += shared
        if better := self._reviews.take(agent, asked.prompt):
            self._use(better, agent)
        segments = self._segments(asked.prompt, values)
        read_from = self._texts_of_runs.find(agent.id, segments, self._quoted(asked, filled))
        asked.run = self.runs.arrive(agent.id, now, read_from)
        self._texts_of_runs.read(agent.id, asked.run.id, segments)
        known = self._ends.get(asked.chain[-1])
        self._ends[asked.chain[-1]] = asked.run.id if known in (None, asked.run.id) else SEVERAL
        return Found(agent.id, agent.team, asked.run, segments, asked.produces, shared)

    def _quoted(self, asked: _Request, filled: Sequence[Filled]) -> Iterator[SampleId]:
        """Yield the answers inside of a prompt's values, the last one first, then those in the part of its fixed prompt
        that is not fixed in prompts which begin like it.
        """
        for one in reversed(filled):
            yield from self.texts.index.find(_value(asked.prompt, one))
        common = (asked.ends[-1][0] + 1) * BLOCK_TOKENS
        yield from self.texts.index.find(token_bytes.cut(asked.prompt, common, filled[0].start))

    def _keep_value(self, prompt: bytes, filled: Filled, quoted: Quoted | None) -> int:
        """Take note of a value that is read. Returns how many of its tokens are known, 0 for too few."""
        value, label = _value(prompt, filled), filled.slot.label
        size = quoted.stop - quoted.start if quoted else token_bytes.size(value)
        is_known = quoted is not None or hash(value) in self._read
        self._read[hash(value)] = None
        self.texts.put(KnownText(value, (lambda: label,)))
        return size if is_known and size >= bounds.LEAST_TOKENS else 0

    def _segments(self, prompt: bytes, values: Sequence[tuple[Filled, Quoted | None]]) -> tuple[Segment, ...]:
        """Return a prompt in segments. A label that comes again has its number; what is before an answer is a value."""
        self._use_labels(token_bytes.cut(prompt, 0, values[0][0].start), [one.slot for one, _ in values])
        segments, at, names, tokens = [], 0, set[str](), token_bytes.unpack(prompt)
        for number, (one, quoted) in enumerate(values):
            if one.start > at:
                segments.append(Segment(tokens[at : one.start], f"p{number}"))
            name = one.slot.label if one.slot.label not in names else f"{one.slot.label}#{number}"
            names.add(name)
            start = one.start + (quoted.start if quoted else 0)
            sample = quoted.sample if quoted else _input_of(one.slot.label, _value(prompt, one))
            if start > one.start:
                joined = _input_of(f"{one.slot.label}.joined", token_bytes.cut(prompt, one.start, start))
                segments.append(Segment(tokens[one.start : start], f"{name}.joined", joined))
            context, stand_in, first = self._labels[one.slot.label]
            around = token_bytes.unpack(context), token_bytes.unpack(stand_in)
            segments.append(Segment(tokens[start : one.stop], name, sample, *around, first and start == one.start))
            at = one.stop
        if at < len(tokens):
            segments.append(Segment(tokens[at:], f"p{len(values)}"))
        return tuple(segments)


def _value(prompt: bytes, filled: Filled) -> bytes:
    return token_bytes.cut(prompt, filled.start, filled.stop)


def _input_of(label: str, value: bytes) -> SampleId:
    return SampleId(ValueKind.INPUT, label, 0, blake2b(value, digest_size=16).hexdigest())


def _answer_of(agent: AgentId, request_id: RequestId) -> SampleId:
    return SampleId(ValueKind.AGENT, agent, 0, blake2b(request_id.encode(), digest_size=8).hexdigest())
