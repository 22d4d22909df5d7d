"""`kedge inspect`: what Kedge can do with a model and why not more, what prompts would save, what traffic tells."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from kedge.cli import options
from kedge.cli.output import Columns, cells, table_of, terminal
from kedge.errors import ConfigError, UnsupportedModel
from kedge.types import AgentId

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from kedge.kv.spec import KVSpec
    from kedge.workflow.graph import Agent, Workflow
    from kedge.workflow.savings import RunSavings, ValueLengths


FLOW_SUFFIXES = {".yaml", ".yml", ".json"}
UNTRIED = "yes, according to its config: no small copy of it could be built and tried"
tokens = partial(options.number, min=0, max=10**6)


def inspect(
    target: Annotated[
        Path | None, typer.Argument(metavar="[MODEL|FLOW]", help="A model (as for run --model) or a workflow file.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="For a workflow: the model with the tokenizer to count by; default: the bundled one."),
    ] = None,
    input_tokens: Annotated[int, tokens(help="Assumed tokens of an input.")] = 200,
    answer_tokens: Annotated[int, tokens(help="Assumed tokens of an answer, at most its max_tokens.")] = 200,
    tool_tokens: Annotated[int, tokens(help="Assumed tokens of a tool's result.")] = 50,
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
        show_traffic(terminal(), from_traffic, api_key)
    elif target is not None and target.suffix.lower() in FLOW_SUFFIXES and not target.is_dir():
        from kedge.workflow.savings import ValueLengths

        lengths = ValueLengths(input_tokens, answer_tokens, tool_tokens, dict(map(_named, length or ())))
        _show_flow(terminal(), target, lengths, model, graph_only=graph)
    elif graph:
        raise ConfigError("--graph", str(target), "only a workflow has a graph; name its file")
    else:
        _show_model(terminal(), target)


def _show_model(console: Console, path: Path | None) -> None:
    from kedge.engine.common.converted import cache_folder, known_copies
    from kedge.engine.common.model_folder import read_config
    from kedge.models import find_model

    folder = find_model(path)
    copies = known_copies(folder) if folder.is_file() else None
    config = read_config(copies[0] if copies else folder)
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _verdict(config):
        table.add_row(name, value)
    console.print(str(folder), soft_wrap=True)
    console.print(table)
    if copies is not None:
        where = ", ".join(map(str, copies)) or f"will be in {cache_folder()}"
        console.print(f"converted: {where}", soft_wrap=True)


def _verdict(config: PretrainedConfig) -> list[tuple[str, str]]:
    """Return the facts of what Kedge can do with a model, found by trying a small random model of its kind."""
    from kedge.engine.local.model.loading import require_buildable
    from kedge.engine.local.model.replica import trial
    from kedge.kv.spec import KVSpec, longest

    family = ("family", config.get_text_config(decoder=True).model_type)
    try:
        require_buildable(config)
        tried = trial(config)
    except UnsupportedModel as error:
        return [family, ("runs", f"no: {error.why}")]
    spec, yes = KVSpec.from_config(config, latent=not tried.keeps_heads), "yes" if tried.ran else UNTRIED
    positions = longest(config)
    return [
        family,
        ("longest prompt", f"{positions - 1} tokens, {positions} with its answer"),
        ("KV per token", _kv_per_token(spec)),
        ("runs, exact reuse", yes),
        ("translation", f"no: {tried.translation_refusal}" if tried.translation_refusal else yes),
    ]


def _kv_per_token(spec: KVSpec) -> str:
    import torch

    sizes = {dtype: replace(spec, dtype=dtype).bytes_per_token for dtype in (torch.float32, torch.bfloat16)}
    shown = ", ".join(f"{size:,} bytes in {str(dtype).removeprefix('torch.')}" for dtype, size in sizes.items())
    return f"{shown}: a latent for all heads" if spec.latent else shown


# workflows ------------------------------------------------------------------------------------------------------------


def _named(pair: str) -> tuple[str, int]:
    name, _, count = pair.partition("=")
    if not re.fullmatch("[0-9]{1,6}", count):
        raise ConfigError("--length", pair, "must be NAME=N with a whole number N of tokens")
    return name, int(count)


def _show_flow(console: Console, path: Path, lengths: ValueLengths, model: Path | None, *, graph_only: bool) -> None:
    """Print what is known of the workflow in `path`, or its step graph alone. Raises `ConfigError` for a length of a
    value that the workflow does not have.
    """
    from kedge.workflow.export import export, lanes
    from kedge.workflow.savings import estimate_savings, value_name
    from kedge.workflow.spec import load_flow
    from kedge.workflow.step_graph import StepGraph

    flow = load_flow(path)
    graph = flow if isinstance(flow, StepGraph) else StepGraph.of(flow)
    if graph_only:
        return typer.echo(export(graph), nl=False)
    steps = (" | ".join(node.id for node in lane) for lane in lanes(graph))
    console.print(Text(" → ".join(f"[{step}]" for step in steps), style="bold"))
    if isinstance(flow, StepGraph):
        return None
    known = {value_name(read.kind, read.of) for agent in flow.agents for read in agent.placeholders}
    if unknown := next((name for name in lengths.named if name not in known), None):
        raise ConfigError("--length", unknown, f"must be one of {', '.join(sorted(known))}")
    # last, after all errors of the input: the tokenizer takes seconds to import
    from kedge.engine.common.model_folder import model_path
    from kedge.engine.common.tokenizer import HFTokenizer

    savings = estimate_savings(flow, HFTokenizer.load(model_path(model)), lengths)
    console.print(f"{flow.name}: {len(flow.agents)} agents, {len(flow.steps)} calls a run")
    console.print(savings_table(savings))
    for text in (advice(savings), *conflicts(flow), _assumptions(lengths, model)):
        for row in textwrap.wrap(text, min(console.width, 100), break_on_hyphens=False):
            console.print(row)
    return None


def _assumptions(lengths: ValueLengths, model: Path | None) -> str:
    named = "".join(f", {name} {count}" for name, count in lengths.named.items())
    tokenizer = f"the tokenizer of {model}" if model else "the bundled model's tokenizer (--model)"
    return (
        f"Counted with {tokenizer}, once earlier questions have filled the caches. Assumed tokens: inputs "
        f"{lengths.input}, answers {lengths.answer} or max_tokens, tool results {lengths.tool}{named} (--input-tokens, "
        "--answer-tokens, --tool-tokens, --length)."
    )


WAYS = {
    "prefix": ("prefix caching, prompts as they are", "exact"),
    "role_last": ("prefix caching, shared text first and role last", "exact"),
    "translation": ("translation, prompts as they are", "at most; approximate"),
}
CLOSE = 0.1
"""Shares that differ by at most this count as equal: lengths are assumed, and translation's share is a bound."""


