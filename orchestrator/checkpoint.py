"""A run directory: an append-only log of metrics, and checkpoints of safetensors and JSON, atomic and hashed."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from algorithms.params import Layout, Params

SCHEMA = 1
LAST, BEFORE = "manifest.json", "before.json"  #: what the last checkpoint is made of, and the one before it
PACKS = 8  #: client memories are written as increments; this many are merged into one


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; says which file and why."""


# Trees of tensors as JSON and safetensors ---------------------------------------------------------------------------


def encode(value: Any, store: dict[str, Tensor]) -> Any:
    """Return the value as JSON, its tensors moved to the store under running names."""
    if isinstance(value, Tensor):
        store[name := str(len(store))] = value.detach().cpu().contiguous().clone()
        return {"$tensor": name}
    if isinstance(value, Params):
        return {"$params": value.layout, "flat": encode(value.flat, store), "buffers": encode(value.buffers, store)}
    if isinstance(value, Mapping):
        return {"$dict": [[encode(k, store), encode(v, store)] for k, v in value.items()]}
    if isinstance(value, tuple):
        return {"$tuple": [encode(v, store) for v in value]}
    if isinstance(value, list):
        return [encode(v, store) for v in value]
    return value


def decode(value: Any, store: Mapping[str, Tensor]) -> Any:
    """Return what `encode` was given."""
    if isinstance(value, list):
        return [decode(v, store) for v in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return store[value["$tensor"]]
    if "$params" in value:
        layout = Layout(*(tuple((name, tuple(shape)) for name, shape in part) for part in value["$params"]))
        return Params(layout, decode(value["flat"], store), decode(value["buffers"], store))
    if "$tuple" in value:
        return tuple(decode(v, store) for v in value["$tuple"])
    return {decode(k, store): decode(v, store) for k, v in value["$dict"]}


def pack(value: Any) -> bytes:
    """Return a value as the bytes of a safetensors file."""
    store: dict[str, Tensor] = {}
    tree = json.dumps(encode(value, store))
    return bytes(save_tensors(store, {"schema": str(SCHEMA), "tree": tree}))


def unpack(content: bytes, path: Path) -> Any:
    """Return what `pack` was given; no code in it is run."""
    try:
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        return decode(json.loads(header["__metadata__"]["tree"]), load_tensors(content))
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is not a file of ours: {error}") from None


def fingerprint(*values: Any) -> str:
    """Return a sha256 of values that is the same wherever the same bits were computed."""
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Params):
            add([value.layout, value.flat, value.buffers])
        elif isinstance(value, Tensor):
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, Mapping):
            digest.update(b"{")
            for key in sorted(value, key=str):
                add([str(key), value[key]])
        elif isinstance(value, list | tuple):
            digest.update(f"[{len(value)}".encode())
            for item in value:
                add(item)
        else:
            digest.update(f"{type(value).__name__}:{value!r};".encode())

    add(values)
    return digest.hexdigest()


def write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise unwritten(path, len(content), error) from error


def unwritten(path: Path, size: int, error: OSError) -> CheckpointError:
    """Say what could not be written, and what to do."""
    hint = "what was written before is intact: make room, and continue with --resume"
    return CheckpointError(f"cannot write {path} ({size:,} bytes): {error.strerror}; {hint}")


def link(source: Path, target: Path) -> None:
    """Give a file that is never written again a second name, or copy it to another file system."""
    try:
        target.hardlink_to(source)
    except FileExistsError:
        raise
    except OSError:
        shutil.copyfile(source, target)


