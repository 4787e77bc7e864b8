"""One harness for all deliberate faults: a test that cannot fail proves nothing. A file of
mutations is a table of `Mutation(fault, check, *args)` and one line that makes it a test, such as
`test_faulty_rings = noticed(FAULTS, on_ranks, size=3)`. A fault is a change to the library: other
text in its source (`Edit`; `edits` makes mutations of a table of them), another function in place
of one of its own (`Replacement`), any function that returns a context manager; or a faulty class or
function that the check takes (`given`). The check runs under a change on each rank (`on_ranks`), in
this process while it is in force on the ranks (`around`), or without ranks (`here`)."""

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import CodeType, ModuleType
from typing import Any
from unittest.mock import patch

import pytest

from labkit import RankError, World

Change = Callable[[], AbstractContextManager[Any]]


# ---- faults


@dataclass(frozen=True)
class Replacement:
    """`owner.name` is `make(real)` while this is in force."""

    owner: Any
    name: str
    make: Callable[[Any], Any]
    label: str

    def __str__(self) -> str:
        return self.label

    def __call__(self) -> AbstractContextManager[Any]:
        new = self.make(getattr(self.owner, self.name))
        if isinstance(inspect.getattr_static(self.owner, self.name), staticmethod):
            new = staticmethod(new)
        return patch.object(self.owner, self.name, new)


def replaces(owner: Any, name: str) -> Callable[[Callable[..., Any]], Replacement]:
    """Decorates the fault that stands in for `owner.name`; its first argument is the real one."""

    def decorate(fault: Callable[..., Any]) -> Replacement:
        def make(real: Any) -> Any:
            return lambda *args, **kwargs: fault(real, *args, **kwargs)

        return Replacement(owner, name, make, fault.__name__)

    return decorate


def instead(label: str, owner: Any, name: str, new: Any) -> Replacement:
    """`owner.name` is `new`, which needs nothing of the real one."""
    return Replacement(owner, name, lambda real: new, label)


@dataclass(frozen=True)
class Edit:
    """The functions of a module run as if its source had `new` in place of `old`: each gets other
    code, so it does not matter who imported it, or which objects use it already."""

    label: str
    module: str
    old: str
    new: str

    def __str__(self) -> str:
        return self.label

    @contextmanager
    def __call__(self) -> Iterator[None]:
        module = importlib.import_module(self.module)
        source, file = inspect.getsource(module), module.__file__ or ""
        if (count := source.count(self.old)) != 1:
            raise LookupError(f"{self.old!r} is {count} times in {self.module}")
        try:
            edited = compile(source.replace(self.old, self.new), file, "exec")
        except SyntaxError as error:
            raise LookupError(f"{self.label}: {error}") from error
        codes = dict(_pairs(compile(source, file, "exec"), edited))
        functions = [x for x in _functions_in(module, self.module) if x.__code__ in codes]
        if any(
            len(x.__code__.co_freevars) != len(codes[x.__code__].co_freevars) for x in functions
        ):
            raise LookupError(f"{self.label}: the edit changes the free variables of a function")
        before = [function.__code__ for function in functions]
        try:
            for function in functions:
                function.__code__ = codes[function.__code__]
            yield
        finally:
            for function, code in zip(functions, before):
                function.__code__ = code


def _pairs(before: CodeType, after: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """The codes inside of `before`, at any depth, each with what it is in `after`."""
    inside = ([x for x in code.co_consts if inspect.iscode(x)] for code in (before, after))
    for old, new in zip(*inside):
        yield old, new
        yield from _pairs(old, new)


def _functions_in(scope: Any, module: str) -> Iterator[Any]:
    """Of a module, or of a class in it; also those behind properties and decorators."""
    for x in list(vars(scope).values()):
        if inspect.isclass(x) and x.__module__ == module:
            yield from _functions_in(x, module)
        elif inspect.isfunction(function := inspect.unwrap(getattr(x, "fget", x))):
            yield function


# ---- how a check meets a fault


def given(world: World, fault: Any, check: Callable[..., Any], *args: Any) -> None:
    check(world, fault, *args)


def on_ranks(world: World, change: Change, check: Callable[..., Any], *args: Any) -> list[Any]:
    """`check(...)` on each rank, under the change."""

    def run() -> Any:
        with change():
            return check(*args)

    return world.run(run)


def around(world: World, change: Change, check: Callable[..., Any], *args: Any) -> None:
    """`check(world, ...)` in this process, with the change in force on the ranks."""
    world.run(_enter, change)
    try:
        check(world, *args)
    finally:
        world.run(_leave)


def here(world: None, change: Change, check: Callable[..., Any], *args: Any) -> None:
    """`check(...)` in this process, under the change."""
    with change():
        check(*args)


_in_force = ExitStack()  # on a rank


def _enter(change: Change) -> None:
    _in_force.enter_context(change())


def _leave() -> None:
    _in_force.close()  # nothing to do on ranks that were started anew


# ---- the tests


class Mutation:
    """`check(..., *args, **kwargs)` fails under `fault`, with a message that matches `match`."""

    def __init__(
        self, fault: Any, check: Callable[..., Any], *args: Any, match: str = "", **kwargs: Any
    ):
        self.fault, self.args, self.match = fault, args, match
        self.check = partial(check, **kwargs) if kwargs else check
        self.label = "-".join(map(_name, (fault, check, *args)))

    def __str__(self) -> str:
        return self.label


def edits(module: ModuleType, *rows: tuple[Any, ...]) -> list[Mutation]:
    """Of each row: label of the fault, what stands in the module, what the fault has there, check,
    its arguments."""
    return [
        Mutation(Edit(label, module.__name__, old, new), *check) for label, old, new, *check in rows
    ]


def _name(x: Any) -> str:
    """As it stands in a test's id, which must be the same in every process: without an address."""
    text = str(getattr(x, "__name__", x))
    return type(x).__name__ if " at 0x" in text else text


Meets = Callable[..., Any]
NOTICED = (AssertionError, RankError)  # a RankError also where ranks wait for each other
# Of a fault that no longer fits the library: no check was asked. Where it is meant, give `match`.
STALE = re.compile(r"raised (TypeError|AttributeError|NameError|ImportError|LookupError)\b")


def noticed(
    mutations: Iterable[Mutation],
    meets: Meets,
    errors: type[BaseException] | tuple[type[BaseException], ...] = NOTICED,
    match: str = "",
    size: int = 0,
    **world: Any,
) -> Callable[..., None]:
    """A test of each mutation, on a world of `size` ranks (none: 0) that they share."""

    @pytest.mark.parametrize("mutation", mutations, ids=str)
    def test(worlds: Callable[..., Any], mutation: Mutation) -> None:
        ranks = worlds(size, **world) if size else None
        message = mutation.match or match
        try:
            with pytest.raises(errors, match=message or None) as info:
                meets(ranks, mutation.fault, mutation.check, *mutation.args)
        except pytest.fail.Exception as error:
            raise AssertionError(f"{mutation}: no check noticed the fault") from error
        assert message or not STALE.search(str(info.value)), f"{mutation}: {info.value}"

    return test
