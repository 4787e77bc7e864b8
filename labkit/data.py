"""Real text without a download, and batches that ranks slice without communication.

    text ── tokens ── ids [n] ── batch(step, rows, length): random windows of length + 1 tokens
        window   t h e   c a t        x   t h e   c a          the model reads x and
                                      y   h e   c a t          predicts y, one token ahead

    global batch, 7 rows     slice(rank, 3): 3, 2, 2 rows     slice(0, 3).split(2): 2, 1 rows

All ranks draw the same windows from (seed, step) and keep their own rows. Averaging the mean losses
of uneven slices would weight tokens unequally, so

    loss = (sum over the slice's tokens) * ranks / (tokens of the global batch)

Averaged over ranks, this loss and its gradients are exactly those of the global batch, even when a
rank has no rows. The losses of micro-batches sum to exactly the slice's loss.
"""

import copy
import functools
import io
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics  # the texts of `help("for")`, in every Python installation
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.events import ranks_in_words


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of a global batch.

    x             inputs, token ids [rows, length]
    y             targets, the token that follows each input [rows, length]
    total_tokens  number of targets in the global batch
    ranks         number of slices into which the global batch is divided
    """

    x: Tensor
    y: Tensor
    total_tokens: int
    ranks: int = 1

    @property
    def share(self) -> float:
        """Weight of this slice's mean loss: 1 for equal slices, 0 for an empty slice."""
        return self.y.numel() * self.ranks / self.total_tokens

    def slice(self, rank: int, size: int) -> "Batch":
        """The contiguous rows of one of `size` ranks; row counts differ by at most 1 and may be 0.
        Raises ValueError unless rank is from 0 to size - 1."""
        if not 0 <= rank < size:
            raise ValueError(
                f"rank {rank} is not one of {ranks_in_words(size)}; choose 0 to {size - 1}"
            )
        x, y = self.x.tensor_split(size)[rank], self.y.tensor_split(size)[rank]
        return replace(self, x=x, y=y, ranks=self.ranks * size)

    def split(self, n: int) -> list["Batch"]:
        """Split into n micro-batches as `slice` does; their losses sum to this batch's loss. Some
        are empty if n exceeds the row count. Raises ValueError if n is below 1."""
        if n < 1:
            raise ValueError(f"n={n}: choose at least 1 micro-batch")
        return [replace(self.slice(i, n), ranks=self.ranks) for i in range(n)]

    def to(self, device: torch.device | str) -> "Batch":
        return replace(self, x=self.x.to(device), y=self.y.to(device))


def loss(logits: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of this slice, in nats per token of the global batch, times `batch.ranks`.

    logits [rows, length, vocab] -> a scalar, at least fp32: the plain mean if slices are even, or
    zero, with zero gradients, if there are no rows. Raises ValueError if shapes do not match.
    """
    if logits.shape[:-1] != batch.y.shape:
        raise ValueError(
            f"logits {list(logits.shape)} do not fit targets {list(batch.y.shape)}; "
            "expected one row of scores per target, [rows, length, vocab]"
        )
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(logits.flatten(0, -2), batch.y.flatten(), reduction="sum")
    return total / (batch.total_tokens / batch.ranks)


class Text:
    """Text as one sequence of token ids: `.ids` [n] int32, each below `.vocab`; `len(text)` is n.

    path    a file; a folder, whose text files are joined in path order (hidden and binary files
            are skipped); or None: Python's built-in documentation, in ASCII, about 450 kB
    tokens  "byte": the 256 byte values of UTF-8; "bpe": subwords learned from this text
    vocab   for "bpe", the number of subwords; a short text may yield fewer (see `.vocab`)

    Raises FileNotFoundError for a missing path, ValueError for an empty or binary file, an unknown
    kind of token, or a vocab too small for the text's characters.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        tokens: Literal["byte", "bpe"] = "byte",
        vocab: int = 1024,
    ) -> None:
        if tokens not in ("byte", "bpe"):
            raise ValueError(f'tokens={tokens!r}: choose "byte" or "bpe"')
        manual = "\n\n".join(topics[key] for key in sorted(topics))
        # ASCII, so that models of 128 tokens can read it; one ? per byte keeps all positions.
        manual = re.sub(r"[^\0-\x7f]", lambda found: "?" * len(found[0].encode()), manual)
        content = manual if path is None else _read(Path(path))
        if not content:
            raise ValueError(f"{path} is empty, or not UTF-8 text; choose a text file or a folder")
        self._tokens = _Bytes() if tokens == "byte" else _learn_bpe(content, vocab)
        self.vocab = self._tokens.vocab
        self.ids = self._tokens.encode(content)  # [n] int32

    def __len__(self) -> int:
        return len(self.ids)

    def encode(self, content: str) -> Tensor:
        """The token ids of any string, [n]; `decode` restores the string exactly."""
        return self._tokens.encode(content).long()

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """The string that ids [n] encode; invalid UTF-8 (a split character) becomes \ufffd."""
        return self._tokens.decode(torch.as_tensor(ids).tolist())

    def batch(self, step: int, rows: int, length: int, seed: int = 0) -> Batch:
        """The global batch of a step: `rows` random windows of `length` tokens. Equal arguments
        produce the same batch in every process; torch's random state is neither read nor changed.
        Raises ValueError if the text is shorter than length + 1 tokens."""
        if rows < 1 or length < 1 or step < 0 or seed < 0:
            raise ValueError(f"{rows=}, {length=} must be at least 1; {step=}, {seed=} at least 0")
        if len(self) < length + 1:
            raise ValueError(
                f"a sequence of {length} and its last target need {length + 1} tokens, but the "
                f"text has {len(self)}; use a longer text or a shorter length"
            )
        # torch's CPU generator uses only 32 bits of its seed, so (seed, step) is hashed to 32 bits.
        (mixed,) = np.random.SeedSequence((seed, step)).generate_state(1)
        generator = torch.Generator().manual_seed(int(mixed))
        starts = torch.randint(len(self) - length, (rows,), generator=generator)
        windows = self.ids.unfold(0, length + 1, 1)[starts].long()  # [rows, length + 1]
        x, y = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()  # [rows, length]
        return Batch(x, y, total_tokens=rows * length)

    def hold_out(self, fraction: float = 0.1) -> tuple["Text", "Text"]:
        """Split off the last `fraction` of tokens; return (training, validation) with one vocab."""
        if not 0 < fraction < 1:
            raise ValueError(f"fraction={fraction}: choose a fraction between 0 and 1")
        cut = len(self) - round(len(self) * fraction)
        train, held = copy.copy(self), copy.copy(self)
        train.ids, held.ids = self.ids[:cut], self.ids[cut:]
        return train, held


