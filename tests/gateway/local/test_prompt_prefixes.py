"""Known prefixes, against a list that is searched the slow way."""

from hypothesis import given
from hypothesis import strategies as st

from agentlightning.gateway.local.prompt_prefixes import PrefixIndex

WORDS = st.lists(st.text("ab", max_size=6).map(str.encode), max_size=12)


@given(WORDS, st.text("ab", max_size=8).map(str.encode))
def test_the_longest_known_prefix_is_found(known, data):
    prefixes = PrefixIndex()
    for word in known:
        prefixes.add(word, word)
    fitting = [word for word in known if data.startswith(word)]
    found = prefixes.longest(data)
    assert found == ((len(max(fitting, key=len)), max(fitting, key=len)) if fitting else None)


def test_the_last_value_for_a_string_counts():
    prefixes = PrefixIndex()
    prefixes.add(b"a", 1)
    prefixes.add(b"a", 2)
    assert prefixes.longest(b"ab") == (1, 2)
