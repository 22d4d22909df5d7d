"""From a call's body to its answer: hints, the engine's requests and the run that they belong to, whole or streamed."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, Request, Response

from kedge.checks import brief
from kedge.errors import EmptyPrompt, InvalidGrammar, InvalidToken, KedgeError, PromptTooLong, RequestError
from kedge.guard import GuardOrders
from kedge.hints import Hints
from kedge.hints.values import MAX_EXPECTED
from kedge.server.http import (
    EVENTS,
    JSON,
    EventStream,
    JSONAnswer,
    answers,
    error_body,
    failure_of,
    kedge_field,
    problem_of,
    sent_as,
)
from kedge.server.logs import CLIENT_GONE
from kedge.server.openai import prompts
from kedge.server.openai.protocol import COMPLETION_MAX_TOKENS, AnyBody, CallBody, ChatBody, CompletionBody
from kedge.server.openai.tool_calls import PARSERS, AnswerReader, grammar_of
from kedge.server.openai.writers import AnswerWriter
from kedge.server.service import GenerationCall, Service, TheService, TheTenant
from kedge.server.tenancy import Tenant
from kedge.server.workflows.client_runs import ClientRun, values_for
from kedge.server.workflows.registry import Registered
from kedge.server.workflows.server_runs import TheWorkflows, Workflows
from kedge.types import (
    ClientId,
    Completion,
    GenerateRequest,
    RequestId,
    ReuseMode,
    RunId,
    SamplingParams,
    Segment,
    TokenDelta,
    ValueKind,
)
from kedge.workflow.graph import Agent, Step


@dataclass(frozen=True, slots=True)
class CallScope:
    """Who asks, and which server answers."""

    request: Request
    service: Service
    workflows: Workflows
    tenant: Tenant


async def _caller(request: Request, service: TheService, workflows: TheWorkflows, tenant: TheTenant) -> CallScope:
    return CallScope(request, service, workflows, tenant)


TheCaller = Annotated[CallScope, Depends(_caller)]
ANSWERS = answers(200, kinds=(*JSON, *EVENTS))
"""Documentation of the answers of routes that generate"""


async def answer(given: CallBody, writer: AnswerWriter, caller: CallScope) -> Response:
    """Answer a call. Raises `NotFound` for another model, and `RequestError` for what cannot be served."""
    with sent_as(given.sent):
        job = GenerationJob.of(*await caller.service.threads.work(partial(_read, given, caller)), caller)
        writer.body, writer.call = job.body, (call := await job.begin())
        if job.body.stream:
            return EventStream(_events(job, call, writer), call.end)
        finished = await job.finished(call)
    if finished is None:
        return Response(status_code=CLIENT_GONE)

    def whole() -> dict[str, Any]:
        deltas = [TokenDelta(one.text, one.tokens, one, one.logprobs, one.prompt_logprobs) for one in finished]
        said = [(job.reader().push(delta), delta) for delta in deltas]
        return {**writer.whole(said), "kedge": job.kedge(call)}

    is_long = job.body.top_logprobs_count is not None
    return JSONAnswer(await caller.service.threads.work(whole) if is_long else whole())


def _read(given: CallBody, caller: CallScope) -> tuple[AnyBody, Hints, str]:
    """Return a body with its hints and the answer's grammar."""
    body, service = given.chat(), caller.service
    if body is not given and body.choices_per_prompt > 1:
        raise RequestError("n", body.n, "this protocol's answers have one choice")
    service.check_model(body.model)
    body.refuse_unsupported()
    hints = caller.request.state.hints = service.hints(caller.tenant, body.hints, caller.request.headers)
    body.left_out.extend(hints.ignored)
    if not isinstance(body, ChatBody):
        return body, hints, ""
    body.left_out.extend(body.unread)
    return body, hints, grammar_of(body, service.settings.tool_call_parser)


async def _events(job: GenerationJob, call: GenerationCall, writer: AnswerWriter) -> AsyncIterator[bytes]:
    readers, left = [job.reader() for _ in call.requests], len(call.requests)

    def written(batch: Sequence[tuple[int, TokenDelta]], kedge: Mapping[str, Any] | None) -> bytes:
        events = bytearray()
        for at, delta in batch:
            said = readers[at].push(delta), delta
            events += b"".join(writer.add(at, said, kedge if delta is batch[-1][1] else None))
        return bytes(events)

    if begun := writer.begin():
        yield begun
    try:
        async for batch in call.batches():
            left -= sum(delta.completion is not None for _, delta in batch)
            write = partial(written, batch, None if left else job.kedge(call))
            is_long = any(delta.prompt_logprobs for _, delta in batch)  # those of a prompt are not for the event loop
            if events := await job.caller.service.threads.work(write) if is_long else write():
                yield events
    except KedgeError as error:
        yield failure(writer, error, job.caller)
    if writer.last:
        yield writer.last


