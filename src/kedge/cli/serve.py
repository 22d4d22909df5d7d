"""`kedge serve`: the embedded engine over HTTP, for any OpenAI client."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kedge.cli.run import open_engine
from kedge.errors import ConfigError
from kedge.types import ReuseMode

if TYPE_CHECKING:
    from kedge.engine.base import Engine
    from kedge.server.config import ServerConfig
    from kedge.server.tenancy import KeyRing

GRACE_SECONDS = 10
"""How long running answers may go on when the server is told to end."""


def serve(
    model: Annotated[Path | None, typer.Argument(help="Folder of a model; default: the bundled one.")] = None,
    host: Annotated[str, typer.Option(envvar="KEDGE_SERVER__HOST")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, envvar="KEDGE_SERVER__PORT")] = 8000,
    name: Annotated[str | None, typer.Option(help="What clients call the model; default: its folder's name.")] = None,
    reuse: Annotated[
        ReuseMode | None, typer.Option(help="Where nothing else says. Default: exact; translate for agents.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings; default: kedge.toml, if there is one here.")] = None,
    api_keys: Annotated[Path | None, typer.Option(help="TOML file with tenants and hashes of their keys.")] = None,
    new_key: Annotated[
        str | None, typer.Option(metavar="TENANT", help="Make a key, show it and its hash, and exit.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer to a chat that names no limit.")] = 512,
    max_in_flight: Annotated[int, typer.Option(min=1, help="Generations at once, of all tenants.")] = 256,
    requests_in_flight: Annotated[int, typer.Option(min=1, help="Generations at once, of one tenant.")] = 64,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="Of one tenant, prompts and answers.")] = None,
    tools: Annotated[
        bool | None, typer.Option(help="Let workflows run tools. Default: only on a loopback address.")
    ] = None,
) -> None:
    """Serve a model over HTTP: OpenAI's API, workflows, and receipts of what was reused."""
    _require_extra()
    from kedge.config import Settings
    from kedge.server.config import ServerConfig
    from kedge.server.tenancy import Limits, load_keys

    if new_key is not None:
        return _make_key(new_key)
    settings = Settings.load(config, engine={"model": model, "device": device})
    limits = Limits(requests_in_flight, tokens_per_minute)
    keys = load_keys(api_keys, os.environ.get("KEDGE_API_KEYS"), limits)
    server = ServerConfig(
        model_name=name or _name(settings.engine.model),
        reuse=reuse,
        default_max_tokens=max_tokens,
        max_in_flight=max_in_flight,
        limits=limits,
        tools=_is_loopback(host) if tools is None else tools,
    )
    console = Console(stderr=True)
    if keys.is_open and not _is_loopback(host):
        console.print("no API keys: whoever reaches this address may call (--api-keys FILE)", style="yellow")
    with console.status("loading the model"):
        engine = open_engine(settings)
    with engine as opened:
        _listen(opened, server, keys, host, port, console)
    return None


def _listen(engine: Engine, config: ServerConfig, keys: KeyRing, host: str, port: int, console: Console) -> None:
    import uvicorn

    from kedge.server.app import create_app

    console.print(f"{config.model_name} on http://{host}:{port}/v1, API page at /docs", markup=False, highlight=False)
    app = create_app(engine, config, keys)
    uvicorn.run(app, host=host, port=port, log_level="info", timeout_graceful_shutdown=GRACE_SECONDS)


def _require_extra() -> None:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError("kedge serve", error.name, "is not installed: pip install 'kedge[server]'") from error


def _make_key(tenant: str) -> None:
    from kedge.server.tenancy import Limits, hashed, load_keys, new_key

    key = new_key()
    load_keys(None, f"{tenant}:{hashed(key)}", Limits())
    section = "operator" if tenant == "*" else f"tenants.{tenant}"
    typer.echo(f'key, shown this once: {key}\n\n[{section}]\nkeys = ["{hashed(key)}"]')


def _name(model: Path | None) -> str:
    return "kedge-nano" if model is None else model.resolve().name


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
