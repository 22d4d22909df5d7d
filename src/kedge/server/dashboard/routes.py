"""The dashboard: a page at `/`, the events that it lives on, its details, and reports on plain requests and the guard.

A tenant sees what is its own, and nothing else. The page itself holds no data and is served to anybody. Figures of the
whole engine would tell of other tenants, so they are shown only where no keys are asked for and there is one tenant.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import cache, partial
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request, Response

from kedge import __version__
from kedge.engine.base import Engine
from kedge.engine.common.watched import WatchedEngine
from kedge.errors import EngineClosed, LimitReached, NotFound
from kedge.server.dashboard.history import AgentName, History, text_of
from kedge.server.http import ERRORS, EventStream, JSONAnswer, event
from kedge.server.service import Service, TheService, TheTenant
from kedge.server.tenancy import Tenant
from kedge.server.workflows.server_runs import TheWorkflows, Workflows
from kedge.types import Namespace, TenantId, Tokens, is_owned
from kedge.workflow.export import columns, workflow_edges
from kedge.workflow.graph import Workflow

OVERLOAD_SECONDS = 10.0
"""How long a refusal for want of room counts as overload, and after how long an engine's silence does."""


def health(service: Service, *, is_closed: bool, silent_s: float, overload_age_s: float | None) -> tuple[str, str]:
    """Return the engine's state, and why where it is not healthy.

    `is_closed`: it refused to be inspected. `silent_s`: for how long it has owed an answer. `overload_age_s`: how long
    ago one of the viewer's calls was refused for want of room, None for never.
    """
    failure = service.engine.failure
    if failure is not None:
        return "failed", str(failure) or type(failure).__name__
    if is_closed:
        return "closed", "the engine was closed"
    if service.is_ending:
        return "shutting down", "the server takes no new work"
    most = service.settings.max_in_flight
    if service.in_flight >= most:
        return "overloaded", f"all {most} places for generations and runs are taken"
    if silent_s > OVERLOAD_SECONDS:
        return "overloaded", f"the engine has not answered for {silent_s:.0f} s"
    if overload_age_s is not None and overload_age_s < OVERLOAD_SECONDS:
        return "overloaded", "calls were refused for want of room"
    return "healthy", ""


PACE, REST = 0.5, 5.0
"""Seconds between two states: at least, and at most."""
LOOK_SECONDS = 2.0
"""How old what was seen in the engine may be."""
MAX_WATCHERS = 16
"""Pages of a tenant that are open at once."""
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Dashboard:
    """What all pages of one server share. The event loop owns it, apart from the history."""

    def __init__(self, engine: Engine, keeps_texts: Callable[[TenantId], bool] = lambda _: False) -> None:
        """`keeps_texts` returns whether a tenant's texts may be kept."""
        self.history = History(keeps_texts=keeps_texts)
        self.engine = WatchedEngine(engine, self.history)
        """What the server is to use, so that there is something to show."""
        self._watchers: Counter[TenantId] = Counter()
        self._looks: dict[TenantId, tuple[float, Future[dict[str, Any]]]] = {}
        """When the engine was last asked, and its answer"""
        self._seen: dict[TenantId, dict[str, Any]] = {}

    def enter(self, tenant: TenantId) -> None:
        """A page opens. Raises `LimitReached` for too many of one tenant."""
        if self._watchers[tenant] >= MAX_WATCHERS:
            raise LimitReached("dashboard", self._watchers[tenant], f"at most {MAX_WATCHERS} pages may be open")
        self._watchers[tenant] += 1

    def leave(self, tenant: TenantId) -> None:
        """A page has gone."""
        self._watchers[tenant] -= 1

    async def seen(self, service: Service, tenant: TenantId) -> Mapping[str, Any]:
        """What the engine holds for the tenant, as it was seen last; a busy engine is not waited for."""
        asked, answer = self._looks.get(tenant, (0.0, None))
        if answer is None or (answer.done() and time.monotonic() - asked > LOOK_SECONDS):
            prompts = self.history.fixed_prompts(tenant)
            task = partial(_look, self.engine, tenant, prompts, with_totals=service.keys.is_open)
            answer = service.threads.wait(task)
            self._looks[tenant] = time.monotonic(), answer
        await asyncio.wait([asyncio.wrap_future(answer)], timeout=PACE)
        if answer.done():
            self._seen[tenant] = {**self.last_seen(tenant), **answer.result()}
        return self.last_seen(tenant)

    def last_seen(self, tenant: TenantId) -> Mapping[str, Any]:
        """What the engine answered last; the figures of one that has closed since stay."""
        return self._seen.get(tenant, {})

    def silent_s(self, tenant: TenantId) -> float:
        """For how many seconds the engine has owed an answer."""
        asked, answer = self._looks.get(tenant, (0.0, None))
        return 0.0 if answer is None or answer.done() else time.monotonic() - asked

    def health(self, service: Service, tenant: TenantId) -> tuple[str, str]:
        """The engine's state, as far as it is known without asking it."""
        return health(
            service,
            is_closed="closed" in self.last_seen(tenant),
            silent_s=self.silent_s(tenant),
            overload_age_s=self.history.seconds_since_overload(tenant),
        )


