"""The closed formulas beside published figures (tests/data/published), replays and counts."""

import ast
import csv
import doctest
import re
from collections.abc import Callable
from importlib import import_module
from inspect import isfunction, signature
from pathlib import Path
from typing import Any

import pytest
import torch

from labkit import predict
from labkit.events import all_gather_bus_bytes, all_reduce_bus_bytes, chunk_sizes
from labkit.models import GPT
from labkit.models.gpt import PRESETS
from labkit.parallel import NaiveDDP
from labkit.replaying import Compute, Issue, Wait, pipeline_programs, run
from labkit.replaying.planning.published import MEGATRON
from labkit.schedules import one_f_one_b
from places import PUBLISHED
from tables import raises, refusals


def rows_of(name: str) -> list[tuple[str, ...]]:
    with open(PUBLISHED / name) as file:
        return [tuple(row) for row in csv.reader(file)][1:]


def value(expression: str, **numbers: float) -> float:
    """Of a formula as papers print it: (2p-1)(F+B) is a product of products."""
    product = re.sub(r"\)\(", ")*(", re.sub(r"(\d)([a-zA-Z(])", r"\1*\2", expression))
    return eval(product, {"min": min}, numbers)


# Billions of parameters, ranks, GB with stage 1, 2, 3: arXiv 1910.02054, Table 1.
ZERO = rows_of("zero_memory.csv")


@pytest.mark.parametrize("row", ZERO, ids=lambda row: f"{row[0]}B-{row[1]}")
def test_model_states_are_those_of_zero(row: tuple[str, ...]) -> None:
    """Within one unit of the last printed digit: some cells are truncated, some rounded."""
    billions, dp, *cells = row
    for stage, printed in enumerate(cells, start=1):
        unit = 10.0 ** -len(printed.partition(".")[2])
        found = predict.model_state_bytes(float(billions) * 1e9, int(dp), stage) / 1e9
        assert abs(found - float(printed)) < unit


def test_model_states_of_ddp_are_16_bytes_and_what_its_own_footprint_says() -> None:
    assert predict.model_state_bytes(7.5e9, dp=64) == 120e9
    model = GPT.preset("1M")
    held = NaiveDDP.predict(model, 4)
    step_counts = 4 * len(list(model.parameters()))
    total = held.parameter_bytes + held.gradient_bytes + held.optimizer_bytes - step_counts
    assert predict.model_state_bytes(model.parameter_count, 4, 0, predict.FP32_ADAM) == total


# arXiv 2205.05198, Table 2; test_predict_tensor.py asks for each of its rows.
ACTIVATIONS = rows_of("activation_bytes_per_layer.csv")


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_first_stage_holds_the_worth_of_all_layers(stages: int, chunks: int) -> None:
    assert predict.first_stage_activation_bytes(1e6, depth=24, stages=stages) == 24e6
    factor = value(ACTIVATIONS[7][1].removeprefix("times ").split(";")[0], p=stages, v=chunks)
    interleaved = predict.first_stage_activation_bytes(1e6, depth=24, stages=stages, chunks=chunks)
    assert interleaved == pytest.approx(24e6 * factor)


@pytest.mark.parametrize("kv_heads", [None, 1, 2])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("sizes", [*PRESETS.values(), PRESETS["1M"] | {"depth": 7, "context": 9}])
def test_parameters_are_those_of_the_model(
    sizes: dict[str, int], tied: bool, kv_heads: int | None
) -> None:
    with torch.device("meta"):
        model = GPT(**sizes, kv_heads=kv_heads, tied=tied)
    assert predict.parameters(**sizes, kv_heads=kv_heads, tied=tied) == model.parameter_count


