"""LangGraph: every model call names its run and node, and forecasts the next nodes.

    from kedge.integrations.langgraph import ChatOpenAI, attach      # in place of langchain_openai's
    graph = attach(builder.compile())

`attach` reads the graph's edges and watches its nodes start and end; `ChatOpenAI` is LangChain's, and sends the hints
with each call. An agent is named by its node, one in a subgraph by its path: `research:writer`.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID

from kedge.errors import ConfigError
from kedge.integrations import edges
from kedge.integrations.edges import END, START, StepEdge
from kedge.integrations.follower import Follower
from kedge.workflow.step_graph import StepGraph

try:
    import langchain_openai
    from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
    from langchain_core.runnables.config import RunnableConfig, ensure_config
    from langgraph.graph.state import CompiledStateGraph
    from langgraph.pregel import Pregel
    from openai import OpenAI

    from kedge.integrations.openai_client import send_hints, with_hints
except ImportError as error:
    why = "is not installed: pip install 'kedge[langgraph]'"
    raise ConfigError("kedge.integrations.langgraph", error.name, why) from error

MAX_PENDING_HINTS = 16
"""Hints without a prompt that may wait for a slow server; further ones are dropped."""
Graph = TypeVar("Graph", bound=Pregel[Any, Any, Any, Any])
Metadata = Mapping[str, Any] | None


def attach(graph: Graph, name: str = "", *, client_id: str = "") -> Graph:
    """Return `graph`, which is used as before, with hints for its models to send.

    `name`: the workflow's, by default the graph's own. A run is named by its `thread_id`, if it has one.
    `client_id` tells equal thread ids of two applications with the same API key apart.
    """
    name = name or graph.get_name()
    return graph.with_config({"callbacks": [_RunWatcher(name, step_graph(graph), client_id)]})


class ChatOpenAI(langchain_openai.ChatOpenAI):
    """LangChain's `ChatOpenAI`; in a node of a graph, its calls send hints."""

    def _get_request_payload(self, input_: Any, *, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        """Return the body of a call with its hints. All kinds of calls, streamed or not, get their body here."""
        payload = super()._get_request_payload(input_, stop=stop, **kwargs)
        hints = _hints(ensure_config(), self.root_client)
        return with_hints(payload, "extra_body", hints) if hints else payload


def _hints(config: RunnableConfig, client: OpenAI | None) -> dict[str, Any]:
    """Return the hints for a call with this config: outside of an attached graph from its metadata alone."""
    metadata = config["metadata"]
    callbacks = config["callbacks"]
    for watcher in callbacks.handlers if isinstance(callbacks, BaseCallbackManager) else callbacks or ():
        if isinstance(watcher, _RunWatcher) and (hints := watcher.call(_place(metadata), client)):
            return hints
    agent, run = ":".join(_names(_place(metadata))), metadata.get("thread_id")
    return {"agent": agent, **({"run": str(run)} if run else {})} if agent else {}


def _place(metadata: Metadata) -> str:
    """Return the path of a running node in its graphs, `outer:<id>|inner:<id>`; empty outside of nodes."""
    return str((metadata or {}).get("langgraph_checkpoint_ns") or "")


def _names(place: str) -> list[str]:
    """Return the names of the nodes of a path, outermost first.

    A part without a name counts the calls of one subgraph in one node.
    """
    return [part.partition(":")[0] for part in place.split("|") if ":" in part]


# runs of a graph ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _GraphRun:
    """One call of an attached graph."""

    follower: Follower
    depth: int
    """Number of nodes of other graphs around it"""


class _RunWatcher(BaseCallbackHandler):
    """The runs of one graph. LangChain calls it from any thread, in order for each node."""

    run_inline = True

    def __init__(self, workflow: str, graph: StepGraph, client_id: str) -> None:
        self._workflow, self._graph, self._client_id = workflow, graph, client_id
        self._runs: dict[UUID, _GraphRun] = {}
        self._tasks: dict[str, tuple[_GraphRun, str]] = {}
        """Nodes that are running, by place: their runs and agents"""
        self._places: dict[UUID, str] = {}
        """By LangChain's id of the task"""
        self._callers: set[str] = set()
        """Agents that have called a model"""
        self._client: OpenAI | None = None
        """The client of the last call. Before the first call the server is unknown, and has no KV to keep."""
        self._thread = ThreadPoolExecutor(1, "kedge-hints")
        """Sends hints without a prompt, so that no node waits for them"""
        self._pending: list[Future[None]] = []

    def call(self, place: str, client: OpenAI | None) -> dict[str, Any] | None:
        """Return the hints for a model call of the node at this place; None where it is not in this graph."""
        if (found := self._tasks.get(place)) is None:
            return None
        run, agent = found
        self._client = client
        self._callers.add(agent)
        return run.follower.hints(agent)

    def on_chain_start(
        self, *_: Any, run_id: UUID, parent_run_id: UUID | None = None, metadata: Metadata = None, **__: Any
    ) -> None:
        """Note that a graph, a node, or something in a node starts."""
        place = _place(metadata)
        if place in self._tasks:
            return
        run, around = self._runs.get(parent_run_id) if parent_run_id else None, place
        while around := around.rpartition("|")[0]:
            if around in self._tasks:
                run = self._tasks[around][0]
                break
        if run is None:
            thread = (metadata or {}).get("thread_id")
            follower = Follower(self._workflow, self._graph, str(thread or ""), self._client_id)
            self._runs[run_id] = _GraphRun(follower, len(_names(place)))
        elif place:
            agent = ":".join(_names(place)[run.depth :])
            self._tasks[place], self._places[run_id] = (run, agent), place
            run.follower.started(agent)
            if agent not in self._callers:  # it is not known to call a model: its start is sent by itself
                self._send(run.follower.hints())

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **_: Any) -> None:  # noqa: ARG002
        """Note that a graph, a node, or something in a node has ended."""
        if place := self._places.pop(run_id, None):
            run, agent = self._tasks.pop(place)
            run.follower.finished(agent)
        elif ended := self._runs.pop(run_id, None):
            self._send(ended.follower.final_hints(), required=True)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:  # noqa: ARG002
        """Note the end, as `on_chain_end` does."""
        self.on_chain_end(None, run_id=run_id)

    def _send(self, hints: Mapping[str, Any] | None, required: bool = False) -> None:
        """Send hints later. Those that are not `required` are dropped while too many are pending."""
        self._pending = [one for one in self._pending if not one.done()]
        if self._client is not None and hints and (required or len(self._pending) < MAX_PENDING_HINTS):
            self._pending.append(self._thread.submit(send_hints, self._client, hints))


