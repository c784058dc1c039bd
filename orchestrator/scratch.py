"""A directory for what Ray writes while it runs, gone when we are: a kill's leavings go when the next run starts."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

PREFIX, LOCK = "fedtail-", "owner.lock"


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
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _remove_abandoned() -> None:
    """Remove the directories of processes that were killed: the lock of a dead process is free."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError, Timeout):
            if folder.lstat().st_uid == os.getuid() and (folder / LOCK).is_file():
                with FileLock(folder / LOCK, timeout=0):
                    shutil.rmtree(folder, ignore_errors=True)
