"""A directory for what Ray writes while it runs, gone when we are: a kill's leavings go when the next run starts."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

PREFIX, LOCK = "fedtail-", "owner.lock"
#: How long processes of ours may take to end by themselves once they were told to.
GRACE_S = 2.0


@contextmanager
def scratch() -> Iterator[Path]:
    """Make a directory that nobody else can enter, and remove it in the end."""
    _remove_abandoned()
    # Under another name until its lock is held: so whoever tidies up never finds it without an owner.
    making = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))
    lock = FileLock(making / LOCK)
    lock.acquire()
    folder = making.rename(making.with_name(making.name[1:]))
    outside = os.environ.get("TMPDIR", "")  # empty is as good as none
    os.environ["TMPDIR"] = str(folder)  # of the processes that are started now: killed ones tidy nothing up
    try:
        yield folder
    finally:
        os.environ["TMPDIR"] = outside
        _end_users(folder)
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _end_users(folder: Path, grace: float = GRACE_S) -> None:
    """End whoever still uses a directory: agents of a Ray that was stopped while it started stay a minute and more."""
    deadline = time.monotonic() + grace
    while (users := _users(folder)) and time.monotonic() < deadline + GRACE_S:
        for pid in users if time.monotonic() > deadline else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _users(folder: Path) -> list[int]:
    """Return the other processes that were started for a directory or have a file in it open; none without a /proc."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended, or is not ours
            started = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
            opened = [os.readlink(file) for file in (process / "fd").iterdir()]
            if os.fsencode(folder) in started or any(Path(file).is_relative_to(folder) for file in opened):
                found.append(int(process.name))
    return [pid for pid in found if pid != os.getpid()]


def _remove_abandoned() -> None:
    """Remove the directories of processes that were killed: the lock of a dead process is free."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError, Timeout):
            if folder.lstat().st_uid == os.getuid() and (folder / LOCK).is_file():
                with FileLock(folder / LOCK, timeout=0):
                    _end_users(folder, 0.0)  # they would write into it again
                    shutil.rmtree(folder, ignore_errors=True)
