"""The list of all error messages (tests/support/messages.py) shows them as a user sees them."""

import pytest

from messages import main, messages


def test_raises_fails_and_warnings_are_listed() -> None:
    source = (
        'raise ValueError(f"{n} ranks" + " of " + str(size))\n'
        'warnings.warn("slow", stacklevel=2)\nfail("wrong.", hint=f"{x}")\nraise Stop\nopen("file")'
    )
    assert [*messages(source)] == [
        (1, "ValueError", "{n} ranks of <str(size)>"), (2, "warnings.warn", "slow"),
        (3, "fail", "wrong."),
    ]  # fmt: skip


def test_each_line_names_the_file_and_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    main(["labkit/parallel/single.py"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("labkit/parallel/single.py:21 ValueError: Single trains in one process")
