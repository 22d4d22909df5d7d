"""`kedge inspect`: what Kedge can do with a model and why not more, what prompts would save, what traffic tells."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import typer
from rich.console import Console
from rich.table import Table

from kedge.cli.inspect_flow import Counts, show_flow
from kedge.cli.tables import FittingTable
from kedge.discovery.report import line
from kedge.errors import ConfigError, UnsupportedModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from kedge.kv.spec import KVSpec


FLOW_SUFFIXES = {".yaml", ".yml", ".json"}
SHORT = {"family", "runs", "runs, exact reuse", "longest prompt", "translation"}
"""The facts of a model that are shown without `--all`."""
UNTRIED = "yes, according to its config: no small copy of it could be built and tried"


def inspect(
    target: Annotated[
        Path | None,
        typer.Argument(metavar="[MODEL|FLOW]", help="A model (as for run --model) or a workflow file."),
    ] = None,
    show_all: Annotated[
        bool, typer.Option("--all", "-a", help="Show everything: all facts of a model; every call, agent and step.")
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(help="For a workflow: the model with the tokenizer to count by; default: the bundled one."),
    ] = None,
    input_tokens: Annotated[int, typer.Option(metavar="N", min=0, help="Assumed tokens of an input.")] = 200,
    answer_tokens: Annotated[
        int, typer.Option(metavar="N", min=0, help="Assumed tokens of an answer, at most its max_tokens.")
    ] = 200,
    tool_tokens: Annotated[int, typer.Option(metavar="N", min=0, help="Assumed tokens of a tool's result.")] = 50,
    length: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=N", help="Tokens of one value: an input, agent_ID or condition_ID; repeatable."),
    ] = None,
    graph: Annotated[bool, typer.Option("--graph", help="Print only the step graph, as text for Mermaid.")] = False,
    from_traffic: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A running server, Kedge's or vLLM's: what was found in its plain requests."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="KEDGE_API_KEY", metavar="KEY", help="For --from-traffic: a tenant's key.")
    ] = None,
) -> None:
    """Show what Kedge can do with a model (default: the bundled one), what a workflow's prompts would save, or what in
    an application's prompts defeats reuse.
    """
    if from_traffic is not None:
        show_traffic(Console(), from_traffic, api_key)
    elif target is not None and target.suffix.lower() in FLOW_SUFFIXES and not target.is_dir():
        counts = Counts(model, input_tokens, answer_tokens, tool_tokens, tuple(length or ()))
        show_flow(Console(), target, counts, graph_only=graph, show_all=show_all)
    elif graph:
        raise ConfigError("--graph", str(target), "only a workflow has a graph; name its file")
    else:
        _show_model(Console(), target, show_all=show_all)


def _show_model(console: Console, path: Path | None, *, show_all: bool) -> None:
    from kedge.engine.common.converted import cache_folder, known_copies
    from kedge.engine.common.model_folder import read_config
    from kedge.models import find_model

    folder = find_model(path)
    copies = known_copies(folder) if folder.is_file() else None
    config = read_config(copies[0] if copies else folder)
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in (*_shape(config), *_verdict(config)):
        if show_all or name in SHORT:
            table.add_row(name, value)
    console.print(str(folder), markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    if copies is not None:
        where = ", ".join(map(str, copies)) or f"will be in {cache_folder()}"
        console.print(f"converted: {where}", markup=False, highlight=False, soft_wrap=True)
    if not show_all:
        console.print("--all shows the model's shape and the size of its KV.", style="dim")


def _shape(config: PretrainedConfig) -> list[tuple[str, str]]:
    text = config.get_text_config(decoder=True)
    names = {
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "KV heads",
        "vocab_size": "vocabulary",
    }
    known = ((label, getattr(text, name, None)) for name, label in names.items())
    return [("family", text.model_type), *((label, str(value)) for label, value in known if value is not None)]


def _verdict(config: PretrainedConfig) -> list[tuple[str, str]]:
    """Return the facts of what Kedge can do with a model, found by trying a small random model of its kind."""
    from kedge.engine.local.model.loading import require_buildable
    from kedge.engine.local.model.replica import trial
    from kedge.kv.spec import KVSpec, longest

    try:
        require_buildable(config)
        tried = trial(config)
    except UnsupportedModel as error:
        return [("runs", f"no: {error.why}")]
    spec, yes = KVSpec.from_config(config, latent=not tried.keeps_heads), "yes" if tried.ran else UNTRIED
    return [
        ("longest prompt", str(longest(config))),
        ("KV per token", _kv_per_token(spec)),
        ("RoPE", _rope(config, spec.rotary_dim, spec.latent + spec.rotary_dim if spec.latent else spec.head_dim)),
        ("runs, exact reuse", yes),
        ("translation", f"no: {tried.translation_refusal}" if tried.translation_refusal else yes),
    ]


def _kv_per_token(spec: KVSpec) -> str:
    import torch

    sizes = {dtype: replace(spec, dtype=dtype).bytes_per_token for dtype in (torch.float32, torch.bfloat16)}
    shown = ", ".join(f"{size:,} bytes in {str(dtype).removeprefix('torch.')}" for dtype, size in sizes.items())
    return f"{shown}: a latent for all heads" if spec.latent else shown


def _rope(config: PretrainedConfig, rotary_dim: int, head_dim: int) -> str:
    from kedge.kv.spec import ropes

    kinds = [f"{one.get('rope_type', 'default')}, theta {one.get('rope_theta', 'unknown')}" for one in ropes(config)]
    share = "" if rotary_dim == head_dim else f", {rotary_dim} of {head_dim} dimensions"
    return "; ".join(dict.fromkeys(kinds)) + share if kinds else "none"


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
    for before, after, share in report["follows"]:
        console.print(f"after {before} comes {after}: {share:.0%}", highlight=False)
    for reason, requests in report["why_not"]:
        console.print(f"not translated in {requests:,} requests: {reason}", markup=False, highlight=False)
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
