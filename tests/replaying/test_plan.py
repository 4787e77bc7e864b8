"""A plan ranks all layouts that fit; steps by formulas (replayed ones: test_plan_replayed.py)."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from command import command
from labkit import cluster, fits, largest_that_fits, plan, plot, write_clusters
from labkit.plot.plans import compared_with_best
from labkit.replaying.planning import ranking
from labkit.replaying.planning.layout import Layout, Sizes, layouts
from labkit.replaying.planning.plan import Plan
from labkit.replaying.planning.published import MODELS, model
from labkit.replaying.planning.ranking import Report, least_bytes
from labkit.replaying.planning.report import StepReport, seconds
from plan_cases import formula_step
from tables import cases, raises

SELENE = cluster("selene")
GPT = Sizes(width=6144, depth=40, heads=48)
ROWS, RANKS = 256, 64
ASKED = "plan --width 6144 --depth 40 --heads 48 --cluster selene"


@pytest.fixture(scope="module", autouse=True)
def asked() -> Iterator[list[Layout]]:
    """The layouts of which a report was asked. Reports are by formulas."""
    asked: list[Layout] = []

    def reporter(where: object, rows: int) -> Report:
        def report(sizes: Sizes, layout: Layout) -> StepReport:
            asked.append(layout)
            return formula_step(sizes, layout, rows, SELENE)

        return report

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "reporter", reporter)
        yield asked


@pytest.fixture(scope="module")
def planned() -> Plan:
    return plan(GPT, SELENE, ROWS, gpus=RANKS)


def test_all_that_fits_is_ranked_and_nothing_else_is(planned: Plan) -> None:
    """Against the reports of every layout that factors, with no lower bound asked before."""
    every = [formula_step(GPT, one, ROWS, SELENE) for one in layouts(GPT, RANKS, ROWS)]
    fitting = {one.layout for one in every if one.peak_bytes <= 80e9}
    assert set(planned.layouts) == fitting and len(planned.layouts) == len(fitting)
    large = {one.layout for one in planned.too_large}
    assert large == {one.layout for one in every} - fitting and large
    steps = [one.step_s for one in planned.reports]
    assert steps == sorted(steps) and planned.best.step_s == min(steps)
    sizes = [one.peak_bytes for one in planned.too_large]
    assert sizes == sorted(sizes) and sizes[0] > 80e9


def test_the_bounds_spare_only_what_cannot_fit(asked: list[Layout]) -> None:
    """A layout between bound and truth, of which a tenth is missing, must be asked."""
    asked.clear()
    every, large = layouts(GPT, RANKS, ROWS), plan(GPT, SELENE, ROWS, gpus=RANKS).too_large
    assert set(asked) == set(every) - {one.layout for one in large if one.at_least}
    assert any(not one.at_least for one in large), "no layout lies between"
    assert any(one.at_least for one in large)


def test_each_layout_says_why_it_loses(planned: Plan) -> None:
    best, *others = map(planned.why, planned.layouts)
    assert best == "the best" not in others and others
    large = planned.too_large[-1]
    assert "does not fit: at least " in planned.why(large.layout) and large.at_least
    raises("does not fit", planned.report, large.layout)
    raises("is not in this plan", planned.report, Layout(tp=3))


def test_the_fastest_with_each_value(planned: Plan) -> None:
    by_tp = planned.fastest("tp")
    assert list(by_tp) == sorted({one.tp for one in planned.layouts})
    for tp, one in by_tp.items():
        assert one.step_s == min(x.step_s for x in planned.reports if x.layout.tp == tp)
    raises("'ep' is not a field of a layout; choose one of tp, pp", planned.fastest, "ep")
    rows = planned.trades().rows
    assert [row[1] for row in rows if row[0] == "tensor"] == [str(tp) for tp in by_tp]
    near = planned.trades(near=1).rows
    assert set(near) < set(rows)
    assert any("leaves the node of 8" in row[-1] for row in near if row[0] == "tensor")


def test_where_no_layout_fits_it_is_reported_with_the_excess() -> None:
    giant = replace(GPT, depth=4000)
    every = [formula_step(giant, layout, ROWS, SELENE) for layout in layouts(giant, RANKS, ROWS)]
    beyond = (min(report.peak_bytes for report in every) - 80e9) / 1e9
    words = rf"no layout fits: .* {beyond:.1f} GB too much"
    raises(words, plan, giant, SELENE, ROWS, gpus=RANKS)
    empty = replace(SELENE, device=replace(SELENE.device, memory_bytes=0))
    raises("no layout fits", plan, GPT, empty, ROWS, gpus=RANKS)
    wide, words = Sizes(200_000, 1, 1), "one block of width 200000 per stage does not fit"
    raises(words, largest_that_fits, wide, SELENE, 8, gpus=8)


@cases(
    ({"gpus": 4000}, "gpus=4000: selene has 3072 devices"),
    ({"gpus": 0}, "gpus=0: selene has 3072 devices"),
    ({"max_memory_bytes": 90e9}, "max_memory_bytes=9e"),
    ({"max_memory_bytes": 0}, "choose more than 0"),
    ({"gpus": 7}, "no layout of 7 ranks"),
    ({"tp": 7}, "48 heads are not divisible by 7; choose 1, 2, 3, 4"),
    ({"tp": 7, "max_memory_bytes": 0}, "48 heads are not divisible by 7"),  # layouts before memory
)
def test_what_cannot_be_is_one_sentence(options: dict, words: str) -> None:
    for ask in (plan, fits):
        raises(words, ask, GPT, SELENE, ROWS, **{"gpus": RANKS, **options})


def test_the_layout_that_holds_the_least_is_found_without_asking_all(asked: list[Layout]) -> None:
    asked.clear()
    every, found = layouts(GPT, RANKS, ROWS), fits(GPT, SELENE, ROWS, gpus=RANKS)
    truth = min(formula_step(GPT, one, ROWS, SELENE).peak_bytes for one in every)
    assert found.report.peak_bytes == truth and found.fits
    assert len(asked) < len(every) / 2
    spared = [sum(least_bytes(GPT, one, ROWS).values()) for one in set(every) - set(asked)]
    assert min(spared) >= truth
    assert not replace(found, budget_bytes=truth - 1).fits


@pytest.mark.parametrize("gpus", [1, 6, 8])
def test_the_largest_that_fits_is_the_deepest_of_all(gpus: int) -> None:
    """Against all depths, one after the other; one block more fits in no layout."""
    found = largest_that_fits(GPT, SELENE, 24, gpus=gpus, sequence=False)
    depth, fitting = found.report.sizes.depth, set()
    for deep in range(1, depth + 20):
        sizes = replace(GPT, depth=deep)
        every = layouts(sizes, gpus, 24, microbatch=1, chunks=1, sequence=False)
        if any(formula_step(sizes, one, 24, SELENE).peak_bytes <= 80e9 for one in every):
            fitting.add(deep)
    assert depth == max(fitting) and found.fits


def test_the_largest_is_found_for_named_stages_and_chunks() -> None:
    found = largest_that_fits(GPT, SELENE, 24, gpus=12, pp=3, chunks=(1, 2), tp=4)
    layout = found.report.layout
    assert (layout.tp, layout.pp) == (4, 3) and found.report.sizes.depth % 3 == 0
    raises("no layout of 12 ranks", largest_that_fits, GPT, SELENE, 24, gpus=12, pp=8)


def test_the_breakdown_adds_up_to_the_device() -> None:
    found = fits(GPT, SELENE, ROWS, gpus=RANKS)
    rows = found.table().rows
    assert rows[-1][0] == "free"
    assert sum(float(row[1]) for row in rows) == pytest.approx(80, abs=0.05)
    tight = replace(found, budget_bytes=1e9)
    assert tight.table().rows[-1][0] == "too much" and "GB too much" in str(tight)


def test_json_reads_back_as_the_same_plan_and_nothing_else_does(planned: Plan) -> None:
    text = planned.to_json()
    again = Plan.from_json(text)
    assert again == planned and again.to_json() == text
    written = json.loads(text)
    first = written["layouts"][0]
    assert first["step_s"] == pytest.approx(sum(first["seconds"].values()))
    assert set(first) == {
        "layout", "step_s", "seconds", "memory_bytes", "sent_bytes", "model_flops", "mfu", "why",
    }  # fmt: skip
    assert written["gpus"] == RANKS and written["model"]["parameters"] == GPT.parameters
    for invalid in ("", "[]", "{}", '{"format": "other"}', '{"format": 3}'):
        raises("not a plan from `Plan.to_json`", Plan.from_json, invalid)
    custom = replace(SELENE, name="custom")
    text = plan(GPT, custom, ROWS, gpus=RANKS, tp=8).to_json()
    raises("no cluster 'custom'", Plan.from_json, text)
    assert Plan.from_json(text, custom).cluster is custom


def test_the_table_has_what_each_takes_holds_and_sends(planned: Plan) -> None:
    table, best = planned.table(3), planned.best
    assert len(table.rows) == 3 and len(planned.table(None).rows) == len(planned.reports)
    row = dict(zip(table.heads, table.rows[0]))
    assert row["step s"] == f"{best.step_s:.2f}" and row["MFU"] == f"{best.mfu:.1%}"
    assert row["peak GB"] == f"{best.peak_bytes / 1e9:.1f}"
    assert row["tensor GB"] == f"{best.sent_bytes['tensor'] / 1e9:.1f}"
    assert row["why it is slower"] == "the best"
    assert "<table>" in planned._repr_html_() and repr(planned) == repr(planned.table())


def test_bars_are_the_seconds_and_the_map_has_every_tp_and_pp(planned: Plan) -> None:
    bars, grid = plot.plan(planned, top=4).axes
    drawn = [sum(stack[row].get_width() for stack in bars.containers) for row in range(4)]
    assert drawn == pytest.approx([report.step_s for report in planned.reports[:4]])
    assert len(bars.containers) == len(seconds(planned.best))
    at = {(one.tp, one.pp) for one in planned.layouts}
    words = [text.get_text() for text in grid.texts]
    assert f"{planned.best.step_s:#.3g}" in words and "across nodes" in words
    assert sum(word.replace(".", "").isdigit() for word in words) == len(at)
    raises("top=0", plot.plan, planned, top=0)
    assert isinstance(plot.plan(planned, figure=Figure()), Figure)
    # The best is drawn alone, and another layout beside it.
    for report, count in ((None, 1), (planned.best, 1), (planned.reports[1], 2)):
        names = compared_with_best(planned, report).axes[0].get_yticklabels()
        assert len(names) == count


@pytest.mark.skipif(find_spec("ipywidgets") is None, reason="needs ipywidgets")
def test_sliders_choose_a_layout_and_say_why_it_loses(planned: Plan) -> None:
    def of(layout: Layout) -> tuple[int, int, int]:
        return layout.tp, layout.pp, layout.microbatch

    view = plot.plan_view(planned)
    assert (view.tp.value, view.pp.value, view.microbatch.value) == of(planned.best.layout)
    assert view.verdict.value == "1.00 × the best: the best" and view.report == planned.best
    before = view.picture.value
    assert bytes(before).startswith(b"\x89PNG")
    view.tp.value = 16
    assert view.report is None or view.report.layout.tp == 16
    view.pp.value, view.microbatch.value = 1, 1
    there = [x for x in planned.reports if of(x.layout) == (16, 1, 1)]
    assert view.report == min(there, key=lambda x: (x.step_s, x.peak_bytes))
    assert "leaves the node" in view.verdict.value and view.picture.value != before
    view.tp.value = 1
    assert view.report is None and "does not fit" in view.verdict.value
    view.tp.value, view.pp.value = 16, 8
    assert view.report is None and "ranks or rows cannot be split evenly" in view.verdict.value
    assert "image/png" in view._repr_mimebundle_()


def test_the_command_ranks_draws_and_tells_the_trades(tmp_path: Path, planned: Plan) -> None:
    picture = tmp_path / "plan.png"
    said = command(f"{ASKED} --gpus 64 --batch 256 --top 3 --plot {picture}")
    assert picture.read_bytes().startswith(b"\x89PNG")
    every = len(planned.reports) + len(planned.too_large)
    assert f"{len(planned.reports):,} of {every:,} layouts fit, planned in" in said
    assert "leaves the node of 8" in said and "does not fit" in said and "the best" in said


def test_the_command_takes_constraints_and_prints_json(planned: Plan) -> None:
    wanted = "--tp 4,8 --no-recompute --sequence --zero 1 --max-memory 40"
    said = command(f"{ASKED} --gpus 64 --batch 256 {wanted} --json")
    assert set(Plan.from_json(said).layouts) == {
        one.layout
        for one in planned.reports
        if one.layout.tp in (4, 8) and one.layout.recompute == "none" and one.layout.sequence
        and one.layout.zero == (one.layout.dp > 1) and one.peak_bytes <= 40e9
    }  # fmt: skip


def test_the_command_says_whether_it_fits() -> None:
    said = command(f"{ASKED} --gpus 8 --batch 16 --fits")
    assert "on 8 devices: fits" in said and "optimizer state" in said
    said = command(f"{ASKED} --gpus 2 --batch 16 --fits", 1)
    assert "does not fit" in said and "too much" in said
    found = json.loads(command(f"{ASKED} --gpus 2 --batch 16 --fits --json", 1))
    assert not found["fits"] and found["peak_bytes"] > found["budget_bytes"]


def test_the_command_finds_the_largest_of_a_width_and_of_the_published() -> None:
    said = command(f"{ASKED} --gpus 8 --batch 16 --largest --json")
    found = largest_that_fits(GPT, SELENE, 16, gpus=8)
    assert json.loads(said)["model"]["depth"] == found.report.sizes.depth
    said = command("plan --cluster selene --gpus 8 --batch 16 --largest")
    small = [one for one in MODELS.values() if one.parameters < 80e9]
    held = [one for one in small if fits(one, SELENE, 16, gpus=8).fits]
    assert f"width {held[-1].width})" in said and len(held) < len(small)


def test_a_cluster_file_is_read_and_implausible_numbers_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "custom.toml"
    write_clusters(path, {"custom": replace(SELENE, name="custom", nodes=1)})
    asked = ASKED.replace("selene", f"custom --clusters {path} --batch 16 --tp 8")
    assert "on 8 × NVIDIA A100" in command(f"{asked} --top 1")
    text = path.read_text()
    for line, words in (
        ('memory_bytes = [-1, "printed"]', "memory_bytes = -1; it must be greater than 0"),
        ("", "memory_bytes = None; write a number and its source"),
    ):
        path.write_text(re.sub(r"(?m)^memory_bytes = .*$", line, text))
        assert words in command(asked, 2)


def test_the_models_have_the_parameters_of_their_names() -> None:
    for name, sizes in MODELS.items():
        billions = float(name.partition("-")[2].removesuffix("b"))
        assert sizes.parameters / 1e9 == pytest.approx(billions, abs=0.5)
        assert model(name) is sizes
    assert len(MODELS) == 11
