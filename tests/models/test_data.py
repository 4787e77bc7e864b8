"""Text and batches: nothing lost, the same everywhere, and exact however the rows are cut."""

import hashlib
import os
import pickle
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parameters_to_vector

from command import python
from labkit.data import Batch, Text, loss
from labkit.models import GPT
from places import SUPPORT
from tables import raises

KINDS = ["byte", "bpe"]


@pytest.fixture(scope="module", params=KINDS)
def text(request: pytest.FixtureRequest) -> Text:
    return Text(tokens=request.param)


def test_default_text_is_the_documentation_of_python(text: Text) -> None:
    content = text.decode(text.ids)
    assert 300_000 < len(content) < 900_000
    assert 'The "for" statement' in content and content.isascii()
    assert torch.equal(text.encode(content), text.ids.long())
    assert text.ids.min() >= 0 and text.ids.max() < text.vocab
    assert text.vocab == (256 if len(text) == len(content) else 1024)


def test_pieces_are_fewer_than_bytes_also_of_small_texts_and_long_lines(tmp_path: Path) -> None:
    assert len(Text()) / 2 > len(Text(tokens="bpe")) > len(Text(tokens="bpe", vocab=2048))
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 4)
    text = Text(tmp_path / "a.txt", tokens="bpe", vocab=1024)
    assert 256 < text.vocab < 1024
    assert text.ids.max() < text.vocab
    (tmp_path / "a.txt").write_text("abcabc " * 30_000 + "z" * 100_000)
    assert len(Text(tmp_path, tokens="bpe", vocab=300)) < 100_000


STRINGS = [
    "", " ", "\n\n\n", "  two spaces   three\n\tand a tab\t \r\n  trailing  ", "x" * 5000,
    "naïve 日本語 😀 \ufeff \u2028 \x85 \x0c", "<unk> <0x0A> <s> </s>",
    "▁ the character ▁▁ that sentencepiece keeps for itself ▁",
]  # fmt: skip


def test_any_string_comes_back(text: Text) -> None:
    dice = random.Random(0)
    alphabet = "ab  \n\t\r▁<>é…\U0001f600\x00\x07"
    drawn = ["".join(dice.choices(alphabet, k=dice.randrange(40))) for _ in range(200)]
    for content in STRINGS + drawn:
        tokens = text.encode(content)
        assert text.decode(tokens) == text.decode(tokens.tolist()) == content
    assert "\ufffd" in text.decode(text.encode("日")[1:]), "a cut character"


def test_learning_pieces_is_silent_and_repeatable(capfd: pytest.CaptureFixture[str]) -> None:
    from labkit import data

    content = Text().decode(Text().ids)
    data._learn_bpe.cache_clear()
    first = data._learn_bpe(content, 600)
    data._learn_bpe.cache_clear()
    second = data._learn_bpe(content, 600)
    assert first is not second
    assert first.processor.serialized_model_proto() == second.processor.serialized_model_proto()
    assert data._learn_bpe(content, 600) is second  # once per process
    assert capfd.readouterr() == ("", "")


def test_pickled_text_is_the_same(text: Text) -> None:
    copied = pickle.loads(pickle.dumps(text))
    assert torch.equal(copied.ids, text.ids)
    assert copied.decode(copied.encode("the cat ▁")) == "the cat ▁"


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_keeps_its_line_ends_and_characters(tmp_path: Path, kind: str) -> None:
    content = "one\r\ntwo\n  drei — Ü\n" * 3
    (tmp_path / "a.txt").write_bytes(content.encode())
    for path in (tmp_path / "a.txt", str(tmp_path / "a.txt")):
        assert Text(path, tokens=kind).decode(Text(path, tokens=kind).ids) == content


def test_a_folder_is_its_text_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    contents = {"b.txt": b"B", "a.md": b"A", "sub/c.py": b"C", ".git/config": b"hidden"}
    contents |= {"empty.txt": b"", "image.png": b"\x89PNG\0\0", "latin.txt": b"caf\xe9"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    os.symlink(tmp_path / "gone", tmp_path / "broken")
    text = Text(tmp_path)
    assert text.decode(text.ids) == "A\nB\nC"


def test_a_pipe_is_a_text() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"abcd" * 100)
    os.close(writing)
    assert len(Text(f"/dev/fd/{reading}")) == 400
    os.close(reading)


