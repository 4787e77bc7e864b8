"""What people read is in the words of the field, in American spelling."""

import re

from places import ROOT
from prose import files, prose

DIALECT = {
    r"told|tells?|telling": "report, raise, print, show",
    r"nobody|somebody|whoever": "no rank, another rank",
    r"of it": "the noun",
    r"things?": "the noun",
    r"as they come|that there is not|what is said of": "a plain clause",
    r"likewise|hence|thereof|anew": "also, so, again",
    r"(?:colour|modell|behaviour|neighbour|cancell)\w*": "American spelling",
    r"no more than one sees": "exposed communication",
    r"cannot be had|that is none": "unavailable, invalid",
    r"come into being|came into being": "are created",
}
ALLOWED = {"cancellation"}
PATTERN = re.compile(rf"(?<![\w-])(?:{'|'.join(DIALECT)})(?![\w-])", re.IGNORECASE)


def dialect(text: str) -> list[str]:
    return [w for w in PATTERN.findall(text) if w.lower() not in ALLOWED]


def test_everything_that_people_read_is_in_the_words_of_the_field() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line} {word}"
        for file in files()
        for line, text in prose(file)
        for word in dialect(text)
    ]
    assert not found, "\n".join(["language.md has the field's word:", *found])


def test_a_word_of_the_dialect_is_found() -> None:
    assert dialect("the first that is broken is told") == ["told"]
    assert dialect("Nobody has such a thing.") == ["Nobody", "thing"]
    assert dialect("Catastrophic cancellation is reported.") == []