def _look(
    engine: Engine, tenant: TenantId, prompts: Mapping[AgentName, tuple[Namespace, Tokens]], *, with_totals: bool
) -> dict[str, Any]:
    """Asks the engine, `with_totals` also for figures of all tenants together; blocks until it comes round to it.

    An engine without figures has nothing to show.
    """
    try:
        own = engine.inspect_tenants(partial(is_owned, tenant), list(prompts.values()))
        if not own:
            return {}
        blocks = engine.inspect()["cache"] if with_totals else None
    except EngineClosed:
        return {"closed": True}
    cached = [{**name._asdict(), **held} for name, held in zip(prompts, own["prompts"], strict=True)]
    seen = {"cached": cached, "pools": own["pools"], "guard": own.get("guard", {}).get("agents")}
    if blocks is None:
        return seen
    tiers = {
        "device": {held: blocks[f"{held}_blocks"] for held in ("cached", "leased", "loading", "free")},
        "host": {
            "cached": blocks["host_cached_blocks"],
            "offloading": blocks["offloading_blocks"],
            "free": blocks["host_free_blocks"],
        },
    }
    return {**seen, "tiers": tiers, "prefetch": blocks["transfers"]["prefetch"]}


# routes ---------------------------------------------------------------------------------------------------------------

router = APIRouter()


@router.get("/", include_in_schema=False, response_model=None)
async def page() -> Response:
    """The page."""
    return await static("index.html")


@router.get("/static/{name}", include_in_schema=False, response_model=None)
async def static(name: str) -> Response:
    """A file that the page is made of."""
    content = _files().get(name)
    if content is None:
        raise NotFound("file", name, "the dashboard has no such file")
    return Response(content, media_type=KINDS[name.rpartition(".")[2]], headers=PAGE_HEADERS)


@router.get("/v1/dashboard/events", include_in_schema=False, response_model=None)
async def events(request: Request, service: TheService, workflows: TheWorkflows, tenant: TheTenant) -> Response:
    """The tenant's state as server-sent events, whenever it has changed."""
    dashboard: Dashboard = request.app.state.dashboard
    dashboard.enter(tenant.id)
    states = _states(dashboard, service, workflows, tenant)
    return EventStream(states, partial(dashboard.leave, tenant.id))


@cache
def _files() -> dict[str, bytes]:
    """The page's files by name."""
    return {file.name: file.read_bytes() for file in (files("kedge.server.dashboard") / "static").iterdir()}


async def _states(dashboard: Dashboard, service: Service, workflows: Workflows, tenant: Tenant) -> AsyncIterator[bytes]:
    """A state whenever it has changed, and a last one when the server ends: it says why."""
    sent, sent_at = None, 0.0
    while not service.is_ending:
        news, now = (dashboard.history.version(tenant.id), dashboard.health(service, tenant.id)), time.monotonic()
        if news != sent or now - sent_at >= REST:
            sent, sent_at = news, now
            engine = await dashboard.seen(service, tenant.id)
            yield event(_state(dashboard, service, workflows, tenant, engine), name="state")
        await asyncio.sleep(PACE)
    yield event(_state(dashboard, service, workflows, tenant, dashboard.last_seen(tenant.id)), name="state")


