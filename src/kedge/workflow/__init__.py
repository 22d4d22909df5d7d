"""Workflows of agents: prompt templates, dependencies, topologies and files."""

from kedge.workflow.graph import Agent, Step, Tool, Workflow
from kedge.workflow.template import CompiledAgent, Kind, Placeholder, Value, compile_agents, escape, parse
from kedge.workflow.topologies import TOPOLOGIES, Topology, Wording, connect

__all__ = [
    "TOPOLOGIES",
    "Agent",
    "CompiledAgent",
    "Kind",
    "Placeholder",
    "Step",
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
