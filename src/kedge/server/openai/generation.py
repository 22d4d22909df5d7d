"""From a body and its hints to the engine's requests."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kedge.errors import EmptyPrompt, InvalidToken, PromptTooLong, RequestError
from kedge.server.calls import Call
from kedge.server.hints import Hints
from kedge.server.openai import prompts
from kedge.server.openai.protocol import COMPLETION_MAX_TOKENS, ChatBody, CompletionBody, GenerationBody
from kedge.server.service import Service
from kedge.server.tenancy import Tenant
from kedge.server.workflows.registry import Registered
from kedge.server.workflows.run_memory import AgentRun, values_for
from kedge.types import (
    AgentId,
    ClientId,
    GenerateRequest,
    RequestId,
    ReuseMode,
    RunId,
    SampleId,
    SamplingParams,
    Segment,
    ValueKind,
)
from kedge.workflow.graph import Step


def plain_sampling(max_tokens: int) -> SamplingParams:
    """What OpenAI's API takes where a request does not say."""
    return SamplingParams(max_tokens, temperature=1.0)


@dataclass(frozen=True)
class Job:
    """What one body asks for: requests to build, and the run that they belong to."""

    service: Service
    tenant: Tenant
    body: GenerationBody
    hints: Hints
    run: AgentRun | None
    registered: Registered | None
    prompts: Callable[[], Sequence[Sequence[Segment]]]
    """Called off the event loop: the segments of every prompt."""
    sampling: SamplingParams
    mode: ReuseMode
    count: int
    """Generations: choices of all prompts."""
    step: Step | None = None
    """The turn of the registered agent whose template is filled."""

    async def begin(self) -> Call:
        """Submits everything. Raises what building and the engine raise; then the run is where it was."""
        self._called()
        try:
            call = await self.service.begin(self.tenant, self.count, self._requests, self._over)
        except (EmptyPrompt, InvalidToken, PromptTooLong) as error:
            self._take_back()
            raise self._in_client_words(error) from error
        except BaseException:
            self._take_back()
            raise
        self._tell_begun(call)
        return call

    def _in_client_words(self, error: RequestError) -> RequestError:
        """Return what the engine says of the prompt with the field that the client sent."""
        if error.key in (field := self.body.prompt_field, "kedge.bindings"):
            return error
        value = {EmptyPrompt: "", PromptTooLong: f"{error.value} tokens"}.get(type(error), error.value)
        return type(error)("kedge.bindings" if self.step else field, value, error.why)

    def _called(self) -> None:
        if self.run and self.hints.agent:
            self.run.call(self.hints.agent)

    def _take_back(self) -> None:
        if self.run and self.hints.agent:
            self.run.end_call(self.hints.agent)
        if self.run and self.step:
            self.run.give_back(self.step)

    def _tell_begun(self, call: Call) -> None:
        runs = self.service.agent_runs
        if self.run and self.step and self.registered:
            runs.filled(self.run, self.registered, self.step, call.requests[0], self.hints.reuse)
        if self.run and self.hints.agent:
            runs.started(self.run, self.hints.agent)

    def _requests(self) -> list[GenerateRequest]:
        return [
            self._request(segments, choice)
            for segments in self.prompts()
            for choice in range(self.body.choices_per_prompt)
        ]

    def _request(self, segments: Sequence[Segment], choice: int) -> GenerateRequest:
        seed, namespace = self.sampling.seed, self.tenant.namespace(self.hints.salt)
        return GenerateRequest(
            segments=tuple(segments),
            sampling=replace(self.sampling, seed=None if seed is None else (seed + choice) % 2**63),
            reuse=self.mode,
            request_id=RequestId(f"http-{uuid.uuid4().hex}"),
            tenant=namespace.tenant,
            partition=namespace.partition,
            client=ClientId(self.hints.client),
            workflow=self.hints.workflow,
            run=self.run.key.run_id if self.run else RunId(""),
            agent=self.hints.agent,
            produces=self._produces() if choice == 0 else None,
            trail=self.registered.prompts[self.step.agent].trail if self.registered and self.step else (),
            fixed=self._fixed(segments),
            logprobs=self.body.likeliest,
            prompt_logprobs=self.body.likeliest_of_prompt,
        )

    def _fixed(self, segments: Sequence[Segment]) -> int | None:
        """Leading tokens that are the same in every call of this agent: what its template begins with, or as hinted."""
        if self.step and self.registered:
            return len(self.registered.prompts[self.step.agent].prefixes[0]) or None
        if self.hints.fixed_messages:
            return prompts.tokens_up_to(segments, f"message_{self.hints.fixed_messages - 1}")
        return self.hints.fixed_tokens

    def _produces(self) -> SampleId | None:
        """The sample that the answer is, where an agent of the workflow is going to read it in this run."""
        if not (self.run and self.step and self.registered):
            return None
        return self.step.sample() if _is_read(self.registered, self.step.agent) else None

    def _over(self, call: Call) -> None:
        if self.run is None:
            return
        if self.step and call.completions[0]:
            self.run.keep(self.step, call.completions[0])
        if self.hints.agent:
            self.run.end_call(self.hints.agent)
        if self.hints.final:
            self.service.agent_runs.end(self.run)
        elif self.hints.agent:
            self.service.agent_runs.finished(self.run, self.hints.agent)


