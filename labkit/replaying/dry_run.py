"""A dry run: what one rank of many does, recorded without data, memory or other ranks.

The same code runs as on real ranks. Its tensors are torch's fake tensors, which have shapes, dtypes
and a place in autograd's graph, but no numbers; its process group is a fake one, in which every
collective is over at once. So a laptop records a rank of a thousand that trains 175B parameters.

What runs so must not look at a number, as `loss.item()` and `if gradient.isnan().any()` do: there
is none. labkit's strategies do not.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from labkit.recording import record
from labkit.trace import Trace
from labkit.world.attach import on_paper


def dry_run(
    fn: Callable[..., object],
    *args: Any,
    ranks: int,
    rank: int = 0,
    alike: Iterable[int] | None = None,
    step: int = 1,
    seed: int = 0,
    **kwargs: Any,
) -> Trace:
    """Record what rank `rank` of `ranks` does in `fn(*args, **kwargs)`, without data.

    Args:
        fn: builds its model and trains it, on a rank. (A model that was built outside has numbers
            and takes memory.)
        alike: the ranks that do the same, for which this one stands; all by default.
        step: the training step to keep. The second by default: then all state is there.

    Returns that step, with operations and memory; its times mean nothing: see `replay`.

    Raises ValueError when `fn` makes fewer steps or looks at a number, RuntimeError on a rank.

    >>> def train():
    ...     model = DDP(GPT.preset("1M"))
    ...     optimizer = torch.optim.AdamW(model.parameters())
    ...     for _ in range(2):
    ...         optimizer.zero_grad()
    ...         model(torch.zeros(8, 64, dtype=torch.long)).sum().backward()
    ...         optimizer.step()
    >>> trace = dry_run(train, ranks=1024)
    """
    others = tuple(sorted(set(range(ranks) if alike is None else alike) - {rank}))
    if others and not 0 <= others[0] <= others[-1] < ranks:
        raise ValueError(f"dry_run: alike={others}; a world of {ranks} has ranks 0 to {ranks - 1}")
    with on_paper(rank, ranks), FakeTensorMode(allow_non_fake_inputs=True):
        torch.manual_seed(seed)
        with record(detail_step=step) as trace:
            try:
                fn(*args, **kwargs)
            except DataDependentOutputException as error:
                raise ValueError(
                    f"dry_run: the function looks at a number ({error}), and without data there "
                    "is none; leave out what needs it, as loss.item() or printing a tensor"
                ) from error
    if step not in trace.steps():
        raise ValueError(
            f"dry_run: the function made {len(trace.steps())} training steps, and step {step} is "
            f"to be kept; make {step + 1}, or give step=0"
        )
    kept = trace.step(step)
    kept.ranks[rank].alike = others
    kept.about = {"what": "dry run", "world_size": ranks}
    return kept
