"""`kedge serve`: the embedded engine, or vLLM, over HTTP for any OpenAI client."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kedge.checks import parse_host
from kedge.cli import options, run
from kedge.cli.options import Config, Device
from kedge.cli.output import terminal
from kedge.cli.preflight import require_free_port, require_model, require_packages, require_state
from kedge.engine.process.engine import ENDING
from kedge.errors import ConfigError
from kedge.types import ReuseMode

if TYPE_CHECKING:
    from kedge.engine.base import Engine
    from kedge.server.tenancy import KeyRing
    from kedge.settings import ServerSettings, Settings


logger = logging.getLogger(__name__)
EXIT_ENGINE_ENDED = os.EX_SOFTWARE
"""Exit code if the engine ended by itself (`EX_SOFTWARE`), so that a supervisor restarts the server."""
HANG_SECONDS = 1.5 * ENDING
"""Seconds that the server may take to end after the engine did, whose process is killed after `ENDING`"""


def serve(
    model: Annotated[
        Path | None, typer.Argument(metavar="MODEL", help="As for run --model: a folder, a GGUF file or a name.")
    ] = None,
    engine: Annotated[
        str | None, options.name(help="local (the embedded engine) or vllm (with Kedge's plug-in). Default: local.")
    ] = None,
    host: Annotated[str | None, options.name(help="Address to listen on. Default: 127.0.0.1.")] = None,
    port: Annotated[
        int | None, typer.Option(metavar="N", help="From 0, which takes any, to 65535. Default: 8000.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        options.name(help="Name that calls may have in Host, besides loopback and --host; repeatable, * is any."),
    ] = None,
    name: Annotated[str | None, options.name(help="What clients call the model; default: its folder's name.")] = None,
    reuse: Annotated[
        ReuseMode | None,
        typer.Option(
            metavar="MODE",
            help="off, exact or translate, where nothing else says. Default: exact; translate for agents.",
        ),
    ] = None,
    device: Device = None,
    config: Config = None,
    api_keys: Annotated[Path | None, options.file(help="TOML file with tenants and hashes of their keys.")] = None,
    new_key: Annotated[
        str | None, typer.Option(metavar="TENANT", help="Make a key, show it and its hash, and exit.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep what is learned here; default: it ends with the server.")
    ] = None,
    max_tokens: Annotated[
        int | None, options.number(help="Longest answer to a chat that names no limit. Default: 512.")
    ] = None,
    max_in_flight: Annotated[
        int | None, options.number(help="Generations at once, of all tenants. Default: 256.")
    ] = None,
    requests_in_flight: Annotated[
        int | None, options.number(help="Generations at once, of one tenant. Default: 64.")
    ] = None,
    tokens_per_minute: Annotated[int | None, options.number(help="Of one tenant, prompts and answers.")] = None,
    tool_call_parser: Annotated[
        str | None, options.name(help="How the model writes tool calls: hermes or llama3_json. Default: no tools.")
    ] = None,
    tools: Annotated[
        bool | None, typer.Option(help="Let workflows run tools, which run code on this machine. Default: no.")
    ] = None,
    keep_texts: Annotated[
        bool | None, typer.Option(help="Let the dashboard show prompts and answers of recent calls. Default: no.")
    ] = None,
    log_format: Annotated[str | None, options.name(help="text or json. Default: text.")] = None,
    tracing: Annotated[
        bool | None, typer.Option("--tracing/--no-tracing", help="Send OpenTelemetry spans, as OTEL_ variables say.")
    ] = None,
) -> None:
    """Serve a model over HTTP: OpenAI's API, workflows, and receipts of what was reused."""
    require_packages("kedge serve", ("fastapi", "prometheus_client", "uvicorn"), "server")
    from kedge.settings import Settings

    if new_key is not None:
        return _make_key(new_key)
    flags = {
        "host": host,
        "port": port,
        "allowed_hosts": allowed_host or None,
        "model_name": name,
        "reuse": reuse,
        "api_keys": api_keys,
        "state": state,
        "default_max_tokens": max_tokens,
        "max_in_flight": max_in_flight,
        "limits": {"requests_in_flight": requests_in_flight, "tokens_per_minute": tokens_per_minute},
        "tools": tools,
        "tool_call_parser": tool_call_parser,
        "keep_texts": keep_texts,
        "log_format": log_format,
        "tracing": tracing,
    }
    return _serve(Settings.load(config, engine={"backend": engine, "model": model, "device": device}, server=flags))


