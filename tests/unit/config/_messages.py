"""What a test asserts of a message: its location, keys, values and suggestions, not its sentence."""

import re

_FACT = re.compile(r"'[^']*'|[\w./~*+\[\]{}()-]*[\d_./\[{][\w./~*+\[\]{}()-]*")


def facts(text: str) -> set[str]:
    """Paths, keys, numbers and quoted values of a message, and the names that it suggests."""
    actual = {fact.strip(".()") for fact in _FACT.findall(text)} | set(re.findall(r"did you mean (\S+?)\?", text))
    return {fact for fact in actual if re.search(r"\w", fact)}


def assert_facts(message: str, expected: str) -> None:
    """A message contains the location of `expected`, the part before its first colon and space, and its facts."""
    location = expected.partition(": ")[0]
    assert location in message, f"{location!r} is not in {message!r}"
    actual = facts(message)
    missing = {fact for fact in facts(expected) if fact not in actual and not ("." in fact and fact in message)}
    assert not missing, f"{sorted(missing)} are not in {message!r}"
