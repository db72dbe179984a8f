import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megads.config.layout_name import EXAMPLES, format_layout_name, parse_layout_name
from megads.errors import ConfigError

SIZES = st.integers(1, 4096)
PARTS = st.fixed_dictionaries(
    {},
    optional={
        "tp": SIZES,
        "pp": SIZES,
        "vpp": SIZES,
        "dp": SIZES,
        "zero": st.integers(0, 3),
        "sp": st.just(""),
    },
).filter(bool)
FIELDS = {"vpp": "chunks", "sp": "sequence_parallel"}


@given(PARTS, st.randoms(use_true_random=False))
def test_parts_in_any_order_mean_the_same(parts, random):
    words = [f"{kind}{value}" for kind, value in parts.items()]
    random.shuffle(words)
    expected = {FIELDS.get(k, k): True if k == "sp" else v for k, v in parts.items()}
    assert parse_layout_name("".join(words)) == expected


@given(PARTS)
def test_format_gives_a_name_of_the_same_layout(parts):
    neutral = {"tp": 1, "pp": 1, "chunks": 1, "dp": 1, "zero": 0, "sequence_parallel": False}
    fields = {FIELDS.get(k, k): True if k == "sp" else v for k, v in parts.items()}
    assert neutral | parse_layout_name(format_layout_name(fields)) == neutral | fields


@given(PARTS, st.sampled_from(["tp", "pp", "vpp", "dp"]), st.integers(1, 9))
def test_a_part_given_twice_is_refused(parts, kind, size):
    name = "".join(f"{k}{v}" for k, v in (parts | {kind: 3}).items()) + f"{kind}{size}"
    with pytest.raises(ConfigError, match=f"{kind} comes twice"):
        parse_layout_name(name)


@given(st.text(alphabet="tpdvzeros0129-_ ", max_size=12))
def test_any_text_is_a_layout_or_refused_with_examples(text):
    try:
        fields = parse_layout_name(text)
    except ConfigError as error:
        assert "tp2pp2dp2zero1" in str(error)
    else:
        assert fields and all(v is True or isinstance(v, int) for v in fields.values())


@pytest.mark.parametrize(
    "name",
    ["", "tp", "8tp", "tp0", "tp08", "tp-2", "tp2x", "zero4", "pp2,tp2", "TP2", "sp2", "tp²"],
)
def test_not_a_layout(name):
    with pytest.raises(ConfigError, match="not a layout"):
        parse_layout_name(name)


def test_known_names():
    assert parse_layout_name("tp8pp4") == {"tp": 8, "pp": 4}
    assert parse_layout_name("tp2pp2dp2zero1") == {"tp": 2, "pp": 2, "dp": 2, "zero": 1}
    assert parse_layout_name("pp4vpp2") == {"pp": 4, "chunks": 2}
    assert parse_layout_name("dp8zero3") == {"dp": 8, "zero": 3}
    assert parse_layout_name("tp2sp") == {"tp": 2, "sequence_parallel": True}
    assert format_layout_name({}) == "tp1"


def test_examples_are_layouts_and_differ():
    parsed = [parse_layout_name(name) for name in EXAMPLES]
    assert all(a != b for a, b in itertools.combinations(parsed, 2))