def test_clear_errors(tmp_path: Path) -> None:
    for name, content in {"empty.txt": b"", "binary": b"ab\0cd", "latin.txt": b"caf\xe9"}.items():
        (tmp_path / name).write_bytes(content)
        raises(f"{name} is empty, or not UTF-8 text", Text, tmp_path / name)
    nowhere = tmp_path / "nowhere"
    raises(r"no such file or folder.*nowhere", Text, nowhere, error=FileNotFoundError)
    raises("tokens='word': choose", Text, tokens="word")
    raises("vocab of 100 is too small for 256 bytes", Text, tokens="bpe", vocab=100)
    (tmp_path / "short.txt").write_text("abcd")
    short = Text(tmp_path / "short.txt")
    assert short.batch(0, rows=2, length=3).x.shape == (2, 3)
    raises("5 tokens, but the text has 4", short.batch, 0, rows=2, length=4)
    for bad in ({"rows": 0}, {"length": 0}, {"step": -1}, {"seed": -1}):
        raises("at least", short.batch, **{"step": 0, "rows": 1, "length": 2, **bad})


def test_targets_are_the_next_tokens(text: Text) -> None:
    batch = text.batch(3, rows=5, length=11)
    assert batch.x.shape == batch.y.shape == (5, 11)
    assert batch.x.dtype == batch.y.dtype == torch.int64
    assert torch.equal(batch.x[:, 1:], batch.y[:, :-1])
    assert text.decode(text.ids).find(text.decode([*batch.x[0], batch.y[0, -1]])) >= 0
    assert (batch.total_tokens, batch.ranks, batch.share) == (55, 1, 1.0)


def test_every_window_can_be_drawn(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdef")
    batch = Text(tmp_path).batch(0, rows=200, length=2)
    assert {bytes(row.tolist()).decode() for row in batch.x} == {"ab", "bc", "cd", "de"}


def test_a_batch_depends_on_step_and_seed_alone() -> None:
    text = Text()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    batches = {
        (seed, step): text.batch(step, 8, 16, seed=seed).x for seed in range(3) for step in range(9)
    }
    assert torch.equal(torch.get_rng_state(), before)  # no shared random state
    assert len({tuple(x.flatten().tolist()) for x in batches.values()}) == 27
    # Seeds that agree in their low 32 bits, the only ones that torch's generator keeps.
    assert not torch.equal(text.batch(0, 8, 16, seed=1 << 32).x, batches[0, 0])
    torch.manual_seed(2)
    assert torch.equal(text.batch(4, 8, 16, seed=2).x, batches[2, 4])


def digest(kind: str) -> str:
    text = Text(tokens=kind)
    batch = text.batch(7, rows=4, length=32, seed=5)
    return hashlib.sha256(text.ids.numpy().tobytes() + batch.y.numpy().tobytes()).hexdigest()


@pytest.mark.slow
def test_other_processes_draw_the_same_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "99")
    path = [str(Path(__file__).parent), str(SUPPORT)]
    code = f"import sys; sys.path += {path}; import test_data as t; print(*map(t.digest, t.KINDS))"
    assert python("-c", code).stdout.split() == [digest(kind) for kind in KINDS]


def test_hold_out_parts_the_tokens() -> None:
    text = Text()
    train, held = text.hold_out(0.1)
    assert torch.equal(torch.cat([train.ids, held.ids]), text.ids)
    assert len(held) == round(0.1 * len(text))
    assert held.vocab == text.vocab and held.batch(0, 2, 8).x.shape == (2, 8)
    raises("between 0 and 1", text.hold_out, 1.0)


def gradient(model: GPT, *batches: Batch) -> Tensor:
    model.zero_grad()
    for batch in batches:
        loss(model(batch.x), batch).backward()
    return parameters_to_vector([weight.grad for weight in model.parameters()])


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT.preset("tiny").double()


