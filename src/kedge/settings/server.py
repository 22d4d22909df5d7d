"""The sections `[server]` and `[server.limits]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, field_validator
from pydantic_core import PydanticCustomError

from kedge.checks import is_host
from kedge.settings.section import Bytes, Seconds, SettingsSection, split_names
from kedge.types import ReuseMode


def _checked_host(host: str) -> str:
    if host != "*" and not is_host(host):
        raise PydanticCustomError("host", "must be a host name or an address without a port, or *")
    return host


HostName = Annotated[str, AfterValidator(_checked_host)]
"""A host name or an address without a port, or `*`."""
HostNames = Annotated[tuple[HostName, ...], BeforeValidator(split_names)]
"""Several host names, as a list or as text with commas or spaces between them."""
ToolCallFormat = Literal["hermes", "llama3_json"]


class QuotaSettings(SettingsSection):
    """What a tenant may hold in the engine's memory. None is no limit."""

    section = "server.limits"

    anchors: PositiveInt | None = None
    """Anchors in all pools of the tenant."""
    anchor_bytes: Bytes | None = None
    """Bytes of the tenant's anchors."""
    host_memory: Bytes | None = None
    """Bytes of the host tier."""


class LimitSettings(QuotaSettings):
    """Limits of a tenant; those of the settings hold for tenants without limits of their own. None is no limit."""

    requests_in_flight: PositiveInt = 64
    """Generations (each of `n` choices is one) and runs at once."""
    tokens_per_minute: PositiveInt | None = None
    """Tokens of prompts and answers together; a minute's worth may be used at once."""
    hints_per_minute: PositiveInt = 12_000
    """Hints without a prompt: one per call, and one more per agent in its forecast. A minute's worth may be used at
    once."""


class ServerSettings(SettingsSection):
    """How the engine is served."""

    section = "server"

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """0 takes any that is free."""
    allowed_hosts: HostNames = ()
    """Host names and addresses without a port that calls may name in `Host`, besides `host` and the loopback interface:
    a list, or a text with commas. `*` is any, for a server behind a proxy that checks them."""
    model_name: str | None = None
    """The model's name for clients; None is its folder's name."""
    reuse: ReuseMode | None = None
    """Reuse mode where neither request, agent nor workflow sets one; None is `exact` for plain requests and `translate`
    for agents of registered workflows."""
    default_max_tokens: PositiveInt = 512
    """Longest answer of a chat completion that names no limit."""
    max_in_flight: PositiveInt = 256
    """Generations and runs of all tenants together."""
    max_body_bytes: Bytes = 4 << 20
    limits: LimitSettings = LimitSettings()
    tools: bool = False
    """Whether workflows may run tools, which run code on this machine."""
    tool_call_parser: ToolCallFormat | None = None
    """Format in which the model writes tool calls, `hermes` or `llama3_json`; None refuses requests with tools."""
    api_keys: Path | None = None
    """TOML file with tenants and hashes of their keys."""
    keep_texts: bool = False
    """Whether the dashboard keeps prompts and answers of the last calls, in memory; a tenant may choose otherwise."""
    state: Path | None = None
    """Folder for what the engine has learned; None keeps nothing."""
    snapshot_interval: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    """Seconds between two snapshots."""
    grace: Seconds = 10.0
    """Seconds that running answers may go on when the server is asked to end."""
    engine_process: bool = True
    """Whether the embedded engine runs in a process of its own, so that the server's work does not slow it down."""
    log_format: Literal["text", "json"] = "text"
    tracing: bool = False
    """Whether OpenTelemetry spans are sent, as its own variables (`OTEL_…`) say."""

    @field_validator("model_name")
    @classmethod
    def _check_model_name(cls, name: str | None) -> str | None:
        if name is not None and not name.strip():
            raise PydanticCustomError("blank", "must not be blank")
        return name
