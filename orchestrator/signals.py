"""An orderly end on the first SIGINT or SIGTERM, and an immediate one on the second."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(BaseException):
    """A signal asked us to stop; the exit code follows the shell's convention."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.code = 128 + signum


_received: list[int] = []
_postponed: list[bool] = []


def _stop(signum: int, frame: FrameType | None) -> None:
    _received.append(signum)
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    if not _postponed:
        heed()


def heed() -> None:
    """Stop if a signal has come."""
    if _received:
        raise Interrupted(_received[0])


@contextmanager
def postponed() -> Iterator[None]:
    """Let a signal wait until `heed` or the end: half of Ray is hard to end, and its calls change our exception."""
    _postponed.append(True)
    try:
        yield
    except SystemExit as error:  # Ray's own answer to a SIGTERM
        _received.append(error.code if isinstance(error.code, int) else signal.SIGTERM)
    finally:
        _postponed.pop()
    heed()


def listen() -> None:
    """Turn the next SIGINT or SIGTERM into `Interrupted`; to be said again after Ray has put in handlers of its own."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, _stop)
