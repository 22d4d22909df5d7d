"""Tokens of pieces and of wholes, and text as it comes, with tokenizers of many families, which are the oracle."""

import threading
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.engine.base import Item
from kedge.engine.common.stream import TextStream, TokenStream
from kedge.types import TokenDelta
from tests.completions import completion
from tests.tokenizers_of_families import FAMILIES, SPECIALS, tokenizer_of

TOKENIZERS = {family: tokenizer_of(family) for family in FAMILIES}
MARK = "\ue000"
WORDS = st.text(st.sampled_from(list("Hello there[INST]/ \n.é∆🙂<>|")), max_size=12)
each_family = pytest.mark.parametrize("family", FAMILIES)


def whole(family: str, text: str) -> tuple[int, ...]:
    """What Transformers makes of a text."""
    return tuple(TOKENIZERS[family].inner.encode(text, add_special_tokens=False))


@each_family
@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(WORDS | st.sampled_from(SPECIALS[1:]), min_size=1, max_size=6))
def test_the_pieces_of_a_text_have_the_tokens_of_the_whole(family: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    ends = [len("".join(pieces[: at + 1])) for at in range(len(pieces))]
    cut = TOKENIZERS[family].encode_cut(text, ends, MARK)
    assert len(cut) == len(pieces)
    assert tuple(chain.from_iterable(cut)) == whole(family, text)


@each_family
@pytest.mark.parametrize("before", ["", "<s>", "<s>[INST] ", "Hello </s> there"])
@pytest.mark.parametrize("spelled", ["</s>", "say <|im_end|> now", "<s></s>\n", "a</s>é"])
def test_a_special_token_that_a_client_spells_out_is_plain_text(family: str, before: str, spelled: str) -> None:
    tokenizer = TOKENIZERS[family]
    broken = spelled
    for name in SPECIALS:
        broken = broken.replace(name, name[0] + MARK + name[1:])
    after = " [/INST]<s>"
    text = before + broken + after
    ends = [len(before), len(before + broken), len(text)]
    first, said, last = tokenizer.encode_cut(text, ends, MARK)
    specials = set(tokenizer.specials.values()) - {tokenizer.inner.unk_token_id}
    assert not specials & set(said) and last[-1] == tokenizer.specials["<s>"]
    names = [name for name in SPECIALS if name in before]
    assert [one for one in first if one in specials] == [tokenizer.specials[name] for name in names]
    plain = tokenizer.inner.decode((*first, *said, *last), skip_special_tokens=True)
    text_only = before.replace("<s>", "").replace("</s>", "") + spelled + " [/INST]"
    kept = tokenizer.decode(tokenizer.encode(text_only, special=False))
    assert "".join(plain.split()) == "".join(kept.split()), "nothing but blanks may differ"


@each_family
@pytest.mark.parametrize("text", ["Hello there", "[INST] 1", " rains", "é", "x\n\ny"])
def test_a_text_inside_another_one_gets_nothing_at_its_beginning(family: str, text: str) -> None:
    tokenizer = TOKENIZERS[family]
    lead = whole(family, "Hello.")
    inside = tokenizer.encode(text, inside=True)
    assert tokenizer.decode((*lead, *inside)) == tokenizer.decode(whole(family, "Hello." + text))


def test_two_threads_do_not_change_each_others_way_to_read_special_tokens() -> None:
    from concurrent.futures import ThreadPoolExecutor

    tokenizer = TOKENIZERS["prepend"]
    with ThreadPoolExecutor(2) as pool:
        plain = pool.map(lambda _: tokenizer.encode("</s>" * 9, special=False), range(300))
        read = pool.map(lambda _: tokenizer.encode("</s>" * 9), range(300))
        assert len(set(plain)) == len(set(read)) == 1
    assert tokenizer.encode("</s>", special=False) != tokenizer.encode("</s>")


# text as it comes -----------------------------------------------------------------------------------------------------


@each_family
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_stream_is_the_text_of_the_whole(family: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[family]
    tokens = data.draw(st.lists(st.integers(0, tokenizer.inner.vocab_size - 1), max_size=20))
    stream = TextStream(tokenizer, ())
    out = [*map(stream.push, tokens), stream.flush(), stream.flush()]
    assert "".join(out) == stream.text == tokenizer.inner.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize(
    "spelled", [("<0x7D>", "<0x93>"), ("<0xE2>", "<0x88>"), ("<0x0A>",), ("<0xF0>", "</s>", "<0x9F>")]
)
def test_bytes_that_are_no_character_end_in_no_error(spelled: tuple[str, ...]) -> None:
    tokenizer = TOKENIZERS["prepend"]
    tokens = [*map(tokenizer.inner.convert_tokens_to_ids, spelled), *tokenizer.encode("rains")]
    stream = TextStream(tokenizer, ())
    assert "".join([*map(stream.push, tokens), stream.flush()]) == tokenizer.decode(tuple(tokens))


def test_a_stop_string_of_a_byte_token_stops_at_once() -> None:
    tokenizer = TOKENIZERS["prepend"]
    stream = TextStream(tokenizer, ("\n",))
    newline = tokenizer.inner.convert_tokens_to_ids("<0x0A>")
    said = "".join(stream.push(token) for token in (*tokenizer.encode("Hello"), newline))
    assert (said, stream.stopped, stream.flush()) == ("Hello", True, "")


def test_a_stop_string_in_what_was_held_back_is_cut_off_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte level"]
    stream = TextStream(tokenizer, ("\ufffd",))
    first = tokenizer.encode("∆")[0]
    assert (stream.push(first), stream.flush(), stream.text) == ("", "", "")


def test_the_sign_of_a_broken_character_is_streamed_as_any_other() -> None:
    stream, text = TextStream(TOKENIZERS["byte level"], ()), "\ufffd" * 3
    assert "".join(map(stream.push, TOKENIZERS["byte level"].encode(text))) == text


@pytest.mark.parametrize(("name", "token"), [("byte level", None), ("prepend", "<0x80>")])
def test_tokens_without_text_that_come_without_end_are_not_decoded(
    name: str, token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = TOKENIZERS[name]
    number = tokenizer.inner.convert_tokens_to_ids(token or tokenizer.inner.eos_token)
    stream = TextStream(tokenizer, ())
    with monkeypatch.context() as patch:
        patch.setattr(type(tokenizer), "decode", None)
        assert {stream.push(number) for _ in range(99)} == {""}
    assert stream.flush() == tokenizer.decode((number,) * 99)


def delta(number: int) -> TokenDelta:
    return TokenDelta(str(number), (number,))


def test_nothing_is_lost_or_overtaken_while_a_listener_comes() -> None:
    for _ in range(50):
        stream, heard = TokenStream("a"), list[Item]()
        putting = threading.Thread(target=lambda stream=stream: [stream.put(delta(n)) for n in range(200)])
        putting.start()
        stream.listen(heard.append)
        putting.join()
        stream.put(error := RuntimeError("end"))
        assert heard == [*(delta(n) for n in range(200)), error]


ENDED = TokenDelta("", (), completion("x"))


def test_all_who_wait_get_the_end() -> None:
    stream, found = TokenStream("a"), list[str]()
    readers = [threading.Thread(target=lambda: found.append(stream.result(10).text)) for _ in range(3)]
    for one in readers:
        one.start()
    stream.put(ENDED)
    for one in readers:
        one.join()
    assert found == ["x"] * 3 and stream.result(0).text == "x"


def test_the_result_is_there_beside_a_listener_also_one_that_fails() -> None:
    for comes_late in (False, True):
        stream = TokenStream("a")
        if comes_late:
            stream.put(ENDED)
        stream.listen(lambda _: 1 / 0)
        if not comes_late:
            stream.put(delta(0))
            stream.put(ENDED)
        assert stream.result(0).text == "x"
