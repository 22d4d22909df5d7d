"""LangGraph: every model call says which node makes it, and who is expected next.

    from kedge.integrations.langgraph import ChatOpenAI, attach      # in place of langchain_openai's
    graph = attach(builder.compile())

`attach` reads the graph's edges and watches its nodes start and end; `ChatOpenAI` is LangChain's, and sends what is
known then with each call. An agent is named by its node, one in a subgraph by the way to it: `research:writer`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID

from kedge.errors import ConfigError
from kedge.integrations import edges
from kedge.integrations.edges import END, START, Edge
from kedge.integrations.follower import Follower
from kedge.integrations.openai_client import tell, with_hints
from kedge.workflow.step_graph import StepGraph

try:
    import langchain_openai
    from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
    from langchain_core.runnables.config import RunnableConfig, ensure_config
    from langgraph.graph.state import CompiledStateGraph
    from langgraph.pregel import Pregel
    from openai import OpenAI
except ImportError as error:
    why = "is not installed: pip install 'kedge[langgraph]'"
    raise ConfigError("kedge.integrations.langgraph", error.name, why) from error

MOST_UNTOLD = 16
"""Hints without a prompt that may wait for a slow server; with more, newer ones are not told."""
Graph = TypeVar("Graph", bound=Pregel[Any, Any, Any, Any])
Metadata = Mapping[str, Any] | None


def attach(graph: Graph, name: str = "", *, client_id: str = "") -> Graph:
    """`graph`, to be run as before, with the hints that its models can send.

    `name`: the workflow's; default: the graph's own. A run is named by its `thread_id`, where it has one.
    `client_id`: whose it is, where two applications with the same API key may use the same thread ids.
    """
    name = name or graph.get_name()
    return graph.with_config({"callbacks": [_Watcher(name, step_graph(graph), client_id)]})


class ChatOpenAI(langchain_openai.ChatOpenAI):
    """LangChain's `ChatOpenAI`; in a node of a graph, its calls send hints."""

    def _get_request_payload(self, input_: Any, *, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        """The one place where all kinds of calls get their body: waiting or not, streamed or not."""
        payload = super()._get_request_payload(input_, stop=stop, **kwargs)
        hints = _hints(ensure_config(), self.root_client)
        return with_hints(payload, "extra_body", hints) if hints else payload


def _hints(config: RunnableConfig, client: OpenAI | None) -> dict[str, Any]:
    """What is known of the node that has this config, outside of an attached graph by its metadata alone."""
    metadata = config["metadata"]
    for watcher in _watchers(config):
        if hints := watcher.call(_place(metadata), client):
            return hints
    agent, run = ":".join(_names(_place(metadata))), metadata.get("thread_id")
    return {"agent": agent, **({"run": str(run)} if run else {})} if agent else {}


def _watchers(config: RunnableConfig) -> Iterator[_Watcher]:
    callbacks = config["callbacks"]
    handlers = callbacks.handlers if isinstance(callbacks, BaseCallbackManager) else callbacks or ()
    return (handler for handler in handlers if isinstance(handler, _Watcher))


def _place(metadata: Metadata) -> str:
    """Where in its graphs a node runs, and for which time: `outer:<id>|inner:<id>`; empty outside of nodes."""
    return str((metadata or {}).get("langgraph_checkpoint_ns") or "")


def _names(place: str) -> list[str]:
    """The nodes of a place, outermost first. A part without a name counts calls of one subgraph in one node."""
    return [part.partition(":")[0] for part in place.split("|") if ":" in part]


# what happens in a graph ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """One call of an attached graph."""

    follower: Follower
    depth: int
    """Nodes of other graphs around it."""


@dataclass(frozen=True)
class _Task:
    """A node that runs."""

    run: _Run
    agent: str


class _Watcher(BaseCallbackHandler):
    """Follows the runs of one graph. LangChain calls it from any thread, in order for each node."""

    run_inline = True

    def __init__(self, workflow: str, graph: StepGraph, client_id: str) -> None:
        self._workflow, self._graph, self._client_id = workflow, graph, client_id
        self._runs: dict[UUID, _Run] = {}
        self._tasks: dict[str, _Task] = {}
        """By place."""
        self._places: dict[UUID, str] = {}
        """LangChain's id of a task -> its place."""
        self._callers: set[str] = set()
        """Agents that have called a model."""
        self._teller = _Teller()

    def call(self, place: str, client: OpenAI | None) -> dict[str, Any] | None:
        """The hints for a model call of the node that runs there; None where it is not in this graph."""
        task = self._tasks.get(place)
        if task is None:
            return None
        self._teller.client = client
        self._callers.add(task.agent)
        return task.run.follower.hints(task.agent)

    def on_chain_start(
        self,
        serialized: Any,  # noqa: ARG002 (LangChain's signature)
        inputs: Any,  # noqa: ARG002
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: Metadata = None,
        **_: Any,
    ) -> None:
        """A graph, a node, or something in a node starts."""
        place = _place(metadata)
        if place in self._tasks:
            return
        run = self._around(place, parent_run_id)
        if run is None:
            self._begin(run_id, place, metadata)
        elif place:
            self._start(run_id, run, place)

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **_: Any) -> None:  # noqa: ARG002
        """A graph, a node, or something in a node has ended."""
        self._end(run_id)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:  # noqa: ARG002
        """As `on_chain_end`."""
        self._end(run_id)

    def _around(self, place: str, parent: UUID | None) -> _Run | None:
        """The run that a node at this place belongs to."""
        while place := place.rpartition("|")[0]:
            if place in self._tasks:
                return self._tasks[place].run
        return self._runs.get(parent) if parent else None

    def _begin(self, run_id: UUID, place: str, metadata: Metadata) -> None:
        thread = (metadata or {}).get("thread_id")
        follower = Follower(self._workflow, self._graph, str(thread or ""), self._client_id)
        self._runs[run_id] = _Run(follower, len(_names(place)))

    def _start(self, run_id: UUID, run: _Run, place: str) -> None:
        """A node runs. Where it is not known to call a model, which would tell it, it is told by itself."""
        task = _Task(run, ":".join(_names(place)[run.depth :]))
        self._tasks[place], self._places[run_id] = task, place
        run.follower.started(task.agent)
        if task.agent not in self._callers:
            self._teller.tell(run.follower.hints())

    def _end(self, run_id: UUID) -> None:
        if place := self._places.pop(run_id, None):
            task = self._tasks.pop(place)
            task.run.follower.finished(task.agent)
        elif run := self._runs.pop(run_id, None):
            self._teller.tell(run.follower.over(), surely=True)


