"""What tensor parallelism keeps and sends: the published formulas, and what ranks keep and send."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from labkit import GPT, Comm, World, listen, predict
from labkit.memory.edits import Choices
from labkit.memory.saved import SavedTensor, saved_by
from labkit.parallel.tensor.layers import vocab_parallel_cross_entropy
from labkit.parallel.tensor.tensor_parallel import tensor_parallel
from test_activations import check_bill, gpt
from test_predict import ACTIVATIONS, value

PAPER = {"s": 2048, "b": 4, "h": 6144, "a": 64}  # the 22B model of arXiv 2205.05198

# activation_bytes_per_layer.csv: a row's name -> how `predict.activation_bytes` is asked for it.
ROWS: dict[str, dict[str, Any]] = {
    "no parallelism": {},
    "tensor parallel": {"t": True},
    "tensor + sequence": {"t": True, "sequence_parallel": True},
    "tensor + selective": {"t": True, "recompute": "selective"},
    "tensor + sequence + selective": {
        "t": True, "sequence_parallel": True, "recompute": "selective",
    },
    "full recompute": {"t": True, "recompute": "full"},
    "full recompute, sharded": {"t": True, "sequence_parallel": True, "recompute": "full"},
}  # fmt: skip


@pytest.mark.parametrize("t", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ROWS)
def test_every_row_of_activations_for_every_number_of_ranks(name: str, t: int) -> None:
    """test_predict.py holds the rows to the file."""
    sizes = {"sequence": 2048, "rows": 4, "width": 6144, "heads": 64, **ROWS[name]}
    sizes["tensor_parallel"] = t if sizes.pop("t", False) else 1
    whole, _, sharded = dict(ACTIVATIONS)[name.removesuffix(", sharded")].partition(" (2")
    printed = "2" + sharded.split(" if")[0] if name.endswith("sharded") else whole
    expected = value(printed, **PAPER, t=t)
    assert predict.activation_bytes(**sizes) == pytest.approx(expected, rel=1e-12)
    terms = predict.activation_terms(**sizes)
    assert sum(terms.values()) == pytest.approx(expected, rel=1e-12), "summand by summand"


def kept(sequence: bool, recompute: str) -> list[SavedTensor]:
    comm, model = Comm(), gpt(torch.bfloat16)
    tensor_parallel(model, comm, sequence=sequence)
    length = 64 // comm.size if sequence else 64
    x = torch.randn(2, length, 64, dtype=torch.bfloat16, requires_grad=True)
    with Choices(model, recompute):
        return saved_by(model.blocks[1], x)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("t", [1, 2, 4])
def test_a_block_keeps_what_the_rows_say(
    worlds: Callable[[int], World], t: int, sequence: bool, recompute: str
) -> None:
    how: dict[str, Any] = dict(tensor_parallel=t, sequence_parallel=sequence, recompute=recompute)
    for of_rank in worlds(t).run(kept, sequence, recompute):
        check_bill(of_rank, 64 // (t if sequence else 1), **how)


@pytest.mark.parametrize("t", [1, 2, 3, 8])
def test_volumes_of_a_layer_are_the_published_ones(t: int) -> None:
    """8 b s h (t-1)/t elements: arXiv 2104.04473, section 3.2. Two inputs gathered again: arXiv
    2205.05198, section 4.2.2."""

    def layer(**how: bool) -> float:  # one of five, in 2-byte types
        return predict.tensor_parallel_bytes(128, 3, 64, depth=5, ranks=t, **how) / 5 / 2

    def printed(halves: int) -> Any:
        return pytest.approx(value(f"{halves}*b*s*h*(t-1)/t", b=3, s=128, h=64, t=t))

    assert layer() == printed(8)
    assert predict.tensor_parallel_bytes(128, 3, 64, 1, ranks=t, element_bytes=1) == printed(8)
    assert layer(sequence_parallel=True) == printed(10)
    assert layer(sequence_parallel=True, kept_whole=True) == printed(8)
    assert layer(recompute=True) == printed(12)
    assert layer(sequence_parallel=True, recompute=True) == printed(14)


@pytest.mark.parametrize("t", [1, 2, 3, 4])
def test_of_the_vocabulary_three_numbers_a_token_travel(t: int) -> None:
    sizes = {"sequence": 128, "rows": 3, "ranks": t}
    found = predict.vocab_parallel_bytes(**sizes, width=64, element_bytes=2)
    assert found == pytest.approx(2 * (t - 1) / t * (2 * 128 * 3 * 64 * 2 + 3 * 128 * 3 * 4))
    logits = predict.gathered_logits_bytes(**sizes, vocab=10)
    assert logits == pytest.approx((t - 1) / t * 128 * 3 * -(-10 // t) * t * 2)


def sent(sequence: bool, gather: bool) -> int:
    comm = Comm()
    torch.manual_seed(0)
    model = tensor_parallel(GPT(50, 24, 3, 12, 24), comm, sequence=sequence, gather_logits=gather)
    tokens = torch.randint(50, (3, 24))
    small = {2 * 24, 24, 24 * 24}  # a norm, a bias, the table of positions
    with listen() as events:
        logits = model(tokens)
        if gather:
            logits.logsumexp(-1).sum().backward()
        else:
            vocab_parallel_cross_entropy(logits, tokens, comm, vocab=50).backward()
    return sum(e.bus_bytes for e in events if not sequence or e.payload_bytes // 4 not in small)


@pytest.mark.slow
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_step_sends_what_the_formulas_say(
    worlds: Callable[[int], World], sequence: bool, gather: bool
) -> None:
    sizes = {"sequence": 24, "rows": 3, "ranks": 4, "element_bytes": 4}
    expected = predict.tensor_parallel_bytes(
        **sizes, width=24, depth=3, sequence_parallel=sequence
    ) + predict.vocab_parallel_bytes(
        **sizes, width=24, sequence_parallel=sequence, loss_element_bytes=4
    )
    if gather:
        loss_bytes = predict.bus_factor("all_reduce", 4) * 3 * 3 * 24 * 4
        expected += predict.gathered_logits_bytes(**sizes, vocab=50) - loss_bytes
    assert set(worlds(4).run(sent, sequence, gather)) == {expected}
