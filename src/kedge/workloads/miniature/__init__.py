"""Miniature multi-agent tasks on which the bundled model is trained and Kedge is measured."""

from kedge.workloads.miniature.base import Role, Split, Task
from kedge.workloads.miniature.choice import TASK as CHOICE
from kedge.workloads.miniature.code import TASK as CODE
from kedge.workloads.miniature.math import TASK as MATH
from kedge.workloads.miniature.role_last import role_last

TASKS: dict[str, Task] = {task.name: task for task in (MATH, CHOICE, CODE)}

__all__ = ["MATH", "TASKS", "Role", "Split", "Task", "role_last"]
