"""Engine requests of a completion body: prompts, sampling and reuse modes, and the run that they belong to."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kedge.errors import EmptyPrompt, InvalidGrammar, InvalidToken, PromptTooLong, RequestError
from kedge.guard import GuardOrders
from kedge.hints import Hints
from kedge.server.openai import prompts
from kedge.server.openai.protocol import COMPLETION_MAX_TOKENS, ChatBody, CompletionBody, GenerationBody
from kedge.server.openai.tool_calls import PARSERS
from kedge.server.service import GenerationCall, Service
from kedge.server.tenancy import Tenant
from kedge.server.workflows.client_runs import ClientRun, values_for
from kedge.server.workflows.registry import Registered
from kedge.server.workflows.server_runs import Workflows
from kedge.types import (
    ClientId,
    GenerateRequest,
    Namespace,
    RequestId,
    ReuseMode,
    RunId,
    SamplingParams,
    Segment,
    ValueKind,
)
from kedge.workflow.graph import Step


@dataclass(frozen=True, slots=True)
class CallContext:
    """Who asks, with which hints, and which server answers."""

    service: Service
    workflows: Workflows
    tenant: Tenant
    hints: Hints

    @property
    def namespace(self) -> Namespace:
        """The namespace of the call's KV, anchors and forecasts."""
        return self.tenant.namespace(self.hints.salt)


@dataclass(frozen=True)
class GenerationJob:
    """Engine requests that one body asks for, still to be built and submitted."""

    context: CallContext
    body: GenerationBody
    run: ClientRun | None
    registered: Registered | None
    prompts: Callable[[], Sequence[Sequence[Segment]]]
    """Builds the segments of every prompt; called off the event loop."""
    sampling: SamplingParams
    mode: ReuseMode
    count: int
    """Number of generations: the choices of all prompts."""
    step: Step | None = None
    """The turn of the registered agent whose template is filled."""

    @property
    def hints(self) -> Hints:
        """The hints of the call, with what of its body was left out until now."""
        hints = self.context.hints
        return replace(hints, ignored=tuple(dict.fromkeys((*hints.ignored, *self.body.skipped)))[:64])

    async def begin(self) -> GenerationCall:
        """Submit all requests. If building or submitting raises, the run is as it was before."""
        run, runs, hints = self.run, self.context.workflows.client_runs, self.context.hints
        if run and hints.agent:
            run.call(hints.agent)
        try:
            call = await self.context.service.begin(self.context.tenant, self.count, self._requests, self._over)
        except BaseException as error:  # cancellation too must undo it
            if run and hints.agent:
                run.end_call(hints.agent)
            if run and self.step:
                run.give_back(self.step)
            if isinstance(error, EmptyPrompt | InvalidGrammar | InvalidToken | PromptTooLong):
                self.name_field(error)
            raise
        if run and self.step and self.registered:
            run.read(self.registered, self.step, call.requests[0], hints.reuse)
        if run and hints.agent:
            runs.moved(run, hints.agent, has_ended=False)
        return call

    def name_field(self, error: RequestError) -> None:
        """Name the field that the client sent in an engine's error about the prompt or the grammar."""
        if error.key in (field := self.body.prompt_field, "kedge.bindings"):
            return
        if isinstance(error, InvalidGrammar):
            error.rename(self.body.grammar_field, error.value)
        else:
            value = {EmptyPrompt: "", PromptTooLong: f"{error.value} tokens"}.get(type(error), error.value)
            error.rename("kedge.bindings" if self.step else field, value)

    def _requests(self) -> list[GenerateRequest]:
        hints, seed, namespace = self.context.hints, self.sampling.seed, self.context.namespace
        agents = self.registered.workflow.agents if self.registered else ()
        agent = next((agent for agent in agents if agent.id == hints.agent), None)
        guard = GuardOrders(hints.guard, fidelity=hints.fidelity, pick=hints.pick)
        if agent is not None:
            fidelity = agent.fidelity if hints.fidelity is None else hints.fidelity
            guard = GuardOrders(hints.guard or agent.guard, fidelity=fidelity, pick=hints.pick or agent.pick)
        prompt = self.registered.prompts[self.step.agent] if self.registered and self.step else None
        produces = None
        if self.run and self.step:  # it is a sample if an agent of the workflow reads the answer in this run
            reads = (read for one in agents for read in one.placeholders if read.kind is ValueKind.AGENT)
            produces = self.step.sample() if any(read.of == self.step.agent for read in reads) else None
        tools = self.context.service.settings.tool_call_parser
        requests = []
        for segments in self.prompts():
            if prompt:  # all calls of this agent share the beginning of its template, or what is hinted
                fixed = len(prompt.prefixes[0]) or None
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
                    tenant=namespace.tenant,
                    partition=namespace.partition,
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
        runs, hints = self.context.workflows.client_runs, self.context.hints
        if self.step and call.completions[0]:
            self.run.keep(self.step, call.completions[0], self.context.service.engine.tokenizer)
        if hints.agent:
            self.run.end_call(hints.agent)
        if hints.final:
            runs.end(self.run)
        elif hints.agent:
            runs.moved(self.run, hints.agent, has_ended=True)


