"""Hints of a request in `kv_transfer_params.kedge`, over HTTP or in process, and messages to the plug-in that come
without a request.

A hint is never an error: one with an unknown name, or a value that is not accepted, is ignored and counted. The names
are those of the HTTP server (`docs/server.md`); `segments` and `produces` are for callers who assemble
prompts, `withheld`, `epoch` and `rung` for those with a quality guard, `ignored` counts what others have ignored.
"""

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field, NonNegativeInt, PlainValidator, StrictBool, TypeAdapter

from kedge.guard import GuardMode, GuardOrders
from kedge.hints.actions import ActionOutcome, ActionResult
from kedge.hints.call_hints import KEDGE
from kedge.hints.values import MAX_EXPECTED, MAX_HINT_AGENTS, MAX_NAME_LENGTH, read_text, read_whole, without_infinity
from kedge.integrations.vllm.entry_point import UTILITY, died
from kedge.reuse.guard.fidelity import RUNGS
from kedge.settings.sections import read_fidelity, shown_fidelity
from kedge.types import (
    AgentId,
    ClientId,
    GenerateRequest,
    Namespace,
    RequestId,
    ReuseMode,
    RunId,
    RunKey,
    SampleId,
    Segment,
    Tokens,
    TurnHints,
    WorkflowId,
)
from kedge.workflow.steps import NextRun

AFRESH = "\0"
"""In a salt, before what keeps a request from what vLLM's prefix cache has of its prompt"""
TIMEOUT = 5.0
"""Seconds to wait for the plug-in's answer: as long as a step may take"""
BEST_FIRST = list(ActionResult)
"""Of what several data-parallel engines answer, the best counts: a session is in one of them"""
OF_A_TURN = ("session", "parent", "returns_in", "keep_for", "expects")
OF_A_GUARD = ("fidelity", "withheld", "epoch", "rung", "held_out", "pick")
"""Hints that are fields of `TurnHints` and of `GuardOrders`"""


@dataclass(frozen=True, slots=True)
class HintedRequest:
    """A request with what its hints say."""

    request: GenerateRequest
    steps: Mapping[AgentId, NextRun] | None = None
    """The forecast of its run"""
    seq: int | None = None
    ignored: int = 0
    """Number of hints that were ignored"""
    actions: tuple[Mapping[str, str], ...] = ()
    """What becomes of the actions that the client asked for, for the receipt"""

    @property
    def ends_run(self) -> bool:
        """Whether a run ends that is more than its session."""
        asked = self.request
        return asked.turn.is_last and bool(asked.run) and asked.run != asked.turn.session


def read_hints(
    request_id: str, prompt: Sequence[int], salt: str | None, params: Mapping[str, Any] | None, reuse: ReuseMode
) -> HintedRequest | None:
    """Return a request with the hints in its `kv_transfer_params`, None where they have none for Kedge: then O(1).

    `salt` is vLLM's `cache_salt`: KV is shared only among requests with the same one, so it is the namespace.
    `reuse` is the mode of a request whose hints have none.
    """
    if (hints := params.get("kedge") if params else None) is None:
        return None
    given, ignored, tokens = dict[str, Any](), int(not isinstance(hints, Mapping)), tuple(prompt)
    for name, value in hints.items() if isinstance(hints, Mapping) else ():
        read = partial(_segments, tokens) if name == "segments" else KNOWN.get(name)
        try:
            if read is None:
                raise ValueError
            if value is not None:
                given[name] = read(value)
        except ValueError:
            ignored += 1
    if "steps" in given and not given.get("run"):  # those of several callers would count as one run's
        del given["steps"]
        ignored += 1
    get = given.get
    is_plain = not given.keys() & {"reuse", "segments"}  # its client says nothing of its prompt and of reuse
    namespace = namespace_of(salt)
    request = GenerateRequest(
        get("segments") or (Segment(tokens, "p0"),),
        reuse=get("reuse") or reuse,
        request_id=RequestId(request_id),
        tenant=namespace.tenant,
        partition=namespace.partition,
        client=ClientId(get("client", "")),
        workflow=WorkflowId(get("workflow", "")),
        run=RunId(get("run", "")),
        agent=AgentId(get("agent", "")),
        fixed=get("fixed_tokens"),
        produces=get("produces"),
        turn=TurnHints(is_last=get("final", False), **{name: given[name] for name in OF_A_TURN if name in given}),
        is_plain=get("plain", is_plain),
        guard=GuardOrders(get("guard"), **{name: given[name] for name in OF_A_GUARD if name in given}),
    )
    steps = get("steps")
    return HintedRequest(
        request,
        steps=None if steps is None else {agent: NextRun(left) for agent, left in steps.items()},
        seq=get("seq"),
        actions=get("actions", ()),
        ignored=ignored + get("ignored", 0),
    )


