"""What a run shows to the network and leaves in files: no open port, no secret."""

import os
import shlex
import socket
import subprocess
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path

import pytest
from chaos import members, rounds, settings, started, until
from test_tracking import ROOT, Server

pytestmark = pytest.mark.chaos

RUN = """\
data: {name: digits, clients: 6}
rounds: 100
clients_per_round: 3
evaluate: {every: 10}
failures: {checkpoint_s: 0}
"""


def listening(pids):
    """Return the addresses (host, port) on which processes accept connections."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(os.readlink(link))
            except FileNotFoundError:
                continue
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = row.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                host, port = local.split(":")
                words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
                found.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


def is_loopback(host):
    return host.removeprefix("::ffff:").startswith("127.") or host == "::1"


def answer(port, path="/", host=None):
    """Return the status and the text with which a local port answers a request; 0 if it does not speak HTTP."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Host": host} if host else {})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=3) as response:
            return response.status, response.read(1000).decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, ""
    except (OSError, HTTPException):
        return 0, ""


def gives_jobs(port):
    """Tell whether a port answers like the one through which jobs are submitted to Ray."""
    code, text = answer(port, "/api/jobs/")
    return code == 200 and text.lstrip().startswith(("[", "{"))


def holding(secret, *folders):
    """Return the files below directories in which a secret stands."""
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    return [path for path in files if secret.encode() in path.read_bytes()]


def test_only_this_machine_is_listened_to(tmp_path, scratch):
    (tmp_path / "run.yaml").write_text(RUN)
    out, canary = tmp_path / "out", "canary-0f3a9c71"
    words = [tmp_path / "run.yaml", "--out", out, "--num-cpus", 2, *settings(rounds=300)]
    with started(*words, scratch=scratch, FEDTAIL_API_TOKEN=canary) as process:
        until(lambda: rounds(out / "run" / "trials" / "0000") >= 3, process)
        open_ports = listening([pid for pid, _ in members(process.pid)])
        assert len(open_ports) > 3, "Ray's own"
        assert [address for address in open_ports if not is_loopback(address[0])] == []
        assert [port for _, port in open_ports if gives_jobs(port)] == []
        token = Path.home() / ".ray" / "auth_token"
        assert not token.exists() or token.stat().st_mode & 0o777 == 0o600
        (temporary,) = scratch.iterdir()
        assert temporary.stat().st_mode & 0o777 == 0o700
        assert holding(canary, scratch, out) == [], "nor in the logs that Ray writes meanwhile"
        text, error = process.communicate(timeout=120)
        assert process.returncode == 0, text + error
    assert holding(canary, out) == []
    assert canary not in text + error

    # What is printed to look at the results is not open to other pages in the browser either.
    (command,) = (line for line in text.splitlines() if "mlflow ui" in line)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = shlex.split(command.replace("--port 5000", f"--port {port}"))
    server = subprocess.Popen(["env", *words], start_new_session=True, stdout=subprocess.DEVNULL, stderr=-3, cwd=ROOT)
    try:
        until(lambda: answer(port, "/health")[0] == 200, seconds=90)
        assert answer(port, "/api/2.0/mlflow/experiments/search?max_results=5")[0] == 200
        assert answer(port, "/api/2.0/mlflow/experiments/search?max_results=5", host="evil.example")[0] == 403
        assert {host for host, _ in listening([pid for pid, _ in members(server.pid)])} == {"127.0.0.1"}
    finally:
        for pid, _ in members(server.pid):
            os.kill(pid, 9)
        server.wait()


def test_a_password_is_written_nowhere(tmp_path, scratch):
    """Neither where MLflow answers nor where it does not."""
    (tmp_path / "run.yaml").write_text(RUN)
    secret = "canary-77d20be4"
    with Server(tmp_path / "server") as server:
        for name, port in (("there", server.port), ("away", 9)):
            uri = f"http://me:{secret}@127.0.0.1:{port}"
            words = [tmp_path / "run.yaml", "--name", name, "--out", tmp_path / "out", "--num-cpus", 2]
            with started(*words, "--tracking-uri", uri, scratch=scratch) as process:
                until(lambda name=name: rounds(tmp_path / "out" / name / "trials" / "0000") >= 3, process)
                assert holding(secret, scratch, tmp_path / "out") == []
                text, error = process.communicate(timeout=120)
                assert process.returncode == 0, text + error
                assert secret not in text + error
                assert ("orchestrator.sync" in text) == (name == "away")
    assert holding(secret, tmp_path) == [], "nor in MLflow's database"
    assert [*tmp_path.glob("out/*/tune/tuner.pkl")], "Ray's own files were looked at too"