def savings_table(savings: RunSavings) -> Group:
    """Return the table of the shares of a run's prompt tokens that each way of serving saves."""
    rows = [[name, f"{savings.share(way):.0%}", answers] for way, (name, answers) in WAYS.items()]
    headings = ("prompt tokens that need not be computed", "share", "answers")
    return table_of("what prompts would save", headings, rows, left={headings[0], "answers"})


def advice(savings: RunSavings) -> str:
    """Return the advice on what to try first: the exact way wherever it saves as much."""
    as_is, role_last, translation = (savings.share(way) for way in WAYS)
    if max(role_last, translation) <= as_is + CLOSE:
        return "These prompts begin with what they share: plain prefix caching is exact, and as good as it gets here."
    if translation <= role_last + CLOSE:
        return (
            "Put the shared text first and the role last if your agents answer as well that way: plain prefix caching "
            "then saves as much, its answers are exact, and translation is not needed."
        )
    return (
        "Where the shared text can stand first and the role last, plain prefix caching is exact and better: try that "
        "first. Translation is for prompts that have to begin with the role. It computes again the tokens that it "
        "would get wrong; `kedge run` shows how many."
    )


def conflicts(flow: Workflow) -> Iterator[str]:
    """Yield a warning for each text that agents read under roles of their own which may want opposite things of it:
    agents that each pick something, or that do not read each other's answers.
    """

    def may_conflict(one: Agent, other: Agent) -> bool:
        is_read = one.id in flow.waits_for[AgentId(other.id)] or other.id in flow.waits_for[AgentId(one.id)]
        return one.system != other.system and (not is_read or bool(one.pick and other.pick))

    for name in dict.fromkeys(read.name for agent in flow.agents for read in agent.placeholders):
        readers = [one for one in flow.agents if name in (read.name for read in one.placeholders)]
        if found := [one.id for one in readers if any(may_conflict(one, other) for other in readers)]:
            yield (
                f"{', '.join(found[:-1])} and {found[-1]} read {name} under roles of their own: whether its KV can be "
                "shared is proved before it is; if they want opposite things of it, it never is."
            )


