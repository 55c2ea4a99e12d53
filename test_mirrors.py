"""The lessons of mirrors.py: the same numbers elsewhere, and never at the price of the run.

Run alone:  python -m pytest -q test_mirrors.py     (seconds)
"""

import importlib.util
import json
import sys
import types
from unittest import mock

import pytest
import torch

import mirrors
import ppo_fsdp

OWN = """
import json

class Mirror:
    def __init__(self, folder, settings):
        self.file, self.calls = folder / "own.jsonl", 0
        self.write(settings)

    def write(self, thing):
        with open(self.file, "a") as lines:
            lines.write(json.dumps(thing) + "\\n")

    def log(self, numbers, step):
        self.calls += 1
        if self.calls == 2 and self.file.parent.name == "breaks":
            raise ConnectionError("the service\\nis gone")
        self.write([step, numbers])

    def finish(self):
        self.write("finished")

def refuses(folder, settings):
    raise PermissionError("no key")
"""
RECORDS = [
    {"training/global_step": step, "critic/score/mean": step / 4, "val/nan": float("nan")}
    for step in range(3)
]


@pytest.fixture
def own(tmp_path):
    """The path of a mirror of the user's."""
    (tmp_path / "mine.py").write_text(OWN)
    return f"{tmp_path / 'mine.py'}"


def reported(folder, names):
    """Three steps of `report`, the program's phase 12; what metrics.jsonl holds then."""
    folder.mkdir()
    world = ppo_fsdp.World(0, 1, torch.device("cpu"))
    opened = mirrors.Mirrors(names)
    opened.open(folder, dict(lr=0.5))
    run = types.SimpleNamespace(world=world, folder=folder, mirrors=opened)
    for record in RECORDS:
        metrics = ppo_fsdp.Metrics(world)
        metrics.known |= {k: v for k, v in record.items() if "step" not in k}
        with mock.patch.object(ppo_fsdp, "all_reduce_sum", lambda x: x):  # one rank
            ppo_fsdp.report(record["training/global_step"], run, metrics)
    opened.finish()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_mirror_of_ones_own_gets_the_settings_and_the_numbers_of_the_file(tmp_path, own):
    """path.py:function: settings once, then step and numbers as metrics.jsonl has them, then the
    end."""
    records = reported(tmp_path / "run", [f"{own}:Mirror"])
    lines = (tmp_path / "run" / "own.jsonl").read_text().splitlines()
    first, *logged, last = map(json.loads, lines)
    assert first == {"lr": 0.5} and last == "finished"
    again = [{"training/global_step": step} | numbers for step, numbers in logged]
    assert str(again) == str(records) == str(RECORDS)  # NaN is not equal to itself


def test_a_mirror_that_fails_is_said_once_and_the_run_goes_on(tmp_path, own, capsys):
    """It fails at its second step: the file has all three, another mirror too, the console has one
    line with the reason."""
    other = types.SimpleNamespace(log=mock.Mock(), finish=mock.Mock())
    with mock.patch.dict(sys.modules, wandb=types.SimpleNamespace(init=lambda **_: other)):
        records = reported(tmp_path / "breaks", [f"{own}:Mirror", "wandb"])
    assert len(records) == other.log.call_count == 3 and other.finish.call_count == 1
    assert len((tmp_path / "breaks" / "own.jsonl").read_text().splitlines()) == 2
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert "mine.py:Mirror" in line and "ConnectionError: the service is gone" in line


def test_wandb_is_asked_for_a_run_of_the_folders_name(tmp_path):
    """wandb.init gets name, folder and settings; what it returns is the mirror."""
    run, asked = types.SimpleNamespace(log=mock.Mock(), finish=mock.Mock()), mock.Mock()
    asked.return_value = run
    with mock.patch.dict(sys.modules, wandb=types.SimpleNamespace(init=asked)):
        reported(tmp_path / "mine", ["wandb"])
    asked.assert_called_once_with(
        project="ppo_fsdp", name="mine", dir=str(tmp_path / "mine"), config={"lr": 0.5}
    )
    assert [call.kwargs for call in run.log.call_args_list] == [{"step": i} for i in range(3)]
    assert run.log.call_args_list[1].args[0]["critic/score/mean"] == 0.25


class Writer:
    """Of torch.utils.tensorboard.SummaryWriter what is used, in the place of an absent package."""

    def __init__(self, folder):
        self.file = open(folder / "events.out.jsonl", "w")
        self.scalars = []

    def add_text(self, tag, text):
        assert tag == "settings" and text == "lr = 0.5"

    def add_scalar(self, tag, value, step):
        self.scalars.append((tag, value, step))

    def flush(self):
        json.dump(self.scalars, self.file)
        self.file.write("\n")
        self.scalars = []

    def close(self):
        self.file.close()


def scalars_of(folder):
    """{(name, step): value} from TensorBoard's own files, or those of `Writer`."""
    if importlib.util.find_spec("tensorboard"):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder))
        events.Reload()
        return {(tag, event.step): event.value
                for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}
    lines = (folder / "events.out.jsonl").read_text().splitlines()
    return {(tag, step): value for line in lines for tag, value, step in json.loads(line)}


def test_tensorboard_gets_a_scalar_for_each_number(tmp_path):
    """With the real package where it is installed, read back with its own reader."""
    fake = {}
    if not importlib.util.find_spec("tensorboard"):
        fake = {"torch.utils.tensorboard": types.SimpleNamespace(SummaryWriter=Writer)}
    with mock.patch.dict(sys.modules, fake):
        reported(tmp_path / "run", ["tensorboard"])
    found = scalars_of(tmp_path / "run")
    assert len(found) == 6
    assert [found["critic/score/mean", step] for step in range(3)] == [0, 0.25, 0.5]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_an_absent_package_is_a_sentence(name):
    """Before anything else: what is missing, and what to do."""
    module = "torch.utils.tensorboard" if name == "tensorboard" else name
    with mock.patch.dict(sys.modules, {module: None}), pytest.raises(ValueError) as error:
        mirrors.Mirrors([name])
    text = str(error.value)
    assert f"mirror {name} cannot be imported" in text and f"pip install {name}" in text
    assert "\n" not in text


def test_a_mirror_that_is_none_is_a_sentence(tmp_path, own):
    """No such file, no such function, no known name; one that cannot be opened, with its reason."""
    for name, words in (
        ("absent.py:f", ["absent.py:f", "tensorboard, wandb, path.py:function"]),
        ("mlflow", ["mlflow"]), (f"{own}:g", ["no function 'g'"]),
    ):
        with pytest.raises(ValueError) as error:
            mirrors.Mirrors([name])
        assert all(word in str(error.value) for word in words)
    with pytest.raises(ValueError, match="refuses cannot be opened: PermissionError: no key"):
        mirrors.Mirrors([f"{own}:refuses"]).open(tmp_path, {})
