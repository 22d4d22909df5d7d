"""`kedge inspect --from-traffic`: what a running server has found in the requests of clients that say nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from rich.console import Console

from kedge.cli.tables import FittingTable
from kedge.discovery.report import line
from kedge.errors import ConfigError

KEY = "--from-traffic"
TIMEOUT_S = 10.0
MIDDLEWARE = "kedge.integrations.vllm.middleware.KedgeMiddleware"
FIGURES = ("calls", "fixed_tokens", "prompt_tokens", "shared_tokens")


def show_traffic(console: Console, url: str, api_key: str | None) -> None:
    """Print the report of a server. Raises `ConfigError` where it cannot be read."""
    report = _read(url.rstrip("/") + "/kedge/report", api_key)
    if report is None:
        raise ConfigError(KEY, url, "has nothing to report yet: plain requests have to come first")
    console.print(line(report), highlight=False)
    if report["agents"]:
        console.print(agents_table(report["agents"]))
    for finding in map(finding_text, report["findings"]):
        console.print(finding, highlight=False)
    if not report["findings"]:
        console.print("nothing was found that defeats reuse", highlight=False)


def agents_table(agents: Sequence[Mapping[str, Any]]) -> FittingTable:
    """Return the table of agents."""
    rows = [[one["id"], one["team"], *(f"{one[name]:,}" for name in FIGURES)] for one in agents]
    return FittingTable("agents", ("agent", "team", *(name.replace("_", " ") for name in FIGURES)), rows)


def finding_text(finding: Mapping[str, Any]) -> str:
    """Return what defeats reuse, what mending it saves, and how it is mended."""
    saved = f"{finding['tokens_per_call']:,} tokens a call, {finding['calls']:,} calls so far"
    return f"agent {finding['agent']}: {finding['kind']} ({saved}): {finding['advice']}"


def _read(url: str, api_key: str | None) -> dict[str, Any] | None:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(KEY, url, "must begin with http:// or https://")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with urlopen(Request(url, headers=headers), timeout=TIMEOUT_S) as answer:
            report: dict[str, Any] | None = json.load(answer)
            return report
    except HTTPError as error:
        hint = f" (vLLM needs --middleware {MIDDLEWARE})" if error.code == 404 else ""
        raise ConfigError(KEY, url, f"answers {error.code}{hint}") from None
    except (URLError, OSError, ValueError) as error:
        raise ConfigError(KEY, url, f"cannot be read: {error}") from None
