"""Base prefills that the plug-in asks for, one at a time, while no request waits for its first token.

What was asked for last comes first: the plug-in keeps what it captured of a few prompts only, and base KV of one that
it has let go teaches nothing. In the order of asking, an engine with more to do than time would never learn.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from kedge.types import Namespace, Tokens

GRACE = 0.02
"""Seconds that they wait: the next agent of a workflow comes within milliseconds."""
MOST = 1024
"""Prompts that wait; what was asked for longest ago goes first."""


class BasePrefills:
    """What is wanted, what was asked for last at the end. Belongs to the engine's event loop."""

    def __init__(self, prefill: Callable[[Namespace, Tokens], Awaitable[None]]) -> None:
        """`prefill` computes a prompt; cancelled, it gives it up at the next step."""
        self._prefill = prefill
        self._wanted: OrderedDict[tuple[Namespace, Tokens], None] = OrderedDict()
        self._work: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._wanted)

    def ask(self, namespace: Namespace, tokens: Tokens) -> None:
        """This one is wanted too."""
        self._wanted[namespace, tokens] = None
        self._wanted.move_to_end((namespace, tokens))
        if len(self._wanted) > MOST:
            self._wanted.popitem(last=False)

    def pause(self) -> None:
        """A request has come: what is under way is given up, and begun again later."""
        if self._work is not None:
            self._work.cancel()
            self._work = None

    async def close(self) -> None:
        """Gives up everything; returns when it has been."""
        work, self._work = self._work, None
        self._wanted.clear()
        if work is not None:
            work.cancel()
            await asyncio.wait([work])

    def resume(self) -> None:
        """There is time."""
        if self._work is None and self._wanted:
            self._work = asyncio.get_running_loop().create_task(self._do())

    async def _do(self) -> None:
        await asyncio.sleep(GRACE)
        while self._wanted:
            one = next(reversed(self._wanted))
            await self._prefill(*one)
            self._wanted.pop(one, None)
        self._work = None
