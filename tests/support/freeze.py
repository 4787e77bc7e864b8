"""What a user can do with labkit: its public names and its commands (tests/test_frozen.py)."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

TEMPORARY = re.compile(r"0x[0-9a-f]+")
MODULE = re.compile(r"\blabkit\.(?:\w+\.)*(?=\w)")  # a module path before a name


def names() -> Iterator[str]:
    """Public names, and the public methods and properties of the classes among them."""
    import labkit

    for name in sorted(labkit.__all__):
        thing = getattr(labkit, name)
        if not inspect.isclass(thing):
            yield f"{name}{_signature(thing)}" if callable(thing) else f"{name}: {type(thing)}"
            continue
        yield f"class {name}{_signature(thing)}"
        for method in sorted(dir(thing)):
            owner = next(c for c in thing.__mro__ if method in vars(c) or c is object)
            if method.startswith("_") or not owner.__module__.startswith("labkit"):
                continue
            found = inspect.getattr_static(thing, method)
            kind = type(found).__name__
            found = getattr(found, "__func__", found)
            yield f"  {name}.{method}{_signature(found) if callable(found) else ': ' + kind}"


def _signature(thing: Any) -> str:
    try:
        return MODULE.sub("", TEMPORARY.sub("...", str(inspect.signature(thing))))
    except (TypeError, ValueError):
        return "(...)"


def commands() -> Iterator[str]:
    """Every command with its arguments and options, defaults and limits."""
    import typer

    from labkit.cli import app

    def walk(command: Any, path: str) -> Iterator[str]:
        for param in sorted(command.params, key=lambda x: x.name):
            spelled = " ".join(sorted([*param.opts, *param.secondary_opts]))
            limits = [getattr(param, name, None) for name in ("min", "max", "required")]
            yield f"{path} {spelled} default={param.default!r} limits={limits}"
        for name in sorted(getattr(command, "commands", {})):
            yield f"{path} {name}"
            yield from walk(command.commands[name], f"{path} {name}")

    yield from walk(typer.main.get_command(app), "labkit")