class _Teller:
    """Tells hints without a prompt, one after the other and aside, so that no node waits for them."""

    def __init__(self) -> None:
        self.client: OpenAI | None = None
        """The client of the last call. Before there was one, nobody knows the server, and it has nothing to keep."""
        self._thread = ThreadPoolExecutor(1, "kedge-hints")
        self._untold: list[Future[None]] = []

    def tell(self, hints: Mapping[str, Any] | None, surely: bool = False) -> None:
        self._untold = [one for one in self._untold if not one.done()]
        if self.client is not None and hints and (surely or len(self._untold) < MOST_UNTOLD):
            self._untold.append(self._thread.submit(tell, self.client, hints))


# its edges ------------------------------------------------------------------------------------------------------------


def step_graph(graph: Pregel[Any, Any, Any, Any]) -> StepGraph:
    """Who may come after whom in `graph`, subgraphs included. A node that only a `Command` without a declared
    destination leads to is not in it."""
    drawn = graph.get_graph(xray=True).edges
    found = _without_ends_of_subgraphs([Edge(one.source, one.target, one.conditional) for one in drawn])
    return edges.step_graph(graph.get_name(), found, _joins(graph, found))


def _without_ends_of_subgraphs(drawn: Sequence[Edge]) -> list[Edge]:
    """The edges with those that lead over a subgraph's own start or end drawn through: nothing runs there."""
    left = list(drawn)
    for pseudo in dict.fromkeys(edge.target for edge in drawn if edge.target.endswith((f":{START}", f":{END}"))):
        into = [edge for edge in left if edge.target == pseudo]
        out = [edge for edge in left if edge.source == pseudo]
        left = [edge for edge in left if pseudo not in edge[:2]]
        left += [Edge(a.source, b.target, a.chosen or b.chosen) for a, b in itertools.product(into, out)]
    return left


def _joins(graph: Pregel[Any, Any, Any, Any], drawn: Sequence[Edge]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Nodes of `graph` and its subgraphs that wait for several others, which no drawing tells."""
    for prefix, level in (("", graph), *((f"{way}|", one) for way, one in graph.get_subgraphs(recurse=True))):
        for members, target in _waiting(level):
            ends = [_ends(drawn, f"{prefix}{member}".replace("|", ":")) for member in members]
            starts = _starts(drawn, f"{prefix}{target}".replace("|", ":"))
            yield from itertools.product(itertools.product(*ends), starts)


def _waiting(level: object) -> Iterable[tuple[tuple[str, ...], str]]:
    return sorted(level.builder.waiting_edges) if isinstance(level, CompiledStateGraph) else ()


def _ends(drawn: Sequence[Edge], node: str) -> list[str]:
    """`node`, or the last nodes of the subgraph that stands in its place."""
    inside = {edge.source for edge in drawn if _is_in(edge.source, node) and not _is_in(edge.target, node)}
    return sorted(inside) or [node]


def _starts(drawn: Sequence[Edge], node: str) -> list[str]:
    """As `_ends`, with the first nodes."""
    inside = {edge.target for edge in drawn if _is_in(edge.target, node) and not _is_in(edge.source, node)}
    return sorted(inside) or [node]


def _is_in(one: str, node: str) -> bool:
    return one.startswith(f"{node}:")
