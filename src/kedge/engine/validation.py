"""What a request and a hint may hold, whatever the engine. Engines call this where values enter, before anything else
sees them: behind it nobody has to expect a float for a token id, or a temperature that is no number.

O(number of tokens), at the speed of C: a prompt of 100,000 tokens takes a few milliseconds.
"""

from __future__ import annotations

import reprlib
from collections.abc import Container, Mapping
from typing import Final

from kedge.errors import EmptyPrompt, InvalidToken, RequestError
from kedge.types import GenerateRequest, RequestId, ReuseMode, SamplingParams, Segment, Tokens
from kedge.workflow.forecast import AgentKey, Changes
from kedge.workflow.steps import NextRun

MAX_COUNT: Final = 2**31 - 1
"""Largest `max_tokens`, largest token id, and most log-probabilities in one place."""
MAX_TEMPERATURE: Final = 100.0
MAX_STOPS: Final = 16
MAX_STOP_LENGTH: Final = 1024
"""Characters of one stop string: the end of an answer is compared with all beginnings of it, token after token."""
_SEED: Final = 2**63
_NAMES: Final = ("request_id", "tenant", "client", "workflow", "run", "agent")
_MAY_NOT_BE_EMPTY: Final = ("request_id", "tenant")


def require_sensible(request: GenerateRequest, vocab_size: int | None = None) -> None:
    """Raise a `RequestError` that names key, value and what is accepted where no engine could serve `request`.

    With `vocab_size`, all its token ids must be smaller, also those that only its hints hold.
    """
    if not isinstance(request, GenerateRequest):
        raise RequestError("request", _brief(request), "must be a GenerateRequest")
    _require_names(request)
    _require_sampling(request.sampling)
    for key in ("logprobs", "prompt_logprobs"):
        if getattr(request, key) is not None:
            _require_integer(key, getattr(request, key), 0, MAX_COUNT)
    if request.fixed is not None and type(request.fixed) is not int:
        raise RequestError("fixed", _brief(request.fixed), "must be an integer or None")
    _require_segments(request.segments, vocab_size)
    _require_tokens("trail", request.trail, vocab_size)
    if not any(segment.tokens for segment in request.segments):
        raise EmptyPrompt("prompt", "", "it has no tokens")


def require_new_id(request_id: RequestId, in_flight: Container[RequestId]) -> None:
    """Raise `RequestError` where a request with this id is among those `in_flight`."""
    if request_id in in_flight:
        raise RequestError("request_id", request_id, "duplicate: a request with this id is in flight already")


def sensible_hints(
    changes: Changes, prompts: Mapping[AgentKey, Tokens]
) -> tuple[dict[AgentKey, NextRun | None], dict[AgentKey, Tokens]]:
    """Return what can be used of a forecast; entries of a wrong type or with impossible numbers are left out.

    Raises nothing, whatever it is given: a hint is never an error.
    """
    return _usable_changes(changes), _usable_prompts(prompts)


# requests -------------------------------------------------------------------------------------------------------------


def _require_names(request: GenerateRequest) -> None:
    for key in _NAMES:
        _require_text(key, getattr(request, key), may_be_empty=key not in _MAY_NOT_BE_EMPTY)
    if request.produces is not None:
        _require_text("produces", request.produces)
    if not isinstance(request.reuse, ReuseMode):
        modes = ", ".join(f"ReuseMode.{mode.name}" for mode in ReuseMode)
        raise RequestError("reuse", _brief(request.reuse), f"must be one of {modes}")


def _require_sampling(sampling: SamplingParams) -> None:
    if not isinstance(sampling, SamplingParams):
        raise RequestError("sampling", _brief(sampling), "must be SamplingParams")
    _require_integer("max_tokens", sampling.max_tokens, 0, MAX_COUNT)
    if not (_is_number(sampling.temperature) and 0 <= sampling.temperature <= MAX_TEMPERATURE):
        raise RequestError("temperature", _brief(sampling.temperature), f"must be from 0 to {MAX_TEMPERATURE}")
    if not (_is_number(sampling.top_p) and 0 < sampling.top_p <= 1):
        raise RequestError("top_p", _brief(sampling.top_p), "must be more than 0 and at most 1")
    if sampling.seed is not None:
        _require_integer("seed", sampling.seed, -_SEED, _SEED - 1)
    if not isinstance(sampling.ignore_eos, bool):
        raise RequestError("ignore_eos", _brief(sampling.ignore_eos), "must be True or False")
    _require_stops(sampling.stop)


