"""Which trial runs next: a fixed list, or one that Optuna proposes; those that share work wait until it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import mean
from typing import Any

from ray.tune.search import Searcher

from orchestrator.client import stream
from orchestrator.prefixes import Cache, Prefix
from orchestrator.space import Trial, fill, leaves
from orchestrator.sweep_file import Sweep
from orchestrator.yaml_file import Open


class Feeder(Searcher):  # type: ignore[misc]
    """Hands trials to Tune one by one, as Tune has room and as the work they share becomes available."""

    def __init__(
        self,
        waiting: Iterable[Trial],
        at_a_time: int,
        assign: Callable[[Trial, int], dict[str, Any]],
        cache: Cache | None,
        prefixes: Callable[[Trial], Sequence[Prefix]],
        ended: Callable[[Trial], bool],
    ) -> None:
        super().__init__()
        self.waiting, self.at_a_time, self.assign = list(waiting), at_a_time, assign
        self.cache, self.prefixes, self.ended = cache, prefixes, ended
        self.live: dict[str, Trial] = {}
        self.alike: dict[str, list[Trial]] = {}  # those that a live trial finishes too

    def suggest(self, trial_id: str) -> Any:
        """Return the next trial's configuration, None if it has to wait, FINISHED if there is none."""
        if len(self.live) >= self.at_a_time:
            return None
        ready = self._ready()
        if not ready:
            return None if self.live or self.waiting else Searcher.FINISHED
        # Whoever works while all others wait for it gets the whole cluster.
        alone = len(ready) == 1 and not self.live
        self.waiting.remove(ready[0])
        self.live[trial_id], self.alike[trial_id] = ready[0], self._take_alike(ready[0])
        config = self.assign(ready[0], 1 if alone else self.at_a_time)
        config["job"]["alike"] = [trial.id for trial in self.alike[trial_id]]
        return config

    def _take_alike(self, chosen: Trial) -> list[Trial]:
        """Take the waiting trials that train the same to the end and only predict otherwise."""
        if self.cache is None:
            return []
        key = self.prefixes(chosen)[-1].key
        alike = [trial for trial in self.waiting if self.prefixes(trial)[-1].key == key]
        self.waiting = [trial for trial in self.waiting if trial not in alike]
        return alike

    def _ready(self) -> list[Trial]:
        """Return the waiting trials that could start now, side by side, without doing the same work twice."""
        busy = {key for trial in self.live.values() for key in self._missing(trial)}
        ready = []
        for trial in self.waiting:
            missing = self._missing(trial)
            if not missing & busy:
                ready.append(trial)
                busy |= missing
        return ready

    def _missing(self, trial: Trial) -> set[str]:
        """Return the keys of what a trial has in common with others and nobody has computed yet."""
        if self.cache is None:
            return set()
        return {prefix.key for prefix in self.prefixes(trial) if not self.cache.holds(prefix)}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Note that a trial no longer runs, whatever became of it; what it should have finished too waits again."""
        self.live.pop(trial_id, None)
        self.waiting = [trial for trial in self.alike.pop(trial_id, []) if not self.ended(trial)] + self.waiting

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        """Accept that Tune names the metric; trials are chosen without it."""
        return True

    def save(self, checkpoint_path: str) -> None:
        """Tune saves its searchers; this one is made anew from the sweep's directory."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing was saved."""

    def __deepcopy__(self, memo: Any) -> Feeder:
        return self

    def __reduce__(self) -> Any:
        return Searcher, ()