def _state(
    dashboard: Dashboard, service: Service, workflows: Workflows, tenant: Tenant, engine: Mapping[str, Any]
) -> dict[str, Any]:
    state = dashboard.history.state(tenant.id)
    add_outcomes(state["runs"], workflows, tenant)
    condition, reason = dashboard.health(service, tenant.id)
    return {
        "server": {"model": service.model_name, "version": __version__, "open": service.keys.is_open},
        "health": {"state": condition, "reason": reason, "silent_s": round(dashboard.silent_s(tenant.id), 1)},
        "workflows": [_drawn(one.workflow) for one in workflows.registry.all(tenant.id)],
        "engine": engine,
        **state,
    }


def add_outcomes(records: Iterable[dict[str, Any]], workflows: Workflows, tenant: Tenant) -> None:
    """Complete records of runs by how they stand and why they failed, and what was never submitted by its workflow."""
    served = {one.id: one for one in workflows.server_runs.all(tenant)}
    for record in records:
        known = served.get(record["id"])
        record["workflow"] = record["workflow"] or (known.workflow if known else "")
        record["status"] = known.status if known else "ended" if record["ended"] else "running"
        record["reason"] = known.failure if known else None


def _drawn(flow: Workflow) -> dict[str, Any]:
    """A workflow as a picture needs it: agents by column, and who hears whom."""
    edges = [{"from": edge.start, "to": edge.to, "loop": edge.is_loop} for edge in workflow_edges(flow)]
    titles = {agent.id: agent.title for agent in flow.agents if agent.title}
    return {"name": flow.name, "columns": columns(flow), "edges": edges, "titles": titles}


FORGOTTEN = "the dashboard remembers only the last ones"


@router.get("/v1/dashboard/runs/{number}", include_in_schema=False, response_model=None)
async def run(number: int, request: Request, workflows: TheWorkflows, tenant: TheTenant) -> Response:
    """A run of the tenant, by its number on the dashboard, with its calls and their receipts."""
    dashboard: Dashboard = request.app.state.dashboard
    found = dashboard.history.run(tenant.id, number)
    if found is None:
        raise NotFound("run", number, FORGOTTEN)
    add_outcomes([found], workflows, tenant)
    return JSONAnswer(found)


@router.get("/v1/dashboard/calls/{number}", include_in_schema=False, response_model=None)
async def call(number: int, request: Request, service: TheService, tenant: TheTenant) -> Response:
    """A call of the tenant, by its number on the dashboard. `text` is null where it is not kept."""
    dashboard: Dashboard = request.app.state.dashboard
    found = dashboard.history.call(tenant.id, number)
    if found is None:
        raise NotFound("call", number, FORGOTTEN)
    details, asked, done = found
    read = partial(text_of, asked, done, service.engine.tokenizer) if asked and done else None
    text = await service.threads.work(read) if read else None
    return JSONAnswer({**details, "text": text, "keeps_texts": dashboard.history.keeps_texts(tenant.id)})


@router.get("/kedge/report", tags=["Operation"], responses=ERRORS, response_model=None)
async def traffic_report(request: Request, service: TheService, tenant: TheTenant) -> Response:
    """Return what was found in the tenant's plain requests: agents, who follows whom, and what defeats reuse; null for
    an engine that does not look at plain requests in this process.
    """
    engine: Engine = request.app.state.dashboard.engine
    look = service.threads.wait(partial(engine.traffic, partial(is_owned, tenant.id)))
    return JSONAnswer(await asyncio.wrap_future(look))


SHOWN = ("mode", "max_changed", "agents")
"""What a tenant sees; counts of checks are of all tenants together, and in the operator's metrics."""


@router.get("/v1/guard", tags=["Kedge"], responses=ERRORS, response_model=None)
async def guard(request: Request, service: TheService, tenant: TheTenant) -> Response:
    """Return how far the translation of the tenant's agents is trusted, by placeholder, and by what evidence.

    `mode` is null for an engine without a guard.
    """
    engine: Engine = request.app.state.dashboard.engine
    look = service.threads.wait(partial(engine.inspect_tenants, partial(is_owned, tenant.id), []))
    held = (await asyncio.wrap_future(look)).get("guard", {})
    shown = {name: held[name] for name in SHOWN if name in held}
    return JSONAnswer({"object": "guard", "mode": None, "max_changed": None, "agents": [], **shown})
