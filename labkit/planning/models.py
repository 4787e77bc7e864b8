"""GPT models that were published, by name, as sizes to plan for.

Sources: Narayanan et al., arXiv 2104.04473, Table 1 (Megatron's family, with a vocabulary of 51,200
and 2,048 positions); Brown et al., arXiv 2005.14165, Table 2.1 (GPT-3, with a vocabulary of 50,257,
padded here as Megatron does).
"""

from labkit.planning.layout import Sizes

MODELS: dict[str, Sizes] = {
    "megatron-1.7b": Sizes(width=2304, depth=24, heads=24),
    "megatron-3.6b": Sizes(width=3072, depth=30, heads=32),
    "megatron-7.5b": Sizes(width=4096, depth=36, heads=32),
    "megatron-18b": Sizes(width=6144, depth=40, heads=48),
    "megatron-39b": Sizes(width=8192, depth=48, heads=64),
    "megatron-76b": Sizes(width=10240, depth=60, heads=80),
    "megatron-146b": Sizes(width=12288, depth=80, heads=96),
    "gpt3-175b": Sizes(width=12288, depth=96, heads=96),
    "megatron-310b": Sizes(width=16384, depth=96, heads=128),
    "megatron-530b": Sizes(width=20480, depth=105, heads=128),
    "megatron-1t": Sizes(width=25600, depth=128, heads=160),
}


def model(name: str) -> Sizes:
    """Raises ValueError, listing the names, for one that is not here."""
    if name not in MODELS:
        raise ValueError(f"no model {name!r}; there are {', '.join(MODELS)}")
    return MODELS[name]
