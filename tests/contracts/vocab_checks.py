"""What a vocabulary cut over ranks must do, on a rank: torch's values and gradients to 1e-10 in
float64, the formula's bytes. `made` has the three parts as labkit.parallel.tensor.layers, or faulty
ones."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit import Comm, listen
from labkit.events import all_gather_bus_bytes, all_reduce_bus_bytes, chunk_sizes
from labkit.parallel.common.shards import shard_of

WIDTH, ROWS, LENGTH = 3, 2, 12  # 12 positions divide over 1, 2, 3 and 4 ranks
AGREE = 1e-10


def padded_vocab(vocab: int, size: int) -> int:
    """The least number of rows, `vocab` or more, that divides over `size` ranks."""
    return -(-vocab // size) * size


def near(a: Tensor, b: Tensor, what: str) -> None:
    assert a.shape == b.shape, f"{what} is {list(a.shape)}, not {list(b.shape)}"
    off = float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
    assert off <= AGREE, f"{what} is off by {off}"


def own_rows(whole: Tensor, comm: Comm) -> Tensor:
    """What a rank must hold of `whole` [v, ...]: its rows, and zeros for padding."""
    vocab = len(whole)
    missing = padded_vocab(vocab, comm.size) - vocab
    filled = torch.cat([whole.detach(), whole.new_zeros(missing, *whole.shape[1:])])
    return filled.chunk(comm.size)[comm.rank]


def drawn(vocab: int) -> tuple[nn.Embedding, nn.Linear, Tensor, Tensor]:
    """A table, a head, tokens (not contiguous, some twice) and x; the same on all ranks."""
    torch.manual_seed(3)
    table = nn.Embedding(vocab, WIDTH, dtype=torch.float64)
    head = nn.Linear(WIDTH, vocab, dtype=torch.float64)
    tokens = torch.randint(0, vocab, (LENGTH, ROWS)).t()
    return table, head, tokens, torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)


def embedding_is_torchs(made: Any, vocab: int) -> None:
    comm = Comm()
    table, _, tokens, weights = drawn(vocab)
    cut = made.VocabParallelEmbedding.from_embedding(table, comm)
    near(cut.weight, own_rows(table.weight, comm), "the weight")
    expected, x = table(tokens), cut(tokens)
    near(x, expected, "x")
    (expected * weights).sum().backward()
    (x * weights).sum().backward()
    near(cut.weight.grad, own_rows(table.weight.grad, comm), "the gradient")
    shard = shard_of(cut.weight)
    assert shard is not None and shard.whole == vocab
    near(cut.weight[: shard.stop - shard.start], table.weight[shard.start : shard.stop], "shard")


def head_is_torchs(made: Any, vocab: int, gather: bool) -> None:
    comm = Comm()
    _, head, _, x = drawn(vocab)
    cut = made.VocabParallelHead.from_linear(head, comm, gather_output=gather)
    here, there = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, logits = head(there), cut(here)
    torch.manual_seed(4)
    slopes = torch.randn_like(expected)
    (expected * slopes).sum().backward()
    if gather:
        near(logits, expected, "logits")
        (logits * slopes).sum().backward()
    else:
        start = comm.rank * logits.shape[-1]
        real = expected[..., start : start + logits.shape[-1]]
        near(logits[..., : real.shape[-1]], real, "logits")
        assert (logits[..., real.shape[-1] :] == -math.inf).all()
        own = slopes[..., start : start + logits.shape[-1]]
        (logits[..., : own.shape[-1]] * own).sum().backward()
    near(here.grad, there.grad, "the gradient of x")
    near(cut.weight.grad, own_rows(head.weight.grad, comm), "the gradient of the weight")
    near(cut.bias.grad, own_rows(head.bias.grad, comm), "the gradient of the bias")


def own_logits(whole: Tensor, comm: Comm) -> Tensor:
    """A rank's part of logits [..., v], padding as `VocabParallelHead` leaves it."""
    missing = padded_vocab(whole.shape[-1], comm.size) - whole.shape[-1]
    return F.pad(whole, (0, missing), value=-math.inf).chunk(comm.size, -1)[comm.rank]


def loss_is_torchs(made: Any, vocab: int, scale: float = 1.0) -> None:
    comm = Comm()
    torch.manual_seed(5)
    whole = torch.randn(ROWS, LENGTH, vocab, dtype=torch.float64) * scale + 10 * scale
    targets = torch.randint(0, vocab, (LENGTH, ROWS)).t()
    ignored = targets.masked_fill(torch.rand(ROWS, LENGTH) < 0.3, -100)
    for reduction in ("mean", "sum", "none"):
        for y, ignore_index in ((targets, -100), (ignored, -100), (targets, 1)):
            there, here = whole.clone().requires_grad_(), whole.clone().requires_grad_()
            expected = F.cross_entropy(
                there.flatten(0, 1), y.flatten(), ignore_index=ignore_index, reduction=reduction
            )
            loss = made.vocab_parallel_cross_entropy(
                own_logits(here, comm), y, comm, ignore_index=ignore_index, reduction=reduction,
                vocab=vocab,
            )  # fmt: skip
            near(loss.flatten(), expected.flatten(), f"the {reduction}")
            weights = torch.arange(1.0, 1 + loss.numel(), dtype=torch.float64)
            (loss.flatten() * weights).sum().backward()
            (expected.flatten() * weights).sum().backward()
            assert here.grad is not None and there.grad is not None
            own = [own_rows(x.movedim(-1, 0), comm) for x in (here.grad, there.grad)]
            near(*own, "the gradient")