def namespace_of(salt: str | None) -> Namespace:
    """Return where KV of a request with this salt is kept: what follows `AFRESH` is for vLLM's prefix cache alone."""
    return Namespace.parse((salt or "").partition(AFRESH)[0] or "default")


def salt_of(namespace: Namespace) -> str:
    """Return the salt of requests whose KV is kept there, the shortest that `namespace_of` reads so."""
    return "" if namespace == namespace_of(None) else str(namespace)


def _names(value: Any) -> frozenset[str]:
    if not isinstance(value, list | tuple) or len(value) > MAX_HINT_AGENTS:
        raise ValueError
    return frozenset(map(read_text, value))


def _sample(value: Any) -> SampleId | None:
    return SampleId.parse(read_text(value))


def _actions(value: Any) -> tuple[Mapping[str, str], ...]:
    """Read outcomes of actions, as `kedge.hints` gives them."""
    if not isinstance(value, list | tuple) or len(value) > MAX_EXPECTED:
        raise ValueError
    return tuple(ActionOutcome.from_dict(one).to_dict() for one in value)


def without_hints(sampling: Any) -> Any:
    """Return vLLM's `SamplingParams` (or None) without hints for Kedge: each worker gets a copy of what is in them."""
    params = (getattr(sampling, "extra_args", None) or {}).get("kv_transfer_params")
    if not isinstance(params, Mapping) or "kedge" not in params:
        return sampling
    others = {name: value for name, value in params.items() if name != "kedge"}
    sampling = copy(sampling)  # the caller may use its own again
    sampling.extra_args = {**sampling.extra_args, "kv_transfer_params": others}
    return sampling


_Token = Annotated[int, Field(ge=0, lt=1 << 63)]  # a template's digest has 64 bits for each


class SegmentHint(BaseModel, strict=True):
    """A part of a prompt in the hint `segments`."""

    name: Annotated[str, PlainValidator(read_text)]
    length: NonNegativeInt
    sample: Annotated[SampleId, PlainValidator(_sample)] | None = None
    base_context: list[_Token] = []
    in_context: bool = False
    placeholder_text: list[_Token] = []


def _segments(tokens: Tokens, value: Any) -> tuple[Segment, ...] | None:
    """Read a list of `SegmentHint`, whose lengths must sum to the prompt's."""
    segments, start = list[Segment](), 0
    for one in _segment_hints(value):
        text, context = tuple(one.placeholder_text), tuple(one.base_context)
        part = tokens[start : start + one.length]
        segments.append(Segment(part, one.name, one.sample, context, text, in_context=one.in_context))
        start += one.length
    if start != len(tokens):
        raise ValueError
    return tuple(segments)


_flag = TypeAdapter(StrictBool).validate_python
_segment_hints = TypeAdapter(list[SegmentHint]).validate_python
_rung = TypeAdapter(Annotated[int, Field(strict=True, ge=0, lt=len(RUNGS))]).validate_python
KNOWN: Mapping[str, Callable[[Any], Any]] = {
    **{rule.path[1]: rule.read for rule in KEDGE if rule.field != "fixed_messages"},
    **{"reuse": ReuseMode, "guard": GuardMode, "fidelity": read_fidelity},
    **{"produces": _sample, "plain": _flag, "actions": _actions, "ignored": read_whole},
    **{"withheld": _names, "epoch": read_whole, "rung": _rung, "held_out": _flag},
}
"""Hints by name, but for `segments`, with the parsers of their values: those of the server, and the plug-in's own"""


# what Kedge's own engines and servers send ---------------------------------------------------------------------------