def write_json(path: Path, value: Any) -> None:
    """Write a value as readable JSON, whole or not at all."""
    write(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def status_of(directory: Path) -> dict[str, Any]:
    """Return a trial's status as its directory tells it."""
    path = directory / "status.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"status": "WAITING"}


def set_status(directory: Path, status: str, **facts: Any) -> None:
    """Write a trial's status down."""
    write_json(directory / "status.json", {"status": status, "error": None} | facts)


class RunDirectory:
    """The log and the checkpoint of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoint"
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self._log = path / "metrics.jsonl"
        self.logged = self._mend_log()
        self._packs: list[str] = []
        self._hashes: dict[str, str] = {}
        self.unscored: dict[str, Any] | None = None  #: the line of the last round, where its evaluation is still due

    # The log -----------------------------------------------------------------------------------------------------

    def _mend_log(self) -> int:
        """Drop a last line that a crash has torn, and return the last round that the log knows."""
        if not self._log.exists():
            return 0
        content = self._log.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            os.truncate(self._log, len(whole))  # which a full disk allows too
        lines = whole.splitlines()
        return int(json.loads(lines[-1])["round"]) if lines else 0

    def log(self, line: Mapping[str, Any]) -> None:
        """Append a round's line; a round that is run again after a crash has its line already."""
        if line["round"] > self.logged:
            text = json.dumps(line, allow_nan=False) + "\n"
            try:
                with self._log.open("a", encoding="utf-8") as file:
                    file.write(text)
            except OSError as error:
                raise unwritten(self._log, len(text), error) from error
            self.logged = line["round"]

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the log's lines."""
        if self._log.exists():
            with self._log.open(encoding="utf-8") as file:
                yield from map(json.loads, file)

    # The checkpoint ------------------------------------------------------------------------------------------------

    def save(self, round: int, run: Mapping[str, Any], memory: Mapping[int, Any], changed: set[int]) -> None:
        """Write the run's state and the memories of the clients that changed; the manifest's rename commits."""
        pack = f"clients-{round:06d}.safetensors"
        if self._log.exists():  # a checkpoint never knows more rounds than the log, not even after a power failure
            with self._log.open("rb") as file:
                os.fsync(file.fileno())
        if len(self._packs) >= PACKS:
            self._packs, changed = [], set(memory)
        if changed:
            self._put(pack, {id: memory[id] for id in sorted(changed) if id in memory})
            self._packs = [p for p in self._packs if p != pack] + [pack]
        self._put(name := f"run-{round:06d}.safetensors", run)
        live = {name, *self._packs}
        self._hashes = {k: v for k, v in self._hashes.items() if k in live}
        manifest = {"schema": SCHEMA, "round": round, "run": name, "clients": self._packs, "sha256": self._hashes}
        last, before = self.checkpoints / LAST, self.checkpoints / BEFORE
        if last.exists():
            content = last.read_bytes()
            write(before, content)
            with suppress(ValueError, KeyError):  # a damaged one names nothing that could still be of use
                live |= set(json.loads(content)["sha256"])
        write_json(last, manifest)
        for path in self.checkpoints.iterdir():  # what is over, and what a kill left half written
            if path.name not in live | {LAST, BEFORE}:
                path.unlink()

    def load(self) -> tuple[dict[str, Any], dict[int, Any]] | None:
        """Return the last committed state and client memories, or those before if these are damaged; None: none yet."""
        if not (self.checkpoints / LAST).exists():
            return None
        try:
            return self._load(LAST)
        except CheckpointError as error:
            if not (self.checkpoints / BEFORE).exists():
                raise
            try:
                found = self._load(BEFORE)
            except CheckpointError:
                raise error from None
            warnings.warn(f"{error}; going on from round {found[0]['round']}, which was saved before it", stacklevel=2)
            return found

    def _load(self, name: str) -> tuple[dict[str, Any], dict[int, Any]]:
        path = self.checkpoints / name
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            schema, self._hashes = manifest["schema"], manifest["sha256"]
            run, self._packs = manifest["run"], manifest["clients"]
            self.unscored = manifest.get("unscored")
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); remove the trial's directory to run it anew") from None
        if schema != SCHEMA:
            raise CheckpointError(f"{path} has schema {schema}, this version reads {SCHEMA}; use the version it is of")
        memory: dict[int, Any] = {}
        for pack in self._packs:
            memory |= self._get(pack)
        return self._get(run), memory

    # The same run in another directory -----------------------------------------------------------------------------

    @property
    def saved_round(self) -> int:
        """The round of the checkpoint, 0 where there is none."""
        path = self.checkpoints / LAST
        return int(json.loads(path.read_text(encoding="utf-8"))["round"]) if path.exists() else 0

    def copy_to(self, target: Path) -> None:
        """Make a directory that holds this run as it was saved last; the files of checkpoints are shared."""
        other, saved = RunDirectory(target), self.saved_round
        lines = [line for line in self.lines() if line["round"] <= saved]
        other.take_over(self.path, lines[:-1], lines[-1], scores_due=False)

    def take_over(self, source: Path, lines: list[dict[str, Any]], last: dict[str, Any], scores_due: bool) -> None:
        """Continue where another directory was saved, with lines for the log; the last may still lack its scores."""
        for line in lines if scores_due else [*lines, last]:
            self.log(line)
        for table in (source / "artifacts").glob("[0-9]*-*"):
            shutil.copytree(table, self.path / "artifacts" / table.name, dirs_exist_ok=True)
        self._link(source, unscored=last if scores_due else None)

    def write_tables(self, title: str, tables: Mapping[str, list[dict[str, Any]]]) -> None:
        """Write the results of a phase per class and per client."""
        folder = self.path / "artifacts" / title
        folder.mkdir(parents=True, exist_ok=True)
        for name, rows in tables.items():
            if rows:
                with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
                    writer = csv.DictWriter(file, list(rows[0]))
                    writer.writeheader()
                    writer.writerows(rows)

    def write_portraits(self, title: str, portraits: Mapping[str, Any]) -> None:
        """Write the pictures that a method gives of itself, as data."""
        folder = self.path / "artifacts" / title / "portraits"
        for name, picture in portraits.items():
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / f"{name}.json", picture)

    def write_arrays(self, title: str, name: str, arrays: Mapping[str, Any]) -> None:
        """Write what pictures of a phase are made of, where there is any."""
        if arrays:
            buffer = io.BytesIO()
            np.savez_compressed(buffer, **arrays)
            (self.path / "artifacts" / title).mkdir(parents=True, exist_ok=True)
            write(self.path / "artifacts" / title / f"{name}.npz", buffer.getvalue())

    def exchange(self, source: Path, whose: str) -> None:
        """Continue with the state of another run; of its log only those rounds are taken over that are lacking here."""
        for line in RunDirectory(source).lines():
            self.log({"reused": whose, **line})
        self._link(source, unscored=None)

    def _link(self, source: Path, unscored: dict[str, Any] | None) -> None:
        manifest = json.loads((source / "checkpoint" / LAST).read_text(encoding="utf-8"))
        names = {name: f"{name.partition('.')[0]}-{sha[:8]}.safetensors" for name, sha in manifest["sha256"].items()}
        for name, own in names.items():
            with suppress(FileExistsError):
                link(source / "checkpoint" / name, self.checkpoints / own)
        manifest |= {"run": names[manifest["run"]], "clients": [names[pack] for pack in manifest["clients"]]}
        manifest |= {"sha256": {names[k]: v for k, v in manifest["sha256"].items()}, "unscored": unscored}
        write_json(self.checkpoints / LAST, manifest)

    def forget_clients(self) -> None:
        """Leave the clients' memories of an algorithm that is done out of the next checkpoint."""
        self._packs = []

    def _put(self, name: str, value: Any) -> None:
        content = pack(value)
        write(self.checkpoints / name, content)
        self._hashes[name] = hashlib.sha256(content).hexdigest()

    def _get(self, name: str) -> Any:
        path = self.checkpoints / name
        if Path(name).name != name or path.is_symlink() or not path.is_file():
            raise CheckpointError(f"{path} is missing or not a plain file; remove the trial's directory to run it anew")
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != self._hashes.get(name):
            raise CheckpointError(f"{path} is damaged: its sha256 differs; remove the trial's directory to run it anew")
        return unpack(content, path)
