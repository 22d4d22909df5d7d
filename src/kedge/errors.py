"""The errors that Kedge raises on purpose. Every message names the key and the bad value."""

from typing import Self


class KedgeError(Exception):
    """Base of all errors that Kedge raises on purpose.

    `key` names the setting, segment, agent or field; `value` is what was wrong with it.
    """

    def __init__(self, key: str, value: object, why: str) -> None:
        super().__init__(f"{key}={value!r}: {why}")
        self.key, self.value, self.why = key, value, why

    def rename(self, key: str, value: object) -> None:
        """Name another key and value, such as the field that a client sent."""
        KedgeError.__init__(self, key, value, self.why)

    def __reduce__(self) -> tuple[object, ...]:
        """Copy and pickle by the three arguments, with notes and whatever else was set."""
        return type(self), (self.key, self.value, self.why), vars(self)


class ConfigError(KedgeError):
    """A setting has a bad value."""


class ModelError(KedgeError):
    """A model cannot be used."""


class ModelNotFound(ModelError):
    """No such folder, or no config in it."""


class CorruptWeights(ModelError):
    """Weights cannot be read, or do not fit the config."""


class UnsupportedModel(ModelError):
    """Not a RoPE decoder that Kedge can run."""


class WorkflowError(KedgeError):
    """A workflow is wrong."""


class UnknownPlaceholder(WorkflowError):
    """A template names a value that does not exist."""


class CycleError(WorkflowError):
    """Agents wait for each other and no edge is marked as a loop."""


class SpecError(WorkflowError):
    """A workflow file cannot be read."""


class RequestError(KedgeError):
    """A request is wrong; the engine goes on."""


class PromptTooLong(RequestError):
    """Longer than the model or the cache allows."""

    tokens = most = 0

    @classmethod
    def of(cls, key: str, tokens: int, most: int) -> Self:
        """Return the error of a prompt of so many tokens, in the words that clients of each protocol look for."""
        limit = f"{most} maximum, this model's maximum context length is {most} tokens"
        error = cls(key, tokens, f"prompt is too long: {tokens} tokens > {limit}")
        error.tokens, error.most = tokens, most
        return error


class EmptyPrompt(RequestError):
    """Nothing to generate from."""


class InvalidToken(RequestError):
    """A token id outside the vocabulary."""


class InvalidGrammar(RequestError):
    """A grammar for the answer that cannot be read, or not followed."""


class MissingInput(RequestError):
    """A run lacks the value of an input, or it is empty."""


class TranslationRefused(KedgeError):
    """This model's attention cannot be translated."""


class LayoutUnknown(TranslationRefused):
    """How vLLM lays out its KV was not found."""


class StateRefused(KedgeError):
    """Saved state is of another model or format."""


class StateDamaged(KedgeError):
    """A file of saved state is damaged (internal: the rest is loaded)."""


class ToolError(KedgeError):
    """A tool raised or ran out of time."""


class ForwardFailed(KedgeError):
    """The model raised on a batch; the requests in it end, the engine goes on."""


class GenerationFailed(KedgeError):
    """One request's own part raised (planning, sampling, text); it ends, the engine goes on."""

    @classmethod
    def of(cls, request_id: object, when: str, cause: Exception) -> Self:
        """Return the error of a request that ends because `cause` was raised when `when`."""
        failure = cls("request_id", request_id, f"an error was raised when {when}: {cause!r}")
        failure.__cause__ = cause
        return failure


class OutOfBlocks(KedgeError):
    """The device tier has no room (internal: a request waits for it)."""


class PlanError(KedgeError):
    """A plan and what was executed disagree (a bug)."""


class ServerError(KedgeError):
    """The HTTP server turns a call away."""


class Unauthenticated(ServerError):
    """No API key came with a call, or none that is known."""


class NotFound(ServerError):
    """The tenant has nothing of that name."""


class LimitReached(ServerError):
    """A tenant asks for more than it may have now."""

    retry_after = 1.0
    """Seconds after which it is worth another try."""


class Overloaded(ServerError):
    """There is no room for another call now."""


class EngineClosed(KedgeError):
    """The engine was closed, its thread has died, or this is a fork of its process."""


class WrongThread(KedgeError):
    """What waits for the engine's thread was called on that thread."""
