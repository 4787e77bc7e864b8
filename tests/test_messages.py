"""The list of all error messages shows them as a user sees them."""

from messages import messages


def test_raises_fails_and_warnings_are_listed() -> None:
    source = (
        'raise ValueError(f"{n} ranks" + " of " + str(size))\n'
        'warnings.warn("slow", stacklevel=2)\nfail("wrong.", hint=f"{x}")\nraise Stop\nopen("file")'
    )
    assert [*messages(source)] == [
        (1, "ValueError", "{n} ranks of <str(size)>"), (2, "warnings.warn", "slow"),
        (3, "fail", "wrong."),
    ]  # fmt: skip
