"""Generation jobs of chat and text completions: their prompts, sampling and reuse modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kedge.errors import RequestError
from kedge.server.openai import prompts
from kedge.server.openai.constraints import grammar_of
from kedge.server.openai.generation import CallContext, GenerationJob
from kedge.server.openai.protocol import COMPLETION_MAX_TOKENS, ChatBody, CompletionBody, GenerationBody
from kedge.server.workflows.registry import Registered
from kedge.server.workflows.run_memory import values_for
from kedge.types import AgentId, ReuseMode, SamplingParams, Segment
from kedge.workflow.graph import Step

PromptBuilder = Callable[[], Sequence[Sequence[Segment]]]


def chat_job(context: CallContext, body: ChatBody) -> GenerationJob:
    """Return the job of a conversation or, where the hints have bindings, of a registered agent's filled template.

    Raises `RequestError`, or `NotFound` for bindings of an unknown workflow or agent.
    """
    _check_tools(context, body)
    grammar = grammar_of(body, context.service.settings.tool_call_parser)
    if context.hints.bindings is not None:
        return _agent_job(context, body, grammar)
    tokenizer = context.service.engine.tokenizer
    sampling = body.sampling(replace(_api_sampling(context.service.settings.default_max_tokens), grammar=grammar))

    def build() -> list[Sequence[Segment]]:
        return [prompts.of_conversation(tokenizer, body.messages, body.tools_to_use)]

    return _plain_job(context, body, build, 1, sampling)


def completion_job(context: CallContext, body: CompletionBody) -> GenerationJob:
    """Return the job of texts or token ids as they stand. Raises `RequestError`."""
    if context.hints.bindings is not None:
        raise RequestError("kedge.bindings", "…", "templates are filled in /v1/chat/completions")
    given, tokenizer = body.prompts, context.service.engine.tokenizer
    sampling = body.sampling(_api_sampling(COMPLETION_MAX_TOKENS))

    def build() -> list[Sequence[Segment]]:
        return [prompts.of_prompt(tokenizer, one) for one in given]

    return _plain_job(context, body, build, len(given), sampling)


def _api_sampling(max_tokens: int) -> SamplingParams:
    """Return the sampling of OpenAI's API where a request sets nothing."""
    return SamplingParams(max_tokens, temperature=1.0)


def _check_tools(context: CallContext, body: ChatBody) -> None:
    if body.tools_to_use and context.service.settings.tool_call_parser is None:
        raise RequestError("tools", len(body.tools_to_use), "this server reads no tool calls (--tool-call-parser)")
    if body.tools_to_use and context.hints.bindings is not None:
        raise RequestError("tools", len(body.tools_to_use), "with kedge.bindings the agent's template is the prompt")


def _plain_job(
    context: CallContext, body: GenerationBody, build: PromptBuilder, prompt_count: int, sampling: SamplingParams
) -> GenerationJob:
    hints = context.hints
    registered = context.workflows.registry.find(context.tenant.id, hints.workflow)
    run = context.workflows.client_runs.touch(context.namespace, hints, registered)
    mode = hints.reuse or _plain_mode(context, registered, hints.agent)
    count = prompt_count * body.choices_per_prompt
    return GenerationJob(context, body, run, registered, build, sampling, mode, count)


def _plain_mode(context: CallContext, registered: Registered | None, agent: AgentId) -> ReuseMode:
    default = context.service.default_mode(ReuseMode.EXACT)
    if registered is None or agent not in registered.workflow.ids:
        return default
    return registered.mode(registered.agent(agent), default)


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
