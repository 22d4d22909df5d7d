"""From a `GenerateRequest`, a forecast and the end of a run to what vLLM and the plug-in are told. Plain data."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kedge.hint_values import MAX_NAME_LENGTH
from kedge.integrations.vllm.plugin.hints import segment_hints
from kedge.types import AgentId, GenerateRequest, Namespace, ReuseMode, Tokens
from kedge.workflow.forecast import AgentKey, Changes, RunKey
from kedge.workflow.steps import NextRun

Hints = dict[str, Any]
"""The `kedge` field of `kv_transfer_params`."""
NO_SEED, LAST_SEED = -1, 2**63 - 1
"""The seed that vLLM takes for none, and the one that stands in for it: a seeded answer repeats."""
NOTHING: Tokens = (0,)
"""The prompt of a message: vLLM knows no request without one."""


@dataclass(frozen=True, slots=True)
class Message:
    """What the plug-in is told without a request: vLLM takes it for one that was given up at once, and runs nothing."""

    namespace: Namespace
    hints: Hints
    tokens: Tokens = NOTHING


def request_hints(request: GenerateRequest) -> Hints:
    """Whose call a request is and what its prompt is made of. Without values that say nothing."""
    said = {
        "reuse": request.reuse.value,
        "workflow": short(request.workflow),
        "run": short(request.run),
        "client": short(request.client),
        "agent": short(request.agent),
        "produces": short(str(request.produces or "")),
        "fixed_tokens": _fixed(request),
        "segments": _segments(request) if request.reuse is ReuseMode.TRANSLATE else None,
    }
    return {name: value for name, value in said.items() if value not in (None, "")}


def short(name: str) -> str:
    """A name as the plug-in takes it; one that is too long, or not fit for a line of a log, by its digest."""
    if len(name) <= MAX_NAME_LENGTH and name.isprintable():
        return name
    return "#" + hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _fixed(request: GenerateRequest) -> int | None:
    """What the request says; else its first prefix segment, which the plug-in sees only where segments are told."""
    if request.fixed is not None and 0 <= request.fixed <= request.prompt_tokens:
        return request.fixed
    first, *others = request.segments
    return len(first.tokens) if others and not first.is_placeholder else None


def _segments(request: GenerateRequest) -> list[Hints]:
    told = segment_hints(request)
    return [{**one, "sample": short(one["sample"])} if one["sample"] is not None else one for one in told]


def sampling_arguments(request: GenerateRequest, room: int) -> dict[str, Any]:
    """Arguments of vLLM's `SamplingParams`; `room` is how many tokens the model can add to the prompt.

    Stop strings are not among them: who turns tokens into text looks for them. vLLM draws at least one token; one more
    than is wanted where others are going to read the answer, so that its last token leaves KV behind too.
    """
    sampling = request.sampling
    wanted = sampling.max_tokens + (request.produces is not None)
    return {
        "max_tokens": max(1, min(wanted, room)),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": LAST_SEED if sampling.seed == NO_SEED else sampling.seed,
        "ignore_eos": sampling.ignore_eos,
        "logprobs": request.logprobs,
        "prompt_logprobs": request.prompt_logprobs,
        "detokenize": False,
        "extra_args": {"kv_transfer_params": {"kedge": request_hints(request)}},
    }


class Forecasts:
    """Keeps the forecast of every run, which the plug-in wants whole, from changes. One thread owns it."""

    def __init__(self) -> None:
        self._runs: dict[RunKey, dict[AgentId, NextRun]] = {}
        self._seq = itertools.count()

    def messages(self, changes: Changes, prompts: Mapping[AgentKey, Tokens]) -> Iterator[Message]:
        """Fixed prompts first: the plug-in adopts them with the forecast that names their agents."""
        for key, tokens in prompts.items():
            fixed = {**_whose(key.run), "agent": short(key.agent), "fixed_tokens": len(tokens)}
            yield Message(key.namespace, fixed, tokens)
        by_run: dict[RunKey, dict[AgentId, NextRun | None]] = {}
        for key, next_run in changes.items():
            by_run.setdefault(key.run, {})[key.agent] = next_run
        for run, changed in by_run.items():
            yield Message(run.namespace, {**_whose(run), "seq": next(self._seq), "steps": self._steps(run, changed)})

    def _steps(self, run: RunKey, changed: Mapping[AgentId, NextRun | None]) -> dict[str, float | None]:
        """Of all agents of a run; None, as JSON has no infinity, for who never comes."""
        merged = {**self._runs.pop(run, {}), **changed}
        known = {agent: next_run for agent, next_run in merged.items() if next_run is not None}
        if known:
            self._runs[run] = known
        return {short(agent): one.steps if math.isfinite(one.steps) else None for agent, one in known.items()}


def end_of_run(run: RunKey) -> Message:
    """Return the message that a run has ended."""
    return Message(run.namespace, {**_whose(run), "final": True})


def _whose(run: RunKey) -> Hints:
    client = {"client": short(run.client_id)} if run.client_id else {}
    return {"run": short(run.run_id), **client}