# plain traffic --------------------------------------------------------------------------------------------------------

KEY = "--from-traffic"
TIMEOUT_S = 10.0
MIDDLEWARE = "kedge.integrations.vllm.middleware.KedgeMiddleware"
AGENTS: Columns = {
    name.replace("_", " "): (name, ",") for name in ("calls", "fixed_tokens", "prompt_tokens", "shared_tokens")
}


def show_traffic(console: Console, url: str, api_key: str | None) -> None:
    """Print the report of a server. Raises `ConfigError` where it cannot be read."""
    report = _read(url.rstrip("/") + "/kedge/report", api_key)
    if report is None:
        raise ConfigError(KEY, url, "has nothing to report yet: plain requests have to come first")
    if not (isinstance(report, dict) and "requests" in report):
        raise ConfigError(KEY, url, "answers with something else than a report of Kedge")
    known = report["known_agents"] / report["requests"] if report["requests"] else 0
    console.print(
        f"plain traffic ({report['mode']}): requests {report['requests']}, agents {len(report['agents'])}, known in "
        f"{known:.0%} of requests, turns of sessions {report['turns']}; of {report['prompt_tokens']} prompt tokens "
        f"{report['exact_tokens']} were cached, {report['translated_tokens']} translated, and "
        f"{report['shared_tokens']} read or answered before elsewhere"
    )
    if report["agents"]:
        rows = [[one["id"], one["team"], *cells(one, AGENTS)] for one in report["agents"]]
        console.print(table_of("agents", ("agent", "team", *AGENTS), rows))
    for before, after, share in report["follows"]:
        console.print(f"after {before} comes {after}: {share:.0%}")
    for reason, requests in report["why_not"]:
        console.print(f"not translated in {requests:,} requests: {reason}")
    for one in report["findings"]:
        saved = f"{one['tokens_per_call']:,} tokens a call, {one['calls']:,} calls so far"
        console.print(f"agent {one['agent']}: {one['kind']} ({saved}): {one['advice']}")
    if not report["findings"]:
        console.print("nothing was found that defeats reuse")


def _read(url: str, api_key: str | None) -> Any:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(KEY, url, "must begin with http:// or https://")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with urlopen(Request(url, headers=headers), timeout=TIMEOUT_S) as answer:
            return json.load(answer)
    except HTTPError as error:
        hints = {401: " (--api-key)", 404: f" (vLLM needs --middleware {MIDDLEWARE})"}
        raise ConfigError(KEY, url, f"answers {error.code}{hints.get(error.code, '')}") from None
    except (OSError, ValueError, HTTPException, RecursionError) as error:
        raise ConfigError(KEY, url, f"cannot be read: {error}") from None
