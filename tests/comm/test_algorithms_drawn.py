"""Any algorithm: on any ranks, sizes, root, dtype, reduction, nodes, pieces, order of delivery."""

from itertools import pairwise
from typing import Any

import pytest

from algorithm_cases import DTYPES, EVERY, Case, serves
from comm_contract import ops_of
from labkit.comm.collectives import costs
from labkit.events import chunk_sizes

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies


@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_whatever_is_drawn(data: Any) -> None:
    collective, name = data.draw(st.sampled_from(EVERY))
    n = data.draw(st.integers(1, 9).filter(lambda n: serves(collective, name, n)))
    small = st.integers(0, 30)
    if collective in ("gather", "scatter") and name == "tree":
        sizes = [data.draw(small)] * n
    elif collective in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        sizes = data.draw(st.lists(small, min_size=n, max_size=n))
    else:
        sizes = chunk_sizes(data.draw(st.integers(0, 200)), n)
    dtype = data.draw(st.sampled_from(DTYPES))
    ops = [op for op in ops_of(dtype) if op != "mean" or collective == "all_reduce"]
    order = data.draw(st.permutations(range(n)))
    cuts = sorted(data.draw(st.sets(st.integers(1, n), max_size=3)) | {0, n})
    nodes = [list(order[a:b]) for a, b in pairwise(cuts)]
    case = Case(
        collective, name, sizes, data.draw(st.integers(0, n - 1)), dtype,
        data.draw(st.sampled_from(ops)), nodes, data.draw(st.booleans()),
    )  # fmt: skip
    piece_bytes, costs.PIECE_BYTES = costs.PIECE_BYTES, data.draw(st.sampled_from([4, 16, 1 << 20]))
    try:
        case.check()
    finally:
        costs.PIECE_BYTES = piece_bytes