def request_hints(request: GenerateRequest) -> dict[str, Any]:
    """Return the hints for a request: its run and agent, and the parts of its prompt. Empty values are left out."""
    has_segments = request.reuse is ReuseMode.TRANSLATE and not request.is_plain
    hints = {
        "reuse": None if request.is_plain else request.reuse.value,
        "plain": request.is_plain or None,
        "workflow": short(request.workflow),
        "run": short(request.run),
        "client": short(request.client),
        "agent": short(request.agent),
        "produces": short(str(request.produces or "")),
        "fixed_tokens": request.fixed_length,  # not every request sends segments
        "segments": [_of_segment(one) for one in request.segments] if has_segments else None,
    }
    return _given(hints) | turn_hints(request.turn) | guard_hints(request.guard)


def _of_segment(segment: Segment) -> dict[str, Any]:
    return {
        "name": segment.name,
        "length": len(segment.tokens),
        "sample": None if segment.sample is None else short(str(segment.sample)),
        "base_context": list(segment.base_context),
        "in_context": segment.in_context,
        "placeholder_text": list(segment.placeholder_text),
    }


def turn_hints(turn: TurnHints) -> dict[str, Any]:
    """Return what a client says of its sessions, with a request or between two."""
    return _given(
        {
            "session": short(turn.session),
            "parent": short(turn.parent),
            "returns_in": turn.returns_in,
            "keep_for": turn.keep_for,
            "expects": without_infinity({short(name): left for name, left in turn.expects.items()}) or None,
            "final": turn.is_last or None,
        }
    )


def guard_hints(orders: GuardOrders) -> dict[str, Any]:
    """Return what a guard orders, and what a client asks of one, as hints. Empty values are left out."""
    return _given(
        {
            "guard": orders.mode and orders.mode.value,
            "fidelity": shown_fidelity(orders.fidelity),
            "withheld": sorted(orders.withheld),
            "epoch": orders.epoch or None,
            "rung": orders.rung,
            "held_out": orders.held_out or None,
            "pick": orders.pick,
        }
    )


def run_hints(run: RunKey, **more: Any) -> dict[str, Any]:
    """Return hints about a run."""
    return _given({"run": short(run.run_id), "client": short(run.client_id)}) | more


class Message(NamedTuple):
    """Hints without a request."""

    hints: Mapping[str, Any]
    salt: str
    tokens: Tokens = ()
    """A prompt that is expected, as far as it is known, or that is fixed"""


def expected_prompt(request: GenerateRequest) -> Message:
    """Return the message that such a request is expected; values that are not known yet have no tokens."""
    return Message(request_hints(request), salt_of(request.namespace), request.tokens)


def end_of(run: RunKey) -> Message:
    """Return the message that a run is over."""
    return Message(run_hints(run, final=True), salt_of(run.namespace))


async def ask(engine_core: Any, what: str, *given: Any) -> list[Any]:
    """Call the plug-in in every engine of vLLM's client (`connector.answer`). Returns the answers of those that answer
    in time. Raises `EngineClosed` where vLLM's engine has died.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    call = partial(engine_core._call_utility_async, UTILITY, what, *given)
    calls = [asyncio.ensure_future(call(engine=one)) for one in engine_core.core_engines]
    done, late = await asyncio.wait(calls, timeout=TIMEOUT)
    for one in late:
        one.cancel()
    if any(isinstance(one.exception(), EngineDeadError) for one in done):
        raise died()
    return [one.result() for one in calls if one in done and one.exception() is None]


async def tell(engine_core: Any, message: Message) -> list[ActionOutcome] | None:
    """Send a message to every engine of vLLM's client, and return what becomes of its hints; None: that was not
    reported. Raises as `ask` does.
    """
    found, best = await ask(engine_core, "tell", [message]), dict[tuple[str, str], ActionOutcome]()
    for one in (ActionOutcome.from_dict(given) for (outcomes,) in found for given in outcomes):
        key = one.action_id, one.session
        best[key] = min(best.get(key, one), one, key=lambda either: BEST_FIRST.index(either.outcome))
    return list(best.values()) if found else None


def _given(hints: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in hints.items() if value not in (None, "", [])}


def short(name: str) -> str:
    """Return a name that the plug-in accepts: a digest for one that is too long or has unprintable characters."""
    if len(name) <= MAX_NAME_LENGTH and name.isprintable():
        return name
    return "#" + hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