@pytest.mark.parametrize("one", MEGATRON, ids=lambda one: f"{one.billions}B")
def test_parameters_and_operations_are_those_of_megatron(one: Any) -> None:
    """arXiv 2104.04473, Table 1, and equation 3."""
    sizes = one.sizes
    assert round(sizes.parameters / 1e9, 1) == one.billions
    assert one.layout.ranks == one.ranks and one.batch % (one.layout.dp * one.microbatch) == 0
    flops = predict.step_flops(
        51200, sizes.width, sizes.depth, sizes.heads, rows=3, sequence=2048, recompute=True
    )
    printed = "96*B*s*l*h*h*(1+s/(6h)+V/(16*l*h))"
    expected = value(printed, B=3, s=2048, l=sizes.depth, h=sizes.width, V=51200)
    assert flops == pytest.approx(expected, rel=1e-12)


def test_six_n_d_is_all_but_attention_and_small_things() -> None:
    sizes = dict(vocab=51200, width=12288, depth=96, heads=96)
    dense = predict.dense_flops(predict.parameters(**sizes, context=2048), 2 * 2048)
    step = predict.step_flops(**sizes, rows=2, sequence=2048)
    attention = 3 * 96 * 4 * 2 * 2048**2 * 12288
    not_products = 6 * 2 * 2048 * (2048 * 12288 + 96 * 13 * 12288 + 2 * 12288)
    assert step - attention == dense - not_products


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_data_parallelism_sends_what_ddp_says(ranks: int) -> None:
    sent_bytes = predict.data_parallel_bytes(predict.parameters(**PRESETS["1M"]), ranks)
    assert sent_bytes == NaiveDDP.predict(GPT.preset("1M"), ranks).bus_bytes


@pytest.mark.parametrize(("depth", "layers_per_stage"), [(8, 8), (8, 2), (6, 1)])
def test_a_pipeline_sends_the_messages_of_its_schedule(depth: int, layers_per_stage: int) -> None:
    microbatches, rows = 5, 2
    schedule = one_f_one_b(depth // layers_per_stage, microbatches)
    programs = pipeline_programs(schedule, lambda stage, action: 1.0).values()
    messages = sum(isinstance(action, Issue) for program in programs for action in program)
    sent = predict.pipeline_parallel_bytes(128, rows * microbatches, 64, depth, layers_per_stage)
    assert sent == messages * predict.stage_boundary_bytes(128, rows, 64)
    assert predict.stage_boundary_bytes(128, rows, 64) == 2 * 128 * rows * 64


FACTORS = rows_of("bus_bandwidth_factors.csv")  # nccl-tests, doc/PERFORMANCE.md
OURS = (
    "all_reduce", "all_reduce_in_network", "reduce_scatter", "all_gather", "broadcast", "reduce",
    "all_to_all",
)  # fmt: skip


@pytest.mark.parametrize(("name", "row"), list(zip(OURS, FACTORS, strict=True)))
@pytest.mark.parametrize("n", [2, 3, 8, 1000])
def test_bus_factors_are_those_of_nccl_tests(name: str, row: tuple[str, ...], n: int) -> None:
    _, factor, time = row
    assert predict.bus_factor(name, n) == pytest.approx(value(factor, n=n), rel=1e-15)
    if name != "all_reduce_in_network":
        assert predict.bus_factor(name, 1) == 0, "a rank alone sends nothing"
    if time:
        formula = time.split(",")[0].replace("nB", "n*B").replace("S(", "S*(")
        least = predict.least_s(name, n, 6e9, bytes_per_s=25e9)
        assert least == pytest.approx(value(formula, S=6e9, B=25e9, n=n), rel=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_bus_factors_are_the_mean_of_what_events_say(n: int) -> None:
    for S in (0, 1, 5, 1024):
        chunks = chunk_sizes(S, n)
        reduced = sum(all_reduce_bus_bytes(chunks, rank) for rank in range(n)) / n
        gathered = sum(all_gather_bus_bytes(chunks, rank) for rank in range(n)) / n
        assert reduced == pytest.approx(predict.bus_factor("all_reduce", n) * S)
        assert gathered == pytest.approx(predict.bus_factor("all_gather", n) * S)


def test_a_ring_is_the_least_time_and_its_latencies() -> None:
    def seconds(algorithm: str, alpha_s: float, **adding: float) -> float:
        return predict.algorithm_s("all_reduce", algorithm, 8, 1e6, alpha_s, 1e9, **adding)

    least = predict.least_s("all_reduce", 8, 1e6, 1e9)
    assert seconds("ring", 1e-5) == pytest.approx(least + 14 * 1e-5)
    assert seconds("tree", 1e-5) == pytest.approx(6 * (1e-5 + 1e-3))
    assert seconds("tree", 0, reduced_bytes_per_s=1e8) == pytest.approx(6 * 1e-3 + 3 * 1e-2)


# arXiv 2104.04473 and 2401.10241; in the ZB rows B is the input gradient.
BUBBLES = rows_of("pipeline_bubbles.csv")


OF_SCHEDULE: dict[str, Callable[..., predict.PipelineStep]] = {
    "GPipe": lambda p, m, F, B, W: predict.gpipe(p, m, F, B),
    "1F1B / PipeDream-flush": lambda p, m, F, B, W: predict.one_f_one_b(p, m, F, B),
    "interleaved 1F1B": lambda p, m, F, B, W: predict.interleaved(p, m, F, B, chunks=3),
    "ZB-H1": predict.zero_bubble_h1,
    "ZB-H2": predict.zero_bubble_h2,
}


@pytest.mark.parametrize("row", BUBBLES, ids=lambda row: row[0])
@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 4), (4, 8), (8, 16)])
def test_bubbles_are_the_published_formulas(row: tuple[str, ...], p: int, m: int) -> None:
    sizes = {"p": p, "m": m, "F": 1.0, "B": 1.25, "W": 0.75, "v": 3}
    step = OF_SCHEDULE[row[0]](p, m, 1.0, 1.25, 0.75)
    assert step.bubble_s == pytest.approx(value(re.split(r"[;\s]", row[1])[0], **sizes))
    peak = value(re.sub(r" (microbatches|M_B)", "", row[2]), **sizes)
    assert step.peak_microbatches == pytest.approx(peak)
    assert step.ideal_s == m * (1.0 + 1.25 + (0.75 if "ZB" in row[0] else 0.0))
    if "fraction" in row[1] or "of ideal" in row[1]:
        assert step.of_ideal == pytest.approx(value("(p-1)/m", **sizes))
        assert step.of_total == pytest.approx(value("(p-1)/(m+p-1)", **sizes))


