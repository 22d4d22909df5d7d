"""Prompt templates: fixed prefix segments and placeholders (KVCOMM, paper 6.2.3), and their compilation to segments.

A template is text with placeholders in braces; `{{` and `}}` stand for the braces themselves.

| placeholder                 | filled with                                          |
|-----------------------------|------------------------------------------------------|
| `{user_question}`           | an input of the workflow (any declared name)         |
| `{agent_X_current}`         | the answer of agent X in this turn                   |
| `{agent_X_history_t}`       | the answer of agent X, t turns back (t >= 1)         |
| `{condition_X_current}`     | what agent X's tool made of its answer in this turn  |
| `{condition_X_history_t}`   | the same, t turns back                               |
"""

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

from kedge.errors import UnknownPlaceholder, WorkflowError
from kedge.types import AgentId, SampleId, Segment, Tokens, ValueKind

_TOKEN = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_NAME = re.compile(r"[\w-]+")
_TURNS = re.compile("[1-9][0-9]{0,8}")
_OF_AGENT = re.compile(r"(agent|condition)_(.+)_(?:current|history_(\d+))")


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A typed placeholder; `of` is the name of an input or the id of an agent."""

    kind: ValueKind
    of: str
    turns_back: int = 0

    @property
    def name(self) -> str:
        """Its name in the template, without braces."""
        if self.kind is ValueKind.INPUT:
            return self.of
        return f"{self.kind}_{self.of}_{f'history_{self.turns_back}' if self.turns_back else 'current'}"

    @classmethod
    def parse(cls, name: str) -> Self:
        """Return the placeholder with this name. Raises `WorkflowError` for an invalid name."""
        if not _NAME.fullmatch(name):
            raise WorkflowError(
                "placeholder", name, "a name has only letters, digits, '_' and '-' (write '{{' for '{')"
            )
        found = _OF_AGENT.fullmatch(name)
        if not found:
            return cls(ValueKind.INPUT, name)
        kind, of, turns = found.groups()
        if turns is not None and not _TURNS.fullmatch(turns):
            raise WorkflowError("placeholder", name, "history counts turns back as 1, 2, 3, …")
        return cls(ValueKind(kind), of, int(turns or 0))


Part = str | Placeholder


def parse(text: str) -> tuple[Part, ...]:
    """Split a template into texts (braces unescaped) and placeholders.

    Texts are not empty and never follow each other, placeholders may. Raises `WorkflowError` naming what is malformed.
    """
    parts: list[Part] = []
    literal, at = "", 0
    for match in _TOKEN.finditer(text):
        literal += text[at : match.start()]
        at = match.end()
        if match[1] is None:
            if len(match[0]) == 1:
                excerpt = text[max(0, match.start() - 20) : match.end() + 20]
                why = f"a single {match[0]!r} (double it to write the brace itself)"
                raise WorkflowError("template", excerpt, why)
            literal += match[0][0]
            continue
        parts += [literal] if literal else []
        parts.append(Placeholder.parse(match[1]))
        literal = ""
    literal += text[at:]
    return (*parts, literal) if literal else tuple(parts)


def escape(text: str) -> str:
    """Return `text` as a template that has no placeholders."""
    return text.replace("{", "{{").replace("}", "}}")


def placeholders(*texts: str) -> tuple[Placeholder, ...]:
    """Return the placeholders of some templates in their order, each as often as it occurs."""
    return tuple(part for text in texts for part in parse(text) if isinstance(part, Placeholder))


class ChatTokenizer(Protocol):
    """The part of a tokenizer that compiling needs; `kedge.engine.base.Tokenizer` has it."""

    def encode(self, text: str, *, inside: bool = False) -> Tokens: ...

    def chat(self, system: str | None, user: str) -> str: ...


class Prompt(Protocol):
    """The part of an agent that compiling needs: its id and its two templates."""

    @property
    def id(self) -> str: ...

    @property
    def system(self) -> str: ...

    @property
    def user(self) -> str: ...


class Value(NamedTuple):
    """Token ids that fill a placeholder, and their sample. Without tokens the segment is left out."""

    tokens: Tokens
    sample: SampleId | None
    """None where the value is known to be empty, because no step makes it."""


class BaseContext(NamedTuple):
    """Tokens behind which base KV of a placeholder's values is computed, if their producers left none."""

    tokens: Tokens
    is_prompt: bool
    """Whether an agent's prompt begins with them and goes on with the value."""


