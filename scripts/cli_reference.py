"""Write `docs/reference/cli.md` from the commands themselves: `python scripts/cli_reference.py`.

A test compares the page with the output of this script, so that it stays up to date. Measurements have a line each, and
those that only a checkout has are left out. The keys of a workflow file are those of its classes, with a meaning each.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer.main

from kedge.cli.main import app
from kedge.settings.sections import Fidelity
from kedge.workflow.graph import Agent, Workflow
from kedge.workflow.spec import AgentSpec, TopologySpec, WorkflowSpec
from kedge.workflow.topologies import TOPOLOGIES, Wording

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"
HEAD = """# Command line

Made by `scripts/cli_reference.py` from the commands' own help; `kedge COMMAND --help` says the same.
"""
BENCH = """
## kedge bench

Measurements, each against a baseline in the same run; `kedge bench NAME --help` has their options. In a checkout,
`kedge bench --help` lists more: those behind the [results](../results/README.md).

| measurement | what it does |
|---|---|
"""

FLOW = """
## Workflow files

All keys of [a workflow](../guides/first-workflow.md). A file with a `graph` is a
[step graph](../kvflow.md#the-agent-step-graph).
"""
MEANINGS = {
    "A file": {
        "name": "of the workflow",
        "agents": "in speaking order",
        "inputs": "names of a run's inputs",
        "turns": "times that every agent answers",
        "loops": "pairs: the second reads the first's answer of the turn before",
        "guard": "for agents without",
        "fidelity": "for agents without",
        "topology": "writes `user` of all agents; its name, or a mapping",
        "wording": "of what it writes",
    },
    "An agent": {
        "id": "as in placeholders",
        "system": "message, with placeholders",
        "user": "the same; only without `topology`",
        "title": "as others read it",
        "tool": "gets the answer: `python`, or one of the application",
        "tool_append": "behind the answer, for the tool",
        "tool_seconds": "time limit",
        "max_tokens": "of an answer",
        "temperature": "0: greedy",
        "top_p": "share of probability that is drawn from",
        "seed": "of draws",
        "stop": "texts that end an answer",
        "reuse": "[mode](../guides/reuse-modes.md), else the run's",
        "guard": "[mode](../guides/guard.md), else the settings'",
        "fidelity": "[budget](../guides/guard.md#the-budget), else the settings'",
        "pick": "before [what it picks](../guides/guard.md#what-is-compared)",
    },
    "`topology`": {
        "kind": ", ".join(TOPOLOGIES),
        "width": "agents of a layer",
        "turns": "of a debate",
        "seed": "of random edges",
        "share": "of random edges",
    },
    "`wording`": {
        "header": "first",
        "intro": "before answers",
        "speaker": "before each",
        "tool": "before a tool's result",
        "footer": "last",
    },
}
"""What the keys of each part of a workflow file mean"""
TYPES = {str: "text", int: "integer", float: "number", list: "list"}


def reference() -> str:
    """Return the page: every command with its arguments and options, a line for each measurement, and the keys of
    workflow files.
    """
    commands = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    bench = commands.pop("bench").commands
    texts = [_command(name, one) for name, one in commands.items()]
    lines = (f"| `{name}` | {_line(one.help)} |\n" for name, one in bench.items())
    return HEAD + "".join(texts) + BENCH + "".join(lines) + FLOW + "".join(_tables())


def _command(name: str, command: Any) -> str:
    return f"\n## kedge {name}\n\n{_line(command.help)}\n" + "".join(_parameters(command))


def _parameters(command: Any) -> Iterator[str]:
    rows = [_row(one) for one in command.params if one.name != "help" and not getattr(one, "hidden", False)]
    if rows:
        yield "\n| argument or option | meaning |\n|---|---|\n"
        yield from rows


def _row(parameter: Any) -> str:
    is_option = parameter.param_type_name == "option"
    names = [*parameter.opts, *parameter.secondary_opts] if is_option else [parameter.metavar or parameter.name.upper()]
    listed = ", ".join(f"`{name}`" for name in names)
    return f"| {_line(listed)} | {_line(getattr(parameter, 'help', ''))}{_default(parameter)} |\n"


def _default(parameter: Any) -> str:
    """Return what follows the help: the default, unless it is off, or found at run time."""
    value = parameter.default() if callable(parameter.default) else parameter.default
    if parameter.required:
        return " Required."
    if value in (None, False, "", (), []):
        return ""
    return f" Default: {value.value if isinstance(value, Enum) else value}."


def _line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _tables() -> Iterator[str]:
    """Yield the tables of keys. Raises `KeyError` for one without a meaning, or the other way round.

    What is built from a part has the defaults, and the function of a topology those of its options.
    """
    options = {key: one for make in TOPOLOGIES.values() for key, one in inspect.signature(make).parameters.items()}
    parts: dict[type, Mapping[str, inspect.Parameter]] = {
        WorkflowSpec: inspect.signature(Workflow).parameters,
        AgentSpec: inspect.signature(Agent).parameters,
        TopologySpec: options,
        Wording: inspect.signature(Wording).parameters,
    }
    for (part, meanings), (kind, built) in zip(MEANINGS.items(), parts.items(), strict=True):
        types = inspect.get_annotations(kind, eval_str=True)
        if types.keys() != meanings.keys():
            raise KeyError(f"{part}: {types.keys() ^ meanings.keys()}")
        needed = {key for key, one in getattr(kind, "model_fields", {}).items() if one.is_required()}
        yield f"\n{part}|type|default|meaning\n-|-|-|-\n"
        for key, meaning in meanings.items():
            default = "needed" if key in needed else _shown(built[key].default if key in built else None)
            yield f"`{key}`|{_type(types[key])}|{default}|{meaning}\n"


def _type(kind: Any) -> str:
    """Return what a value is, in a reader's words."""
    if kind is Fidelity:
        return "budget"
    if get_origin(kind) in (Union, UnionType, Annotated):
        return _type(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return "/".join(get_args(kind))
    return TYPES.get(get_origin(kind) or kind, "mapping")


def _shown(default: object) -> str:
    """Return a default as YAML may have it; nothing for one that is nothing."""
    return "" if default in (None, "", (), inspect.Parameter.empty) else f"`{json.dumps(default)}`"


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
