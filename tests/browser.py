"""A browser for tests: Chromium without a window, spoken to through a pair of pipes."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One page; `with` ends the browser."""

    def __init__(self, width=1500, height=1100):
        self._home = tempfile.mkdtemp(prefix="fedtail-browser-")
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        options += [f"--user-data-dir={self._home}", f"--window-size={width},{height}", "about:blank"]

        def pipes():  # Chromium reads commands from 3 and answers on 4
            read, write = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(read, 3)
            os.dup2(write, 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *options],
            preexec_fn=pipes,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = os.fdopen(ours_in, "rb", buffering=0), os.fdopen(ours_out, "wb", buffering=0)
        self._rest, self._count, self._session = b"", 0, None
        page = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]

    def _ask(self, method, **params):
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                more = self._in.read(65536)
                assert more, "the browser has ended"
                self._rest += more
            raw, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(raw)
            if answer.get("id") == self._count:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def open(self, address):
        """Go to an address."""
        self._ask("Page.navigate", url="about:blank")
        self._ask("Page.navigate", url=address)

    def find(self, script, seconds=60.0):
        """Wait until a JavaScript expression is true of the page."""
        deadline = time.monotonic() + seconds
        while True:
            if self._ask("Runtime.evaluate", expression=f"Boolean({script})")["result"].get("value"):
                return
            assert time.monotonic() < deadline, f"waited {seconds} s for {script}"
            time.sleep(0.25)

    def keep(self, path: Path):
        """Take a picture of the page."""
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot", format="png")["data"]))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        self._in.close()
        self._out.close()
        shutil.rmtree(self._home, ignore_errors=True)
