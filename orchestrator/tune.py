"""`python -m orchestrator.tune [FILE]`: run a sweep, or an experiment, which is a sweep with nothing left open."""

from __future__ import annotations

import argparse
import atexit
import errno
import os
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console

import search_spaces
from orchestrator import catalogue, folder, preflight, tracking
from orchestrator import summary as results
from orchestrator.checkpoint import CheckpointError, set_status, status_of
from orchestrator.data import DataError
from orchestrator.prefixes import Cache
from orchestrator.signals import Interrupted, listen
from orchestrator.space import Trial
from orchestrator.space import trials as expand
from orchestrator.sweep_file import Sweep, read
from orchestrator.yaml_file import InputError

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


def arguments() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m orchestrator.tune",
        description="Run a sweep or an experiment of personalized federated learning on Ray, tracked in MLflow.",
    )
    parser.add_argument("file", nargs="?", type=path, help="sweep or experiment (YAML); default: a small demonstration")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="override a leaf; repeatable")
    parser.add_argument("--preset", help="a variant that the file describes, e.g. smoke")
    parser.add_argument("--name", help="name of the run's directory (default: the file's name)")
    parser.add_argument("--resume", action="store_true", help="continue what was interrupted")
    parser.add_argument("--extend", metavar="WHAT=N", help="continue a finished sweep: rounds=N or samples=N")
    parser.add_argument("--no-share", action="store_true", help="train what trials have in common in each of them")
    add_where(parser)
    parser.add_argument(
        "--list", action="store_true", help="print the catalogue of methods, losses, priors and data sets"
    )
    return parser


def add_where(parser: argparse.ArgumentParser) -> None:
    """Describe where things run and are written, and how much is said of it."""
    parser.add_argument("--out", type=path, default=Path("runs"), help="where directories are made (default: runs)")
    address = os.environ.get("RAY_ADDRESS")
    parser.add_argument("--address", default=address, help="a running Ray cluster (default: start one here)")
    parser.add_argument("--num-cpus", type=_amount, help="CPUs to use on this machine")
    parser.add_argument("--num-gpus", type=_amount, help="GPUs to use on this machine")
    parser.add_argument("--tracking-uri", help="an MLflow server (default: sqlite inside --out)")
    parser.add_argument("--force", action="store_true", help="continue even under changed code or a changed experiment")
    parser.add_argument("--quiet", action="store_true", help="print the result only")
    parser.add_argument("--dry-run", action="store_true", help="check everything, show what would run, start nothing")


def path(text: str) -> Path:
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
    return execute(arguments().parse_args(argv))


def execute(options: argparse.Namespace) -> int:
    """Do what the command line asks for; return the exit code."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not options.address:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray then listens on the loopback only
    elif (Path.home() / ".ray" / "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # a cluster asks for it, but Ray offers it only when told to
    console = Console(width=None if sys.stdout.isatty() else 160)
    if options.list:
        console.print(catalogue.text(), markup=False, highlight=False, soft_wrap=True)
        return 0
    try:
        return run(options, console)
    except (InputError, DataError) as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", markup=False, highlight=False)
        return 2
    except Interrupted as stop:
        return stop.code
    except (CheckpointError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOSPC:
            raise
        hint = "" if isinstance(error, CheckpointError) else f"; make room in {options.out} and continue with --resume"
        Console(stderr=True, soft_wrap=True).print(f"error: {error}{hint}", markup=False, highlight=False)
        return 1


def run(options: argparse.Namespace, console: Console) -> int:
    """Check everything, then run what is left to run, then tell what came out."""
    listen()
    out = options.out.resolve()
    directory, sweep, trials = _prepare(options, out)
    # Where trials are proposed one by one, some possible ones stand for them all.
    examples = [replace(t, id="-") for t in expand(sweep)[:20]] if sweep.search.searcher == "optuna" else trials
    preflight.check_metric(sweep.search.metric, examples)
    checked = preflight.Checked(options.dry_run)
    for trial in [*examples, *trials]:
        checked.check(trial)
    if not checked.missing:
        preflight.check_space(examples, checked, out)
    if options.address:
        preflight.knock(options.address)
    if options.dry_run:
        optuna = sweep.search.searcher == "optuna"
        more = f", {sweep.search.samples} proposed by optuna, of which these are possible ones" if optuna else ""
        preflight.show(examples, sweep.search, options, checked, console, more)
        return 0
    if not options.address:  # what a cluster has is known only once it is joined
        at_a_time, shares = preflight.shares(examples, sweep.search, options, checked)
        preflight.warn(*preflight.crowd(examples, shares, at_a_time, checked), console)
    (directory / "trials").mkdir(parents=True, exist_ok=True)
    uri = options.tracking_uri or tracking.default_uri(out)
    mirror = tracking.Mirror(uri, directory, experiment=folder.stem(options.file), tags=_environment())
    if options.extend:
        (directory / "code.json").unlink(missing_ok=True)
        _extend(directory, trials, checked, mirror, out)
    for trial in trials:
        folder.create(directory, trial, checked.dataset(trial.experiment), checked.partition(trial.experiment))
    if options.extend or not (directory / "sweep.yaml").exists():
        folder.commit(directory, sweep, trials)
    mirror.start()
    status, out_of_time = "FAILED", False
    try:
        from orchestrator.sweep import run_sweep  # Ray is imported only once all is known to be good

        out_of_time = run_sweep(directory, trials, examples, sweep, checked, mirror, options, console)
        status = "FINISHED"
    except Interrupted:
        status = "KILLED"
        raise
    finally:
        # The second signal ends us at once; the first still leaves everything in order.
        _settle(directory, status == "KILLED" or out_of_time, mirror)
        ids = [path.name for path in (directory / "trials").iterdir()]
        found = results.write_summary(directory, sweep.search, {id: mirror.run_id(id) for id in ids})
        best, report = results.best(found), _report(directory)
        well = _all_well(found, out_of_time)
        owed = mirror.close(
            status if status != "FINISHED" or well else "FAILED",
            summary=directory / "summary.json",
            note=_note(found, options),
            metrics={}
            if best is None
            else {f"best/{m}": mean(best.values(m)) for m in results.headline(best.trials) if best.values(m)},
            timeout=30.0 if status == "FINISHED" else 8.0,
        )
        _tell(found, best, directory, report, uri, owed, mirror, console)
        if out_of_time:
            console.print("the time budget is used up", highlight=False)
        if status != "FINISHED" or out_of_time:
            words = [sys.executable, "-m", "orchestrator.tune", "--resume", "--name", directory.name, "--out", str(out)]
            console.print(f"to continue, type:\n  {shlex.join(words)}", markup=False, highlight=False, soft_wrap=True)
    return 0 if well else 1


# Before anything starts ---------------------------------------------------------------------------------------------


def _prepare(options: argparse.Namespace, out: Path) -> tuple[Path, Sweep, list[Trial]]:
    """Read what to run, and find or choose its directory; Optuna's trials are not known before they run."""
    stem = folder.stem(options.file)
    if options.name is not None and not folder.NAME.fullmatch(options.name):
        raise InputError([f"--name {options.name!r}: use letters, digits, '.', '_', '+' and '-', at most 100 of them"])
    if options.resume and options.extend:
        raise InputError(["--extend: continue with --resume what was interrupted, and extend it when it is done"])
    if options.resume or options.extend:
        directory = out / (options.name or folder.newest(out, stem))
        flag = "--resume" if options.resume else "--extend"
        sweep = folder.reopen(directory, flag, [*options.set, *([options.preset] if options.preset else [])])
        if options.resume:
            trials = folder.known(directory)
            found = folder.differences(directory, trials, options.file) if not options.force else []
            if found:
                why = (
                    "--resume: the run would not go on as it was begun; undo this, or add --force to go on all the same"
                )
                raise InputError([why, *found])
            return directory, sweep, trials
        return directory, *folder.extended(directory, sweep, options.extend)
    file = options.file or Path(search_spaces.__file__).with_name("quickstart.yaml")
    sweep = read(file, None, options.set, options.preset)
    directory = out / (options.name or folder.free(out, stem))
    if directory.exists():
        raise InputError([f"{directory} exists; choose another --name, or continue it with --resume"])
    return directory, sweep, [] if sweep.search.searcher == "optuna" else expand(sweep)


