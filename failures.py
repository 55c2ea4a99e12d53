"""How a run ends when something stops it: the cause in one sentence, a status, no rank left behind.

What was foreseen (a wrong setting, an input that cannot be read, a full disk) is one sentence. A
traceback is for what was not. Where the rank that suffers is not the first, it speaks too, after
the first has had its turn.

For drills `--inject` plants a fault in a run: docs/operating.md says how each ends.
"""

import errno
import functools
import math
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import data
import losses
import plan
import resharding
import rollout
from config import Config

SIGNALS: list[int] = []  # SIGTERM and SIGINT that this process got during the loop


def catch_signals() -> None:
    """From now on SIGTERM and SIGINT are noted, and the step in progress is finished."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: SIGNALS.append(number))


def report(error: BaseException, config: Config | None) -> int:
    """Say what ended this rank; the exit status. `config` is None if it was not read yet."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    is_main, known = os.environ.get("RANK", "0") == "0", is_foreseen(error)
    if not is_main or not known:
        # Rank 0 says what this one complains of too, or another rank failed and this one only
        # lost it: torchrun ends this one meanwhile. If that rank was on another machine, the
        # first rank of this one speaks and ends, and torchrun ends the rest before they speak.
        time.sleep(10 + int(os.environ.get("LOCAL_RANK", "0")))
    where = "" if is_main else f" on rank {os.environ['RANK']}"
    start = "\n" if _step else ""  # the first rank's bar of steps stands in the line
    if SIGNALS and not known:
        print(f"{start}told to stop{where}, and then: {str(error).partition('. ')[0]}")
    elif not isinstance(error, SystemExit):  # its own complaint is out already
        lost = lost_rank(error)
        if not known and not lost:
            traceback.print_exception(error)
        text = lost or str(error) or type(error).__name__
        print(f"{start}error{where}: {text}", file=sys.stderr)
    if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available():
        print(plan.out_of_memory(config), file=sys.stderr)
    return error.code if isinstance(error, SystemExit) else 1


def is_foreseen(error: BaseException) -> bool:
    """Is its sentence enough? Settings and inputs are ValueErrors, after the start those of our own
    files alone; a disk may be full anywhere."""
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    places = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    ours = not _step or not places or Path(places[-1]).parent == Path(__file__).parent
    asked = isinstance(error, (SystemExit, KeyboardInterrupt))
    return full or asked or (ours and isinstance(error, ValueError))


def lost_rank(error: BaseException) -> str:
    """A sentence if `error` is gloo's complaint that another rank does not answer any more; "" for
    any other. gloo has no class for it, but names its own source file."""
    text = str(error)
    if "gloo/transport" not in text:
        return ""
    address = re.search(r"\[([0-9a-f.:]+)\]:\d+", text)
    where = f" on {address[1]}" if address else ""
    return (
        f"lost the connection to a rank{where}: its process or its machine is gone, and its own "
        "output says why; --run-name and --resume latest go on from the newest checkpoint, over "
        "any number of ranks"
    )


# ------------------------------------------------------------------------------------ drills

SLOW = 15.0  # seconds
_step = 0  # of the loop, from 1


def begin_step(step: int) -> None:
    global _step
    _step = step


def inject(spec: str, rank: int, size: int) -> None:
    """Plant KIND[@STEP[:RANK]], of step 1 and the last rank if it does not say: the first call of a
    function in that step does something else. Once; but stale weights stay so."""
    if not spec:
        return
    found = re.fullmatch(r"([a-z-]+)(?:@(\d+)(?::(\d+))?)?", spec)
    if not found or found[1] not in FAULTS or int(found[3] or 0) >= size:
        raise ValueError(f"inject is {spec!r}: it is KIND@STEP:RANK, with a rank below {size} and "
                         f"KIND one of {', '.join(FAULTS)}")
    owner, name, fault = FAULTS[found[1]]
    start, last = int(found[2] or 1), math.inf if found[1] == "stale-weights" else 1
    original, done = getattr(owner, name), []

    @functools.wraps(original)
    def faulty(*args: Any, **options: Any) -> Any:
        if _step < start or len(done) >= last:
            return original(*args, **options)
        done.append(_step)
        return fault(functools.partial(original, *args, **options), *args)

    if rank == int(found[3] or size - 1):
        setattr(owner, name, faulty)


def _stale_weights(load: Callable, engine: rollout.Engine, weights: Any) -> None:
    for _ in weights:  # the other ranks send theirs
        pass


def _slow_rank(generate: Callable, *_: Any) -> Any:
    time.sleep(SLOW)
    return generate()


def _dead_rank(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hanging_grader(call: Callable, reward: data.Reward, *asked: str) -> float:
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write("import time\ndef hangs(*asked):\n    time.sleep(3600)\n")
        file.flush()
        return data.Reward(f"{file.name}:hangs", reward._timeout)(*asked)


def _full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _truncated_checkpoint(save: Callable, *_: Any) -> Path:
    folder = save()
    file = max((folder / "state").iterdir(), key=lambda file: file.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)
    return folder


def _out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("out of memory: injected")


# kind: whose function, its name, what happens in its place
FAULTS: dict[str, tuple[Any, str, Callable]] = {
    "stale-weights": (rollout.Engine, "load_weights", _stale_weights),
    "nan-reward": (data.Reward, "__call__", lambda *_: math.nan),
    "slow-rank": (rollout, "generate", _slow_rank),
    "dead-rank": (rollout, "generate", _dead_rank),
    "hanging-grader": (data.Reward, "__call__", _hanging_grader),
    "full-disk": (resharding._Writer, "write_data", _full_disk),
    "kill-during-save": (resharding, "_fingerprints", _dead_rank),
    "truncated-checkpoint": (resharding, "save_checkpoint", _truncated_checkpoint),
    "out-of-memory": (losses, "compute_policy_loss", _out_of_memory),
}
