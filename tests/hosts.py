"""Hosts made of namespaces, on one machine: each has an address, processes, a home, a /tmp and an sshd of its own."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

PACKAGES = {"sshd": "openssh-server", "rsync": "rsync", "ip": "iproute2", "unshare": "util-linux"}
ROOT = Path(__file__).parents[1]

# What a host, or the laptop from which they are reached, sees of the machine: everything but what it has of its own.
# Python and the project stay visible where they are, even in /tmp.
PRIVATE = """\
set -e
mount -t tmpfs tmpfs /run && mkdir /run/tmp && mount --bind /tmp /run/tmp && mount -t tmpfs tmpfs /tmp
for path in $SHARED; do
  case $path in /tmp/*) mkdir -p $path && mount --bind /run$path $path ;; esac
done
umount /run/tmp
mount -t tmpfs -o size=2g tmpfs /dev/shm
sed "s|^root:\\([^:]*:[^:]*:[^:]*:[^:]*\\):[^:]*:|root:\\1:$HOME:|" /etc/passwd > /tmp/passwd
mount --bind /tmp/passwd /etc/passwd
mount --bind $FOLDER/hosts /etc/hosts
mount --bind /dev/null /etc/resolv.conf
hostname $NAME
"""
SSHD = """\
mkdir -p /run/sshd
exec /usr/sbin/sshd -D -e -f /dev/null -h $FOLDER/$NAME/key -o ListenAddress=$ADDRESS -o UsePAM=no -o StrictModes=no \
  -o PermitRootLogin=prohibit-password -o PidFile=none -o AuthorizedKeysFile=$FOLDER/id.pub
"""


def lacking() -> str:
    """Return why hosts cannot be made here, or nothing; Debian's packages are installed if need be."""
    if os.geteuid() != 0:
        return "only root can make namespaces"
    missing = [package for tool, package in PACKAGES.items() if not shutil.which(tool, path=_path())]
    if missing:
        install = f"apt-get update -qq && apt-get install -qq -y --no-install-recommends {' '.join(missing)}"
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        done = subprocess.run(["sh", "-c", install], env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"cannot install {', '.join(missing)}: {done.stderr.strip()[-200:]}"
    trial = ["ip", "netns", "exec", "fedtail-trial", "unshare", "--mount", "--pid", "--uts", "--fork", "true"]
    try:
        _run("ip", "netns", "add", "fedtail-trial")
        _run(*trial)
    except subprocess.CalledProcessError as error:
        return f"the kernel does not let us make namespaces: {error.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", "fedtail-trial"], capture_output=True, check=False)
    return ""


def _path() -> str:
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Hosts:
    """Hosts on a network of their own, which nothing else on the machine sees; `with` takes them down again."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder, self.names = folder, names
        self.prefix = f"ft{os.getpid()}"
        self.switch = f"{self.prefix}-switch"
        self.address = {name: f"10.77.0.{10 + i}" for i, name in enumerate(names)}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Hosts":
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self.address.items())]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / "id"))
        try:
            self._cable()
            for name in self.names:
                self._boot(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _cable(self) -> None:
        """Join all hosts and the laptop by a switch."""
        _run("ip", "netns", "add", self.switch)
        inside = ["ip", "-n", self.switch]
        _run(*inside, "link", "add", "switch", "type", "bridge")
        _run(*inside, "addr", "add", "10.77.0.1/24", "dev", "switch")
        for name in self.names:
            host = f"{self.prefix}-{name}"
            _run("ip", "netns", "add", host)
            _run(*inside, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", host)
            _run(*inside, "link", "set", name, "master", "switch", "up")
            _run("ip", "-n", host, "addr", "add", f"{self.address[name]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", host, "link", "set", device, "up")
            # Ray finds its own address by the route to the world.
            _run("ip", "-n", host, "route", "add", "default", "via", "10.77.0.1")
        for device in ("lo", "switch"):
            _run(*inside, "link", "set", device, "up")

    def _boot(self, name: str) -> None:
        """Start a host: its sshd is the first of its processes, and with it all end."""
        home = self.folder / name / "home"
        home.mkdir(parents=True)
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name / "key"))
        # A machine with one CPU, whatever we run on.
        (home / ".bashrc").write_text("""export RAY_OVERRIDE_RESOURCES='{"CPU": 1}'\n""")
        with (self.folder / name / "sshd.log").open("wb") as log:
            command = self._enter(f"{self.prefix}-{name}", PRIVATE + SSHD)
            environment = self._environment(name, home) | {"ADDRESS": self.address[name]}
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._processes[name] = process
        deadline = time.monotonic() + 60
        while "listening" not in (said := (self.folder / name / "sshd.log").read_text()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"host {name} does not start: {said}")
            time.sleep(0.1)

    def _enter(self, namespace: str, script: str) -> list[str]:
        unshare = ["unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]
        # Should this process be killed, nothing survives it.
        return ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", namespace, *unshare, "bash", "-c", script]

    def _environment(self, name: str, home: Path) -> dict[str, str]:
        shared = {ROOT, self.folder, Path(sys.prefix), Path(sys.base_prefix)}
        return {
            "HOME": str(home),
            "NAME": name,
            "FOLDER": str(self.folder),
            "SHARED": " ".join(sorted(str(path.resolve()) for path in shared)),
            "PATH": _path(),
            "LANG": "C.UTF-8",
        }

    def laptop(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command in the project's directory on a machine that is no part of the cluster, but reaches it."""
        home = self.folder / "laptop"
        home.mkdir(exist_ok=True)
        (home / "tmp").mkdir(exist_ok=True)
        script = PRIVATE + 'cd $ROOT\nexec "$@"'
        # What Ray remembers of clusters is kept from one command to the next.
        kept = {"ROOT": str(ROOT), "TMPDIR": str(home / "tmp")}
        return subprocess.Popen(
            [*self._enter(self.switch, script), "laptop", *command],
            env=self._environment("laptop", home) | kept | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def shell(self, name: str, command: str) -> subprocess.Popen[str]:
        """Start a command on a host."""
        options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
        return self.laptop("ssh", "-i", str(self.folder / "id"), *options, f"root@{name}", command)

    def processes(self, name: str) -> list[str]:
        """Return the command lines of all that runs on a host besides its sshd."""
        (first,) = _children(self._processes[name].pid)
        world, found = os.readlink(f"/proc/{first}/ns/pid"), []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(path / "ns" / "pid") == world and int(path.name) != first:
                    found.append((path / "cmdline").read_text().replace("\0", " ").strip())
            except OSError:
                continue
        return [line for line in found if line and not line.startswith("sshd:")]

    def lose(self, name: str) -> None:
        """Pull a host's cable, then its plug: nobody is told."""
        _run("ip", "-n", self.switch, "link", "set", name, "down")
        self._off(name)

    def _off(self, name: str) -> None:
        process = self._processes.pop(name)
        for first in _children(process.pid):
            os.kill(first, signal.SIGKILL)  # and the kernel ends all that is in its namespace
        process.wait(timeout=60)

    def __exit__(self, *_: object) -> None:
        for name in list(self._processes):
            self._off(name)
        for name in (*self.names, "switch"):
            subprocess.run(["ip", "netns", "del", f"{self.prefix}-{name}"], capture_output=True, check=False)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
