"""Mirrors of metrics.jsonl: TensorBoard, Weights & Biases, or whatever has their interface.

    --mirrors tensorboard wandb my_mirror.py:open_mirror

The file is the truth. A mirror gets the same numbers of each step; if it fails later, the run goes
on without it. A mirror of your own is a function(folder: Path, settings: dict) that returns an
object with log(numbers: dict[str, float], step: int) and finish(), as wandb.init does.
"""

import importlib
import os
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

STEP = "training/global_step"


class Mirrors:
    """The mirrors of one run. On the rank that writes metrics.jsonl; the others have none."""

    def __init__(self, names: Sequence[str] = ()):
        """Find and import them, which is early: what is absent is a ValueError of one sentence."""
        self.openers = {name: _opener(name) for name in names}
        self.opened: dict[str, Any] = {}

    def open(self, folder: Path, settings: dict[str, Any]) -> None:
        for name, opener in self.openers.items():
            try:
                self.opened[name] = opener(folder, settings)
            except Exception as error:
                raise ValueError(f"mirror {name} cannot be opened: {_reason(error)}") from error

    def log(self, record: dict[str, float]) -> None:
        numbers = {name: value for name, value in record.items() if name != STEP}
        self._tell(lambda mirror: mirror.log(numbers, step=record[STEP]))

    def finish(self) -> None:
        self._tell(lambda mirror: mirror.finish())

    def _tell(self, call: Callable[[Any], None]) -> None:
        for name, mirror in list(self.opened.items()):
            try:
                call(mirror)
            except Exception as error:
                del self.opened[name]
                tqdm.write(f"warning: mirror {name} failed and gets no more: {_reason(error)}; "
                           "metrics.jsonl goes on")


class TensorBoard:
    """Event files in the run's folder: tensorboard --logdir runs"""

    def __init__(self, folder: Path, settings: dict[str, Any]):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(folder)
        self.writer.add_text("settings", "\n\n".join(f"{k} = {v}" for k, v in settings.items()))

    def log(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()  # a run that is killed has shown all it wrote

    def finish(self) -> None:
        self.writer.close()


def open_wandb(folder: Path, settings: dict[str, Any]) -> Any:
    import wandb

    return wandb.init(project="ppo_fsdp", name=folder.name, dir=str(folder), config=settings)


def _opener(name: str) -> Callable[[Path, dict[str, Any]], Any]:
    known = dict(tensorboard=TensorBoard, wandb=open_wandb)
    if name in known:
        try:
            importlib.import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
        except ImportError as error:
            raise ValueError(
                f"mirror {name} cannot be imported ({_reason(error)}): pip install {name}, or "
                "leave it out of --mirrors; metrics.jsonl is written in any case"
            ) from error
        return known[name]
    path, _, function = name.rpartition(":")
    if not os.path.isfile(path):
        raise ValueError(f"mirror {name!r} is none of {', '.join(known)}, path.py:function")
    found = runpy.run_path(path, run_name="user_mirror").get(function)
    if not callable(found):
        raise ValueError(f"mirror {name}: {path} has no function {function!r}")
    return found


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
