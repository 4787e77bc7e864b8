"""Lab 17's checks: the bytes of its jobs and trainings are those that ranks send."""

import pytest

from labkit import predict
from labkit.labs.lab_17.placement import (
    BEST_PERCENT,
    JOBS,
    TINY,
    Job,
    by_rule,
    counted_on_4_ranks,
    held_gb,
    idle,
    leaving_bytes,
    parameters_of,
    percent_of_rule,
    why_not,
)
from labkit.labs.lab_17.scenarios import (
    GPT_SIZES,
    MESHES,
    MICROBATCHES,
    NORM_MESHES,
    PLACES,
    ROWS,
    counted_bytes,
    right_place,
    squared_norms,
)
from labkit.labs.lab_17.wrong_answers import best, layouts
from labkit.models import GPT
from tables import cases


def test_places_are_those_of_megatron() -> None:
    """By hand, for Mesh(pp=2, dp=2, tp=2) and for one with tp outermost."""
    axes = PLACES[0][0]
    assert right_place(0, axes, 16) == ((0, 8), 4, [0, 2], [0, 4])
    assert right_place(3, axes, 16) == ((8, 16), 7, [1, 3], [3, 7])
    assert right_place(7, axes, 16) == ((8, 16), None, [5, 7], [3, 7])
    assert right_place(3, {"tp": 2, "dp": 2, "pp": 2}, 16) == ((8, 16), None, [1, 3], [2, 3])
    assert right_place(5, {"pp": 3, "dp": 2, "tp": 2}, 8).tied is None, "a middle stage"
    assert right_place(5, {"pp": 1, "dp": 4, "tp": 2}, 8).tied is None, "a single stage"


@pytest.mark.slow
def test_ranks_send_the_bytes_of_the_closed_form() -> None:
    """The check counts on ranks; labkit.predict, plus the bytes of the loss, must agree."""
    sizes = {name: n for name, n in GPT_SIZES.items() if name != "heads"}
    for training, of_stages in counted_bytes():
        axes, of_replica = training.axes, ROWS // training.axes["dp"]
        formulas = predict.bytes_by_axis(
            **sizes, rows=of_replica, sequence=sizes["context"], microbatches=MICROBATCHES,
            gather_logits=False, element_bytes=8, **axes,
        )  # fmt: skip
        t = axes["tp"]
        formulas[-1]["tensor"] += 2 * (t - 1) / t * 3 * of_replica * sizes["context"] * 8
        assert of_stages == formulas
    all_axes = [training.axes for training, _ in counted_bytes()]
    of_four_ranks = {axis for axes in all_axes for axis, n in axes.items() if n == 4}
    assert of_four_ranks == {"pp", "dp", "tp"}, "2 (n-1)/n is 1 for two ranks"
    assert len(all_axes) == len(MESHES)


def test_every_wrong_norm_is_a_different_number() -> None:
    """Otherwise the check could pass a wrong norm, or explain it wrongly."""
    for axes in NORM_MESHES:
        cut, whole, tied = squared_norms(axes)
        right = sum(cut) + sum(whole) + tied
        t, d = axes["tp"], axes["dp"]
        wrong = [sum(cut) + t * sum(whole) + tied, right - tied]
        wrong += [right + tied] if axes["pp"] > 1 else []
        wrong += [d * right] if d > 1 else []
        wrong += [cut[0] + whole[0] + tied] if axes["pp"] > 1 else []
        found = [right, *wrong]
        assert len({round(x, 6) for x in found}) == len(found)


@pytest.mark.slow
def test_bytes_that_leave_a_node_equal_those_counted_on_ranks() -> None:
    sample = list(layouts(TINY))[::5]
    assert len(sample) >= 3 and len({tuple(sorted(axes.items())) for axes in sample}) >= 2
    for axes in sample:
        assert counted_on_4_ranks(axes) == leaving_bytes(TINY, axes), axes


def test_parameters_are_those_of_a_gpts_layers() -> None:
    job = JOBS["nodes of two"]._replace(width=8, heads=2, depth=3)
    layers = GPT(vocab=4, width=8, depth=3, heads=2, context=4).blocks
    single = {"pp": 1, "dp": 1, "tp": 1}
    assert parameters_of(job, single) == sum(p.numel() for p in layers.parameters())
    assert held_gb(job, single) == 16e-9 * parameters_of(job, single)
    assert idle(job, {"pp": 4, "dp": 16, "tp": 1}) == 3 / (8 + 3)


def test_only_the_last_stage_in_a_node_sends_out_of_it() -> None:
    job = Job(2, 4, 1.0, 8, 16, 4, 8, 8, 1.0)
    x = 8 * 8 * 16 * 2
    assert leaving_bytes(job, {"dp": 1, "tp": 1, "pp": 8}) == 2 * x
    assert leaving_bytes(job, {"pp": 2, "dp": 1, "tp": 4}) == 4 * 2 * x


def test_the_rule_of_thumb_can_be_beaten_but_not_always() -> None:
    for job in (*JOBS.values(), TINY):
        assert not why_not(job, by_rule(job))
    beaten = [
        leaving_bytes(job, best(job)) < leaving_bytes(job, by_rule(job)) for job in JOBS.values()
    ]
    assert any(beaten) and not all(beaten)
    assert percent_of_rule({name: by_rule(job) for name, job in JOBS.items()}) == 100
    assert round(percent_of_rule({name: best(job) for name, job in JOBS.items()})) == BEST_PERCENT


@cases(
    ({"pp": 2, "dp": 2}, "must have axes"),
    ({"pp": 16, "dp": 2, "tp": 0.5}, "each with a whole number"),
    ({"pp": 4, "dp": 2, "tp": 2}, "uses 16 GPUs, but the job has 32"),
    ({"pp": 32, "dp": 1, "tp": 1}, "pp=32, which does not divide 24 layers"),
    ({"pp": 2, "dp": 8, "tp": 2}, "GB per GPU, but a GPU has 32"),
    ({"pp": 8, "dp": 4, "tp": 1}, "GB per GPU, but a GPU has 32"),
    ({"pp": 8, "dp": 2, "tp": 2}, ""),
)
def test_an_invalid_layout_has_a_reason(axes: dict[str, int], says: str) -> None:
    found = why_not(JOBS["nodes of two"], axes)
    assert says in found and bool(found) == bool(says)