def _extend(
    directory: Path, trials: Sequence[Trial], checked: preflight.Checked, mirror: tracking.Mirror, out: Path
) -> None:
    """Put the results of shorter runs aside."""
    cache = Cache(out / ".prefixes")
    for trial in trials:
        digest = checked.dataset(trial.experiment).digest
        if (directory / "trials" / trial.id).exists() and folder.lengthen(directory, trial, cache, digest):
            mirror.supersede(trial.id)


# The end ------------------------------------------------------------------------------------------------


def _settle(directory: Path, stopped: bool, mirror: tracking.Mirror) -> None:
    """Give every trial that was running when we stopped, or failed, its final status."""
    for path in sorted((directory / "trials").iterdir()):
        if status_of(path)["status"] == "RUNNING":
            set_status(path, "KILLED" if stopped else "FAILED", error="the sweep ended before the trial did")
            mirror.finish(path.name)


def _all_well(found: Mapping[str, Any], out_of_time: bool) -> bool:
    good = {*folder.ENDED, *(("KILLED", "WAITING") if out_of_time else ())}
    return all(t["status"] in good for t in found["trials"])


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


def _report(directory: Path) -> Path | None:
    """Write the report; that it cannot be written must not hide what was found."""
    from orchestrator.findings import collect
    from orchestrator.report import write_report

    try:
        return write_report(collect([directory]))
    except Exception as error:
        warnings.warn(f"no report could be written: {error}", stacklevel=1)
        return None


def _note(found: Mapping[str, Any], options: argparse.Namespace) -> str:
    """Return the parent run's note: what came out, and how to repeat it."""
    command = ["python", "-m", "orchestrator.tune", *([str(options.file)] if options.file else [])]
    command += ["--preset", options.preset] if options.preset else []
    command += [word for change in options.set for word in ("--set", change)]
    return f"{results.markdown(found)}\n\nTo repeat: `{shlex.join(command)}`"


def _tell(
    found: Mapping[str, Any],
    best: results.Configuration | None,
    directory: Path,
    report: Path | None,
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
            where = f"{directory}/trials/{trial['id']}/status.json"
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
    console.print(f"results: {directory}", highlight=False)
    if report:
        console.print(f"report:  {report}", highlight=False, soft_wrap=True)
    if owed:
        text = (
            f"MLflow could not be reached ({mirror.last_error}); {owed} lines and endings wait in the directory. "
            f"Later, type:\n  {sys.executable} -m orchestrator.sync {directory}"
            + ("" if tracking.public(uri) == uri else " --tracking-uri URI   (with its password: none is kept)")
        )
    else:
        command = tracking.ui_command(uri)
        text = (
            f"to browse them, type:\n  {command}\nand open" if command else "to browse them, open"
        ) + f" {mirror.page()}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    code = main()
    if code > 128:  # stopped by a signal, and all is in order: Ray's threads, half started, may abort in the exit
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
