"""Workflows of agents: prompt templates, dependencies, topologies, files, and forecasts of who runs next."""

from kedge.workflow.forecast import AgentKey, Forecast, ForecastBoard, RunKey, RunProgress
from kedge.workflow.graph import Agent, Step, Tool, Workflow
from kedge.workflow.step_graph import Node, RunState, StepGraph
from kedge.workflow.steps import UNKNOWN, NextRun
from kedge.workflow.template import CompiledAgent, Placeholder, Value, compile_agents, escape, parse
from kedge.workflow.topologies import TOPOLOGIES, Topology, Wording, connect

__all__ = [
    "TOPOLOGIES",
    "UNKNOWN",
    "Agent",
    "AgentKey",
    "CompiledAgent",
    "Forecast",
    "ForecastBoard",
    "NextRun",
    "Node",
    "Placeholder",
    "RunKey",
    "RunProgress",
    "RunState",
    "Step",
    "StepGraph",
    "Tool",
    "Topology",
    "Value",
    "Wording",
    "Workflow",
    "compile_agents",
    "connect",
    "escape",
    "parse",
]
