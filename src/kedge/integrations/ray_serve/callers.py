"""Who calls, as far as it matters for where a call goes: the same hints as the plug-in's, read before it sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kedge.hint_values import read_text
from kedge.types import AgentId, Namespace, RunId, TenantId, WorkflowId
from kedge.workflow.forecast import RunKey

Template = tuple[str, ...]
"""What names a fixed prompt: tenant, workflow and agent, or tenant, client and run of a caller who names neither."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A call's tenant, client, workflow, run and agent; an empty name is one that was not said."""

    namespace: Namespace = Namespace(TenantId("default"))
    client: str = ""
    workflow: WorkflowId = WorkflowId("")
    run: RunId = RunId("")
    agent: AgentId = AgentId("")
    final: bool = False
    """Nothing more comes in this run."""

    @property
    def run_key(self) -> RunKey | None:
        return RunKey(self.namespace, self.client, self.run) if self.run else None

    @property
    def template(self) -> Template:
        if self.workflow or self.agent:
            return (str(self.namespace), self.workflow, self.agent)
        return (str(self.namespace), self.client, self.run)


def read_caller(params: object, salt: object, session: str = "") -> Caller | None:
    """The caller that `kv_transfer_params` name; None where nothing tells calls that belong together.

    `salt` is vLLM's `cache_salt`, which names the tenant. `session` is Ray Serve's session id, from a header: the run
    of a caller who does not say one. A name that cannot be meant is as good as none.
    """
    said = params.get("kedge") if isinstance(params, Mapping) else None
    hints: Mapping[str, Any] = said if isinstance(said, Mapping) else {}
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
