"""The route of OpenAI's Responses API."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from kedge.server.http.errors import BODY_ERRORS, ERRORS, EVENTS, JSON, answers
from kedge.server.http.media_types import TypedRoute
from kedge.server.openai.single import answer
from kedge.server.responses.protocol import ResponsesBody
from kedge.server.responses.writer import ResponsesWriter
from kedge.server.service import TheService, TheTenant
from kedge.server.workflows.workflows import TheWorkflows

router = APIRouter(tags=["OpenAI"], responses=ERRORS, route_class=TypedRoute)
ANSWERS = answers(200, kinds=(*JSON, *EVENTS)) | BODY_ERRORS


@router.post("/v1/responses", response_model=None, responses=ANSWERS)
async def responses(
    body: ResponsesBody, request: Request, service: TheService, workflows: TheWorkflows, tenant: TheTenant
) -> Response:
    """Answer a list of items. Nothing is stored: every call sends its whole conversation."""
    writer = ResponsesWriter(body, service.model_name)
    return await answer(body.chat(), writer, request, service, workflows, tenant)
