"""Base prefills that the plug-in asks for, one at a time, while no request waits for its first token.

The latest is computed first: the plug-in keeps captured KV of a few prompts only, and base KV of a prompt that it has
dropped teaches nothing. In the order of asking, an engine with a backlog would never learn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kedge.structures.bounded import BoundedDict
from kedge.types import Namespace, Tokens

GRACE = 0.02
"""Seconds of idleness before the first one starts: the next agent of a workflow comes within milliseconds."""
MAX_PROMPTS = 1024
"""Prompts that may wait; the one that was asked for longest ago is dropped."""


class BasePrefills:
    """A stack of prompts to prefill. Owned by the engine's event loop."""

    def __init__(self, prefill: Callable[[Namespace, Tokens], Awaitable[None]]) -> None:
        """`prefill` computes a prompt, and stops at the next step when it is cancelled."""
        self._prefill = prefill
        self._wanted: BoundedDict[tuple[Namespace, Tokens], None] = BoundedDict(MAX_PROMPTS)
        self._work: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._wanted)

    def add(self, namespace: Namespace, tokens: Tokens) -> None:
        """Put a prompt on top of the stack."""
        self._wanted[namespace, tokens] = None

    def pause(self) -> None:
        """Cancel the prefill that runs; it starts again after `resume`."""
        if self._work is not None:
            self._work.cancel()
            self._work = None

    async def close(self) -> None:
        """Drop all prompts, and wait until the prefill that runs has been cancelled."""
        work, self._work = self._work, None
        self._wanted.clear()
        if work is not None:
            work.cancel()
            await asyncio.wait([work])

    def resume(self) -> None:
        """Prefill while the engine is idle."""
        if self._work is None and self._wanted:
            self._work = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        await asyncio.sleep(GRACE)
        while self._wanted:
            one = next(reversed(self._wanted))
            await self._prefill(*one)
            self._wanted.pop(one, None)
        self._work = None
