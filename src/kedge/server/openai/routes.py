"""OpenAI's routes: chat completions, text completions and models."""

from __future__ import annotations

from fastapi import APIRouter, Response

from kedge.server.http import ERRORS, JSONAnswer, TypedRoute
from kedge.server.openai.generation import ANSWERS, TheCaller, answer
from kedge.server.openai.protocol import ChatBody, CompletionBody
from kedge.server.openai.writers import CompletionsWriter
from kedge.server.service import Service, TheService, TheTenant

router = APIRouter(tags=["OpenAI"], responses=ERRORS, route_class=TypedRoute)


@router.post("/v1/chat/completions", response_model=None, responses=ANSWERS)
async def chat_completions(body: ChatBody, caller: TheCaller) -> Response:
    """Answer a conversation or, with `kedge.bindings`, as a registered workflow's agent."""
    return await answer(body, CompletionsWriter(caller.service), caller)


@router.post("/v1/completions", response_model=None, responses=ANSWERS)
async def completions(body: CompletionBody, caller: TheCaller) -> Response:
    """Continue texts or token ids."""
    return await answer(body, CompletionsWriter(caller.service), caller)


@router.get("/v1/models", response_model=None)
async def models(service: TheService, tenant: TheTenant) -> Response:  # noqa: ARG001 (authenticates the caller)
    """List the one model that is served."""
    return JSONAnswer({"object": "list", "data": [_model(service)]})


@router.get("/v1/models/{name:path}", response_model=None)
async def model(name: str, service: TheService, tenant: TheTenant) -> Response:  # noqa: ARG001
    """Return a model by its name."""
    service.check_model(name)
    return JSONAnswer(_model(service))


def _model(service: Service) -> dict[str, object]:
    return {"id": service.model_name, "object": "model", "created": service.started, "owned_by": "kedge"}
