"""What the scheduler's half of the plug-in puts off until the workers compute a pass: it would wait for them anyway."""

from __future__ import annotations

from collections.abc import Callable

Task = Callable[[], object]


class Upkeep:
    """Tasks that no decision needs yet, in the order in which they came up. Whoever decides by their effects, such as
    an eviction, calls `catch_up` before. Tasks are carried out at once until `open`. What is due `always` comes after
    them, in every pass.
    """

    def __init__(self) -> None:
        self._tasks: list[Task] = []
        self._always: tuple[Task, ...] = ()
        self._is_open = False

    @property
    def is_open(self) -> bool:
        """Whether tasks are put off."""
        return self._is_open

    def open(self) -> None:
        """Put tasks off from now on: the scheduler calls `run` in every pass."""
        self._is_open = True

    def always(self, *tasks: Task) -> None:
        """Set what is due in every pass."""
        self._always = tasks

    def put_off(self, task: Task) -> None:
        """Carry out a task with the next `catch_up`, or now."""
        if self._is_open:
            self._tasks.append(task)
        else:
            task()

    def catch_up(self) -> None:
        """Carry out what was put off."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task()

    def run(self) -> None:
        """Carry out what was put off, and what is due in every pass."""
        self.catch_up()
        for task in self._always:
            task()