def test_one_chunk_is_1f1b_and_no_bubble_is_below_zero() -> None:
    assert predict.interleaved(4, 9, 1, 2, chunks=1) == predict.one_f_one_b(4, 9, 1, 2)
    assert predict.interleaved(4, 4, 1, 2, chunks=2).peak_microbatches == 4, "all there are"
    assert predict.zero_bubble_h2(4, 7, 1, 1, 1).bubble_s == 0
    assert predict.zero_bubble_h2(4, 7, 1, 1, 3).bubble_s == 0
    nothing = predict.gpipe(4, 4, 0, 0)
    assert (nothing.of_ideal, nothing.of_total) == (0, 0)


@pytest.mark.parametrize("buckets", [1, 2, 10])
@pytest.mark.parametrize("communication_s", [0.0, 1.0, 2.0, 7.0])
def test_the_step_of_ddp_is_the_replayed_one(communication_s: float, buckets: int) -> None:
    program: list[Compute | Issue | Wait] = [Compute(1.0)]
    for k in range(buckets):
        program += [Compute(2.0 / buckets), Issue(k, (0, 1), communication_s / buckets)]
    program += [Wait(buckets - 1), Compute(0.5)]
    found = predict.ddp_step_s(1.0, 2.0, communication_s, buckets, optimizer_s=0.5)
    assert found == pytest.approx(run({0: program, 1: program})[0][-1].ended_s)
    shortest = 1.0 + max(2.0, communication_s) + 0.5
    longest = predict.ddp_step_without_overlap_s(1.0, 2.0, communication_s, optimizer_s=0.5)
    assert longest == 3.5 + communication_s
    assert shortest <= found <= longest


