"""`kedge inspect`: what Kedge can do with a model and why not more, or who hears whom in a workflow."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from kedge.errors import ConfigError, UnsupportedModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from kedge.types import AgentId
    from kedge.workflow.graph import Workflow

FLOW_SUFFIXES = {".yaml", ".yml", ".json"}
UNTRIED = "yes, as far as its config tells: no small copy of it could be built and tried"


def inspect(
    target: Annotated[
        Path | None, typer.Argument(metavar="[MODEL|FLOW]", help="A model's folder or a workflow file.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the step graph too: a .png or .svg file.")
    ] = None,
) -> None:
    """Say what Kedge can do with a model (default: the bundled one) and why not more, or show a workflow's graph."""
    if target is not None and target.suffix.lower() in FLOW_SUFFIXES and not target.is_dir():
        _show_flow(Console(), target, picture)
    elif picture is not None:
        raise ConfigError("--picture", str(picture), "only a workflow has a picture; name its file")
    else:
        Console().print(_model(target))


def _model(path: Path | None) -> Table:
    from kedge.engine.local.build import model_path
    from kedge.engine.local.model.loading import read_config

    folder = model_path(path)
    config = read_config(folder)
    return _facts(str(folder), [*_shape(config), *_verdict(config)])


def _facts(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(title=title, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


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
    """Return what the engine would do with such a model: a small random one of its kind is tried."""
    from kedge.engine.local.model.loading import require_buildable
    from kedge.engine.local.model.replica import trial
    from kedge.kv.spec import KVSpec, longest

    try:
        require_buildable(config)
        tried = trial(config)
    except UnsupportedModel as error:
        return [("runs", f"no: {error.why}")]
    spec, yes = KVSpec.from_config(config), "yes" if tried.ran else UNTRIED
    return [
        ("longest prompt", str(longest(config))),
        ("KV per token", _kv_per_token(config)),
        ("RoPE", _rope(config, spec.rotary_dim, spec.head_dim)),
        ("runs, exact reuse", yes),
        ("translation", f"no: {tried.translation_refusal}" if tried.translation_refusal else yes),
    ]


def _kv_per_token(config: PretrainedConfig) -> str:
    import torch

    from kedge.kv.spec import KVSpec

    sizes = {dtype: KVSpec.from_config(config, dtype).bytes_per_token for dtype in (torch.float32, torch.bfloat16)}
    return ", ".join(f"{size:,} bytes in {str(dtype).removeprefix('torch.')}" for dtype, size in sizes.items())


def _rope(config: PretrainedConfig, rotary_dim: int, head_dim: int) -> str:
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    share = "" if rotary_dim == head_dim else f", first {rotary_dim} of {head_dim} dimensions"
    return f"{rope.get('rope_type', 'default')}, theta {rope.get('rope_theta', 'unknown')}{share}"


def _show_flow(console: Console, path: Path, picture: Path | None) -> None:
    from kedge.cli.flow_picture import flow_picture
    from kedge.cli.flow_text import flow_text
    from kedge.workflow.spec import load_flow
    from kedge.workflow.step_graph import StepGraph

    flow = load_flow(path)
    graph = flow if isinstance(flow, StepGraph) else StepGraph.of(flow)
    if picture:
        flow_picture(graph, picture)
    if not isinstance(flow, StepGraph):
        console.print(_flow(flow))
    console.print(flow_text(graph, console.width))
    if picture:
        console.print(f"picture: {picture}", markup=False, highlight=False, soft_wrap=True)


def _flow(flow: Workflow) -> Table:
    caption = f"inputs: {', '.join(flow.inputs)}; turns: {flow.turns}"
    table = Table(title=flow.name, caption=caption, show_lines=True)
    for column in ("agent", "waits for", "reads", "tool", "reuse"):
        table.add_column(column, overflow="fold")
    for agent_id in flow.order:
        table.add_row(*_agent(flow, agent_id))
    return table


def _agent(flow: Workflow, agent_id: AgentId) -> tuple[str, ...]:
    agent = flow.agent(agent_id)
    waits_for = [other for other in flow.order if other in flow.waits_for[agent_id]]
    reads = [f"{{{placeholder.name}}}" for placeholder in agent.placeholders]
    return (
        agent_id,
        "\n".join(waits_for) or "nobody",
        "\n".join(reads),
        "yes" if agent.tool else "",
        agent.reuse or "",
    )
