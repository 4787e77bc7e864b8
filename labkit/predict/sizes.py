"""Argument validation."""


def check_counts(**counts: int) -> None:
    """Raises ValueError for a count that is not a whole number or is below 1."""
    for name, number in counts.items():
        if isinstance(number, bool) or not number >= 1 or number % 1:
            raise ValueError(f"{name}={number}: choose a whole number, 1 or more")


def check_not_negative(**numbers: float) -> None:
    """Raises ValueError for a negative quantity, or NaN."""
    for name, number in numbers.items():
        if not number >= 0:
            raise ValueError(f"{name}={number}: choose 0 or more")


def check_positive(**numbers: float) -> None:
    """Raises ValueError for a quantity of 0 or less, or NaN."""
    for name, number in numbers.items():
        if not number > 0:
            raise ValueError(f"{name}={number}: choose more than 0")


def check_divides(what: str, number: int, over: str, parts: int) -> None:
    """Raises ValueError unless `parts` divides `number`."""
    if number % parts:
        raise ValueError(
            f"{what}={number} is not divisible by {over}={parts}; "
            f"choose a {over} that divides {number}"
        )
