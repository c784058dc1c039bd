"""How the harness leads a contender: a line in is a wish, a line out its fulfilment; so rounds are taken in turns."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


class Gate:
    """The contender's end. What libraries print goes to stderr: stdout belongs to the answers."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def opens(self, weights: Callable[[], torch.Tensor]) -> bool:
        """Return when the next round is wanted, or false when none is; save the weights whenever asked for them."""
        while path := sys.stdin.readline():
            if not path.strip():
                return True
            np.save(path.strip(), weights().detach().numpy())
            self.answer()
        return False

    def answer(self, **facts: Any) -> None:
        """Tell that a round is over, or the weights are saved."""
        self._out.write(json.dumps(facts) + "\n")
        self._out.flush()
