"""`python -m orchestrator.tune [FILE]`: run a sweep, or an experiment, which is a sweep with nothing left open."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console

import search_spaces
from orchestrator import summary as results
from orchestrator import tracking
from orchestrator.checkpoint import set_status, status_of, write, write_json
from orchestrator.client import network
from orchestrator.data import DataError, Dataset, load
from orchestrator.driver import data_key, split_for
from orchestrator.experiment import InputError, Search, Sweep, dump, dump_sweep, filled_in, read
from orchestrator.resources import Share, concurrency, share
from orchestrator.signals import Interrupted, listen
from orchestrator.space import Trial as Point
from orchestrator.space import trials as expand

#: Nothing phones home, Tune neither moves us to another directory nor writes what we write ourselves, and it leaves
#: the signals to us; whoever wants otherwise sets these before.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a method without a shared model reports none
}
NAME = re.compile(r"[\w][\w.+-]{0,99}")


def arguments() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m orchestrator.tune",
        description="Run a sweep or an experiment of personalized federated learning on Ray, tracked in MLflow.",
    )
    parser.add_argument(
        "file", nargs="?", type=_path, help="sweep or experiment (YAML); default: a small demonstration"
    )
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="override a leaf; repeatable")
    parser.add_argument("--name", help="name of the run's directory (default: the file's name)")
    parser.add_argument("--out", type=_path, default=Path("runs"), help="where directories are made (default: runs)")
    parser.add_argument("--resume", action="store_true", help="continue what was interrupted")
    address = os.environ.get("RAY_ADDRESS")
    parser.add_argument("--address", default=address, help="a running Ray cluster (default: start one here)")
    parser.add_argument("--num-cpus", type=_amount, help="CPUs to use on this machine")
    parser.add_argument("--num-gpus", type=_amount, help="GPUs to use on this machine")
    parser.add_argument("--tracking-uri", help="an MLflow server (default: sqlite inside --out)")
    parser.add_argument("--dry-run", action="store_true", help="check everything, show what would run, start nothing")
    parser.add_argument("--quiet", action="store_true", help="print the result only")
    return parser


def _path(text: str) -> Path:
    """Read a path; a job's command line has been through no shell, so `~` is still in it."""
    return Path(text).expanduser()


