"""Deliberate faults in what DDP does beyond averaging; each must turn its check red."""

from typing import Any

import pytest
import torch

import ddp_checks
from harness import edits, noticed, on_ranks
from labkit import DDP
from labkit.parallel.common import data_parallel
from labkit.parallel.ddp import comm_hooks, ddp, extras

pytestmark = pytest.mark.slow

ORDER: Any = ddp_checks.buckets_follow_the_order_of_arrival, DDP
OTHER_ORDERS: Any = ddp_checks.ranks_with_other_orders_agree, DDP
STATIC: Any = ddp_checks.a_static_graph_may_not_change, DDP
HALVED: Any = (
    ddp_checks.a_hook_halves_the_bytes, DDP, comm_hooks.bf16_compress_hook, torch.bfloat16
)  # fmt: skip
NOT_STATIC = "ignores static_graph=True", "overlap, static_graph, hook\n", "overlap, False, hook\n"
AGREED = "order = agreed_order(self._parameters_to_average, arrived, self.comm, self._join.first)\n"
OWN_ORDER = """        rest = [p for p in self._parameters_to_average if p not in set(arrived)]
        order = [*arrived, *rest]
"""
FAULTS = [
    *edits(
        ddp,
        ("never rebuilds", "self._rebuild(self._arrived)", "self._arrived = None", *ORDER),
        ("rebuilds each time", "self._arrived = None  #", "self._arrived = []  #", *ORDER),
        ("leaves gradients in old buckets", "bucket.copy_gradients()", "pass", *ORDER),
        ("ranks agree on an order and do not use it", AGREED, AGREED + OWN_ORDER, *OTHER_ORDERS),
        ("takes over nothing", "view.copy_(parameter.grad)", "view.zero_()", *HALVED),
        (*NOT_STATIC, ddp_checks.a_static_graph_sends_what_is_used, DDP),
        (*NOT_STATIC, *STATIC),
        ("never checks what a static graph uses",
         "if self.static_graph and self._arrived is None:", "if False:", *STATIC),
        ("divides again afterwards",
         "            self.handle.wait()\n",
         "            self.handle.wait()\n            self.flat.div_(2)\n", *HALVED),
    ),
    *edits(
        extras,
        ("what rank 0 used counts for all",
         "comm.all_gather_object(own)", "[comm.all_gather_object(own)[0]] * comm.size", *STATIC),
    ),
    *edits(
        data_parallel,
        ("sends each micro-batch",
         "with self.no_sync():", "if True:", ddp_checks.accumulation_equals_one_batch, DDP),
    ),
    *edits(
        comm_hooks,
        ("forgets to cast back", "self.elements.copy_(self.small)", "pass", *HALVED),
        ("halves nothing",
         "return _CastBack(small, elements, comm.all_reduce(small, async_op=async_op))",
         "return comm.all_reduce(flat.copy_(small), async_op=async_op)", *HALVED),
    ),
]  # fmt: skip
JOIN: Any = ddp_checks.ranks_whose_data_ends_join, DDP, [2, 4, 5], False
JOINING = [
    *edits(
        ddp,
        ("divides by the others",
         "device, divide_by_active)", "device, not divide_by_active)", *JOIN),
        ("a joined rank goes on sending its last gradient",
         "                    self.zero_grad()\n", "", *JOIN),
    ),
    *edits(
        extras,
        ("ends with the model of rank 0", "return self.active[0]", "return 0", *JOIN),
    ),
]  # fmt: skip
some_ranks_wait = {"timeout_s": 5}  # under some of the faults
test_a_fault_turns_its_check_red = noticed(FAULTS, on_ranks, size=2, **some_ranks_wait)
test_faulty_joining_turns_its_check_red = noticed(JOINING, on_ranks, size=3, **some_ranks_wait)
