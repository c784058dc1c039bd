"""What clients share while they are scored, within bounds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor

MOST = 256 * 2**20  #: bytes of features and logits


class Memo:
    """What was made lately, under what it was made from; what was not asked for longest goes where it becomes much."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._kept: OrderedDict[Any, tuple[Any, Tensor]] = OrderedDict()
        self._bytes = 0

    def get(self, key: Any, held: Any, make: Callable[[], Tensor]) -> Tensor:
        """Return what is kept, or make it and keep it, with what must not go before it."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key][1]
        made = make()
        self._kept[key], self._bytes = (held, made), self._bytes + made.nbytes
        while self._bytes > MOST and len(self._kept) > 1:
            _, (_, oldest) = self._kept.popitem(last=False)
            self._bytes -= oldest.nbytes
        return made
