"""Kedge moves KV caches between the prompts of cooperating LLM agents.

    import kedge

    flow = kedge.load_workflow("flow.yaml")
    with kedge.LocalEngine() as engine:
        result = kedge.run(engine, flow, {"user_question": "…"})

This is the front door. What needs torch or takes time to import is loaded from its room when it is first used, so
`import kedge` costs next to nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from kedge import errors
from kedge.errors import *  # noqa: F403 (all of them are offered)
from kedge.types import (
    AgentId,
    AgentKey,
    ClientId,
    Completion,
    FinishReason,
    GenerateRequest,
    Miss,
    Namespace,
    Receipt,
    RequestId,
    ReuseMode,
    RunId,
    RunKey,
    SampleId,
    SamplingParams,
    Segment,
    Source,
    Span,
    TenantId,
    TokenDelta,
    TokenLogprob,
    TurnHints,
    ValueKind,
    WorkflowId,
)

if TYPE_CHECKING:
    from kedge.engine.base import Engine, Stream, Tokenizer
    from kedge.engine.echo import EchoEngine
    from kedge.engine.local.engine import LocalEngine
    from kedge.runner.run import run
    from kedge.settings import AnchorSettings, EngineSettings, PlannerSettings, Settings, TierSettings
    from kedge.workflow.graph import Agent, Workflow
    from kedge.workflow.spec import load_workflow
    from kedge.workflow.topologies import connect

__version__ = "0.1.0"

_LAZY = {
    "Agent": "kedge.workflow.graph",
    "AnchorSettings": "kedge.settings",
    "EchoEngine": "kedge.engine.echo",
    "Engine": "kedge.engine.base",
    "EngineSettings": "kedge.settings",
    "LocalEngine": "kedge.engine.local.engine",
    "PlannerSettings": "kedge.settings",
    "Settings": "kedge.settings",
    "Stream": "kedge.engine.base",
    "TierSettings": "kedge.settings",
    "Tokenizer": "kedge.engine.base",
    "Workflow": "kedge.workflow.graph",
    "connect": "kedge.workflow.topologies",
    "load_workflow": "kedge.workflow.spec",
    "run": "kedge.runner.run",
}

__all__ = [
    "Agent",
    "AgentId",
    "AgentKey",
    "AnchorSettings",
    "ClientId",
    "Completion",
    "EchoEngine",
    "Engine",
    "EngineSettings",
    "FinishReason",
    "GenerateRequest",
    "LocalEngine",
    "Miss",
    "Namespace",
    "PlannerSettings",
    "Receipt",
    "RequestId",
    "ReuseMode",
    "RunId",
    "RunKey",
    "SampleId",
    "SamplingParams",
    "Segment",
    "Settings",
    "Source",
    "Span",
    "Stream",
    "TenantId",
    "TierSettings",
    "TokenDelta",
    "TokenLogprob",
    "Tokenizer",
    "TurnHints",
    "ValueKind",
    "Workflow",
    "WorkflowId",
    "__version__",
    "connect",
    "load_workflow",
    "run",
]
__all__ += [name for name, value in vars(errors).items() if isinstance(value, type)]
__all__.sort()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
