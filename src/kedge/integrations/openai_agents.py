"""Workflows of the OpenAI Agents SDK: handoffs and agents as tools become a step graph.

    async with workflow(client, triage) as run:
        result = await Runner.run(triage, "…", run_config=run.config())

Whatever uses the run's config belongs to the run: one call of the `Runner`, or several in a row or at once.
"""

from dataclasses import replace
from inspect import isawaitable
from typing import Any

from kedge.errors import ConfigError
from kedge.integrations.edges import END, START, StepEdge
from kedge.integrations.edges import step_graph as graph_of
from kedge.workflow.graph import Workflow
from kedge.workflow.step_graph import StepGraph

try:
    from agents import Agent, OpenAIProvider, RunConfig
    from agents.run import CallModelData, ModelInputData
    from openai import AsyncOpenAI

    from kedge.integrations.openai_client import AsyncWorkflowRun, follower_of, set_acting
except ImportError as error:
    why = "is not installed: pip install 'kedge[openai-agents]'"
    raise ConfigError("kedge.integrations.openai_agents", error.name, why) from error


class AgentsRun(AsyncWorkflowRun):
    """One run of a workflow whose agents are the SDK's, which names the acting agent in every call."""

    def config(self, base: RunConfig | None = None) -> RunConfig:
        """Return `base` for agents that call the model through this run.

        Models are looked up by name at the run's client, in its chat completions, instead of in `base.model_provider`.
        A provider of your own that calls through `client` works as well: `replace(run.config(), model_provider=…)`.
        """
        base = base or RunConfig()
        given = base.call_model_input_filter

        async def note_agent(data: CallModelData[Any]) -> ModelInputData:
            """Note the agent. The SDK calls this right before each call of a model, in the same task."""
            set_acting(data.agent.name)
            filtered = given(data) if given else data.model_data
            return await filtered if isawaitable(filtered) else filtered

        provider = OpenAIProvider(openai_client=self.client, use_responses=False)
        return replace(base, model_provider=provider, call_model_input_filter=note_agent)


def workflow(
    client: AsyncOpenAI, flow: Agent[Any] | str | Workflow | StepGraph, *, run: str = "", client_id: str = ""
) -> AgentsRun:
    """Return a run that begins with the agent `flow` and follows its handoffs and tools, for an `async with` block.

    Where your own code chooses the next agent, `flow` and the rest are as in `openai_client.workflow`.
    """
    known = step_graph(flow) if isinstance(flow, Agent) else flow
    return AgentsRun(client, follower_of(known, run, client_id))


def step_graph(first: Agent[Any]) -> StepGraph:
    """Return the step graph of the agents that `first` leads to. Agents with the same name are one node."""
    edges, seen, todo = [StepEdge(START, first.name)], {first.name}, [first]
    while todo:
        agent = todo.pop()
        found = (getattr(tool, "_agent_instance", None) for tool in agent.tools)  # the SDK has no public accessor
        handoffs, helpers = _handoffs(agent), [helper for helper in found if helper is not None]
        # the model chooses: the answer, a handoff, an agent that reports back, or a tool and another call
        again = [agent.name] if len(agent.tools) > len(helpers) or agent.mcp_servers else []
        targets = (END, *handoffs, *(helper.name for helper in helpers), *again)
        edges += [StepEdge(agent.name, target, chosen=True) for target in targets]
        edges += [StepEdge(helper.name, agent.name, chosen=True) for helper in helpers]
        for other in (*handoffs.values(), *helpers):
            if other is not None and other.name not in seen:
                seen.add(other.name)
                todo.append(other)
    return graph_of(first.name, edges)


def _handoffs(agent: Agent[Any]) -> dict[str, Agent[Any] | None]:
    """Return the handoffs' agents by name, None for one that only the SDK's own code can resolve."""
    found: dict[str, Agent[Any] | None] = {}
    for one in agent.handoffs:
        if isinstance(one, Agent):
            found[one.name] = one
        else:
            known = getattr(one, "_agent_ref", None)  # the SDK has no public accessor for a handoff's agent
            found[one.agent_name] = known() if known is not None else None
    return found
