"""Plain OpenAI clients in a workflow: every call names its run and agent, and forecasts the next agents.

    with workflow(client, flow) as run:
        plan = run.agent("planner").chat.completions.create(model=…, messages=[…])

`run.agent(…)` is a client like the given one. Where calls are made deep in the code, let them use `run.client`, and
name the agent around them: `with acting("planner"): …`.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Generic, Self, TypeVar, cast, overload

from kedge.errors import ConfigError
from kedge.integrations.follower import Follower
from kedge.workflow.graph import Workflow
from kedge.workflow.step_graph import StepGraph

try:
    from openai import AsyncOpenAI, OpenAI, OpenAIError
except ImportError as error:
    why = "is not installed: pip install 'kedge[openai]'"
    raise ConfigError("kedge.integrations.openai_client", error.name, why) from error

logger = logging.getLogger(__name__)
GENERATIONS = ("/chat/completions", "/completions", "/responses")
"""The routes whose calls get hints."""
HINTS_TIMEOUT = 5.0
"""Seconds after which sending hints without a prompt is given up."""

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_acting: ContextVar[str] = ContextVar("kedge_acting", default="")
Flow = str | Workflow | StepGraph
Client = TypeVar("Client", OpenAI, AsyncOpenAI)


@contextmanager
def acting(agent: str) -> Iterator[None]:
    """Make the calls in this block `agent`'s, if they use a run's `client`. Tasks started in the block inherit it."""
    token = _acting.set(agent)
    try:
        yield
    finally:
        _acting.reset(token)


def set_acting(agent: str) -> None:
    """Make calls `agent`'s as `acting` does, for the rest of this task or thread."""
    _acting.set(agent)


class _ClientRun(ABC, Generic[Client]):
    """One run of a workflow. Its clients are copies of the given one and share its connections."""

    def __init__(self, client: Client, follower: Follower) -> None:
        self._given: Client = client
        self._follower = follower
        self.client: Client = self._calling(client.copy(), _acting.get)
        """A client whose calls are made by the agent set with `acting`."""

    @property
    def id(self) -> str:
        """The run's id on the server."""
        return self._follower.run

    def agent(self, name: str) -> Client:
        """Return a client whose calls are this agent's, as are those of its copies with other options."""
        return self._calling(self._given.copy(), lambda: name)

    def _calling(self, client: Any, agent: Callable[[], str]) -> Client:
        """Let the calls of a client, and of the copies that are made of it, be made by `agent`."""
        copy = client.copy
        client.post = self._hinted(client.post, agent)  # every route of the client goes through it
        client.copy = client.with_options = lambda **options: self._calling(copy(**options), agent)
        return cast("Client", client)

    @abstractmethod
    def _hinted(self, post: Callable[..., Any], agent: Callable[[], str]) -> Callable[..., Any]:
        """Return a client's `post` with hints in the calls, which `agent` makes."""

    @contextmanager
    def _call(self, agent: str, path: str, options: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the options of a call with its hints. A call that streams counts as finished when its answer begins."""
        if path not in GENERATIONS:
            yield options
            return
        with self._follower.calling(agent) as hints:
            yield with_hints(options, "extra_json", hints)


class WorkflowRun(_ClientRun[OpenAI]):
    """One run of a workflow, driven by a blocking client."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let the server forget the run. A server that cannot be reached is ignored."""
        if hints := self._follower.final_hints():
            send_hints(self._given, hints)

    def _hinted(self, post: Callable[..., Any], agent: Callable[[], str]) -> Callable[..., Any]:
        def post_with_hints(path: str, *, options: Mapping[str, Any] = _NOTHING, **rest: Any) -> Any:
            with self._call(agent(), path, options) as hinted:
                return post(path, options=hinted, **rest)

        return post_with_hints


class AsyncWorkflowRun(_ClientRun[AsyncOpenAI]):
    """One run of a workflow, driven by an asynchronous client."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Let the server forget the run. A server that cannot be reached is ignored."""
        if hints := self._follower.final_hints():
            client = self._given.with_options(max_retries=0, timeout=HINTS_TIMEOUT)
            with _ignoring_errors():
                await client.post("/hints", body={"kedge": hints}, cast_to=object)

    def _hinted(self, post: Callable[..., Any], agent: Callable[[], str]) -> Callable[..., Any]:
        async def post_with_hints(path: str, *, options: Mapping[str, Any] = _NOTHING, **rest: Any) -> Any:
            with self._call(agent(), path, options) as hinted:
                return await post(path, options=hinted, **rest)

        return post_with_hints


@overload
def workflow(client: OpenAI, flow: Flow, *, run: str = "", client_id: str = "") -> WorkflowRun: ...
@overload
def workflow(client: AsyncOpenAI, flow: Flow, *, run: str = "", client_id: str = "") -> AsyncWorkflowRun: ...
def workflow(
    client: OpenAI | AsyncOpenAI, flow: Flow, *, run: str = "", client_id: str = ""
) -> WorkflowRun | AsyncWorkflowRun:
    """Return a run of `flow`, to be used in a `with` or `async with` block.

    A step graph or a workflow is followed by the client, which sends a forecast with every call. A name alone is for a
    workflow that is registered at the server, which follows it then, or for one without a known order.

    `run`: the run's id, for one that continues in another block or process; by default a unique one.
    `client_id` tells equal run ids of two applications with the same API key apart.
    """
    follower = follower_of(flow, run, client_id)
    return AsyncWorkflowRun(client, follower) if isinstance(client, AsyncOpenAI) else WorkflowRun(client, follower)


def follower_of(flow: Flow, run: str, client_id: str) -> Follower:
    """Return the follower of a run of `flow`."""
    if isinstance(flow, str):
        return Follower(flow, None, run, client_id)
    return Follower(flow.name, StepGraph.of(flow) if isinstance(flow, Workflow) else flow, run, client_id)


def send_hints(client: OpenAI, hints: Mapping[str, Any]) -> None:
    """Send hints without a prompt. A server that cannot be reached is ignored."""
    client = client.with_options(max_retries=0, timeout=HINTS_TIMEOUT)
    with _ignoring_errors():
        client.post("/hints", body={"kedge": hints}, cast_to=object)


@contextmanager
def _ignoring_errors() -> Iterator[None]:
    try:
        yield
    except OpenAIError as error:
        logger.debug("hints were not accepted: %s", error)


def with_hints(fields: Mapping[str, Any], name: str, hints: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fields` with `hints` in their additional body, the field `name`. Hints that are already there win."""
    body = fields.get(name) or {}
    return {**fields, name: {**body, "kedge": {**hints, **(body.get("kedge") or {})}}}
