"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from kedge.server.anthropic.protocol import MessagesBody
from kedge.server.anthropic.writer import MessagesWriter
from kedge.server.http.errors import BODY_ERRORS, ERRORS, EVENTS, JSON, answers
from kedge.server.http.media_types import TypedRoute
from kedge.server.http.sse import JSONAnswer
from kedge.server.openai import prompts
from kedge.server.openai.single import answer
from kedge.server.service import TheService, TheTenant
from kedge.server.workflows.workflows import TheWorkflows

router = APIRouter(tags=["Anthropic"], responses=ERRORS, route_class=TypedRoute)
ANSWERS = answers(200, kinds=(*JSON, *EVENTS)) | BODY_ERRORS


@router.post("/v1/messages", response_model=None, responses=ANSWERS)
async def messages(
    body: MessagesBody, request: Request, service: TheService, workflows: TheWorkflows, tenant: TheTenant
) -> Response:
    """Answer a conversation."""
    return await answer(body.chat(), MessagesWriter(service.model_name), request, service, workflows, tenant)


@router.post("/v1/messages/count_tokens", response_model=None, responses=answers(200) | BODY_ERRORS)
async def count_tokens(body: MessagesBody, service: TheService, tenant: TheTenant) -> Response:  # noqa: ARG001
    """Return how many tokens a conversation's prompt has."""
    chat = body.chat()
    service.check_model(chat.model)

    def count() -> int:
        segments = prompts.of_conversation(service.engine.tokenizer, chat.messages, chat.tools_to_use)
        return sum(len(one.tokens) for one in segments)

    return JSONAnswer({"input_tokens": await service.threads.work(count)})
