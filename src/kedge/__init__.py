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

from kedge.errors import *  # noqa: F403 (all of them are offered)
from kedge.types import AgentId as AgentId
from kedge.types import AgentKey as AgentKey
from kedge.types import ClientId as ClientId
from kedge.types import Completion as Completion
from kedge.types import FinishReason as FinishReason
from kedge.types import GenerateRequest as GenerateRequest
from kedge.types import Miss as Miss
from kedge.types import Namespace as Namespace
from kedge.types import Receipt as Receipt
from kedge.types import RequestId as RequestId
from kedge.types import ReuseMode as ReuseMode
from kedge.types import RunId as RunId
from kedge.types import RunKey as RunKey
from kedge.types import SampleId as SampleId
from kedge.types import SamplingParams as SamplingParams
from kedge.types import Segment as Segment
from kedge.types import Source as Source
from kedge.types import Span as Span
from kedge.types import TenantId as TenantId
from kedge.types import TokenDelta as TokenDelta
from kedge.types import TokenLogprob as TokenLogprob
from kedge.types import TurnHints as TurnHints
from kedge.types import ValueKind as ValueKind
from kedge.types import WorkflowId as WorkflowId

if TYPE_CHECKING:
    from kedge.engine.base import Engine as Engine
    from kedge.engine.base import Stream as Stream
    from kedge.engine.base import Tokenizer as Tokenizer
    from kedge.engine.echo import EchoEngine as EchoEngine
    from kedge.engine.local.engine import LocalEngine as LocalEngine
    from kedge.runner.run import run as run
    from kedge.settings import AnchorSettings as AnchorSettings
    from kedge.settings import EngineSettings as EngineSettings
    from kedge.settings import PlannerSettings as PlannerSettings
    from kedge.settings import Settings as Settings
    from kedge.settings import TierSettings as TierSettings
    from kedge.workflow.graph import Agent as Agent
    from kedge.workflow.graph import Workflow as Workflow
    from kedge.workflow.spec import load_workflow as load_workflow
    from kedge.workflow.topologies import connect as connect

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

_OURS = [one for one in dir() if getattr(globals()[one], "__module__", "") in ("kedge.errors", "kedge.types")]
__all__ = sorted(["__version__", *_LAZY, *_OURS])


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
