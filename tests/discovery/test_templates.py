"""Templates are learned from prompts side by side, and filled by prompts that follow them."""

from hypothesis import given
from hypothesis import strategies as st

from kedge.discovery.bounds import MAX_LOOKED_AT
from kedge.discovery.templates import Example, Occurrence, PromptTemplate, Slot, learn
from kedge.structures import token_bytes
from kedge.types import Tokens

HEAD, MIDDLE, END = tuple(range(100, 120)), tuple(range(200, 212)), tuple(range(300, 304))
Value = tuple[int, ...]
values = st.lists(st.integers(1000, 5000), min_size=1, max_size=20).map(tuple)


def example(*parts: Value, known: tuple[Occurrence, ...] = ()) -> Example:
    return Example(token_bytes.pack(sum(parts, ())), known)


def contents(template: PromptTemplate, prompt: Value) -> list[Tokens] | None:
    packed = token_bytes.pack(prompt)
    filled = template.fill(packed)
    return (
        None if filled is None else [token_bytes.unpack(token_bytes.cut(packed, one.start, one.stop)) for one in filled]
    )


@given(st.lists(st.tuples(values, values), min_size=3, max_size=5, unique=True), values, values)
def test_every_example_fills_its_template_and_so_does_every_other_prompt(
    pairs: list[tuple[Value, Value]], one: Value, two: Value
) -> None:
    distinct = [((7 * at, *first), (7 * at, *second)) for at, (first, second) in enumerate(pairs)]
    rows = [((at, *first, at), (at, *second, at)) for at, (first, second) in enumerate(distinct)]
    template = learn([example(HEAD, first, MIDDLE, second, END) for first, second in rows])
    assert template is not None
    for first, second in [*rows, ((10_000, *one, 10_000), (10_000, *two, 10_000))]:
        assert contents(template, (*HEAD, *first, *MIDDLE, *second, *END)) == [first, second]


def test_a_prompt_that_differs_from_fixed_text_does_not_follow_the_template() -> None:
    template = learn([example(HEAD, (at,) * 9, MIDDLE, (at + 50,) * 3, END) for at in range(3)])
    assert template is not None
    good = (*HEAD, 8, 8, *MIDDLE, 9, *END)
    assert contents(template, good) == [(8, 8), (9,)]
    wrong = [
        (0, *good[1:]),
        good[:-1],
        (*good, 1),
        (*HEAD, *MIDDLE, 9, *END),
        (*HEAD, 8, 8, *MIDDLE[:-1], 0, 9, *END),
        (*HEAD, 8, 8, *MIDDLE, *END),
        HEAD,
        (),
    ]
    assert [contents(template, prompt) for prompt in wrong] == [None] * len(wrong)


def test_a_known_text_is_a_slot_even_where_all_examples_have_the_same() -> None:
    answer = (5, 6, 7, 8, 9, 10, 11, 12)
    known = (Occurrence(len(HEAD) + 3, len(HEAD) + 3 + len(answer), "answer.a"),)
    template = learn([example(HEAD, (at, at, at), answer, END, known=known) for at in range(3)])
    assert template is not None
    assert [slot.label for slot in template.slots] == ["answer.a"]  # with nothing fixed between, the two are one
    known = (Occurrence(len(HEAD), len(HEAD) + len(answer), "answer.a"),)
    template = learn([example(HEAD, answer, END, known=known)] * 3)
    assert template == PromptTemplate(
        token_bytes.pack(HEAD), (Slot("answer.a", token_bytes.pack(answer), token_bytes.pack(END)),)
    )


def test_known_texts_that_some_examples_lack_or_have_in_another_order_are_no_slots() -> None:
    a, b = (5,) * 8, (6,) * 8
    ab = (Occurrence(20, 28, "a"), Occurrence(32, 40, "b"))
    ba = (Occurrence(20, 28, "b"), Occurrence(32, 40, "a"))
    template = learn([example(HEAD, a, END, b, known=ab), example(HEAD, b, END, a, known=ba)])
    assert template is not None and {slot.label for slot in template.slots} == {""}
    template = learn([example(HEAD, a, END, b, known=ab), example(HEAD, a, END, (9,) * 8, known=ab[:1])])
    assert template is not None and [slot.label for slot in template.slots] == ["a", ""]


def test_examples_that_are_equal_or_have_no_common_beginning_have_no_template() -> None:
    assert learn([example(HEAD, END)] * 3) is None
    assert learn([example((at,), HEAD, END) for at in range(3)]) is None


def test_prompts_of_many_slots_have_a_template_with_some_of_them() -> None:
    fixed = [tuple(range(9000 + row * 9, 9009 + row * 9)) for row in range(1500)]
    prompts: list[Value] = [sum(((at, *one) for one in fixed), HEAD) for at in range(3)]
    template = learn([example(prompt) for prompt in prompts])
    assert template is not None and len(template.slots) == MAX_LOOKED_AT + 1
    assert all(contents(template, prompt) for prompt in prompts)


def test_fixed_text_that_stands_twice_is_found_in_a_part_that_has_it_once() -> None:
    again, other = tuple(range(400, 410)), tuple(range(500, 510))
    values = [((at, 9, at), (at, 8), (at, 7), (at, 6)) for at in range(3)]
    rows = [example(HEAD, a, MIDDLE, again, b, again, c, other, again, d, END) for a, b, c, d in values]
    template = learn(rows)
    assert template is not None and len(template.slots) == 4


def test_a_slot_that_one_example_leaves_empty_takes_a_token_of_what_follows() -> None:
    template = learn([example(HEAD, *filler, END) for filler in (((1, 2),), ((3,),), ())])
    assert template is not None
    assert contents(template, (*HEAD, *END)) == [END[:1]]
    assert contents(template, (*HEAD, 4, 5, *END)) == [(4, 5, END[0])]
