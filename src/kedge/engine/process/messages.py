"""The messages between a program and its engine's process, sent as pickled lists."""

import pickle
from dataclasses import dataclass

from kedge.engine.base import Item
from kedge.errors import KedgeError
from kedge.types import Tokens

Packed = tuple[int, str, Tokens] | tuple[int, Item]
"""An item of the stream with this number; a delta with nothing but text and tokens goes without its class, which is
several times faster."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of one of the engine's methods."""

    number: int | None
    """The number that the answer repeats; None where no answer is expected. A stream has the number of its `submit`."""
    method: str
    arguments: bytes = b""
    """Pickled separately, so that what cannot be read there fails only its caller."""
    queued_for: str = ""
    """The tenant in whose queue it waits, since reading a grammar takes up to a second; "": it is called at once."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a call, or its error; the first one is the tokenizer of the engine that has started."""

    number: int
    value: bytes = b""
    """Pickled separately, so that a value that cannot be read fails only its caller."""
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The message that the engine has ended by itself, and its process with it."""

    error: BaseException


def packed(number: int, item: Item) -> Packed:
    """Return a stream's item as it is sent."""
    if isinstance(item, BaseException):
        return number, portable(item)
    if item.completion or item.logprobs or item.prompt_logprobs:
        return number, item
    return number, item.text, item.tokens


def portable(error: BaseException) -> BaseException:
    """Return an error that can be pickled: itself, or else one that shows its value, or all of it, as text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # foreign classes raise anything
        if isinstance(error, KedgeError):
            return type(error)(error.key, repr(error.value), error.why)
        return RuntimeError(repr(error))
    return error