PromptBuilder = Callable[[], Sequence[Sequence[Segment]]]


def chat_job(context: CallContext, body: ChatBody, grammar: str) -> GenerationJob:
    """Return the job of a conversation or, where the hints have bindings, of a registered agent's filled template.
    `grammar` is the answer's.

    Raises `RequestError`, or `NotFound` for bindings of an unknown workflow or agent.
    """
    tools = len(body.tools_to_use)
    if tools and context.service.settings.tool_call_parser is None:
        raise RequestError("tools", tools, "this server reads no tool calls (--tool-call-parser)")
    if tools and context.hints.bindings is not None:
        raise RequestError("tools", tools, "with kedge.bindings the agent's template is the prompt")
    if context.hints.bindings is not None:
        return _agent_job(context, body, grammar)
    tokenizer = context.service.engine.tokenizer
    sampling = body.sampling(
        replace(context.service.sampling(context.service.settings.default_max_tokens), grammar=grammar)
    )

    return _plain_job(context, body, lambda: [prompts.of_chat(tokenizer, body)], 1, sampling)


def completion_job(context: CallContext, body: CompletionBody) -> GenerationJob:
    """Return the job of texts or token ids as they stand. Raises `RequestError`."""
    if context.hints.bindings is not None:
        raise RequestError("kedge.bindings", "…", "templates are filled in /v1/chat/completions")
    given, tokenizer = body.prompts, context.service.engine.tokenizer
    sampling = body.sampling(context.service.sampling(COMPLETION_MAX_TOKENS))
    build = lambda: [prompts.of_prompt(tokenizer, one) for one in given]  # noqa: E731
    return _plain_job(context, body, build, len(given), sampling)


def _plain_job(
    context: CallContext, body: GenerationBody, build: PromptBuilder, prompt_count: int, sampling: SamplingParams
) -> GenerationJob:
    hints = context.hints
    registered = context.workflows.registry.find(context.tenant.id, hints.workflow)
    run = context.workflows.client_runs.touch(context.namespace, hints, registered)
    mode = context.service.default_mode(ReuseMode.EXACT)
    if registered is not None and hints.agent in registered.workflow.ids:
        mode = registered.mode(registered.agent(hints.agent), mode)
    count = prompt_count * body.choices_per_prompt
    return GenerationJob(context, body, run, registered, build, sampling, hints.reuse or mode, count)


def _agent_job(context: CallContext, body: ChatBody, grammar: str) -> GenerationJob:
    hints, workflows = context.hints, context.workflows
    if body.messages:
        raise RequestError("messages", len(body.messages), "with kedge.bindings the agent's template is the prompt")
    registered = workflows.registry.get(context.tenant.id, hints.workflow)
    agent = registered.agent(hints.agent)
    run = workflows.client_runs.touch(context.namespace, hints, registered)
    mode = hints.reuse or registered.mode(agent, context.service.default_mode(ReuseMode.TRANSLATE))
    sampling = body.sampling(replace(agent.sampling, grammar=grammar))  # before the turn begins: it may raise
    step = run.begin(hints.agent) if run else Step(hints.agent, 0)
    tokenizer = context.service.engine.tokenizer

    def build() -> list[Sequence[Segment]]:
        prompt = registered.prompts[step.agent]
        return [prompt.fill(values_for(prompt, hints.bindings or {}, tokenizer, registered, run, step))]

    return GenerationJob(context, body, run, registered, build, sampling, mode, body.choices_per_prompt, step)
