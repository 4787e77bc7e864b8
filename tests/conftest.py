"""What the whole suite shares: how it behaves on a machine that lacks a plugin or a GPU."""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from worlds import world_fixture

if TYPE_CHECKING:
    from labkit import World


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    # `make test-here` installs nothing: without pytest-timeout, the `timeout` of pyproject.toml
    # and the mark of the same name mean nothing, but they must not be unknown either.
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds a test may take (needs pytest-timeout)")


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): needs pytest-timeout")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A suite that was started in the background (nohup, &) ignores Ctrl-C, and so would all
        # that it starts: then what is tested about interrupts would wait for ever.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if shutil.which("nvidia-smi"):  # all tests but those of the GPU compute on the CPU
        os.environ.setdefault("LABKIT_DEVICE", "cpu")


def pytest_collection_finish() -> None:
    """What runs here without ranks computes with one thread, as a rank does: the tests' tensors are
    so small that a second thread only waits, and takes the core that ranks would have."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch  # not before a test asks for it: most of tests/test_setup.py needs no torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def gpu_tests_may_use_the_gpu(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.node.get_closest_marker("gpu"):
        monkeypatch.delenv("LABKIT_DEVICE", raising=False)


@pytest.fixture(autouse=True)
def recorded_runs_keep_the_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test records in this process, whole, is held to the laws of a trace."""
    session = sys.modules.get("labkit.trace.recording.session")
    if session is None:
        return
    fill: Callable[..., None] = session._fill

    def held_to_the_laws(trace: Any, found: Any) -> None:
        from laws import broken_laws

        fill(trace, found)
        if trace.complete:
            assert broken_laws(trace) == []

    monkeypatch.setattr(session, "_fill", held_to_the_laws)


@pytest.fixture(scope="module", autouse=True)
def no_ranks_wait_for_the_next_check() -> Iterator[None]:
    """The worlds of `labkit.course.ranks` wait for the next check; between files they only cost."""
    yield
    ranks = sys.modules.get("labkit.course.ranks")
    if ranks is not None:
        ranks.close_worlds()


@pytest.fixture(scope="module")
def worlds() -> Iterator[Callable[..., "World"]]:
    """`worlds(size, **options)` is the same world for the tests of one file that ask alike; one
    that fails them gets new ranks after it."""
    from labkit import World

    with ExitStack() as stack:
        made: dict[Any, World] = {}

        def world(size: int, **options: Any) -> World:
            key = (size, *sorted(options.items()))
            if key not in made:
                made[key] = stack.enter_context(World(size, **options))
            return made[key]

        yield world


world2, world3, world4 = world_fixture(2), world_fixture(3), world_fixture(4)


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """What this process has printed since the last time."""
    return lambda: capsys.readouterr().out


@pytest.fixture(autouse=True)
def this_process_is_no_rank_afterwards() -> Iterator[None]:
    """What trains or saves without ranks makes its process a world of one, where nothing more can
    be recorded on paper."""
    yield
    attach = sys.modules.get("labkit.runtime.attach")
    if attach is not None and attach.current() is not None:
        attach.leave()
        attach.become(None)