# its edges ------------------------------------------------------------------------------------------------------------


def step_graph(graph: Pregel[Any, Any, Any, Any]) -> StepGraph:
    """Return the step graph of `graph` with its subgraphs.

    A node that is reached only by a `Command` without a declared destination is not in it.
    """
    drawn = graph.get_graph(xray=True).edges
    found = _without_ends_of_subgraphs([StepEdge(one.source, one.target, one.conditional) for one in drawn])
    return edges.step_graph(graph.get_name(), found, _joins(graph, found))


def _without_ends_of_subgraphs(drawn: Sequence[StepEdge]) -> list[StepEdge]:
    """Return the edges without the start and end nodes of subgraphs, over which edges are connected."""
    left = list(drawn)
    for pseudo in dict.fromkeys(edge.target for edge in drawn if edge.target.endswith((f":{START}", f":{END}"))):
        into = [edge for edge in left if edge.target == pseudo]
        out = [edge for edge in left if edge.source == pseudo]
        left = [edge for edge in left if pseudo not in edge[:2]]
        left += [StepEdge(a.source, b.target, a.chosen or b.chosen) for a, b in itertools.product(into, out)]
    return left


def _joins(graph: Pregel[Any, Any, Any, Any], drawn: Sequence[StepEdge]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the joins of `graph` and its subgraphs, which are not among the drawn edges."""
    for prefix, level in (("", graph), *((f"{way}|", one) for way, one in graph.get_subgraphs(recurse=True))):
        waiting = sorted(level.builder.waiting_edges) if isinstance(level, CompiledStateGraph) else ()
        for members, target in waiting:
            ends = [_outermost(drawn, f"{prefix}{member}".replace("|", ":"), 0) for member in members]
            starts = _outermost(drawn, f"{prefix}{target}".replace("|", ":"), 1)
            yield from itertools.product(itertools.product(*ends), starts)


def _outermost(drawn: Sequence[StepEdge], node: str, side: int) -> list[str]:
    """Return `node`, or what is in its place of a subgraph: its last nodes (`side` 0) or its first ones (1)."""
    ends, inside = [(edge.source, edge.target)[:: 1 - 2 * side] for edge in drawn], f"{node}:"
    return sorted({one for one, other in ends if one.startswith(inside) and not other.startswith(inside)}) or [node]
