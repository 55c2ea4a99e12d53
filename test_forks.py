"""The lesson of forks/: a diff that is not run rots.

Run alone:  python -m pytest -q test_forks.py     (about 15 seconds, CPU, 2 gloo ranks)
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from testing_ranks import free_port

HERE = Path(__file__).parent
# One update of actor and critic by the product's own functions; prints what came out of it.
PROGRAM = '''
import json, sys, types
import torch
import data, models, ppo_fsdp, resharding
from config import PRESETS, Config
from metrics import Metrics
from ppo_fsdp import Experience

world = ppo_fsdp.init_distributed()
config = Config(**PRESETS["tiny"] | dict(
    dtype="float32", gradient_checkpointing="none", train_batch_size=6, ppo_mini_batch_size=3,
    ppo_max_token_len_per_gpu=40, critic_ppo_max_token_len_per_gpu=40,
    log_prob_max_token_len_per_gpu=40, lr=1e-2, max_grad_norm=0.1))
folder = models.resolve_model("tiny", ppo_fsdp.Path(".cache"))
actor, critic, reference = ppo_fsdp.build_networks(config, folder, world, 1)
draw = torch.Generator().manual_seed(0)
rollouts = []
for i in range(6):
    ids = torch.randint(3, 84, (9 + 3 * i,), generator=draw).tolist()
    prompt = data.Prompt(i, ids[: 4 + i], "", "")
    rollouts.append(data.Rollout(prompt, ids[4 + i :], "length", score=0.0))
batch = data.collate(rollouts)
run = types.SimpleNamespace(config=config, world=world, actor=actor, critic=critic)
metrics = Metrics(world)
(old,) = ppo_fsdp.forward_all(actor.model, batch, run)
(ref,) = ppo_fsdp.forward_all(reference, batch, run)
(values,) = ppo_fsdp.forward_all(critic.model, batch, run)
noise = torch.randn(old.shape, generator=draw)
experience = Experience(batch.response_mask, old + 0.1 * noise, ref, values, noise, values + noise,
                        None)
ppo_fsdp.ppo_update(batch, experience, run, 0, metrics)
names = "actor/pg_loss", "critic/vf_loss", "actor/grad_norm", "critic/grad_norm"
numbers = metrics.reduce(ppo_fsdp.all_reduce_sum)
found = {name: numbers[name] for name in names} | {"ref": ref.sum().item()}
for kind, learner in (("actor", actor), ("critic", critic)):
    for name, weight in resharding.full_params(learner.model):
        found[f"{kind} {name}"] = weight.flatten().tolist()
resharding.export_hf(actor.model, "exported", dtype=torch.float32)
if world.is_main:
    whole = models.build_actor("exported").hf.named_parameters()
    found["exported"] = {name: weight.sum().item() for name, weight in whole}
    found["kind"] = type(actor.model).__name__
    print(json.dumps(found))
'''


def updated(folder):
    """What PROGRAM prints in `folder`, on two ranks."""
    (folder / "program.py").write_text(PROGRAM)
    port, processes = free_port(), []
    for rank in range(2):
        where = dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                     MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        processes.append(subprocess.Popen(
            [sys.executable, "program.py"], cwd=folder, env=os.environ | where, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    answers = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], answers
    return json.loads(answers[0][0].splitlines()[-1])


@pytest.fixture(scope="module")
def copy_of(tmp_path_factory):
    """copy_of(patch) -> a folder with the flat files, and the patch applied; "": none."""

    def make(patch):
        folder = tmp_path_factory.mktemp("fork")
        for file in HERE.glob("*.py"):
            shutil.copy(file, folder)
        (folder / ".cache").symlink_to((HERE / ".cache").resolve())
        if patch:
            subprocess.run(["git", "apply", HERE / "forks" / patch], cwd=folder, check=True)
        return folder

    return make


def test_fsdp1_makes_the_same_update(copy_of):
    """Two optimizer steps of actor and critic, several micro-batches each, clipped: losses, norms
    and weights to 1e-5. Averaged gradients would have half the norm."""
    expected, found = updated(copy_of("")), updated(copy_of("fsdp1.patch"))
    assert (expected.pop("kind"), found.pop("kind")) == ("FSDPActor", "Flat")
    assert found.keys() == expected.keys()
    assert found.pop("exported") == pytest.approx(expected.pop("exported"), abs=1e-3)
    for name, numbers in expected.items():
        assert found[name] == pytest.approx(numbers, rel=1e-5, abs=1e-5), name


def test_every_fork_is_in_the_table():
    text = (HERE / "forks" / "README.md").read_text()
    for patch in (HERE / "forks").glob("*.patch"):
        assert f"| `{patch.name}` |" in text
