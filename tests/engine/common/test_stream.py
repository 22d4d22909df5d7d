"""A stream passes everything on once and in order, whenever its listener comes."""

from __future__ import annotations

import threading

from kedge.engine.base import Item
from kedge.engine.common.stream import TokenStream
from kedge.types import Completion, FinishReason, Receipt, RequestId, ReuseMode, TokenDelta


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


def ended() -> TokenDelta:
    receipt = Receipt(RequestId("a"), ReuseMode.OFF, ())
    return TokenDelta("", (), Completion(RequestId("a"), "x", (1,), FinishReason.LENGTH, receipt, 1.0, 2.0))


def test_all_who_wait_get_the_end() -> None:
    stream, found = TokenStream(RequestId("a")), list[str]()
    readers = [threading.Thread(target=lambda: found.append(stream.result(10).text)) for _ in range(3)]
    for one in readers:
        one.start()
    stream.put(ended())
    for one in readers:
        one.join()
    assert found == ["x"] * 3 and stream.result(0).text == "x"


def test_the_result_is_there_beside_a_listener_also_one_that_fails() -> None:
    for comes_late in (False, True):
        stream = TokenStream(RequestId("a"))
        if comes_late:
            stream.put(ended())
        stream.listen(lambda _: 1 / 0)
        if not comes_late:
            stream.put(delta(0))
            stream.put(ended())
        assert stream.result(0).text == "x"
