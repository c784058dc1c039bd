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


def _stop(signum: int, frame: FrameType | None) -> None:
    _received.append(signum)
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    raise Interrupted(signum)


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside Ray's native calls an exception from a handler comes out as another one: make it `Interrupted` again."""
    try:
        yield
    except Interrupted:
        raise
    except BaseException:
        if _received:
            raise Interrupted(_received[0]) from None
        raise


def listen() -> None:
    """Turn the next SIGINT or SIGTERM into `Interrupted`; to be said again after Ray has put in handlers of its own."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, _stop)
