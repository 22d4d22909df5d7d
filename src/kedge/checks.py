"""Checks of texts, integers and sampling values, for requests, workflows and HTTP bodies.

An invalid value raises a `RequestError` that names key, value and what is accepted.
"""

import reprlib
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

from kedge.errors import InvalidGrammar, RequestError
from kedge.types import SamplingParams

MAX_COUNT: Final = 2**31 - 1
"""Largest `max_tokens`, largest token id, and most log-probabilities in one place."""
MAX_TEMPERATURE: Final = 100.0
MAX_STOPS: Final = 16
MAX_STOP_LENGTH: Final = 1024
"""Characters of one stop string: every token's end is compared with all its beginnings."""
MAX_GRAMMAR: Final = 1 << 18
"""Characters of an answer's grammar"""
LAST_SEED: Final = 2**63 - 1


def require_sampling(sampling: SamplingParams, least_tokens: int = 0) -> None:
    """Raise a `RequestError` for invalid sampling values, or fewer than `least_tokens` tokens."""
    if not isinstance(sampling, SamplingParams):
        raise RequestError("sampling", brief(sampling), "must be SamplingParams")
    require_integer("max_tokens", sampling.max_tokens, least_tokens, MAX_COUNT)
    if not (is_number(sampling.temperature) and 0 <= sampling.temperature <= MAX_TEMPERATURE):
        raise RequestError("temperature", brief(sampling.temperature), f"must be from 0 to {MAX_TEMPERATURE}")
    if not (is_number(sampling.top_p) and 0 < sampling.top_p <= 1):
        raise RequestError("top_p", brief(sampling.top_p), "must be more than 0 and at most 1")
    require_integer("top_k", sampling.top_k, 0, MAX_COUNT)
    for name, least, most in (
        ("min_p", 0, 1), ("repetition_penalty", 0.01, 10), ("presence_penalty", -2, 2), ("frequency_penalty", -2, 2)
    ):  # fmt: skip
        if not (is_number(value := getattr(sampling, name)) and least <= value <= most):
            raise RequestError(name, brief(value), f"must be from {least} to {most}")
    if sampling.seed is not None:
        require_integer("seed", sampling.seed, -LAST_SEED - 1, LAST_SEED)
    if not isinstance(sampling.ignore_eos, bool):
        raise RequestError("ignore_eos", brief(sampling.ignore_eos), "must be True or False")
    require_text("grammar", sampling.grammar, may_be_empty=True)
    if len(sampling.grammar) > MAX_GRAMMAR:
        raise InvalidGrammar("grammar", brief(sampling.grammar), f"must have at most {MAX_GRAMMAR} characters")
    if sampling.grammar and sampling.ignore_eos:
        raise InvalidGrammar("grammar", brief(sampling.grammar), "cannot be followed with `ignore_eos`")
    if not isinstance(sampling.stop, (tuple, list)):
        raise RequestError("stop", brief(sampling.stop), "must be a sequence of strings, as in ('.',)")
    if len(sampling.stop) > MAX_STOPS:
        raise RequestError("stop", f"{len(sampling.stop)} strings", f"must be at most {MAX_STOPS}")
    for stop in sampling.stop:
        require_text("stop", stop)
        if len(stop) > MAX_STOP_LENGTH:
            raise RequestError("stop", brief(stop), f"must have at most {MAX_STOP_LENGTH} characters")


def require_integer(key: str, value: object, least: int, most: int) -> None:
    """Raise a `RequestError` unless `value` is an integer in this range."""
    if type(value) is not int or not least <= value <= most:
        raise RequestError(key, brief(value), f"must be an integer from {least} to {most}")


def require_text(key: str, value: object, *, may_be_empty: bool = False) -> None:
    """Raise a `RequestError` unless `value` is a string of valid Unicode."""
    if not isinstance(value, str):
        raise RequestError(key, brief(value), "must be a string")
    if not (value or may_be_empty):
        raise RequestError(key, value, "must not be empty")
    if not is_unicode(value):
        raise RequestError(key, brief(value), "must be valid Unicode, without lone surrogates")


def is_unicode(text: str) -> bool:
    """Return whether a text has no half of a surrogate pair."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def is_number(value: object) -> bool:
    """Return whether a value is a float, which may be infinite or NaN, or an integer that a float can hold; no bool."""
    return isinstance(value, float) or (type(value) is int and value.bit_length() < 1000)


def parse_host(host: str) -> str | IPv4Address | IPv6Address:
    """Return the address that `host` spells, with or without brackets, or else the name in lower case."""
    try:
        address = ip_address(host[1:-1] if host[:1] + host[-1:] == "[]" else host)
    except ValueError:
        return host.lower().removesuffix(".")
    return getattr(address, "ipv4_mapped", None) or address


class _Excerpt(str):
    """A shortened value in an error message."""

    def __repr__(self) -> str:
        return str(self)


def brief(value: object) -> object:
    """Return `value`, or an excerpt where it is longer than a message should be."""
    if isinstance(value, int):
        return value if value.bit_length() <= 128 else _Excerpt(f"an integer of {value.bit_length()} bits")
    if value is None or isinstance(value, float):
        return value
    if isinstance(value, str) and len(value) <= 60:
        return value
    try:
        return _Excerpt(reprlib.repr(value))
    except ValueError:  # of an integer that is too long to be shown
        return _Excerpt(f"a {type(value).__name__} with a long integer")
