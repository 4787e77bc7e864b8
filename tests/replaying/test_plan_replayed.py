"""The takeaways of arXiv 2104.04473, sections 3.2 to 3.4, from replayed steps of its second model
(tests/data/published/a100_step_times_cluster.csv): 39.1B parameters on 512 A100, 1F1B and full
recomputation as measured."""

from dataclasses import replace
from itertools import pairwise

import pytest

from labkit import cluster, fits, largest_that_fits, plan, step_report
from labkit.replaying.planning.layout import Layout, Sizes, described, layouts
from labkit.replaying.planning.plan import Plan
from labkit.replaying.planning.published import MODELS
from labkit.replaying.planning.ranking import least_bytes, reporter
from labkit.replaying.planning.report import StepReport, cause, reached, why
from plan_cases import SMALL

SELENE = cluster("selene")
GPT, GPUS, ROWS = MODELS["megatron-39.1b"], 512, 1536


@pytest.fixture(scope="module")
def planned() -> Plan:
    return plan(
        GPT, SELENE, ROWS, gpus=GPUS, tp=(8, 16), microbatch=2, chunks=(1, 2), zero=0,
        sequence=False, recompute="full",
    )  # fmt: skip


def at(planned: Plan, tp: int, pp: int, dp: int, chunks: int = 1) -> StepReport:
    return planned.report(Layout(tp, pp, dp, 2, chunks, recompute="full"))


def test_tensor_parallelism_belongs_inside_a_node_and_pipelines_between_them(planned: Plan) -> None:
    words = "tp 16 leaves the node of 8: its collectives go over InfiniBand"
    for pp, dp in ((2, 32), (4, 16), (16, 4)):
        inside, outside = at(planned, 8, pp, dp), at(planned, 16, pp // 2, dp)
        assert inside.step_s < outside.step_s and cause(inside, outside) == "tensor"
        assert words in why(inside, outside, SELENE)
    assert planned.best.layout.tp == 8


def test_where_a_replica_fits_the_rest_is_for_data_parallelism(planned: Plan) -> None:
    steps = [at(planned, 8, 512 // 8 // dp, dp) for dp in (32, 16, 8, 4)]
    for more, fewer in pairwise(steps):
        assert more.step_s < fewer.step_s and cause(more, fewer) == "bubble"
        assert more.bubble_s < fewer.bubble_s
        assert more.peak_bytes > fewer.peak_bytes, "what it costs"
    alone = Layout(8, 1, 64, 2, recompute="full")
    assert alone not in planned.layouts and "does not fit" in planned.why(alone)


def test_interleaving_trades_bubble_for_messages(planned: Plan) -> None:
    plain, interleaved = at(planned, 8, 8, 8), at(planned, 8, 8, 8, chunks=2)
    assert interleaved.bubble_s < plain.bubble_s
    assert interleaved.sent_bytes["pipeline"] > 1.5 * plain.sent_bytes["pipeline"]
    assert interleaved.peak_bytes > plain.peak_bytes


@pytest.mark.slow
def test_the_micro_batch_trades_the_speed_of_products_for_the_bubble() -> None:
    report = reporter(SELENE, ROWS)
    steps = [report(GPT, Layout(8, 8, 8, b, recompute="full")) for b in (1, 2, 4, 8, 24)]
    for small, large in pairwise(steps):
        assert reached(small) < reached(large)
        assert small.bubble_s < large.bubble_s
        assert small.peak_bytes < large.peak_bytes
    best = min(steps, key=lambda one: one.step_s)
    assert best.layout.microbatch < 24 and cause(best, steps[-1]) == "bubble"
    assert "pp - 1 = 7 over 8 micro-batches" in why(best, steps[-1], SELENE)
    assert cause(steps[-1], steps[0]) == "compute"
    assert steps[0].step_s < steps[-1].step_s


@pytest.mark.slow
def test_the_formulas_never_promise_more_than_a_step_holds() -> None:
    """Else a layout that fits would be dropped. Of every choice, and near the truth."""
    rows, nearest = 32, 0.0
    report = reporter(SELENE, rows)
    for one in layouts(SMALL, 16, rows, microbatch=(1, 4)):
        promised = sum(least_bytes(SMALL, one, rows).values())
        held = report(SMALL, one).peak_bytes
        assert promised <= held, described(one)
        nearest = max(nearest, promised / held)
    assert nearest > 0.8


@pytest.mark.slow
def test_the_largest_that_fits_fits_and_one_block_more_does_not() -> None:
    asked = {"gpus": 4, "max_memory_bytes": 4e9, "tp": (1, 4), "sequence": False, "zero": 0}
    found = largest_that_fits(SMALL, SELENE, 8, **asked)
    depth = found.report.sizes.depth
    assert found.fits and fits(replace(SMALL, depth=depth), SELENE, 8, **asked).fits
    asked |= {"microbatch": 1, "chunks": 1}
    for deeper in range(depth + 1, depth + 5):
        assert not fits(replace(SMALL, depth=deeper), SELENE, 8, **asked).fits
    assert sum(found.report.memory_bytes.values()) <= 4e9


def test_a_plan_knows_the_host_that_launches() -> None:
    """Narrow layers run faster than the host of this cluster launches them."""
    narrow, layout, where = Sizes(256, 4, 4, 128, 512), Layout(dp=2), cluster("selene-fitted")
    found = reporter(where, 8)(narrow, layout)
    assert found == step_report(narrow, layout, 8, where)
    alone = replace(where, device=replace(where.device, host_s=0.0))
    assert found.step_s > step_report(narrow, layout, 8, alone).step_s
