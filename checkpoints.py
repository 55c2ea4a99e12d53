"""Checkpoints on the disk: there whole or not at all.

    root/step_000010/checkpoint.json   step, schedules, controller, notes of the caller; size and
                                       SHA-256 of every file of state/: what makes it complete
                     state/            torch.distributed.checkpoint: a file a rank, and .metadata
                     hf/, hf_critic/   the networks as anybody's transformers or vLLM reads them
    root/best -> step_000010           the one of the highest score among those kept

A folder is written as step_000010.tmp and gets its name when every byte of it is on the disk. A
kill at any moment leaves the older ones, and at most one .tmp that the next save clears away.

Files alone: no tensor and no other rank is known here. What goes into state/ and hf/, and which
rank does what, is in resharding.py.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

STEP_FOLDER = re.compile(r"step_(\d+)(\.replaced)?")


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; one sentence says why."""


def read_facts(folder: Path) -> dict[str, Any]:
    """What checkpoint.json says."""
    return json.loads((folder / "checkpoint.json").read_text())


def find(root: Path) -> Path:
    """The newest complete checkpoint under `root`, or `root` itself if that is one.

    A folder without its checkpoint.json, or with files missing or cut short, is passed over, which
    is said. Nothing left is an error.
    """
    faults = []
    for folder in [root] if STEP_FOLDER.fullmatch(root.name) else step_folders(root)[::-1]:
        fault = fault_of(folder)
        if fault is None:
            for line in faults:
                print(f"passed over: {line}", flush=True)
            return folder
        faults.append(fault)
    raise CheckpointError("; ".join([f"there is no complete checkpoint in {root}", *faults]))


def step_folders(root: Path) -> list[Path]:
    """Those named as checkpoints, oldest first. A .replaced one is what a step held before it was
    saved again: there for the moment in which the two change places."""
    found = []
    for folder in root.iterdir() if root.is_dir() else ():
        if match := STEP_FOLDER.fullmatch(folder.name):
            found.append((int(match[1]), match[2] is None, folder))
    return [folder for _, _, folder in sorted(found)]


def fault_of(folder: Path) -> str | None:
    """Why `folder` is not a complete checkpoint, by names and sizes; None if it is one."""
    try:
        for name, (size, _) in read_facts(folder)["files"].items():
            found = (folder / "state" / name).stat().st_size
            if found != size:
                return f"{folder / 'state' / name} has {found} of {size} bytes"
    except (OSError, ValueError, KeyError) as error:
        return f"{folder} is not complete ({reason(error)})"
    return None


def fingerprints(files: list[Path]) -> dict[str, list]:
    """{name: [bytes, SHA-256]}"""
    found = {}
    for file in files:
        with open(file, "rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        found[file.name] = [file.stat().st_size, digest]
    return found


def unfinished(final: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return final.with_name(f"{final.name}.tmp")


def begin(folder: Path) -> None:
    """A new unfinished folder; away with what a killed save has left."""
    for leftover in folder.parent.glob("step_*.tmp"):
        shutil.rmtree(leftover)
    (folder / "state").mkdir(parents=True)


def complete(folder: Path, final: Path, facts: dict[str, Any], keep: int) -> None:
    """All of `folder` onto the disk, then the name `final`, then the older ones may go: the newest
    `keep` stay and the one of the highest score; 0: all."""
    (folder / "checkpoint.json").write_text(json.dumps(facts, indent=1))
    for path in [*folder.rglob("*"), folder]:
        _sync(path)
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(final, replaced)
    os.rename(folder, final)
    _sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    there = [other for other in step_folders(final.parent) if fault_of(other) is None]
    scores = [(read_facts(other)["score"], other) for other in there]
    _, best = max((pair for pair in scores if pair[0] is not None), default=(None, None))
    if best is not None:
        link = final.with_name(".best")
        link.unlink(missing_ok=True)
        link.symlink_to(best.name)
        os.replace(link, final.with_name("best"))
    for other in there[:-keep] if keep else ():
        if other != best:  # its name first: a half removed one must not look like a checkpoint
            shutil.rmtree(other.rename(unfinished(other)))


def _sync(path: Path) -> None:
    """A file's bytes, a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason(error: BaseException) -> str:
    """One line of what went wrong."""
    text = (str(error).strip().splitlines() or [""])[0]
    known = isinstance(error, (OSError, CheckpointError))
    return text if known else f"{type(error).__name__}: {text}"