def test_mfu_is_that_of_palm() -> None:
    """540.35e9 parameters, 238,300 tokens a second on 6,144 chips of 275 TFLOP/s, 118 layers of 48
    heads of 256, 2,048 positions: 45.7 % without attention, 46.2 % with (arXiv 2204.02311, B). A
    step that only computes has 1."""
    dense = predict.dense_flops(540.35e9, tokens=238.3e3)
    attention = 238.3e3 * 12 * 118 * 48 * 256 * 2048
    assert round(predict.mfu(dense, 1.0, 275e12, ranks=6144), 3) == 0.457
    assert round(predict.mfu(dense + attention, 1.0, 275e12, ranks=6144), 3) == 0.462
    for ranks in (1, 8):
        step_s = predict.compute_s(6e15, 150e12, ranks)
        assert step_s == 40 / ranks and predict.mfu(6e15, step_s, 150e12, ranks) == 1


@pytest.mark.parametrize(
    "name", ["pipelines", "states", "steps", "tables", "three_d", "transformer"]
)
def test_examples_are_true(name: str) -> None:
    tried = doctest.testmod(import_module(f"labkit.predict.{name}"))
    assert tried.attempted and not tried.failed


def test_every_formula_is_imported_by_name_so_that_it_has_its_type() -> None:
    """A module-level `__getattr__` would make each of them `Any` for mypy."""
    tree = ast.parse(Path(predict.__file__).read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert sorted(x.name for node in imports for x in node.names) == sorted(predict.__all__)
    assert "__getattr__" not in vars(predict)


GOOD = {  # values that all functions take, by the names of arguments
    **dict.fromkeys(("sequence", "context"), 8),
    **dict.fromkeys(("width", "depth", "block", "key_width", "microbatches"), 4),
    **dict.fromkeys(("heads", "kv_heads", "head_width", "vocab", "ranks", "stages", "chunks"), 2),
    **dict.fromkeys(("dp", "pp", "tp", "tensor_parallel", "element_bytes"), 2),
    **dict.fromkeys(("rows", "layers_per_stage", "loss_element_bytes", "buckets"), 1),
    **dict.fromkeys(("forward_s", "backward_s", "input_s", "weight_s", "update_s"), 1.0),
    **dict.fromkeys(("optimizer_s", "communication_s", "step_s", "alpha_s", "flops"), 1.0),
    **dict.fromkeys(("flops_per_s", "peak_flops_per_s", "bytes_per_s", "nbytes"), 1.0),
    **dict.fromkeys(("parameters", "tokens", "layer_bytes", "reduced_bytes_per_s"), 1.0),
    "collective": "reduce",
    "algorithm": "tree",
}
OTHERS = {"table", "activation_bill", "load_then_run_s", "pipelined_loading_s", "in_place_s"}
FORMULAS = [name for name in predict.__all__ if isfunction(getattr(predict, name))]


@pytest.mark.parametrize("name", [name for name in FORMULAS if name not in OTHERS])
def test_no_size_may_be_less_than_nothing(name: str) -> None:
    function = getattr(predict, name)
    good: dict[str, Any] = {x: GOOD[x] for x in signature(function).parameters if x in GOOD}
    function(**good)
    for argument, number in good.items():
        wrong = [-1, 0, 1.5, float("inf"), True] if isinstance(number, int) else [-1, float("nan")]
        for one in wrong if not isinstance(number, str) else ():
            raises(f"{argument}={one}: choose", function, **good | {argument: one})


THREE_D = {"vocab": 2, "width": 4, "context": 8, "rows": 1, "sequence": 8, "pp": 2}
test_impossible_sizes_are_reported = refusals(
    lambda wrong: wrong(),
    (lambda: predict.model_state_bytes(1e9, stage=4), "stage=4: choose ZeRO stage 1"),
    (lambda: predict.activation_bytes(8, 1, 10, 3), "width=10 is not divisible by heads=3"),
    (
        lambda: predict.activation_bytes(8, 1, 12, 3, tensor_parallel=2),
        "heads=3 is not divisible by tensor_parallel=2; choose a tensor_parallel that",
    ),
    (lambda: predict.activation_bytes(8, 1, 12, 3, recompute="half"), "selective, full"),
    (lambda: predict.first_stage_activation_bytes(1, 6, 4), "stages x chunks=4"),
    (lambda: predict.parameters(9, 12, 1, 4, 8, kv_heads=3), "kv_heads=3; choose"),
    (lambda: predict.parameters(9, 10, 1, 4, 8), "width=10 is not divisible by heads=4"),
    (lambda: predict.pipeline_parallel_bytes(8, 1, 8, 6, 4), "layers_per_stage=4"),
    (lambda: predict.bytes_by_axis(**THREE_D, depth=3, chunks=2), "depth=3: 4 stages"),
    (
        lambda: predict.bytes_by_axis(**THREE_D, depth=4, zero=4),
        "zero=4: choose 0 for DDP, or a ZeRO stage",
    ),
    (
        lambda: predict.tensor_parallel_bytes(128, 3, 64, 1, ranks=2, kept_whole=True),
        "kept_whole needs sequence_parallel=True",
    ),
    (lambda: predict.ulysses_bytes(9, 1, 2, 2, 4, 2), "sequence=9 is not divisible by ranks=2"),
    (lambda: predict.ulysses_bytes(8, 1, 3, 2, 4, 2), "^heads=3 is not divisible by ranks=2"),
    (lambda: predict.ulysses_bytes(8, 1, 2, 1, 4, 2), "kv_heads=1 is not divisible by ranks=2"),
    (lambda: predict.bus_factor("all_sum", 2), "'all_sum' has no bus factor; choose one of all_r"),
    (lambda: predict.least_s("reduce", 2, 1, 0), "bytes_per_s=0: choose more than 0"),
    (lambda: predict.algorithm_s("all_reduce", "star", 2, 1, 0, 1), "all_reduce by 'star'"),
    (lambda: predict.interleaved(4, 6, 1, 1, 2), "microbatches=6 is not divisible by stages"),
    (lambda: predict.zero_bubble_h2(4, 6, 1, 1, 1), "4 stages, this schedule needs 7"),
    (lambda: predict.mfu(1, 0, 1), "step_s=0: choose more than 0"),
    (lambda: predict.table(), "table.. needs numbers, with a name for each source"),
)


def test_formula_replay_and_measurement_stand_side_by_side() -> None:
    found = predict.table(
        formula={"sent_bytes": 6144.0, "step_s": 0.04, "memory_bytes": 7},
        replayed={"sent_bytes": 6144, "step_s": 0.042, "idle_s": 1 / 3},
        measured={"sent_bytes": 6144, "step_s": 0.05, "idle_s": 12345.6},
    )
    assert repr(found).splitlines() == [
        "                formula  replayed  measured",
        "sent (bytes)      6,144     6,144     6,144  ✓ equal",
        "step (s)           0.04     0.042      0.05  replayed 1.05 ×, measured 1.25 × the formula",
        "memory (bytes)        7",
        "idle (s)                   0.3333    12,346",
    ]
    page = found._repr_html_()
    assert page.count("<th>") == 5 and page.count("<tr>") == 5
    assert '<td style="text-align: right">12,346</td>' in page


def test_a_row_says_what_is_equal_and_what_is_a_multiple() -> None:
    tenths = sum([0.1] * 10)
    near = predict.table(formula={"a_s": 1.0, "a_bytes": 1e12}, replayed={"a_s": tenths})
    assert tenths != 1 and near.rows[0][-1] == "✓ equal"
    off = predict.table(formula={"a_bytes": 10**12}, measured={"a_bytes": 10**12 + 1})
    assert off.rows[0][-1] == "measured 1 × the formula"
    zeros = predict.table(formula={"a_s": 0, "b_s": 0}, measured={"a_s": 0, "b_s": 2})
    assert [row[-1] for row in zeros.rows] == ["✓ equal", ""]
    assert predict.table(measured={"a_s": 1}).rows == [("a (s)", "1", "")]


def test_what_a_table_holds_is_no_markup() -> None:
    page = predict.table(**{"<b>": {"<i>": 1}})._repr_html_()
    assert "<b>" not in page and "<i>" not in page and "&lt;i&gt;" in page
