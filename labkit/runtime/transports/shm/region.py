"""Memory shared by several processes: words that announce progress, followed by data.

Each process opens or creates the file, sets its size (new bytes are zero) and announces HERE.
The first process to see that all have mapped the file deletes its name; the memory lives while any
process maps it, so that nothing remains, however the ranks end.

Each word has one writer, which uses a single aligned store, so no lock is needed. A reader polls
for a while (the word often changes within microseconds), then sleeps until the writer wakes it: on
Linux by futex ("sleep while this word is 7", "wake the sleepers on this word"), elsewhere in naps
of growing length. A waiting rank thus leaves its core, and the GIL, to other threads.

    writer                                    reader
    copies the data                           word < expected: add 1 to its sleeper count
    fence                                     fence
    word = 7                                  sleep while the word is unchanged
    fence                                     awake: subtract 1 from that count; look again
    any sleepers? wake those on this word     fence; read the data

Without the fences, the processor may reorder loads and stores: a reader could see the word before
the data, or the writer could miss the sleeper while the sleeper misses the word.
"""

import ctypes
import mmap
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

WORD_BYTES = 8
ALIGNED = 64  # bytes of a cache line, to which each rank's data is aligned
HERE, GONE = 1, 2  # state of a process: it has mapped the file; it has given up, for good
LOOKS, TURNS = 40, 12  # polls before yielding the core, and number of yields
X86 = platform.machine() in ("x86_64", "AMD64")
SLEEP_S = 0.1  # time after which a sleeper polls again
NAPS_S = 20e-6, 1e-3  # first and longest nap, without futex


class Region:
    """`words` integers and, from `data` on, `data_bytes` bytes, shared by `parties` processes, of
    which this process is number `me`. Raises RuntimeError if too little memory is free."""

    def __init__(self, path: Path, me: int, parties: int, words: int, data_bytes: int):
        self._here = range(words, words + parties)  # a word per process: HERE or GONE
        notes = [self._here.stop + process for process in range(parties)]  # counts of sleepers
        self.data = -(-(notes[-1] + 1) * WORD_BYTES // ALIGNED) * ALIGNED
        self.memory = _map(path, self.data + data_bytes)
        self._words = memoryview(self.memory).cast("Q")
        self._address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        self._note, self._own = notes.pop(me), self._here[me]
        self._notes_of_others = notes
        self._sleepers = threading.Lock()  # threads of this process share its note
        self.announce(self._own, HERE)
        if all(self[word] for word in self._here):
            with suppress(OSError):  # two processes may see this at once
                path.unlink()

    def address(self, begin: int) -> int:
        """Address of the data's byte `begin`."""
        return self._address + self.data + begin

    def tensor(self, begin: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`numel` elements from the data's byte `begin` on."""
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        with torch.inference_mode(False):  # may be written later, outside inference mode
            return torch.frombuffer(self.memory, dtype=dtype, count=numel, offset=self.data + begin)

    def __getitem__(self, word: int) -> int:
        return self._words[word]

    def write(self, word: int, value: int) -> None:
        """Write a word that others read after this process's next announcement."""
        self._words[word] = value

    def announce(self, word: int, value: int) -> None:
        """Write a word after all earlier writes of this process, and wake the waiting readers."""
        words = self._words
        in_order()
        words[word] = value
        fence()
        for note in self._notes_of_others:
            if words[note]:
                wake(self._address + WORD_BYTES * word)
                return

    def give_up(self) -> None:
        """Make the other processes stop waiting for this process."""
        self.announce(self._own, GONE)

    def gave_up(self, process: int) -> bool:
        return self._words[self._here[process]] == GONE

    def wait(self, word: int, value: int, deadline_s: float, on: Sequence[int]) -> bool:
        """Wait until a word is at least `value`. Return False after `deadline_s`, or once a process
        in `on` gives up (sleepers are not woken then, but poll again within SLEEP_S)."""
        words = self._words
        for _ in range(TURNS):
            for _ in range(LOOKS):
                if words[word] >= value:
                    in_order()
                    return True
            yield_core()
        nap_s = NAPS_S[0]
        while words[word] < value:
            if time.monotonic() > deadline_s or any(map(self.gave_up, on)):
                return False
            self._count_sleepers(1)
            if (seen := words[word]) < value:
                sleep(self._address + WORD_BYTES * word, seen, nap_s)
            self._count_sleepers(-1)
            nap_s = min(2 * nap_s, NAPS_S[1])
        in_order()
        return True

    def _count_sleepers(self, more: int) -> None:
        with self._sleepers:
            self._words[self._note] += more
        fence()


def _map(path: Path, nbytes: int) -> mmap.mmap:
    file = None
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        if hasattr(os, "posix_fallocate"):  # otherwise a full disk causes a crash later
            os.posix_fallocate(file, 0, nbytes)
        else:
            os.ftruncate(file, nbytes)
        return mmap.mmap(file, nbytes)
    except OSError as error:
        raise RuntimeError(
            f"{path.parent} has no room for {nbytes / 1e6:.0f} MB of shared memory "
            f'({error.strerror}); free some memory, or use World(..., transport="gloo")'
        ) from error
    finally:
        if file is not None:
            os.close(file)


_hinge = threading.Lock()


def fence() -> None:
    """A full memory fence: no load or store moves across a lock's release and next acquire."""
    with _hinge:
        pass
    with _hinge:
        pass


def in_order() -> None:
    """A fence between two stores or two loads, which x86 processors never reorder."""
    if not X86:
        fence()


# --- system calls -------------------------------------------------------------------------------


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


FUTEX_WAIT, FUTEX_WAKE, ALL_SLEEPERS = 0, 1, 2**31 - 1
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}  # the system call's number
_system_call: Callable[..., int] | None = None
if sys.platform == "linux" and sys.byteorder == "little" and platform.machine() in _FUTEX:
    _system_call = ctypes.CDLL(None).syscall
    _system_call.argtypes = [
        ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32,
        ctypes.POINTER(_Timespec), ctypes.c_void_p, ctypes.c_uint32,
    ]  # fmt: skip
_number = _FUTEX.get(platform.machine(), 0)
_patience = _Timespec(0, int(SLEEP_S * 1e9))


def wake(address: int) -> None:
    """Wake all threads that sleep on the word at `address`."""
    if _system_call is not None:
        _system_call(_number, address, FUTEX_WAKE, ALL_SLEEPERS, None, None, 0)


def sleep(address: int, seen: int, nap_s: float) -> None:
    """Sleep while the word at `address` is `seen`, at most SLEEP_S, or `nap_s` without futex."""
    if _system_call is not None:
        low = seen & 0xFFFFFFFF  # the kernel compares four bytes
        _system_call(_number, address, FUTEX_WAIT, low, _patience, None, 0)
    else:
        time.sleep(nap_s)


# Yields the core, and the GIL, to other threads.
yield_core = ctypes.CDLL(None).sched_yield if os.name == "posix" else partial(time.sleep, 0)
