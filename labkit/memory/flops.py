"""FLOPs of one call, from the shapes of its tensors."""

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """FLOPs of one call, 2 per multiply-add; 0 except for matmuls, convolutions and attention."""
    match func._overloadpacket:  # torch has no formula for attention on a CPU
        case aten._scaled_dot_product_flash_attention_for_cpu:
            return sdpa_flop_count(*(x.shape for x in args[:3]))
        case aten._scaled_dot_product_flash_attention_for_cpu_backward:
            return sdpa_backward_flop_count(*(x.shape for x in args[:4]))
    formula = flop_registry.get(func._overloadpacket)
    return formula(*args, **kwargs, out_val=out) if formula else 0