def _require_stops(stops: tuple[str, ...]) -> None:
    if not isinstance(stops, (tuple, list)):
        raise RequestError("stop", _brief(stops), "must be a sequence of strings, as in ('.',)")
    if len(stops) > MAX_STOPS:
        raise RequestError("stop", f"{len(stops)} strings", f"must be at most {MAX_STOPS}")
    for stop in stops:
        _require_text("stop", stop)
        if len(stop) > MAX_STOP_LENGTH:
            raise RequestError("stop", _brief(stop), f"must have at most {MAX_STOP_LENGTH} characters")


def _require_segments(segments: tuple[Segment, ...], vocab_size: int | None) -> None:
    if not isinstance(segments, tuple):
        raise RequestError("segments", _brief(segments), "must be a tuple of Segment")
    for at, segment in enumerate(segments):
        if not isinstance(segment, Segment):
            raise RequestError(f"segments[{at}]", _brief(segment), "must be a Segment")
        _require_segment(f"segments[{at}]", segment, vocab_size)


def _require_segment(key: str, segment: Segment, vocab_size: int | None) -> None:
    _require_text(f"{key}.name", segment.name)
    if segment.sample is not None:
        _require_text(f"{key}.sample", segment.sample)
    for part in ("tokens", "lead_in", "stand_in", "trail", "held"):
        _require_tokens(f"{key}.{part}", getattr(segment, part), vocab_size)
    held, tokens = segment.held, segment.tokens
    if held and tokens and tokens[-len(held) :] != held:
        raise RequestError(f"{key}.held", _brief(held), "must be what the segment's tokens end with")


def _require_tokens(key: str, tokens: Tokens, vocab_size: int | None) -> None:
    if not isinstance(tokens, tuple):
        raise RequestError(key, _brief(tokens), "must be a tuple of token ids")
    if not tokens:
        return
    if not set(map(type, tokens)) <= {int}:
        bad = next(token for token in tokens if type(token) is not int)
        raise InvalidToken(key, _brief(bad), f"must be an integer{_vocabulary(vocab_size)}")
    most = MAX_COUNT if vocab_size is None else vocab_size - 1
    if min(tokens) < 0 or max(tokens) > most:
        bad = next(token for token in tokens if not 0 <= token <= most)
        raise InvalidToken(key, _brief(bad), f"must be from 0 to {most}{_vocabulary(vocab_size)}")


def _vocabulary(size: int | None) -> str:
    return "" if size is None else f", in the vocabulary of {size}"


def _require_integer(key: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise RequestError(key, _brief(value), f"must be an integer from {least} to {most}")


def _require_text(key: str, value: object, *, may_be_empty: bool = False) -> None:
    if not isinstance(value, str):
        raise RequestError(key, _brief(value), "must be a string")
    if not (value or may_be_empty):
        raise RequestError(key, value, "must not be empty")
    if not _is_unicode(value):
        raise RequestError(key, _brief(value), "must be valid Unicode, without lone surrogates")


def _is_unicode(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class _Excerpt(str):
    """A value as it stands in a message where the whole one would be too long."""

    def __repr__(self) -> str:
        return str(self)


def _brief(value: object) -> object:
    """Return `value`, or an excerpt where it is longer than a message should be."""
    if isinstance(value, int):
        return value if value.bit_length() <= 128 else _Excerpt(f"an integer of {value.bit_length()} bits")
    if value is None or isinstance(value, float):
        return value
    if isinstance(value, str) and len(value) <= 60:
        return value
    return _Excerpt(reprlib.repr(value))


# hints ----------------------------------------------------------------------------------------------------------------


def _usable_changes(changes: object) -> dict[AgentKey, NextRun | None]:
    if not isinstance(changes, Mapping):
        return {}
    return {key: next_run for key, next_run in changes.items() if _is_agent(key) and _is_run(next_run)}


def _usable_prompts(prompts: object) -> dict[AgentKey, Tokens]:
    if not isinstance(prompts, Mapping):
        return {}
    return {key: tokens for key, tokens in prompts.items() if _is_agent(key) and _are_tokens(tokens)}


def _is_agent(key: object) -> bool:
    return isinstance(key, AgentKey) and all(isinstance(name, str) and _is_unicode(name) for name in key)


def _is_run(next_run: object) -> bool:
    """Whether a forecast can say so: at least 0 steps (perhaps infinitely many), or None for an agent that is over."""
    if not isinstance(next_run, NextRun):
        return next_run is None
    steps, probability = next_run
    return _is_number(steps) and steps >= 0 and _is_number(probability) and 0 <= probability <= 1


def _are_tokens(tokens: object) -> bool:
    try:
        _require_tokens("prompts", tokens, None)  # type: ignore[arg-type]
    except RequestError:
        return False
    return True
