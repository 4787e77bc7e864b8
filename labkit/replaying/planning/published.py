"""GPTs that have been trained at scale, and how: figures from papers.

Table 1 of arXiv 2104.04473 (Narayanan et al., Megatron-LM): 1.7B to 1008B parameters on 32 to 3,072
A100 of Selene, each trained with all activations computed again. Vocabulary 51,200, sequences of
2,048. FLOP/s are counted with what is computed again, as that paper does (its equation 3).
"""

from dataclasses import dataclass

from labkit.replaying.planning.layout import Layout, Sizes


@dataclass(frozen=True)
class Trained:
    """A row of the table. `microbatch` is not in it: it is chosen here, and so is plain 1F1B."""

    billions: float  # of parameters
    heads: int
    width: int
    depth: int
    tp: int
    pp: int
    ranks: int
    batch: int  # rows
    tflops: float  # reached, of each GPU
    microbatch: int

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.width, self.depth, self.heads)

    @property
    def layout(self) -> Layout:
        dp = self.ranks // (self.tp * self.pp)
        return Layout(self.tp, self.pp, dp, self.microbatch, recompute="full")


MEGATRON = (
    Trained(1.7, 24, 2304, 24, 1, 1, 32, 512, 137, microbatch=8),
    Trained(3.6, 32, 3072, 30, 2, 1, 64, 512, 138, microbatch=8),
    Trained(7.5, 32, 4096, 36, 4, 1, 128, 512, 142, microbatch=4),
    Trained(18.4, 48, 6144, 40, 8, 1, 256, 1024, 135, microbatch=4),
    Trained(39.1, 64, 8192, 48, 8, 2, 512, 1536, 138, microbatch=2),
    Trained(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140, microbatch=2),
    Trained(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148, microbatch=2),
    Trained(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155, microbatch=1),
    Trained(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163, microbatch=1),
    Trained(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163, microbatch=1),
)

GPT3 = Sizes(width=12288, depth=96, heads=96)  # arXiv 2005.14165, table 2.1; vocabulary padded
MODELS: dict[str, Sizes] = {  # as `labkit plan --model` takes them
    **{f"megatron-{one.billions:g}b": one.sizes for one in MEGATRON},
    "gpt3-175b": GPT3,
}


def model(name: str) -> Sizes:
    """Raises ValueError, listing the names, for an unknown one."""
    if name not in MODELS:
        raise ValueError(f"no model {name!r}; there are {', '.join(MODELS)}")
    return MODELS[name]
