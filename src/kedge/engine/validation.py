"""Validation of requests and hints for all engines. Engines call it where values enter, so that the code behind it
never meets a float as a token id, or a temperature that is not a number.

O(number of tokens), at the speed of C: a prompt of 100,000 tokens takes a few milliseconds.
"""

from collections.abc import Container, Mapping
from typing import Final

from kedge.checks import MAX_COUNT, brief, is_number, is_unicode, require_integer, require_sampling, require_text
from kedge.errors import EmptyPrompt, InvalidToken, PromptTooLong, RequestError
from kedge.guard import GuardOrders
from kedge.hints.values import MAX_EXPECTED
from kedge.types import (
    AgentKey,
    GenerateRequest,
    Namespace,
    RequestId,
    ReuseMode,
    SampleId,
    Segment,
    Tokens,
    TurnHints,
    ValueKind,
)
from kedge.workflow.forecast import Changes
from kedge.workflow.steps import NextRun

_HEXADECIMAL: Final = frozenset("0123456789abcdef")
_TEXTS: Final = ("request_id", "tenant", "partition", "client", "workflow", "run", "agent", "tool_mark")


def require_sensible(request: GenerateRequest, vocab_size: int | None = None, most: int | None = None) -> None:
    """Raise a `RequestError` that names key, value and what is accepted where no engine could serve `request`.

    With `vocab_size`, all token ids must be smaller, also in its hints. Its prompt may have `most` tokens.
    """
    if not isinstance(request, GenerateRequest):
        raise RequestError("request", brief(request), "must be a GenerateRequest")
    for key in _TEXTS:
        require_text(key, getattr(request, key), may_be_empty=key not in ("request_id", "tenant"))
    if "/" in request.tenant:
        raise RequestError("tenant", brief(request.tenant), "must have no '/': `partition` names a part of its data")
    _require_sample("produces", request.produces)
    if not isinstance(request.reuse, ReuseMode):
        raise RequestError("reuse", brief(request.reuse), f"must be one of {', '.join(ReuseMode)}")
    require_sampling(request.sampling)
    for key in ("logprobs", "prompt_logprobs"):
        if getattr(request, key) is not None:
            require_integer(key, getattr(request, key), 0, MAX_COUNT)
    if request.fixed is not None and type(request.fixed) is not int:
        raise RequestError("fixed", brief(request.fixed), "must be an integer or None")
    if not isinstance(request.guard, GuardOrders):
        raise RequestError("guard", brief(request.guard), "must be GuardOrders")
    _require_turn(request.turn)
    _require_tokens("forced", request.forced, vocab_size)
    _require_segments(request.segments, vocab_size)
    if not any(segment.tokens for segment in request.segments):
        raise EmptyPrompt("prompt", "", "it has no tokens")
    if most is not None and request.prompt_tokens > most:
        raise PromptTooLong.of("prompt_tokens", request.prompt_tokens, most)


def require_advice(namespace: Namespace, hints: TurnHints) -> None:
    """Raise a `RequestError` that names key, value and what is accepted where no engine could take such hints."""
    if not isinstance(namespace, Namespace):
        raise RequestError("namespace", brief(namespace), "must be a Namespace")
    require_text("tenant", namespace.tenant)
    require_text("partition", namespace.partition, may_be_empty=True)
    _require_turn(hints)


def require_new_id(request_id: RequestId, in_flight: Container[RequestId]) -> None:
    """Raise `RequestError` where a request with this id is among those `in_flight`."""
    if request_id in in_flight:
        raise RequestError("request_id", request_id, "duplicate: a request with this id is in flight already")


def sensible_hints(
    changes: Changes, prompts: Mapping[AgentKey, Tokens]
) -> tuple[dict[AgentKey, NextRun | None], dict[AgentKey, Tokens]]:
    """Return the valid entries of a forecast; entries of a wrong type or with impossible numbers are left out.

    Never raises: a hint is never an error.
    """
    changes = changes if isinstance(changes, Mapping) else {}
    prompts = prompts if isinstance(prompts, Mapping) else {}
    return (
        {key: next_run for key, next_run in changes.items() if _is_agent(key) and _is_run(next_run)},
        {key: tokens for key, tokens in prompts.items() if _is_agent(key) and _are_tokens(tokens)},
    )


