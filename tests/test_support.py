"""What the tests compare with: a helper that passes a wrong value would prove nothing."""

from collections.abc import Callable

import torch

from harness import Edit, Mutation, noticed
from labkit import RankError
from small_models import difference
from tables import raises


def test_the_difference_is_the_largest_of_all_tensors() -> None:
    expected = {"a": torch.zeros(2), "b": torch.zeros(3), "empty": torch.zeros(0)}
    assert difference(expected, expected) == 0
    worst = difference(expected | {"b": torch.tensor([0.0, -2.0, 1.0])}, expected)
    assert worst == 2 and f"off by {worst:.1e}, {worst}" == "off by 2.0e+00 in b, 2.0e+00 in b"


def test_nan_and_other_names_shapes_and_dtypes_are_refused_by_name() -> None:
    expected = {"a": torch.zeros(2), "b": torch.zeros(2)}
    nan = torch.tensor([0.0, torch.nan])
    raises("a has a NaN", difference, expected | {"a": nan}, expected, error=AssertionError)
    raises("b has a NaN", difference, expected, expected | {"b": nan}, error=AssertionError)
    inf = expected | {"b": torch.tensor([torch.inf, 0.0])}
    raises("b has .* an inf on both sides", difference, inf, inf, error=AssertionError)
    assert difference(inf, expected) == torch.inf
    for wrong in (torch.zeros(1), torch.zeros(1, 2), torch.zeros(2).double()):
        raises("^b: ", difference, expected | {"b": wrong}, expected, error=AssertionError)
    for found in ({"b": nan}, expected | {"a other": nan}):
        raises("'a", difference, found, expected, error=AssertionError)


def test_a_fault_that_no_longer_fits_the_library_is_no_proof() -> None:
    def check() -> None: ...

    def meets(message: str) -> Callable[..., None]:
        def meet(*_: object) -> None:
            raise RankError(message, "raised")

        return meet

    def tried(message: str, match: str = "") -> None:
        noticed([], meets(message))(lambda size: None, Mutation("fault", check, match=match))

    tried("rank 0 raised AssertionError: 1 != 2")
    tried("rank 0 raised TypeError: meant", match="meant")
    for error in ("TypeError", "AttributeError", "NameError", "ImportError", "LookupError"):
        raises(error, tried, f"rank 0 raised {error}: it takes 2 arguments", error=AssertionError)
    edit = Edit("stale", "small_models", "no such line", "")
    raises("0 times in small_models", edit().__enter__, error=LookupError)
