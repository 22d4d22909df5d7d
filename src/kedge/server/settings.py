"""How a server is set up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from kedge.errors import ConfigError
from kedge.server.hosts import is_host
from kedge.server.openai.tool_calls import PARSERS, PlainText, ToolParser
from kedge.server.tenancy import Limits
from kedge.settings import ServerSettings
from kedge.types import ReuseMode


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything that a server can be told. Raises `ConfigError` for a value that can never work."""

    model_name: str = "kedge-nano"
    """What clients call the model."""
    reuse: ReuseMode | None = None
    """Where neither request, agent nor workflow says; None: `exact` for plain requests, `translate` for the agents of
    registered workflows."""
    default_max_tokens: int = 512
    """Longest answer of a chat completion that names no limit."""
    max_in_flight: int = 256
    """Generations and runs of all tenants together; each has a thread that waits for its tokens."""
    max_body_bytes: int = 4 << 20
    host: str = "127.0.0.1"
    """The address that the server is bound to; calls may name it in `Host`."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names and addresses that calls may name there, without a port; `*` is any."""
    limits: Limits = Limits()
    """For a tenant that has none of its own."""
    tools: bool = False
    """Whether registered workflows may name tools, which run code on this machine."""
    tool_call_parser: str | None = None
    """The format in which the model writes tool calls (a name in `kedge.server.openai.tool_calls.PARSERS`); None: it is
    not told of any tools."""
    state: Path | None = None
    """Folder for what the engine has learned; None: it ends with the server."""
    snapshot_interval: float = 60.0
    """Seconds between two snapshots."""
    grace: float = 10.0
    """Seconds that running answers may go on when the server is told to end."""

    @classmethod
    def of(cls, settings: ServerSettings, *, model_name: str) -> ServerConfig:
        """Return what the settings say, with the model's name, which may depend on more than them."""
        same = {field.name for field in fields(cls)} - {"model_name", "limits"}
        limits = Limits(**settings.limits.model_dump())
        return cls(model_name=model_name, limits=limits, **settings.model_dump(include=same))

    def __post_init__(self) -> None:
        for key in ("default_max_tokens", "max_in_flight", "max_body_bytes"):
            if getattr(self, key) < 1:
                raise ConfigError(f"server.{key}", getattr(self, key), "must be at least 1")
        for host in self.allowed_hosts:
            if not is_host(host):
                raise ConfigError("server.allowed_hosts", host, "must be a name or an address without a port, or *")
        if not self.model_name.strip():
            raise ConfigError("server.model_name", self.model_name, "must not be blank")
        if self.tool_call_parser not in (None, *PARSERS):
            raise ConfigError("server.tool_call_parser", self.tool_call_parser, f"not one of {', '.join(PARSERS)}")

    @property
    def parser(self) -> Callable[[], ToolParser]:
        """What reads an answer in which there may be tool calls."""
        return PARSERS[self.tool_call_parser] if self.tool_call_parser else PlainText
