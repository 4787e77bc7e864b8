"""Numbers of ranks, as messages say them."""


def ranks_in_words(size: int) -> str:
    """ "1 rank", "2 ranks", "1,024 ranks"."""
    return "1 rank" if size == 1 else f"{size:,} ranks"
