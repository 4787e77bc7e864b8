"""Are ranks in step in torch's own operations, as `dist.all_reduce(x)`, which no board sees?"""

from collections import Counter
from collections.abc import Collection
from typing import Any

import torch.distributed as dist

Begun = tuple[dict[str, int], Counter[tuple[str, int, int]]]
_calls: Counter[str] = Counter()  # sends and receives of a group
_messages: Counter[tuple[str, int, int]] = Counter()  # (group, from, to) -> sent less received


def count_messages() -> None:
    """From now on, count what this rank sends and receives."""
    group: Any = dist.ProcessGroup
    group.send, group.recv = _counted(group.send, 1), _counted(group.recv, -1)


def _counted(call: Any, way: int) -> Any:
    def counted(self: Any, tensors: Any, peer: int, tag: int) -> Any:
        _calls[self.group_name] += 1
        _messages[self.group_name, *(self.rank(), peer)[::way]] += way
        return call(self, tensors, peer, tag)

    return counted


def begun() -> Begun:
    """What this rank has begun: the collectives of each group, and the messages."""
    collectives: dict[str, int] = {}
    groups: Any = dist.distributed_c10d._world.pg_map
    for group in groups:
        numbered = group._get_sequence_number_for_group()  # by gloo, messages too
        messages = _calls[group.group_name] if dist.get_backend(group) == "gloo" else 0
        collectives[group.group_name] = numbered - messages
    return collectives, _messages


def in_step(ranks: Collection[Begun]) -> bool:
    """Whether all have groups, began as many collectives in each, and received what was sent."""
    left: Counter[tuple[str, int, int]] = Counter()
    numbers: dict[str, int] = {}
    for collectives, messages in ranks:
        left.update(messages)
        numbers.update(collectives)
    return not any(left.values()) and all(
        collectives and collectives.items() <= numbers.items() for collectives, _ in ranks
    )
