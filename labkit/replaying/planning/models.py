"""GPTs of papers by name, as `labkit plan --model` takes them."""

from labkit.replaying.planning.layout import Sizes
from labkit.replaying.planning.published import GPT3, MEGATRON

MODELS: dict[str, Sizes] = {
    **{f"megatron-{one.billions:g}b": one.sizes for one in MEGATRON},
    "gpt3-175b": GPT3,
}


def model(name: str) -> Sizes:
    """Raises ValueError, listing the names, for one that is not here."""
    if name not in MODELS:
        raise ValueError(f"no model {name!r}; there are {', '.join(MODELS)}")
    return MODELS[name]
