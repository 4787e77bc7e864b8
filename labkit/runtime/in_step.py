"""Compares the ranks' direct calls to torch.distributed, which the board does not record."""

from collections import Counter
from collections.abc import Collection
from typing import Any

import torch.distributed as dist

Begun = tuple[dict[str, int], Counter[tuple[str, int, int]]]
_calls: Counter[str] = Counter()  # group -> number of sends and receives
_messages: Counter[tuple[str, int, int]] = Counter()  # (group, from, to) -> sent minus received


def count_messages() -> None:
    """Start counting the messages that this rank sends and receives."""
    group: Any = dist.ProcessGroup
    group.send, group.recv = _counted(group.send, 1), _counted(group.recv, -1)


def _counted(call: Any, way: int) -> Any:
    def counted(self: Any, tensors: Any, peer: int, tag: int) -> Any:
        _calls[self.group_name] += 1
        _messages[self.group_name, *(self.rank(), peer)[::way]] += way
        return call(self, tensors, peer, tag)

    return counted


def begun() -> Begun:
    """The number of collectives that this rank has begun, by group, and its message counts."""
    collectives: dict[str, int] = {}
    groups: Any = dist.distributed_c10d._world.pg_map
    for group in groups:
        numbered = group._get_sequence_number_for_group()  # with gloo, this counts messages too
        messages = _calls[group.group_name] if dist.get_backend(group) == "gloo" else 0
        collectives[group.group_name] = numbered - messages
    return collectives, _messages


def in_step(ranks: Collection[Begun]) -> bool:
    """Whether all ranks have begun equally many collectives, with no message outstanding."""
    outstanding: Counter[tuple[str, int, int]] = Counter()
    expected: dict[str, int] = {}
    for collectives, messages in ranks:
        outstanding.update(messages)
        expected.update(collectives)
    return not any(outstanding.values()) and all(
        collectives and collectives.items() <= expected.items() for collectives, _ in ranks
    )
