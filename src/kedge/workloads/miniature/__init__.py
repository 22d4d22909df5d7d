"""Miniature multi-agent tasks on which the bundled model is trained and Kedge is measured."""

from kedge.workloads.base import Question
from kedge.workloads.miniature.base import Role, Split, Task
from kedge.workloads.miniature.choice import TASK as CHOICE
from kedge.workloads.miniature.code import TASK as CODE
from kedge.workloads.miniature.math import TASK as MATH
from kedge.workloads.miniature.prompts import MiniatureTeam, agent_prompt, workflow
from kedge.workloads.miniature.role_last import role_last
from kedge.workloads.miniature.tools import TASK as TOOLS

TASKS: dict[str, Task] = {task.name: task for task in (MATH, CHOICE, CODE)}
"""The tasks that the default bundled model answers; `nano-both` answers `TOOLS` as well."""
ALL_TASKS: dict[str, Task] = {**TASKS, TOOLS.name: TOOLS}

__all__ = [
    "ALL_TASKS",
    "TASKS",
    "TOOLS",
    "MiniatureTeam",
    "Question",
    "Role",
    "Split",
    "Task",
    "agent_prompt",
    "role_last",
    "workflow",
]