@pytest.mark.parametrize("rows", [1, 3, 4, 7])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_mean_over_slices_is_the_global_batch(model: GPT, rows: int, size: int) -> None:
    batch = Text().batch(0, rows, length=9)
    slices = [batch.slice(rank, size) for rank in range(size)]
    heights = [len(part.x) for part in slices]
    assert torch.equal(torch.cat([part.x for part in slices]), batch.x)
    assert torch.equal(torch.cat([part.y for part in slices]), batch.y)
    assert max(heights) - min(heights) <= 1 and heights == sorted(heights, reverse=True)

    whole = F.cross_entropy(model(batch.x).flatten(0, 1), batch.y.flatten())  # the plain mean
    weights = list(model.parameters())
    true = parameters_to_vector(torch.autograd.grad(whole, weights))
    losses = [loss(model(part.x), part) for part in slices]
    assert (sum(losses) / size - whole).abs() < 1e-12
    mean = sum(gradient(model, part) for part in slices) / size
    assert (mean - true).abs().max() < 1e-12
    for part, value in zip(slices, losses):
        if len(part.x):  # share weighs the slice's own mean loss
            own = F.cross_entropy(model(part.x).flatten(0, 1), part.y.flatten())
            assert (part.share * own - value).abs() < 1e-12
        else:
            assert part.share == value == 0
    if rows % size == 0:
        assert [part.share for part in slices] == [1.0] * size


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_micro_batches_of_a_slice_add_up(model: GPT, n: int) -> None:
    batch = Text().batch(0, rows=7, length=6)
    for part in (batch, batch.slice(1, 3), batch.slice(8, 9)):
        pieces = part.split(n)
        assert len(pieces) == n and torch.equal(torch.cat([p.x for p in pieces]), part.x)
        assert abs(sum(p.share for p in pieces) - part.share) < 1e-12
        assert (gradient(model, *pieces) - gradient(model, part)).abs().max() < 1e-12


def test_slices_of_slices_stay_exact_and_even_ones_have_the_plain_mean(model: GPT) -> None:
    batch = Text().batch(0, rows=5, length=6)
    cut = [batch.slice(i, 2).slice(j, 3) for i in range(2) for j in range(3)]
    mean = sum(gradient(model, part) for part in cut) / 6
    assert (mean - gradient(model, batch)).abs().max() < 1e-12
    part = Text().batch(0, rows=6, length=8).slice(1, 3)
    logits = torch.randn(2, 8, 256)
    assert torch.equal(loss(logits, part), F.cross_entropy(logits.flatten(0, 1), part.y.flatten()))


def test_loss_is_summed_in_at_least_fp32() -> None:
    batch = Text().batch(0, rows=8, length=64)
    logits = torch.randn(8, 64, 256).bfloat16()
    rounded, exact = loss(logits, batch), loss(logits.double(), batch)
    assert rounded.dtype == torch.float32 and exact.dtype == torch.float64
    assert abs(rounded - exact) < 1e-5


def test_loss_runs_on_shapes_alone() -> None:
    with FakeTensorMode():
        tokens = torch.zeros(3, 4, dtype=torch.long)
        batch = Batch(tokens, tokens, total_tokens=12).slice(0, 2).to("cpu")
        value = loss(GPT.preset("tiny")(batch.x), batch)
        value.backward()
    assert value.shape == ()


def test_wrong_cuts_and_shapes_are_refused() -> None:
    batch = Text().batch(0, rows=2, length=4)
    for rank, size in [(-1, 2), (2, 2), (0, 0)]:
        raises("is not one of", batch.slice, rank, size)
    raises("at least 1 micro-batch", batch.split, 0)
    raises(r"logits \[3, 4, 256\] do not fit targets \[2, 4\]", loss, torch.zeros(3, 4, 256), batch)


@pytest.mark.slow
def test_loss_falls_on_real_text(text: Text) -> None:
    torch.manual_seed(0)
    model = GPT(text.vocab, width=32, depth=2, heads=4, context=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(30):
        batch = text.batch(step, rows=16, length=32)
        optimizer.zero_grad()
        value = loss(model(batch.x), batch)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[0] == pytest.approx(torch.tensor(float(text.vocab)).log().item(), abs=0.2)
    assert sum(losses[-5:]) / 5 < losses[0] - 1.0