def _serve(settings: Settings) -> None:
    from kedge.server import logs
    from kedge.server.tenancy import load_keys

    server, model = settings.server, settings.engine.model
    if server.model_name is None and model is not None:
        server = type(server)(**{**dict(server), "model_name": model.resolve().name})
    keys = load_keys(server.api_keys, os.environ.get("KEDGE_API_KEYS"), server.limits)
    if server.tracing:
        require_packages("--tracing", ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"), "otel")
    require_free_port(server.host, server.port)
    logs.configure(server.log_format)
    require_state(server.state)
    is_open = server.host != "localhost" and not getattr(parse_host(server.host), "is_loopback", False)
    if is_open and keys.is_open:
        logger.warning("no API keys: anyone who can reach this address may call (--api-keys FILE)")
    if is_open and not server.allowed_hosts:
        logger.warning("no host names are allowed: callers must use an address (--allowed-host NAME)")
    with terminal(stderr=True).status("loading the model"):
        engine = open_engine(settings, keys)
    ended_by: list[int] = []
    with engine:
        at_once = signal.signal(signal.SIGTERM, lambda number, _: ended_by.append(number))
        _listen(engine, server, keys)  # ends at a signal, and then repeats it
        signal.signal(signal.SIGTERM, at_once)
    for number in ended_by:
        end_by_signal(number)


def _listen(engine: Engine, server: ServerSettings, keys: KeyRing) -> None:
    from kedge.server.app import GracefulServer, create_app

    app = create_app(engine, server, keys)
    dtype = f" in {found}" if (found := engine.inspect().get("dtype")) else ""
    logger.info("%s%s: OpenAI's API at /v1, described at /openapi.json", app.state.service.model_name, dtype)
    # The log is configured, and the application writes a line of its own for every call.
    options = {"host": server.host, "port": server.port, "log_config": None, "access_log": False}
    GracefulServer(app, on_failure=_exit_soon, **options).run()
    if engine.failure is not None:
        raise typer.Exit(EXIT_ENGINE_ENDED)


def end_by_signal(number: int, _: object = None) -> None:
    """End this process as a signal does, and vLLM's engine core before: it would go on, with the memory of its GPU."""
    for child in multiprocessing.active_children():
        child.kill()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    os._exit(128 + number)  # the first process of a container, which no signal of its own ends


def _exit_soon() -> None:
    """Force the process to end after `HANG_SECONDS`, even if a tool, a snapshot or the engine's own end hangs."""
    timer = threading.Timer(HANG_SECONDS, os._exit, (EXIT_ENGINE_ENDED,))
    timer.daemon = True
    timer.start()


def _make_key(tenant: str) -> None:
    from kedge.server.tenancy import NAME, NAMES, OPERATOR, hashed, new_key

    if not NAME.fullmatch(tenant):
        raise ConfigError("--new-key", tenant, NAMES)
    key, section = new_key(), "operator" if tenant == OPERATOR else f'tenants."{tenant}"'
    typer.echo(f'key, shown this once: {key}\n\n[{section}]\nkeys = ["{hashed(key)}"]')


def open_engine(settings: Settings, keys: KeyRing) -> Engine:
    """Open the engine that the settings name; the embedded one runs in its own process unless they say otherwise. vLLM
    gets the folder of saved state and the quotas of tenants at its start.

    Raises `ConfigError` or `ModelNotFound`.
    """
    if settings.engine.backend == "vllm":
        from kedge.settings import QuotaSettings

        quotas = {tenant.id: tenant.quota for tenant in keys.tenants if tenant.quota != QuotaSettings()}
        return run.open_engine(settings, state=settings.server.state, quotas=quotas)
    if settings.engine.dtype == "auto" and (state := settings.server.state):
        from kedge.engine.common.state.files import saved_dtype

        # what the machine would pick it measures, and of another dtype nothing that was learned could be used
        engine = settings.engine.model_copy(update={"dtype": saved_dtype(state) or "auto"})
        settings = settings.model_copy(update={"engine": engine})
    if not settings.server.engine_process:
        return run.open_engine(settings)
    require_model(settings.engine.model)
    from kedge.engine.process.engine import ProcessEngine

    return ProcessEngine(partial(_open_local, settings))


def _open_local(settings: Settings) -> Engine:
    """Open the embedded engine in its process, with the server's log format."""
    from kedge.server import logs

    logs.configure(settings.server.log_format)
    return run.open_engine(settings)
