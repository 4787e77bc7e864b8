"""What the tests compare with: a helper that passes a wrong value would prove nothing."""

from collections.abc import Callable
from math import isnan

import pytest
import torch
from torch import Tensor

from harness import Edit, Mutation, noticed
from labkit import RankError
from small_models import difference
from tables import raises


def test_the_difference_is_the_largest_of_all_tensors() -> None:
    expected = {"a": torch.zeros(2), "b": torch.zeros(3), "empty": torch.zeros(0)}
    assert difference(expected, expected) == 0
    assert difference(expected | {"b": torch.tensor([0.0, -2.0, 1.0])}, expected) == 2


@pytest.mark.parametrize("first", [True, False])
def test_a_nan_is_a_difference(first: bool) -> None:
    expected = {"a": torch.zeros(2), "b": torch.ones(2)}
    wrong = torch.tensor([0.0, float("nan")])
    assert isnan(difference(expected | {"a" if first else "b": wrong}, expected))


@pytest.mark.parametrize(
    "found", [torch.zeros(1), torch.zeros(1, 2), torch.zeros(2, dtype=torch.float64), None]
)
def test_other_names_shapes_and_dtypes_are_refused(found: Tensor | None) -> None:
    with pytest.raises(AssertionError):
        difference({} if found is None else {"a": found}, {"a": torch.zeros(2)})


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
    with pytest.raises(LookupError, match="0 times in small_models"), edit():
        pass