class Proposer(Feeder):
    """Lets Optuna propose values for the open leaves; each proposal is run with every seed and judged by the mean."""

    def __init__(
        self,
        sweep: Sweep,
        known: Sequence[Trial],
        create: Callable[[Trial], None],
        score: Callable[[Trial], tuple[bool, float | None]],
        **feeding: Any,
    ) -> None:
        """Go on after the trials that are known; `create` makes a new one's directory, `score` says (ended, value)."""
        import optuna

        super().__init__([], **feeding)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.sweep, self.create, self.score = sweep, create, score
        self.seeds = seeds(sweep)
        self.distributions = {path: _distribution(leaf) for path, leaf in proposed(sweep).items()}
        self.study = optuna.create_study(direction="maximize" if sweep.search.mode == "max" else "minimize")
        self.proposals: list[tuple[Any, list[Trial]]] = []  # Optuna's trial and ours, one for each seed
        for i in range(0, len(known), len(self.seeds)):
            self._recall(list(known[i : i + len(self.seeds)]))

    def suggest(self, trial_id: str) -> Any:
        """Ask Optuna when nothing is waiting; otherwise as any list is fed."""
        if not self.waiting and len(self.live) < self.at_a_time and len(self.proposals) < self.sweep.search.samples:
            asked = self._ask()
            at = {path: self._decoded(path, value) for path, value in asked.params.items()}
            first = len(self.proposals) * len(self.seeds)
            trials = [fill(self.sweep, at | seed, f"{first + i:04d}") for i, seed in enumerate(self.seeds)]
            for trial in trials:
                self.create(trial)
            self.proposals.append((asked, trials))
            self.waiting += trials
        return super().suggest(trial_id)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Tell Optuna what a proposal was worth, once all its seeds have ended."""
        ended = [self.live[trial_id], *self.alike[trial_id]] if trial_id in self.live else []
        super().on_trial_complete(trial_id, result, error)
        for asked, trials in self.proposals:
            if any(trial in trials for trial in ended):
                self._judge(asked, trials)

    def _ask(self) -> Any:
        from optuna.samplers import TPESampler

        # A sampler for each proposal, so that a resumed search proposes what an uninterrupted one would have.
        seed = stream(0, len(self.proposals)) % 2**32
        self.study.sampler = TPESampler(seed=seed, constant_liar=True)
        return self.study.ask(self.distributions)

    def _recall(self, trials: list[Trial]) -> None:
        """Take up a proposal that an earlier process has made."""
        self.study.enqueue_trial({path: self._encoded(path, trials[0].params[path]) for path in self.distributions})
        asked = self._ask()
        # A process may have died before it had made all of a proposal's trials.
        for i, seed in enumerate(self.seeds[len(trials) :], len(self.proposals) * len(self.seeds) + len(trials)):
            values = {path: trials[0].params[path] for path in self.distributions}
            trials.append(fill(self.sweep, values | seed, f"{i:04d}"))
            self.create(trials[-1])
        self.proposals.append((asked, trials))
        self.waiting += [trial for trial in trials if not self.score(trial)[0]]
        self._judge(asked, trials)

    def _judge(self, asked: Any, trials: Sequence[Trial]) -> None:
        from optuna.trial import TrialState

        scores = [self.score(trial) for trial in trials]
        if all(ended for ended, _ in scores):
            values = [value for _, value in scores if value is not None]
            self.study.tell(asked, mean(values) if values else None, state=None if values else TrialState.FAIL)

    def _encoded(self, path: str, value: Any) -> Any:
        leaf = leaves(self.sweep)[path]
        return leaf.values.index(value) if leaf.kind == "choice" else value

    def _decoded(self, path: str, value: Any) -> Any:
        leaf = leaves(self.sweep)[path]
        if leaf.kind == "choice":
            return leaf.values[value]
        return float(f"{value:.12g}") if leaf.kind == "quniform" and isinstance(value, float) else value


def seeds(sweep: Sweep) -> list[dict[str, int]]:
    """Return what the leaf `seed` takes in turn, if it is open."""
    leaf = leaves(sweep).get("seed")
    return [{}] if leaf is None else [{"seed": value} for value in leaf.values]


def proposed(sweep: Sweep) -> dict[str, Open]:
    """Return the open leaves for which a searcher proposes values."""
    return {path: leaf for path, leaf in leaves(sweep).items() if path != "seed" and leaf.kind != "sample"}


def _distribution(leaf: Open) -> Any:
    """Return Optuna's form of an open leaf; of a choice, whose values may be anything, the number."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    low, high, step = (*leaf.values, None)[:3] if leaf.kind != "choice" else (0, 0, None)
    match leaf.kind:
        case "choice":
            return CategoricalDistribution(range(len(leaf.values)))
        case "randint":
            return IntDistribution(low, high - 1)
        case "quniform" if all(isinstance(value, int) for value in leaf.values):
            return IntDistribution(low, high, step=step)
        case "quniform":
            return FloatDistribution(low, high, step=step)
    return FloatDistribution(low, high, log=leaf.kind == "loguniform")
