"""Child processes that end with the tool that started them, and the memory they take."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_TERM_SECONDS = 20


def _die_with_parent() -> None:
    """Runs in the child: a tool that is killed outright must not leave it behind."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def start(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen:
    """Start a command in a process group of its own, for `stop`.

    It also gets SIGTERM when the thread that called this ends, whatever ended it.

    Args:
        command: program and arguments.
        log: file for its output, overwritten.
        environment: all of its variables.
    """
    with open(log, "wb") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=dict(environment),
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )


def stop(process: subprocess.Popen) -> None:
    """End a process of `start` and all that it has started (its process group)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_TERM_SECONDS)
    deadline = time.monotonic() + _TERM_SECONDS
    while _group_alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    kill(process.pid)
    process.wait()


def kill(pid: int) -> None:
    """End, at once, what is left of a process of `start` and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def tail(log: Path, num_lines: int = 30) -> str:
    """Last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])


def descendants(pid: int) -> set[int]:
    """Process ids of all that a process has started, and what that has started."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            parents[int(folder.name)] = int(fields[1])
    family, grown = {pid}, True
    while grown:
        more = {child for child, parent in parents.items() if parent in family} - family
        grown = bool(more)
        family |= more
    return family - {pid}


def resident_mib(pid: int) -> float:
    """Memory that is the processes' own (resident less shared), of a process and its children."""
    pages = 0
    for member in {pid, *descendants(pid)}:
        with contextlib.suppress(OSError):
            _, resident, shared = (Path(f"/proc/{member}/statm").read_text().split())[:3]
            pages += int(resident) - int(shared)
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt, so that what is started is stopped in both cases."""

    def interrupt(_signum: int, _frame: object) -> None:
        raise KeyboardInterrupt

    earlier = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)