@dataclass(frozen=True)
class CompiledAgent:
    """An agent's chat text, cut at its placeholders and tokenized piece by piece."""

    agent: AgentId
    prefixes: tuple[Tokens, ...]
    """`p0 … pn`: one more than placeholders, empty between two adjacent ones."""
    placeholders: tuple[Placeholder, ...]
    contexts: tuple[BaseContext, ...]
    stand_ins: tuple[Tokens, ...]

    def fill(
        self, values: Mapping[Placeholder, Value], pending: Collection[SampleId] = frozenset()
    ) -> tuple[Segment, ...]:
        """Return the prompt `p0 φ1 p1 φ2 …`. Empty segments are left out, except of `pending` samples, whose tokens are
        not known yet. Raises `UnknownPlaceholder` where a value is missing.
        """
        segments = [Segment(self.prefixes[0], "p0")]
        filled = zip(self.placeholders, self.contexts, self.stand_ins, self.prefixes[1:], strict=True)
        for i, (placeholder, context, placeholder_text, prefix) in enumerate(filled, 1):
            if placeholder not in values:
                raise UnknownPlaceholder(f"agent {self.agent}", placeholder.name, "has no value")
            tokens, sample = values[placeholder]
            around = context.tokens, placeholder_text, context.is_prompt
            segments.append(Segment(tokens, placeholder.name, sample, *around))
            segments.append(Segment(prefix, f"p{i}"))
        return tuple(one for one in segments if one.tokens or one.sample in pending)


def compile_agents(agents: Sequence[Prompt], tokenizer: ChatTokenizer) -> dict[AgentId, CompiledAgent]:
    """Render and tokenize the prompts of agents that share placeholder values.

    Every prefix part is tokenized by itself, so that its token ids do not depend on its neighbours. A placeholder has
    one base context for all agents. Raises `WorkflowError` where the chat template loses or repeats a placeholder.
    """
    cuts = {AgentId(agent.id): _cut(agent, tokenizer) for agent in agents}
    contexts = _contexts(agents, cuts.values(), tokenizer)
    return {
        agent: CompiledAgent(
            agent,
            prefixes,
            found,
            tuple(contexts[placeholder] for placeholder in found),
            tuple(tokenizer.encode(f"{{{placeholder.name}}}", inside=True) for placeholder in found),
        )
        for agent, (prefixes, found) in cuts.items()
    }


Cut = tuple[tuple[Tokens, ...], tuple[Placeholder, ...]]
"""An agent's prefix parts, and the placeholders between them."""


def _cut(agent: Prompt, tokenizer: ChatTokenizer) -> Cut:
    """Cut the chat text at its placeholders. A hash of the text marks them, so that no text can look like a mark."""
    mark = _mark(agent.system + agent.user)
    known = placeholders(agent.system, agent.user)
    numbers = iter(range(len(known)))
    marked = [
        "".join(part if isinstance(part, str) else f"<{mark}:{next(numbers)}>" for part in parse(text))
        for text in (agent.system, agent.user)
    ]
    pieces = re.split(f"<{mark}:(\\d+)>", tokenizer.chat(marked[0] or None, marked[1]))
    order = [int(number) for number in pieces[1::2]]
    if sorted(order) != list(range(len(known))):
        raise WorkflowError(f"agent {agent.id}", [p.name for p in known], "the chat template loses or repeats some")
    prefixes = tuple(tokenizer.encode(text, inside=at > 0) if text else () for at, text in enumerate(pieces[::2]))
    return prefixes, tuple(known[number] for number in order)


def _mark(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _contexts(
    agents: Sequence[Prompt], cuts: Iterable[Cut], tokenizer: ChatTokenizer
) -> dict[Placeholder, BaseContext]:
    """Return the base context of every placeholder: what the first agent that has nothing but fixed text before it has
    there. Where there is no such agent, it is the last line before it in the first agent that uses it, as the beginning
    of a chat without system message.
    """
    contexts: dict[Placeholder, BaseContext] = {}
    for placeholder, line in _last_lines(agents).items():
        mark = f"<{_mark(line)}>"
        up_to_mark = tokenizer.chat(None, line + mark).partition(mark)[0]
        contexts[placeholder] = BaseContext(tokenizer.encode(up_to_mark), False)
    for prefixes, found in cuts:
        if found and not contexts[found[0]].is_prompt:
            contexts[found[0]] = BaseContext(prefixes[0], True)
    return contexts


def _last_lines(agents: Sequence[Prompt]) -> dict[Placeholder, str]:
    """Return by placeholder the last line that is not blank, to its end, of the text right before its first use."""
    lines: dict[Placeholder, str] = {}
    for agent in agents:
        parts = (*parse(agent.system), "", *parse(agent.user))
        for before, part in zip(("", *parts), parts, strict=False):
            if isinstance(part, Placeholder):
                text = before if isinstance(before, str) else ""
                lines.setdefault(part, text[text.rfind("\n", 0, len(text.rstrip())) + 1 :])
    return lines
