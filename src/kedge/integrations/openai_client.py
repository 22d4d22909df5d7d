"""Plain OpenAI clients in a workflow: every call says whose it is, and who is expected next.

    with workflow(client, flow) as run:
        plan = run.agent("planner").chat.completions.create(model=…, messages=[…])

`run.agent(…)` is a client like the given one. Where the calls are somewhere deep in the code, give them `run.client`
and say around them who acts: `with acting("planner"): …`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Generic, TypeVar, overload

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
GENERATIONS = ("/chat/completions", "/completions")
"""The routes whose calls are an agent's."""
PATIENCE = 5.0
"""Seconds for which the end of a run waits for the server to take note."""

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_acting: ContextVar[str] = ContextVar("kedge_acting", default="")


@contextmanager
def acting(agent: str) -> Iterator[None]:
    """Calls in this block are `agent`'s, where they are made with some run's `client`; also those of tasks that are
    started in it."""
    token = _acting.set(agent)
    try:
        yield
    finally:
        _acting.reset(token)


def set_acting(agent: str) -> None:
    """As `acting`, for the rest of this task or thread."""
    _acting.set(agent)


Flow = str | Workflow | StepGraph
Client = TypeVar("Client", OpenAI, AsyncOpenAI)


class _Caller:
    """Who makes the calls of a client."""

    def __init__(self, follower: Follower, agent: Callable[[], str]) -> None:
        self._follower, self._agent = follower, agent

    @contextmanager
    def call(self, path: str, options: Mapping[str, Any]) -> Iterator[Any]:
        """The options of a call with the hints in them. Of a stream's call the end is not seen: the agent counts as
        done when its answer begins."""
        if path not in GENERATIONS:
            yield options
            return
        with self._follower.calling(self._agent()) as hints:
            yield with_hints(options, "extra_json", hints)


class _Run(ABC, Generic[Client]):
    """One run of a workflow. The clients that it gives are copies of the given one and share its connections."""

    def __init__(self, client: Client, follower: Follower) -> None:
        self._given: Client = client
        self._follower = follower
        self.client: Client = self._calling(_Caller(follower, _acting.get))
        """A client whose calls are of whoever is `acting`."""

    @property
    def id(self) -> str:
        """What the server knows this run by."""
        return self._follower.run

    def agent(self, name: str) -> Client:
        """A client whose calls are this agent's."""
        return self._calling(_Caller(self._follower, lambda: name))

    @abstractmethod
    def _calling(self, caller: _Caller) -> Client:
        """A copy of the given client whose calls are of `caller`."""


class WorkflowRun(_Run[OpenAI]):
    """One run of a workflow, driven by a client that waits."""

    def __enter__(self) -> WorkflowRun:
        return self

    def __exit__(self, *_: object) -> None:
        """The server may forget the run. That it cannot be reached is no error."""
        if over := self._follower.over():
            tell(self._given, over)

    def _calling(self, caller: _Caller) -> OpenAI:
        copy = self._given.copy()
        post = copy.post

        def post_with_hints(path: str, *, options: Mapping[str, Any] = _NOTHING, **rest: Any) -> Any:
            with caller.call(path, options) as hinted:
                return post(path, options=hinted, **rest)

        copy.post = post_with_hints  # type: ignore[method-assign] # every route of the copy goes through it
        return copy


class AsyncWorkflowRun(_Run[AsyncOpenAI]):
    """One run of a workflow, driven by an asynchronous client."""

    async def __aenter__(self) -> AsyncWorkflowRun:
        return self

    async def __aexit__(self, *_: object) -> None:
        """The server may forget the run. That it cannot be reached is no error."""
        if over := self._follower.over():
            client = self._given.with_options(max_retries=0, timeout=PATIENCE)
            with _no_error():
                await client.post("/hints", body={"kedge": over}, cast_to=object)

    def _calling(self, caller: _Caller) -> AsyncOpenAI:
        copy = self._given.copy()
        post = copy.post

        async def post_with_hints(path: str, *, options: Mapping[str, Any] = _NOTHING, **rest: Any) -> Any:
            with caller.call(path, options) as hinted:
                return await post(path, options=hinted, **rest)

        copy.post = post_with_hints  # type: ignore[method-assign] # every route of the copy goes through it
        return copy


@overload
def workflow(client: OpenAI, flow: Flow, *, run: str = "", client_id: str = "") -> WorkflowRun: ...
@overload
def workflow(client: AsyncOpenAI, flow: Flow, *, run: str = "", client_id: str = "") -> AsyncWorkflowRun: ...
def workflow(
    client: OpenAI | AsyncOpenAI, flow: Flow, *, run: str = "", client_id: str = ""
) -> WorkflowRun | AsyncWorkflowRun:
    """A run of `flow`, to be used in a `with` or `async with` block.

    A step graph, or a workflow, is followed here and forecast with every call. A name is all that is said where the
    server has the workflow of that name and follows it itself, or where nobody knows who is next.

    `run`: the run's id, for one that goes on in another block or process; default: one that nobody else has.
    `client_id`: whose run it is, where two applications with the same API key may use the same ids.
    """
    follower = follower_of(flow, run, client_id)
    return AsyncWorkflowRun(client, follower) if isinstance(client, AsyncOpenAI) else WorkflowRun(client, follower)


def follower_of(flow: Flow, run: str, client_id: str) -> Follower:
    """What `workflow` follows."""
    if isinstance(flow, str):
        return Follower(flow, None, run, client_id)
    return Follower(flow.name, StepGraph.of(flow) if isinstance(flow, Workflow) else flow, run, client_id)


def tell(client: OpenAI, hints: Mapping[str, Any]) -> None:
    """Tells hints without a prompt. That the server cannot be reached is no error."""
    client = client.with_options(max_retries=0, timeout=PATIENCE)
    with _no_error():
        client.post("/hints", body={"kedge": hints}, cast_to=object)


@contextmanager
def _no_error() -> Iterator[None]:
    try:
        yield
    except OpenAIError as error:
        logger.debug("hints were not taken: %s", error)


def with_hints(fields: Mapping[str, Any], name: str, hints: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` with `hints` in their part `name`, the additional body. What the caller wrote there goes before them."""
    body = fields.get(name) or {}
    return {**fields, name: {**body, "kedge": {**hints, **body.get("kedge", {})}}}
