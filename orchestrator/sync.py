"""`python -m orchestrator.sync DIR/NAME`: give MLflow what a run directory still owes it, or import it elsewhere."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from orchestrator.spool import read_json
from orchestrator.tracking import Mirror, absolute, default_uri, public


def sync(sweep_dir: Path, uri: str | None = None) -> Mirror:
    """Deliver what a directory still owes, to its own MLflow or to another; the mirror tells what is owed then."""
    sweep_dir = sweep_dir.resolve()
    old = read_json(sweep_dir / "mlflow.json")
    home = old.get("tracking_uri") or uri or default_uri(sweep_dir.parent)
    experiment = old.get("experiment") or sweep_dir.name
    mirror = Mirror(uri or home, sweep_dir, experiment=experiment, tags=old.get("tags") or {})
    mirror.keep_record = public(mirror.uri) == public(absolute(home))  # an import leaves the sweep's own record alone
    finished = not old and (sweep_dir / "summary.json").exists()
    closed = old.get("closing") or {"status": "FINISHED" if finished else "KILLED"}
    mirror.deliver_all(closed["status"], closed.get("summary"), closed.get("note"), closed.get("metrics") or {})
    return mirror


def main() -> int:
    """Run the command; return 1 if something is still owed."""
    parser = argparse.ArgumentParser(prog="python -m orchestrator.sync", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR/NAME")
    parser.add_argument("--tracking-uri", metavar="URI", help="another MLflow than the directory's own")
    options = parser.parse_args()
    if not (options.directory / "trials").is_dir():
        parser.error(f"{options.directory} is not a sweep's directory: it has no trials/")
    mirror = sync(options.directory, options.tracking_uri)
    owed = mirror.owed()
    said = f"still owes {owed} lines and endings ({mirror.last_error})" if owed else "is complete"
    sys.stdout.write(f"{options.directory} {said} in {public(mirror.uri)}\n")
    return int(owed > 0)


if __name__ == "__main__":
    sys.exit(main())
