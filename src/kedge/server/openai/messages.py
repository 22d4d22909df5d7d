"""Messages of a conversation, and tools with their calls, as chat bodies contain them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kedge.server.http.bodies import Body, accepted


class Function(Body):
    """Function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """Tool that the model may call; functions are the only type."""

    type: Literal["function"]
    function: Function


class CalledFunction(Body):
    """Function that the model called."""

    name: str
    arguments: str = "{}"
    """JSON text of an object."""


class CalledTool(Body):
    """Tool call of an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class TextPart(Body):
    """Part of a message; text is the only type that the engine reads."""

    type: Literal["text"]
    text: str


Content = Annotated[
    str | list[TextPart], accepted('a string or a list of text parts (objects with `type: "text"` and `text`)')
]


class ChatMessage(Body):
    """Message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None

    @property
    def marked_parts(self) -> list[dict[str, Any]]:
        """What its parts have besides their text, such as `cache_control`."""
        return [] if isinstance(self.content, str) else [part.model_extra or {} for part in self.content or ()]

    @property
    def text(self) -> str:
        """The content as one text."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)
