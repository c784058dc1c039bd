"""A contender: a plain loop. `python benchmarks/run_plain.py TASK.npz plain|one|tuned`."""

import sys

import numpy as np
from gate import Gate
from plain import ONE_PROCESS, PLAIN, TUNED, Loop


def main() -> None:
    """Run rounds as the harness wants them."""
    gate = Gate()
    path, kind = sys.argv[1:]
    settings = {"plain": PLAIN, "one": ONE_PROCESS, "tuned": TUNED[str(np.load(path)["network"])]}
    loop = Loop(path, settings[kind])
    while gate.opens(lambda: loop.weights):
        did = loop.advance()
        gate.answer(steps=did.steps, samples=did.trained, training_s=did.training_s)
    loop.close()


if __name__ == "__main__":
    main()
