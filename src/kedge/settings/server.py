"""The sections `[server]` and `[server.limits]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from kedge.settings.section import Bytes, Names, Seconds, SettingsSection
from kedge.types import ReuseMode


class LimitSettings(SettingsSection):
    """What a tenant may have that has no limits of its own; the server builds its `Limits` from these (same names)."""

    section = "server.limits"

    requests_in_flight: PositiveInt = 64
    """Generations (each of `n` choices is one) and runs at once."""
    tokens_per_minute: PositiveInt | None = None
    """Prompt and answer together; a minute's worth may be used at once."""
    hints_per_minute: PositiveInt = 12_000
    """Hints without a prompt: a call counts one, and one more for each agent that its forecast speaks of."""
    anchors: PositiveInt | None = None
    """Anchors in all its pools."""
    anchor_bytes: Bytes | None = None
    """Bytes of its anchors."""
    host_memory: Bytes | None = None
    """Bytes of the host tier."""


class ServerSettings(SettingsSection):
    """How the engine is served; the server builds its `ServerConfig` from these."""

    section = "server"

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """0 takes any that is free."""
    allowed_hosts: Names = ()
    """Names and addresses, besides `host` and those of the loopback interface, that calls may have in `Host`: a list,
    or a text with commas. `*` is any, for a server behind a proxy that checks them."""
    model_name: str | None = None
    """What clients call the model; None is its folder's name."""
    reuse: ReuseMode | None = None
    """Where neither request, agent nor workflow says; None: `exact` for plain requests, `translate` for agents."""
    default_max_tokens: PositiveInt = 512
    """Longest answer of a chat completion that names no limit."""
    max_in_flight: PositiveInt = 256
    """Generations and runs of all tenants together."""
    max_body_bytes: Bytes = 4 << 20
    limits: LimitSettings = LimitSettings()
    tools: bool = False
    """Whether workflows may run tools, which run code on this machine."""
    tool_call_parser: str | None = None
    """The format in which the model writes tool calls, `hermes` or `llama3_json`; None: it is not told of any tools."""
    api_keys: Path | None = None
    """TOML file with tenants and hashes of their keys."""
    state: Path | None = None
    """Folder for what the engine has learned; None: it ends with the server."""
    snapshot_interval: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    """Seconds between two snapshots."""
    grace: Seconds = 10.0
    """Seconds that running answers may go on when the server is told to end."""
    engine_process: bool = True
    """Whether the embedded engine runs in a process of its own, so that the server's work does not slow it down."""
    log_format: Literal["text", "json"] = "text"
    tracing: bool = False
    """Whether OpenTelemetry spans are sent, to where its own variables (`OTEL_…`) say."""