def failure(writer: AnswerWriter, error: KedgeError, caller: CallScope) -> bytes:
    """Return the end of a stream of which a call has failed, and count the call."""
    body = error_body(error)
    caller.service.failed(caller.tenant.id, failure_of(caller.request, body, problem_of(error).status))
    return b"".join(writer.failed(body["error"]))


@dataclass(frozen=True)
class GenerationJob:
    """Engine requests that one body asks for, still to be built and submitted."""

    caller: CallScope
    body: AnyBody
    hints: Hints
    run: ClientRun | None
    registered: Registered | None
    agent: Agent | None
    """The agent of the registered workflow that asks"""
    sampling: SamplingParams
    mode: ReuseMode
    step: Step | None
    """The turn of the agent whose template is filled"""

    @classmethod
    def of(cls, body: AnyBody, hints: Hints, grammar: str, caller: CallScope) -> GenerationJob:
        """Return the job of a conversation, of texts or token ids as they stand, or, where the hints have bindings, of
        a registered agent's filled template. `grammar` is the answer's.

        Raises `RequestError`, or `NotFound` for bindings of an unknown workflow or agent.
        """
        service, workflows, tenant = caller.service, caller.workflows, caller.tenant
        tools = len(body.tools_to_use) if isinstance(body, ChatBody) else 0
        if tools and service.settings.tool_call_parser is None:
            raise RequestError("tools", tools, "this server reads no tool calls (--tool-call-parser)")
        if hints.bindings is None:
            registered = workflows.registry.find(tenant.id, hints.workflow)
            is_known = registered is not None and hints.agent in registered.workflow.ids
            agent = registered.agent(hints.agent) if registered and is_known else None
            is_chat, mode = isinstance(body, ChatBody), service.default_mode(ReuseMode.EXACT)
            sampling = service.sampling(service.settings.default_max_tokens if is_chat else COMPLETION_MAX_TOKENS)
        else:
            if not isinstance(body, ChatBody):
                raise RequestError("kedge.bindings", "…", "templates are filled in /v1/chat/completions")
            for name, many in (("tools", tools), ("messages", len(body.messages))):
                if many:
                    raise RequestError(name, many, "with kedge.bindings the agent's template is the prompt")
            registered = workflows.registry.get(tenant.id, hints.workflow)
            agent, mode = registered.agent(hints.agent), service.default_mode(ReuseMode.TRANSLATE)
            sampling = agent.sampling
        run = workflows.client_runs.touch(tenant.namespace(hints.salt), hints, registered)
        mode = hints.reuse or (registered.mode(agent, mode) if registered and agent else mode)
        sampling = body.sampling(replace(sampling, grammar=grammar))
        step = None
        if hints.bindings is not None:
            step = run.begin(hints.agent) if run else Step(hints.agent, 0)
        return cls(caller, body, hints, run, registered, agent, sampling, mode, step)

    def reader(self) -> AnswerReader:
        """Return the reader of a choice."""
        form, body = self.caller.service.settings.tool_call_parser, self.body
        if form and isinstance(body, ChatBody) and body.tools_to_use:
            return PARSERS[form](1 if body.parallel_tool_calls is False else None)
        return AnswerReader()

    def kedge(self, call: GenerationCall) -> dict[str, Any]:
        """Return the answer's field `kedge`, with what of the body was left out."""
        ignored = [str(brief(one)) for one in dict.fromkeys(self.body.left_out)][:MAX_EXPECTED]
        return kedge_field(replace(self.hints, ignored=tuple(ignored)), [one for one in call.completions if one])

    async def begin(self) -> GenerationCall:
        """Submit all requests. If building or submitting raises, the run is as it was before."""
        run, runs, hints, body = self.run, self.caller.workflows.client_runs, self.hints, self.body
        count = body.choices_per_prompt * (len(body.prompts) if isinstance(body, CompletionBody) else 1)
        if run and hints.agent:
            run.call(hints.agent)
        try:
            call = await self.caller.service.begin(self.caller.tenant, count, self._requests, self._over)
        except BaseException as error:  # cancellation too must undo it
            if run and hints.agent:
                run.end_call(hints.agent)
            if run and self.step:
                run.give_back(self.step)
            self._name_field(error)
            raise
        if run and self.step and self.registered:
            run.read(self.registered, self.step, call.requests[0], hints.reuse)
        if run and hints.agent:
            runs.moved(run, hints.agent, has_ended=False)
        return call

    async def finished(self, call: GenerationCall) -> list[Completion] | None:
        """Return the completions of a call, or None if the client disconnects first. The call is over then."""

        async def is_gone() -> None:
            while (await self.caller.request.receive())["type"] != "http.disconnect":
                pass

        finished, gone = asyncio.ensure_future(call.finished()), asyncio.ensure_future(is_gone())
        try:
            await asyncio.wait({finished, gone}, return_when=asyncio.FIRST_COMPLETED)
            return finished.result() if finished.done() else None
        except InvalidGrammar as error:
            self._name_field(error)
            raise
        finally:
            call.end()
            finished.cancel()
            gone.cancel()

    def _name_field(self, error: BaseException) -> None:
        """Name the chat's field in an engine's error about the prompt or the grammar."""
        if isinstance(error, InvalidGrammar):
            is_call = isinstance(self.body, ChatBody) and self.body.must_call
            error.rename("tools" if is_call else "response_format", error.value)
        elif isinstance(error, EmptyPrompt | InvalidToken | PromptTooLong):
            field = "kedge.bindings" if self.step else self.body.prompt_field
            value = {EmptyPrompt: "", PromptTooLong: f"{error.value} tokens"}.get(type(error), error.value)
            if error.key not in ("kedge.bindings", field):
                error.rename(field, value)

    def _prompts(self) -> list[Sequence[Segment]]:
        """Return the segments of every prompt; called off the event loop."""
        tokenizer = self.caller.service.engine.tokenizer
        if self.step and self.registered:
            prompt, bindings = self.registered.prompts[self.step.agent], self.hints.bindings or {}
            return [prompt.fill(values_for(prompt, bindings, tokenizer, self.registered, self.run, self.step))]
        if isinstance(self.body, CompletionBody):
            return [prompts.of_prompt(tokenizer, one) for one in self.body.prompts]
        return [prompts.of_chat(tokenizer, self.body)]

    def _requests(self) -> list[GenerateRequest]:
        hints, seed, agent, registered = self.hints, self.sampling.seed, self.agent, self.registered
        guard = GuardOrders(hints.guard, fidelity=hints.fidelity, pick=hints.pick)
        if agent is not None:
            fidelity = agent.fidelity if hints.fidelity is None else hints.fidelity
            guard = GuardOrders(hints.guard or agent.guard, fidelity=fidelity, pick=hints.pick or agent.pick)
        produces = None
        if self.run and self.step and registered:  # a sample if an agent of the workflow reads the answer in this run
            reads = (read for one in registered.workflow.agents for read in one.placeholders)
            is_read = any(read.kind is ValueKind.AGENT and read.of == self.step.agent for read in reads)
            produces = self.step.sample() if is_read else None
        tools = self.caller.service.settings.tool_call_parser
        requests = []
        for segments in self._prompts():
            if self.step and registered:  # all calls of this agent share the beginning of its template
                fixed = len(registered.prompts[self.step.agent].prefixes[0]) or None
            elif hints.fixed_messages:
                fixed = prompts.tokens_up_to(segments, f"message_{hints.fixed_messages - 1}")
            else:
                fixed = hints.fixed_tokens
            for choice in range(self.body.choices_per_prompt):
                request = GenerateRequest(
                    segments=tuple(segments),
                    sampling=replace(self.sampling, seed=None if seed is None else (seed + choice) % 2**63),
                    reuse=self.mode,
                    guard=guard,
                    request_id=RequestId(f"http-{uuid.uuid4().hex}"),
                    tenant=self.caller.tenant.id,
                    partition=self.caller.tenant.namespace(hints.salt).partition,
                    client=ClientId(hints.client),
                    workflow=hints.workflow,
                    run=self.run.key.run_id if self.run else RunId(""),
                    agent=hints.agent,
                    produces=produces if choice == 0 else None,
                    fixed=fixed,
                    is_plain=self.step is None and hints.reuse is None,
                    turn=hints.turn,
                    tool_mark=PARSERS[tools].mark if tools else "",
                    logprobs=self.body.top_logprobs_count,
                    prompt_logprobs=self.body.prompt_logprobs_count,
                )
                requests.append(request)
        return requests

    def _over(self, call: GenerationCall) -> None:
        if self.run is None:
            return
        runs, hints = self.caller.workflows.client_runs, self.hints
        if self.step and call.completions[0]:
            self.run.keep(self.step, call.completions[0], self.caller.service.engine.tokenizer)
        if hints.agent:
            self.run.end_call(hints.agent)
        if hints.final:
            runs.end(self.run)
        elif hints.agent:
            runs.moved(self.run, hints.agent, has_ended=True)
