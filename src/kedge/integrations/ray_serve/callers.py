"""The tenant, run and agent of a call, from the hints that the plug-in reads later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kedge.hints.values import read_text
from kedge.types import AgentId, Namespace, RunId, TenantId, WorkflowId
from kedge.workflow.forecast import RunKey

Template = tuple[str, ...]
"""The key of a fixed prompt: (tenant, workflow, agent), or (tenant, client, run) for a caller who names neither."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A call's tenant, client, workflow, run and agent; a name without a hint is empty."""

    namespace: Namespace = Namespace(TenantId("default"))
    client: str = ""
    workflow: WorkflowId = WorkflowId("")
    run: RunId = RunId("")
    agent: AgentId = AgentId("")
    final: bool = False
    """Whether the run ends with this call"""

    @property
    def run_key(self) -> RunKey | None:
        """The run that the call belongs to, None where it names none."""
        return RunKey(self.namespace, self.client, self.run) if self.run else None

    @property
    def template(self) -> Template:
        """The agent's template as a key, which calls with the same fixed prompt share."""
        if self.workflow or self.agent:
            return (str(self.namespace), self.workflow, self.agent)
        return (str(self.namespace), self.client, self.run)


def read_caller(params: object, salt: object, session: str = "") -> Caller | None:
    """Return the caller that `kv_transfer_params` name; None where they name no run, workflow or agent.

    `salt` is vLLM's `cache_salt`, which names the tenant. `session` is Ray Serve's session id, from a header: the run
    of a caller whose hints have none. A name that is not accepted is ignored.
    """
    field = params.get("kedge") if isinstance(params, Mapping) else None
    hints: Mapping[str, Any] = field if isinstance(field, Mapping) else {}
    caller = Caller(
        namespace=Namespace.parse(_name(salt) or "default"),
        client=_name(hints.get("client")),
        workflow=WorkflowId(_name(hints.get("workflow"))),
        run=RunId(_name(hints.get("run")) or _name(session)),
        agent=AgentId(_name(hints.get("agent"))),
        final=hints.get("final") is True,
    )
    return caller if caller.run or caller.workflow or caller.agent else None


def _name(value: object) -> str:
    try:
        return read_text(value)
    except ValueError:
        return ""
