"""Public names, imported on first use, so that `import labkit` is fast.

__all__, __getattr__, __dir__ = lazy(__name__, {"World": "labkit.runtime.world", ...})
"""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy(
    package: str, home: dict[str, str]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of `package`; `home` maps names to modules."""
    names = sorted(home, key=str.lower)

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"{package} has no {name!r}; it has {', '.join(names)}")
        value = getattr(import_module(home[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return names, get, lambda: sorted({*vars(sys.modules[package]), *names})
