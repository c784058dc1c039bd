"""The peers that install from PyPI, in a virtual environment of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = HERE / ".peers"
PYTHON = FOLDER / "bin" / "python"
#: Each peer's adapter.
PEERS = {"Flower": "run_flower.py", "pfl": "run_pfl.py"}
REQUIREMENTS = HERE / "peers.txt"


def install() -> list[str]:
    """Make the environment, unless there is one for the same versions; return the names of the peers."""
    stamp = FOLDER / "installed.txt"
    if not stamp.exists() or stamp.read_text() != REQUIREMENTS.read_text():
        print(f"installing the peers into {FOLDER} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(FOLDER)], check=True)
        pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--requirement", str(REQUIREMENTS)]
        if subprocess.run(pip).returncode != 0:
            raise SystemExit("the peers could not be installed (see above); leave out --peers to measure without them")
        stamp.write_text(REQUIREMENTS.read_text())
    return list(PEERS)