class _Bytes:
    vocab = 256

    def encode(self, content: str) -> Tensor:
        return torch.from_numpy(np.array(bytearray(content.encode()), dtype=np.int32))

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


class _Subwords:
    """BPE (Sennrich et al. 2016) with sentencepiece; characters outside the vocab become bytes."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.vocab: int = processor.vocab_size()
        # sentencepiece writes a space as ▁, so a ▁ in the text itself must be encoded as bytes.
        self.underline = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in "▁".encode()]

    def encode(self, content: str) -> Tensor:
        ids: list[int] = []
        for i, part in enumerate(content.split("▁")):
            ids += self.underline if i else []
            for line in self.processor.encode(part.splitlines(keepends=True), num_threads=1):
                ids += line
        return torch.tensor(ids, dtype=torch.int32)

    def decode(self, ids: list[int]) -> str:
        return str(self.processor.decode(ids))


@functools.lru_cache(maxsize=4)
def _learn_bpe(content: str, vocab: int) -> _Subwords:
    """Learn subwords, deterministically, from the first 4 million characters."""
    import sentencepiece  # imported here: byte tokens do not need it

    lines = content[:4_000_000].split("\n")
    short = (line[i : i + 1000] for line in lines for i in range(0, len(line), 1000))
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=short,  # sentencepiece skips lines longer than 4,192 bytes
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab,
            hard_vocab_limit=False,  # a short text yields fewer subwords, not an error
            byte_fallback=True,  # together with the next three options, makes decoding exact
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,  # indentation becomes one token
            bos_id=-1,
            eos_id=-1,
            num_threads=1,
            minloglevel=2,  # print nothing
        )
    except RuntimeError as error:
        raise ValueError(
            f"a BPE vocab of {vocab} is too small for 256 bytes and this text's characters; "
            f"choose a larger one, or byte tokens ({error})"
        ) from error
    return _Subwords(sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()))


def _read(path: Path) -> str:
    if not path.exists():
        raise FileNotFoundError(f"no such file or folder: {path}; check the path")
    if not path.is_dir():  # a file, or a pipe
        return _decode(path)
    paths = [file.relative_to(path) for file in path.rglob("*") if file.is_file()]
    names = sorted(x.as_posix() for x in paths if not any(part[0] == "." for part in x.parts))
    return "\n".join(filter(None, (_decode(path / name) for name in names)))


def _decode(file: Path) -> str:
    """The file's text, line endings unchanged; "" if the file is not text or cannot be read."""
    try:
        data = file.read_bytes()
        return "" if b"\0" in data else data.decode()
    except (OSError, UnicodeDecodeError):  # no permission, or not UTF-8
        return ""