def _require_turn(turn: TurnHints) -> None:
    if not isinstance(turn, TurnHints):
        raise RequestError("turn", brief(turn), "must be a TurnHints")
    for key in ("session", "parent"):
        require_text(f"turn.{key}", getattr(turn, key), may_be_empty=True)
    for key in ("returns_in", "keep_for"):
        seconds = getattr(turn, key)
        if seconds is not None and not (is_number(seconds) and seconds >= 0):
            raise RequestError(f"turn.{key}", brief(seconds), "must be a number of seconds from 0 on, or None")
    expects = turn.expects
    if not isinstance(expects, Mapping) or len(expects) > MAX_EXPECTED:
        raise RequestError("turn.expects", brief(expects), f"must be a mapping of at most {MAX_EXPECTED} sessions")
    for session, seconds in expects.items():
        require_text("turn.expects", session, may_be_empty=False)
        if not (is_number(seconds) and seconds >= 0):
            raise RequestError(f"turn.expects[{brief(session)}]", brief(seconds), "must be a number from 0 on, or inf")


# requests -------------------------------------------------------------------------------------------------------------


def _require_segments(segments: tuple[Segment, ...], vocab_size: int | None) -> None:
    if not isinstance(segments, tuple):
        raise RequestError("segments", brief(segments), "must be a tuple of Segment")
    for at, segment in enumerate(segments):
        if not isinstance(segment, Segment):
            raise RequestError(f"segments[{at}]", brief(segment), "must be a Segment")
        key = f"segments[{at}]"
        require_text(f"{key}.name", segment.name)
        _require_sample(f"{key}.sample", segment.sample)
        for part in ("tokens", "base_context", "placeholder_text"):
            _require_tokens(f"{key}.{part}", getattr(segment, part), vocab_size)
        if not isinstance(segment.in_context, bool):
            raise RequestError(f"{key}.in_context", brief(segment.in_context), "must be True or False")


def _require_sample(key: str, sample: SampleId | None) -> None:
    if sample is None:
        return
    if not isinstance(sample, SampleId) or not isinstance(sample.kind, ValueKind):
        raise RequestError(key, brief(sample), "must be a SampleId with a ValueKind, or None")
    require_text(f"{key}.of", sample.of, may_be_empty=True)
    require_integer(f"{key}.turn", sample.turn, 0, MAX_COUNT)
    if not (isinstance(sample.digest, str) and _HEXADECIMAL.issuperset(sample.digest)):
        raise RequestError(f"{key}.digest", brief(sample.digest), "must have only the characters 0-9 and a-f")


def _require_tokens(key: str, tokens: Tokens, vocab_size: int | None) -> None:
    if not isinstance(tokens, tuple):
        raise RequestError(key, brief(tokens), "must be a tuple of token ids")
    if not tokens:
        return
    vocabulary = "" if vocab_size is None else f", in the vocabulary of {vocab_size}"
    if not set(map(type, tokens)) <= {int}:
        bad = next(token for token in tokens if type(token) is not int)
        raise InvalidToken(key, brief(bad), f"must be an integer{vocabulary}")
    most = MAX_COUNT if vocab_size is None else vocab_size - 1
    if min(tokens) < 0 or max(tokens) > most:
        bad = next(token for token in tokens if not 0 <= token <= most)
        raise InvalidToken(key, brief(bad), f"must be from 0 to {most}{vocabulary}")


# hints ----------------------------------------------------------------------------------------------------------------


def _is_agent(key: object) -> bool:
    if not (isinstance(key, AgentKey) and isinstance(key.namespace, Namespace)):
        return False
    return all(isinstance(name, str) and is_unicode(name) for name in (*key.namespace, *key[1:]))


def _is_run(next_run: object) -> bool:
    """Return whether a forecast may have this entry: 0 or more steps, infinity included, or None for one that ended."""
    if not isinstance(next_run, NextRun):
        return next_run is None
    steps, probability = next_run
    return is_number(steps) and steps >= 0 and is_number(probability) and 0 <= probability <= 1


def _are_tokens(tokens: object) -> bool:
    try:
        _require_tokens("prompts", tokens, None)  # type: ignore[arg-type]
    except RequestError:
        return False
    return True
