"""A stream passes everything on once and in order, whenever its listener comes."""

from __future__ import annotations

import threading

from kedge.engine.base import Item
from kedge.engine.common.stream import TokenStream
from kedge.types import RequestId, TokenDelta


def delta(number: int) -> TokenDelta:
    return TokenDelta(str(number), (number,))


def test_a_listener_gets_what_has_come_and_what_comes() -> None:
    stream, heard = TokenStream(RequestId("a")), list[Item]()
    stream.put(delta(0))
    stream.put(delta(1))
    stream.listen(heard.append)
    error = RuntimeError("end")
    stream.put(error)
    assert heard == [delta(0), delta(1), error]


def test_nothing_is_lost_or_overtaken_while_a_listener_comes() -> None:
    for _ in range(50):
        stream, heard = TokenStream(RequestId("a")), list[Item]()
        putting = threading.Thread(target=lambda stream=stream: [stream.put(delta(n)) for n in range(200)])
        putting.start()
        stream.listen(heard.append)
        putting.join()
        assert heard == [delta(n) for n in range(200)]
