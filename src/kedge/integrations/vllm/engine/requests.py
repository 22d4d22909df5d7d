"""Sampling arguments, hints and messages for vLLM and the plug-in. No vLLM is needed."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kedge.checks import LAST_SEED
from kedge.guard import GuardOrders
from kedge.hints.values import MAX_NAME_LENGTH, without_infinity
from kedge.integrations.vllm.entry_point import FORCED
from kedge.integrations.vllm.plugin.hints import NO_PROMPT, segment_hints
from kedge.settings.sections import shown_fidelity
from kedge.structures.bounded import BoundedDict
from kedge.types import AgentId, GenerateRequest, Namespace, ReuseMode, Tokens, TurnHints
from kedge.workflow.forecast import AgentKey, Changes, RunKey
from kedge.workflow.steps import NextRun

Hints = dict[str, Any]
"""The `kedge` field of `kv_transfer_params`."""
NO_SEED = -1
"""The seed that vLLM takes for none; `LAST_SEED` is used instead, so that a seeded answer repeats."""


class PluginMessage(NamedTuple):
    """Hints for the plug-in without a prompt to run. For vLLM it is a request that is aborted at once."""

    namespace: Namespace
    hints: Hints
    tokens: Tokens = NO_PROMPT


def request_hints(request: GenerateRequest) -> Hints:
    """Return the hints for a request: its run and agent, and the parts of its prompt. Empty values are left out."""
    segments: list[Hints] = []
    if request.reuse is ReuseMode.TRANSLATE and not request.is_plain:
        segments = segment_hints(request)
        for one in segments:
            one["sample"] = None if one["sample"] is None else short(one["sample"])
    hints = {
        "reuse": None if request.is_plain else request.reuse.value,
        "plain": request.is_plain or None,
        "workflow": short(request.workflow),
        "run": short(request.run),
        "client": short(request.client),
        "agent": short(request.agent),
        "produces": short(str(request.produces or "")),
        "fixed_tokens": _fixed(request),
        "segments": segments,
    }
    return _given(hints) | turn_hints(request.turn) | guard_hints(request.guard)


def turn_hints(turn: TurnHints) -> Hints:
    """Return what a client says of its sessions, with a request or between two."""
    expects = without_infinity({short(name): left for name, left in turn.expects.items()})
    return _given(
        {
            "session": short(turn.session),
            "parent": short(turn.parent),
            "returns_in": turn.returns_in,
            "keep_for": turn.keep_for,
            "expects": expects or None,
            "final": turn.is_last or None,
        }
    )


def guard_hints(orders: GuardOrders) -> Hints:
    """Return what a guard orders, and what a client asks of one, as hints. Empty values are left out."""
    hints: Hints = {
        "guard": orders.mode and orders.mode.value,
        "fidelity": shown_fidelity(orders.fidelity),
        "withheld": sorted(orders.withheld),
        "epoch": orders.epoch or None,
        "rung": orders.rung,
        "held_out": orders.held_out or None,
        "pick": orders.pick,
    }
    return _given(hints)


def _given(hints: Hints) -> Hints:
    return {name: value for name, value in hints.items() if value not in (None, "", [])}


def short(name: str) -> str:
    """Return a name that the plug-in accepts: a digest for one that is too long or has unprintable characters."""
    if len(name) <= MAX_NAME_LENGTH and name.isprintable():
        return name
    return "#" + hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _fixed(request: GenerateRequest) -> int | None:
    """Return the request's fixed length, else that of its first prefix segment: not every request sends segments."""
    if request.fixed is not None and 0 <= request.fixed <= request.prompt_tokens:
        return request.fixed
    first, *others = request.segments
    return len(first.tokens) if others and not first.is_placeholder else None


def sampling_arguments(request: GenerateRequest, room: int, *, hinted: bool = True) -> dict[str, Any]:
    """Return arguments of vLLM's `SamplingParams`, with hints for the plug-in if `hinted`.

    `room` is the number of tokens that the model can add to the prompt. Stop strings are not among them, as they are
    matched where tokens become text. vLLM draws at least one token.
    """
    sampling = request.sampling
    forced = {FORCED: list(request.forced)} if request.forced else {}  # where vLLM cannot force it, it is drawn
    return {
        "max_tokens": max(1, min(sampling.max_tokens, room)),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": LAST_SEED if sampling.seed == NO_SEED else sampling.seed,
        "ignore_eos": sampling.ignore_eos,
        "logprobs": request.logprobs,
        "prompt_logprobs": request.prompt_logprobs,
        "detokenize": False,
        "structured_outputs": {"grammar": sampling.grammar} if sampling.grammar else None,
        "extra_args": {"kv_transfer_params": {"kedge": request_hints(request)}, **forced} if hinted else None,
    }


class Forecasts:
    """The forecast of every run, merged from changes: the plug-in takes whole forecasts only. Owned by one thread."""

    def __init__(self) -> None:
        self._runs: dict[RunKey, dict[AgentId, NextRun]] = {}
        self._sent: BoundedDict[tuple[Namespace, str, AgentId], Tokens] = BoundedDict()
        """The fixed prompts that the plug-in has: a team's runs begin with the same ones"""
        self._seq = itertools.count()

    def messages(self, changes: Changes, prompts: Mapping[AgentKey, Tokens]) -> Iterator[PluginMessage]:
        """Yield fixed prompts that the plug-in does not know from earlier runs, then forecasts: it adopts a prompt with
        the forecast that names its agent.
        """
        for key, tokens in prompts.items():
            if self._sent.get(agent := (key.namespace, key.client_id, key.agent)) == tokens:
                continue
            self._sent[agent] = tokens
            fixed = {**_run_hints(key.run), "agent": short(key.agent), "fixed_tokens": len(tokens)}
            yield PluginMessage(key.namespace, fixed, tokens)
        by_run: dict[RunKey, dict[AgentId, NextRun | None]] = {}
        for key, next_run in changes.items():
            by_run.setdefault(key.run, {})[key.agent] = next_run
        for run, changed in by_run.items():
            merged = {**self._runs.pop(run, {}), **changed}
            known = {agent: next_run for agent, next_run in merged.items() if next_run is not None}
            if known:
                self._runs[run] = known
            steps = {short(agent): one.steps if math.isfinite(one.steps) else None for agent, one in known.items()}
            yield PluginMessage(run.namespace, {**_run_hints(run), "seq": next(self._seq), "steps": steps})


def end_of_run(run: RunKey) -> PluginMessage:
    """Return the message that a run is over."""
    return PluginMessage(run.namespace, {**_run_hints(run), "final": True})


def _run_hints(run: RunKey) -> Hints:
    client = {"client": short(run.client_id)} if run.client_id else {}
    return {"run": short(run.run_id), **client}