class Tiny(nn.Module):
    """An embedding, a layer and a head tied to the embedding."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.tokens(tokens))))


def tied_weights_train_as_one(made: Any, vocab: int) -> None:
    """Five steps of AdamW, whose weight decay leaves zeros of padding as they are."""
    comm = Comm()
    torch.manual_seed(6)
    plain = Tiny(vocab).double()
    torch.manual_seed(6)
    cut = Tiny(vocab).double()
    cut.tokens = made.VocabParallelEmbedding.from_embedding(cut.tokens, comm)
    cut.head = made.VocabParallelHead.from_linear(cut.head, comm, gather_output=False)
    cut.head.weight = cut.tokens.weight
    assert len(list(cut.parameters())) == 3
    one, other = (torch.optim.AdamW(m.parameters(), lr=0.05) for m in (plain, cut))
    for _ in range(5):
        tokens = torch.randint(0, vocab, (ROWS, LENGTH + 1))
        x, y = tokens[:, :-1], tokens[:, 1:]
        expected = F.cross_entropy(plain(x).flatten(0, 1), y.flatten())
        loss = made.vocab_parallel_cross_entropy(cut(x), y, comm, vocab=vocab)
        near(loss, expected, "the loss")
        for each, optimizer in ((expected, one), (loss, other)):
            optimizer.zero_grad()
            each.backward()
            optimizer.step()
    near(cut.tokens.weight, own_rows(plain.tokens.weight, comm), "the table")
    near(cut.middle.weight, plain.middle.weight, "the layer between")


def bytes_are_the_formulas(made: Any, vocab: int) -> None:
    """b s w for the embedding, b s w for the head's backward, 3 b s for the loss."""
    comm = Comm()
    table, head, tokens, _ = drawn(vocab)
    embedding = made.VocabParallelEmbedding.from_embedding(table, comm)
    cut = made.VocabParallelHead.from_linear(head, comm, gather_output=False)
    gathering = made.VocabParallelHead.from_linear(head, comm, gather_output=True)
    n, each = ROWS * LENGTH, 8  # tokens, and bytes of a float64
    own = n * (padded_vocab(vocab, comm.size) // comm.size) * each

    def all_reduced(elements: int) -> tuple[str, int, int]:
        chunks = [m * each for m in chunk_sizes(elements, comm.size)]
        return "all_reduce", elements * each, all_reduce_bus_bytes(chunks, comm.rank)

    def hear(what: str, expected: list[tuple[str, int, int]], fn: Any) -> Any:
        with listen() as events:
            result = fn()
        heard = [(e.op, e.payload_bytes, e.bus_bytes) for e in events]
        if comm.size == 1:
            assert sum(bus_bytes for _, _, bus_bytes in heard) == 0, f"{what}: {heard}"
        else:
            assert heard == expected, f"{what}: {heard}, expected {expected}"
        return result

    x = hear("embedding", [all_reduced(n * WIDTH)], lambda: embedding(tokens))
    logits = hear("head", [], lambda: cut(x))
    loss = hear(
        "loss", [all_reduced(n), all_reduced(2 * n)],
        lambda: made.vocab_parallel_cross_entropy(logits, tokens, comm),
    )  # fmt: skip
    backward = lambda: torch.autograd.grad(loss, logits, retain_graph=True)  # noqa: E731
    hear("backward of the loss", [], backward)
    hear("backward", [all_reduced(n * WIDTH)], loss.backward)
    sent = all_gather_bus_bytes([own] * comm.size, comm.rank)
    hear("gathered", [("all_gather", comm.size * own, sent)], lambda: gathering(x.detach()))


def sequence_parts_are_torchs(made: Any, vocab: int) -> None:
    """Each rank has its positions of x, and the gradients are those of the whole."""
    comm = Comm()
    table, head, tokens, weights = drawn(vocab)
    embedding = made.VocabParallelEmbedding.from_embedding(table, comm, sequence=True)
    cut = made.VocabParallelHead.from_linear(head, comm, gather_output=False, sequence=True)
    own = slice(comm.rank * LENGTH // comm.size, (comm.rank + 1) * LENGTH // comm.size)
    there, here = table(tokens), embedding(tokens)
    near(here, there[:, own], "x")
    expected = F.cross_entropy(head(there * weights).flatten(0, 1), tokens.flatten())
    logits = cut(here * weights[:, own])
    loss = made.vocab_parallel_cross_entropy(logits, tokens, comm, vocab=vocab)
    near(loss, expected, "the loss")
    expected.backward()
    loss.backward()
    near(embedding.weight.grad, own_rows(table.weight.grad, comm), "the table's gradient")
    near(cut.weight.grad, own_rows(head.weight.grad, comm), "the head's gradient")
    near(cut.bias.grad, own_rows(head.bias.grad, comm), "the bias's gradient")
