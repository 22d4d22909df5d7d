"""The dashboard: a page at `/`, what it is made of, and reports on plain requests and the guard.

The page asks for three things: what the tenant did, what the engine holds for it, and the text of a call. A tenant sees
what is its own, and nothing else. The page itself holds no data and is served to anybody. Figures of the whole engine
would tell of other tenants, so they are shown only where no keys are asked for and there is one tenant.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.staticfiles import StaticFiles

from kedge import __version__
from kedge.engine.base import Engine
from kedge.errors import EngineClosed, NotFound
from kedge.server.history import text_of
from kedge.server.http import ERRORS, JSONAnswer
from kedge.server.service import Service, TheCaller
from kedge.types import TenantId, Tokens, WorkflowAgent, is_owned

files = StaticFiles(packages=[("kedge.server.dashboard", "static")])
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
router = APIRouter()


@router.get("/", include_in_schema=False)
@router.get("/static/{name}", include_in_schema=False)
async def page(request: Request, name: str = "index.html") -> Response:
    """The page, or a file that it is made of."""
    answer = await files.get_response(name, request.scope)
    answer.headers.update(PAGE_HEADERS)
    return answer


# what the tenant did --------------------------------------------------------------------------------------------------


@router.get("/v1/dashboard", include_in_schema=False)
async def state(caller: TheCaller, since: int = 0) -> Response:
    """The tenant's workflows, runs and failures, and its calls that have changed since version `since`."""
    service, tenant = caller.service, caller.tenant
    told = service.history.state(tenant.id, since)
    condition, reason = health(service)
    drawn = await service.threads.work(lambda: [one.drawn for one in list(tenant.workflows.values())])
    about = {"model": service.model_name, "version": __version__, "open": service.keys.is_open}
    return JSONAnswer(
        {
            "server": {**about, "started": service.started},
            "health": {"state": condition, "reason": reason},
            "workflows": drawn,
            "runs": [
                # of clients' runs those that go on: any other run of a call has ended
                *({**one.brief(), "reason": one.failure and one.failure.reason} for one in tenant.runs.values()),
                *({"id": run.name, "status": "running"} for run in service.client_runs.by_tenant[tenant.id]),
            ],
            **told,
        }
    )


def health(service: Service) -> tuple[str, str]:
    """Return the engine's state as far as it is known without asking it, and why where it is not healthy."""
    failure, most = service.engine.failure, service.settings.max_in_flight
    if failure is not None:
        return "failed", str(failure) or type(failure).__name__
    if service.is_ending:
        return "shutting down", "the server takes no new work"
    if service.in_flight >= most:
        return "overloaded", f"all {most} places for generations and runs are taken"
    return "healthy", ""


# what the engine holds ------------------------------------------------------------------------------------------------


@router.get("/v1/dashboard/engine", include_in_schema=False)
async def engine(caller: TheCaller) -> Response:
    """What the engine holds for the tenant. It answers between two steps."""
    service, tenant = caller.service, caller.tenant
    prompts = service.history.fixed_prompts(tenant.id)
    look = partial(look_into, service.engine, tenant.id, prompts, with_totals=service.keys.is_open)
    return JSONAnswer(await service.threads.ask(("dashboard", tenant.id), look))


def look_into(
    engine: Engine, tenant: TenantId, prompts: Mapping[WorkflowAgent, Tokens], *, with_totals: bool
) -> dict[str, Any]:
    """Ask the engine, `with_totals` also for figures of all tenants together; blocks until it comes round to it.

    An engine without figures has nothing to show.
    """
    try:
        asked = [(agent.namespace, tokens) for agent, tokens in prompts.items()]
        own = engine.inspect_tenants(partial(is_owned, tenant), asked)
        if not own:
            return {}
        seen = {"guard": own.get("guard", {}).get("agents")}
        if "prompts" not in own:  # vLLM reports no tenant's holdings
            return seen
        blocks = engine.inspect()["cache"] if with_totals else None
    except EngineClosed:
        return {"closed": True}
    held = zip(prompts.items(), own["prompts"], strict=True)
    cached = [
        {"workflow": one.workflow, "agent": one.agent, "fixed": len(tokens), **tiers} for (one, tokens), tiers in held
    ]
    seen |= {"cached": cached, "pools": own["pools"]}
    if blocks is None:
        return seen
    device = {held: blocks[f"{held}_blocks"] for held in ("cached", "leased", "loading", "free")}
    host = {"cached": blocks["host_cached_blocks"], "free": blocks["host_free_blocks"]}
    tiers = {"device": device, "host": {**host, "offloading": blocks["offloading_blocks"]}}
    return {**seen, "tiers": tiers, "prefetch": blocks["transfers"]["prefetch"]}


# the text of a call ---------------------------------------------------------------------------------------------------


@router.get("/v1/dashboard/calls/{number}", include_in_schema=False)
async def call(number: int, caller: TheCaller) -> Response:
    """The text of a call of the tenant, by its number on the dashboard; null where it is not kept."""
    service, tenant = caller.service, caller.tenant
    found = service.history.texts(tenant.id, number)
    if found is None:
        raise NotFound("call", number, "the dashboard remembers only the last ones")
    asked, done = found
    read = partial(text_of, asked, done, service.engine.tokenizer) if asked and done else None
    text = await service.threads.work(read) if read else None
    return JSONAnswer({"text": text, "keeps_texts": service.history.keeps_texts(tenant.id)})


# reports --------------------------------------------------------------------------------------------------------------


@router.get("/kedge/report", tags=["Operation"], responses=ERRORS)
async def traffic_report(caller: TheCaller) -> Response:
    """Return what was found in the tenant's plain requests: agents, who follows whom, and what defeats reuse; null for
    an engine that does not look at plain requests in this process.
    """
    tenant, threads = caller.tenant.id, caller.service.threads
    look = partial(caller.service.engine.traffic, partial(is_owned, tenant))
    return JSONAnswer(await threads.ask(("traffic", tenant), look))


SHOWN = ("mode", "max_changed", "agents")
"""What a tenant sees; counts of checks are of all tenants together, and in the operator's metrics."""


@router.get("/v1/guard", tags=["Kedge"], responses=ERRORS)
async def guard(caller: TheCaller) -> Response:
    """Return how far the translation of the tenant's agents is trusted, by placeholder, and by what evidence.

    `mode` is null for an engine without a guard.
    """
    tenant, threads = caller.tenant.id, caller.service.threads
    look = partial(caller.service.engine.inspect_tenants, partial(is_owned, tenant), [])
    held = (await threads.ask(("guard", tenant), look)).get("guard", {})
    shown = {name: held[name] for name in SHOWN if name in held}
    return JSONAnswer({"object": "guard", "mode": None, "max_changed": None, "agents": [], **shown})
