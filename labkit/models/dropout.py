"""Dropout with a mask of one byte for each element, on every device.

torch's nn.Dropout does the same on a GPU. On a CPU it keeps a mask in the type of the input, two
bytes in bfloat16 and four in float32, so that a layer recorded there would hold a tenth more than
on the machine it stands for.
"""

import torch
from torch import Tensor, nn


class Dropout(nn.Dropout):
    """Each element becomes 0 with probability p, and the others 1 / (1 - p) times as large; in
    evaluation, and for p = 0, nothing is changed."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        return torch.native_dropout(x, self.p, True)[0]  # and the mask, which backward keeps