def _amount(text: str) -> float:
    """Read a number of CPUs or GPUs."""
    value = float(text)
    if not 0 <= value < 1e6:
        raise ValueError
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    options = arguments().parse_args(argv)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if options.address and (Path.home() / ".ray" / "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # a cluster asks for it, but Ray offers it only when told to
    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        return run(options, console)
    except (InputError, DataError) as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", markup=False, highlight=False)
        return 2
    except Interrupted as stop:
        return stop.code


def run(options: argparse.Namespace, console: Console) -> int:
    """Check everything, then run what is left to run, then tell what came out."""
    listen()
    folder, sweep, points = _prepare(options)
    _check_metric(sweep.search.metric, points)
    datasets, partitions = _check(points)
    if options.address:
        _knock(options.address)
    # What a cluster has is known only once it is joined.
    at_a_time, shares = (0, {}) if options.address else _shares(points, sweep.search, options)
    if options.dry_run:
        _show(points, shares, at_a_time, console)
        return 0
    out = options.out.resolve()
    _write(folder, sweep, points, datasets, partitions)
    uri = options.tracking_uri or tracking.default_uri(out)
    stem = _stem(options)
    mirror = tracking.Mirror(uri, folder, experiment=stem, tags=_environment())
    mirror.start()
    status = "FAILED"
    try:
        from orchestrator.sweep import run_sweep  # Ray is imported only once all is known to be good

        run_sweep(folder, points, sweep.search, datasets, mirror, options, console)
        status = "FINISHED"
    except Interrupted:
        status = "KILLED"
        raise
    finally:
        # The second signal ends us at once; the first still leaves everything in order.
        _settle(folder, status, mirror)
        found = results.write_summary(folder, sweep.search, {p.id: mirror.run_id(p.id) for p in points})
        best = results.best(found)
        owed = mirror.close(
            status if status != "FINISHED" or _all_well(found) else "FAILED",
            summary=folder / "summary.json",
            note=_note(found, options),
            metrics={}
            if best is None
            else {f"best/{m}": mean(best.values(m)) for m in results.HEADLINE if best.values(m)},
            timeout=30.0 if status == "FINISHED" else 8.0,
        )
        _tell(found, best, folder, uri, owed, mirror, console)
        if status != "FINISHED":
            words = [sys.executable, "-m", "orchestrator.tune", "--resume", "--name", folder.name, "--out", str(out)]
            console.print(f"to continue, type:\n  {shlex.join(words)}", markup=False, highlight=False, soft_wrap=True)
    return 0 if _all_well(found) else 1


# Before anything starts ---------------------------------------------------------------------------------------------


def _prepare(options: argparse.Namespace) -> tuple[Path, Sweep, list[Point]]:
    """Read what to run, and find or choose its directory."""
    out = options.out.resolve()
    stem = _stem(options)
    if options.name is not None and not NAME.fullmatch(options.name):
        raise InputError([f"--name {options.name!r}: use letters, digits, '.', '_', '+' and '-', at most 100 of them"])
    if options.resume:
        folder = out / (options.name or _newest(out, stem))
        if not (folder / "sweep.yaml").is_file():
            raise InputError([f"--resume: there is no sweep in {folder}; give the right --name and --out"])
        sweep = read(folder / "sweep.yaml", None, options.set)
        points = expand(sweep)
        if options.set or dump_sweep(sweep) != (folder / "sweep.yaml").read_text(encoding="utf-8"):
            raise InputError(["--resume: a sweep is continued as it was; drop --set, or start a new one"])
        return folder, sweep, points
    if options.file is None:
        sweep = read(Path(search_spaces.__file__).with_name("quickstart.yaml"), None, options.set)
    else:
        sweep = read(options.file, None, options.set)
    points = expand(sweep)
    folder = out / (options.name or _free(out, stem))
    if folder.exists():
        raise InputError([f"{folder} exists; choose another --name, or continue it with --resume"])
    return folder, sweep, points


def _stem(options: argparse.Namespace) -> str:
    """Return the file's name as the beginning of a directory's."""
    return re.sub(r"[^\w.+-]", "_", options.file.stem).lstrip(".+-")[:90] or "sweep" if options.file else "quickstart"


def _taken(out: Path, stem: str) -> list[int]:
    """Return the numbers of the directories stem, stem-2, stem-3 and so on that exist."""
    found = (re.fullmatch(rf"{re.escape(stem)}(?:-(\d+))?", p.name) for p in out.iterdir()) if out.is_dir() else ()
    return sorted(int(m[1] or 1) for m in found if m)


def _free(out: Path, stem: str) -> str:
    taken = _taken(out, stem)
    return f"{stem}-{taken[-1] + 1}" if taken else stem


def _newest(out: Path, stem: str) -> str:
    taken = _taken(out, stem)
    return f"{stem}-{taken[-1]}" if taken and taken[-1] > 1 else stem


def _check_metric(metric: str, points: Sequence[Point]) -> None:
    """Refuse to rank by a metric that some trial will not report."""
    kind = metric.split("/")[0]
    for point in points:
        e = point.experiment
        if kind in ("generic", "personal") and kind not in e.evaluate.what:
            raise InputError([f"search.metric: {metric} is not reported: evaluate.what lacks '{kind}'"])
        if kind == "validation" and not (e.data.validation and "personal" in e.evaluate.what):
            raise InputError([f"search.metric: {metric} needs data.validation > 0 and evaluate.what with 'personal'"])


def _check(points: Sequence[Point]) -> tuple[dict[str, Dataset], dict[str, str]]:
    """Load all data, cut all partitions and build all networks once, so that mistakes show before Ray starts.

    Return the data sets, and the digest of each trial's partition.
    """
    datasets: dict[str, Dataset] = {}
    digests: dict[Any, str] = {}
    built = set()
    for point in points:
        experiment = point.experiment
        key = data_key(experiment)
        if key not in datasets:
            datasets[key] = load(experiment.data.name, experiment.data.root)
        cut = experiment.data, experiment.seed
        if cut not in digests:
            try:
                digests[cut] = split_for(experiment, datasets[key]).digest
            except DataError as error:
                raise InputError([f"data (trial {point.id}): {error}"]) from None
        form = key, experiment.model, tuple(part.experts for part in experiment.chain().parts)
        if form not in built:
            try:
                network(experiment, datasets[key])
            except ValueError as error:
                raise InputError([f"model: {error}"]) from None
            built.add(form)
    return datasets, {p.id: digests[p.experiment.data, p.experiment.seed] for p in points}


def _knock(address: str) -> None:
    """Refuse the address of a cluster where nobody answers, for which Ray would wait minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError as error:
            raise InputError(
                [f"--address {address}: nobody answers there ({error}); start the cluster first"]
            ) from None


def _shares(points: Sequence[Point], search: Search, options: argparse.Namespace) -> tuple[int, dict[str, Share]]:
    """Return how many trials would run at a time on this machine, and what each would get; refuse what cannot fit."""
    cpus = options.num_cpus if options.num_cpus is not None else float(os.cpu_count() or 1)
    gpus = options.num_gpus if options.num_gpus is not None else float(torch.cuda.device_count())
    here = [{"CPU": cpus, "GPU": gpus, "node:here": 1.0}]
    at_a_time = concurrency([p.experiment for p in points], search.concurrent, here)
    return at_a_time, {p.id: share(p.experiment, here, at_a_time, "here") for p in points}


def _show(points: Sequence[Point], shares: Mapping[str, Share], at_a_time: int, console: Console) -> None:
    """Print what would run."""
    for point in points:
        console.print(f"# trial {point.id}: {point.name}", markup=False, highlight=False)
        if point.id in shares:
            got = shares[point.id]
            console.print(f"# asks for {got.actors} client actor(s) with {got.cpu:g} CPU and {got.gpu:g} GPU each")
        console.print(dump(point.experiment), markup=False, highlight=False)
    where = f", {at_a_time} at a time on this machine" if shares else ""
    console.print(f"{len(points)} trial(s){where}; nothing was started.")


def _write(
    folder: Path,
    sweep: Sweep,
    points: Sequence[Point],
    datasets: Mapping[str, Dataset],
    partitions: Mapping[str, str],
) -> None:
    """Lay out the sweep's directory, unless it is there already."""
    (folder / "trials").mkdir(parents=True, exist_ok=True)
    for point in points:
        path, e = folder / "trials" / point.id, point.experiment
        path.mkdir(exist_ok=True)
        dataset = datasets[data_key(e)]
        tags = {
            "algorithm": "+".join(part.name for part in e.chain().parts),
            "data": e.data.name,
            "data.digest": dataset.digest,
            "data.partition": partitions[point.id],
            "imbalance": f"{e.data.imbalance:g}",
            "alpha": f"{e.data.alpha:g}",
            "clients": str(e.data.clients),
            "model": str(e.model.name),
            "seed": str(e.seed),
        }
        data = {"name": dataset.name, "digest": dataset.digest, "source": e.data.root or e.data.name}
        trial = {"id": point.id, "name": point.name, "params": point.params, "tags": tags, "data": data}
        if not (path / "trial.json").exists():
            write(path / "experiment.yaml", dump(e).encode())
            write_json(path / "trial.json", trial)
    # Written last: a directory with it is complete and may be resumed.
    if not (folder / "sweep.yaml").exists():
        write(folder / "sweep.yaml", dump_sweep(filled_in(sweep)).encode())


# The end ------------------------------------------------------------------------------------------------


def _settle(folder: Path, status: str, mirror: tracking.Mirror) -> None:
    """Give every trial that was running when we stopped its final status."""
    for path in sorted((folder / "trials").iterdir()):
        if status_of(path)["status"] == "RUNNING":
            set_status(path, "KILLED" if status == "KILLED" else "FAILED", error="the sweep ended before the trial did")
            mirror.finish(path.name)


def _all_well(found: Mapping[str, Any]) -> bool:
    return all(t["status"] in ("FINISHED", "STOPPED") for t in found["trials"])


def _environment() -> dict[str, str]:
    """Return what a result depends on besides the experiment."""
    tags = {f"version.{name}": version(name) for name in ("torch", "ray", "mlflow", "numpy", "fedtail")}
    git = shutil.which("git")
    if git:
        ask = [git, "-C", str(Path(__file__).parent)]
        revision, changed = (
            subprocess.run([*ask, *words], capture_output=True, text=True, check=False)
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
        if revision.returncode == 0:
            tags["git.revision"] = revision.stdout.strip() + ("+changes" if changed.stdout.strip() else "")
    return tags


def _note(found: Mapping[str, Any], options: argparse.Namespace) -> str:
    """Return the parent run's note: what came out, and how to repeat it."""
    command = ["python", "-m", "orchestrator.tune", *([str(options.file)] if options.file else [])]
    command += [f"--set '{change}'" for change in options.set]
    return f"{results.markdown(found)}\n\nTo repeat: `{' '.join(command)}`"


def _tell(
    found: Mapping[str, Any],
    best: results.Configuration | None,
    folder: Path,
    uri: str,
    owed: int,
    mirror: tracking.Mirror,
    console: Console,
) -> None:
    """Print what came out and what to type next."""
    console.print(results.table(found))
    for trial in found["trials"]:
        if trial["status"] == "FAILED":
            reason = (trial["error"] or "unknown").splitlines()[0]
            where = f"{folder}/trials/{trial['id']}/status.json"
            text = f"trial {trial['id']} failed: {reason}\n  the traceback is in {where}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    if best is not None:
        goal = "highest" if found["mode"] == "max" else "lowest"
        ids = ", ".join(t["id"] for t in best.trials)
        text = (
            f"best: {best.name} (trial {ids}): {goal} {found['metric']} in the last round, {best.show(found['metric'])}"
        )
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    elif any(trial["status"] == "FINISHED" for trial in found["trials"]):
        text = f"no best: no finished trial has reported {found['metric']}, by which the sweep ranks"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(f"results: {folder}", highlight=False)
    if owed:
        text = (
            f"MLflow could not be reached ({mirror.last_error}); {owed} lines and endings wait in the directory. "
            f"Later, type:\n  {sys.executable} -m orchestrator.tracking sync {folder} --tracking-uri {uri}"
        )
    else:
        text = f"to browse them, type:\n  {tracking.ui_command(uri)}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