def _is_read(registered: Registered, agent: AgentId) -> bool:
    reads = (read for one in registered.workflow.agents for read in one.placeholders)
    return any(read.kind is ValueKind.AGENT and read.of == agent for read in reads)


def chat_job(service: Service, tenant: Tenant, body: ChatBody, hints: Hints) -> Job:
    """A conversation or, where the hints give bindings, a registered agent's filled template.

    Raises `RequestError`, or `NotFound` for bindings of a workflow or an agent that nobody registered.
    """
    _check_tools(service, body, hints)
    if hints.bindings is not None:
        return _agent_job(service, tenant, body, hints)
    tokenizer = service.engine.tokenizer
    sampling = body.sampling(plain_sampling(service.config.default_max_tokens))
    return _plain_job(
        service,
        tenant,
        body,
        hints,
        lambda: [prompts.of_conversation(tokenizer, body.messages, body.tools_to_use)],
        1,
        sampling,
    )


def _check_tools(service: Service, body: ChatBody, hints: Hints) -> None:
    if body.tools_to_use and service.config.tool_call_parser is None:
        raise RequestError("tools", len(body.tools_to_use), "this server reads no tool calls (--tool-call-parser)")
    if body.tools_to_use and hints.bindings is not None:
        raise RequestError("tools", len(body.tools_to_use), "with kedge.bindings the agent's template is the prompt")


def completion_job(service: Service, tenant: Tenant, body: CompletionBody, hints: Hints) -> Job:
    """Texts or token ids as they stand. Raises `RequestError`."""
    if hints.bindings is not None:
        raise RequestError("kedge.bindings", "…", "templates are filled in /v1/chat/completions")
    given, tokenizer = body.prompts, service.engine.tokenizer
    sampling = body.sampling(plain_sampling(COMPLETION_MAX_TOKENS))
    return _plain_job(
        service, tenant, body, hints, lambda: [prompts.of_prompt(tokenizer, one) for one in given], len(given), sampling
    )


def _plain_job(
    service: Service,
    tenant: Tenant,
    body: GenerationBody,
    hints: Hints,
    build: Callable[[], Sequence[Sequence[Segment]]],
    number: int,
    sampling: SamplingParams,
) -> Job:
    registered = service.workflows.find(tenant.id, hints.workflow)
    run = service.agent_runs.touch(tenant.namespace(hints.salt), hints, registered)
    mode = hints.reuse or _plain_mode(service, registered, hints.agent)
    count = number * body.choices_per_prompt
    return Job(service, tenant, body, hints, run, registered, build, sampling, mode, count)


def _plain_mode(service: Service, registered: Registered | None, agent: AgentId) -> ReuseMode:
    default = service.default_mode(ReuseMode.EXACT)
    if registered is None or agent not in registered.workflow.ids:
        return default
    return registered.mode(registered.agent(agent), default)


def _agent_job(service: Service, tenant: Tenant, body: ChatBody, hints: Hints) -> Job:
    if body.messages:
        raise RequestError("messages", len(body.messages), "with kedge.bindings the agent's template is the prompt")
    registered = service.workflows.get(tenant.id, hints.workflow)
    agent = registered.agent(hints.agent)
    run = service.agent_runs.touch(tenant.namespace(hints.salt), hints, registered)
    mode = hints.reuse or registered.mode(agent, service.default_mode(ReuseMode.TRANSLATE))
    sampling = body.sampling(agent.sampling)
    step = run.begin(hints.agent) if run else Step(hints.agent, 0)

    def build() -> list[Sequence[Segment]]:
        return [_filled(service, registered, hints, run, step)]

    count = body.choices_per_prompt
    return Job(service, tenant, body, hints, run, registered, build, sampling, mode, count, step)


def _filled(
    service: Service, registered: Registered, hints: Hints, run: AgentRun | None, step: Step
) -> Sequence[Segment]:
    prompt, bindings = registered.prompts[step.agent], hints.bindings or {}
    return prompt.fill(values_for(prompt, bindings, service.engine.tokenizer, registered, run, step))
