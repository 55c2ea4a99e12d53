"""The lesson of forks/: a diff that is not run rots.

Run alone:  python -m pytest -q test_forks.py     (about 15 seconds, CPU, 2 gloo ranks)
"""

import importlib
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from testing_ranks import preload

preload("ppo_fsdp")
HERE = Path(__file__).parent
FILES = [file.stem for file in HERE.glob("*.py") if not file.stem.startswith("test")]


def updated(world, folder):
    """One update of actor and critic by the product's own functions, as they are in `folder`."""
    sys.path.insert(0, str(folder))
    for name in FILES:
        sys.modules.pop(name, None)
    data, models, ppo_fsdp, resharding, config = map(
        importlib.import_module, ("data", "models", "ppo_fsdp", "resharding", "config"))
    assert resharding.__file__ == str(folder / "resharding.py")
    caps = dict.fromkeys(["ppo_max_token_len_per_gpu", "critic_ppo_max_token_len_per_gpu",
                          "log_prob_max_token_len_per_gpu"], 40)
    c = config.Config(**config.PRESETS["tiny"] | caps | dict(
        dtype="float32", gradient_checkpointing="none", train_batch_size=6, ppo_mini_batch_size=3,
        lr=1e-2, max_grad_norm=0.1))
    path = models.resolve_model("tiny", HERE / ".cache")
    actor, critic, reference = ppo_fsdp.build_networks(c, path, world, 1)
    draw, rollouts = torch.Generator().manual_seed(0), []
    for i in range(6):
        ids = torch.randint(3, 84, (9 + 3 * i,), generator=draw).tolist()
        prompt = data.Prompt(i, ids[: 4 + i], "", "")
        rollouts.append(data.Rollout(prompt, ids[4 + i :], "length", score=0.0))
    batch = data.collate(rollouts)
    run = types.SimpleNamespace(config=c, world=world, actor=actor, critic=critic)
    metrics = ppo_fsdp.Metrics(world)
    old, ref, values = [
        ppo_fsdp.forward_all(network, batch, run)[0]
        for network in (actor.model, reference, critic.model)]
    noise = torch.randn(old.shape, generator=draw)
    experience = ppo_fsdp.Experience(
        batch.response_mask, old + 0.1 * noise, ref, values, noise, values + noise, None)
    ppo_fsdp.ppo_update(batch, experience, run, 0, metrics)
    numbers = metrics.reduce(ppo_fsdp.all_reduce_sum)
    names = "actor/pg_loss", "critic/vf_loss", "actor/grad_norm", "critic/grad_norm"
    found = {name: numbers[name] for name in names} | {"reference": ref}
    for kind, learner in (("actor", actor), ("critic", critic)):
        for name, weight in resharding.full_params(learner.model):
            found[f"{kind} {name}"] = weight.clone()
    resharding.export_hf(actor.model, folder / "exported", dtype=torch.float32)
    whole = models.build_actor(str(folder / "exported")).hf.named_parameters()
    found |= {f"exported {name}": weight.detach() for name, weight in whole}
    return type(actor.model).__name__, found, sentences(resharding, actor)


def sentences(resharding, actor):
    """What is said of what this way of sharding cannot do; nothing where it can."""
    said = []
    for work in (lambda: resharding.offload(actor.model),
                 lambda: resharding._state_of("actor", actor.model, actor.optimizer)):
        try:
            work()
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.fixture
def folder_of(tmp_path):
    """folder_of(patch) -> a folder with the flat files, and the patch applied; "": none."""

    def make(patch):
        folder = tmp_path / (patch or "as it is")
        folder.mkdir()
        for name in FILES:
            shutil.copy(HERE / f"{name}.py", folder)
        if patch:
            subprocess.run(["git", "apply", HERE / "forks" / patch], cwd=folder, check=True)
        return folder

    return make


def test_fsdp1_makes_the_same_update(ranks, folder_of):
    """Two optimizer steps of actor and critic, several micro-batches each, clipped: losses, norms,
    weights and the exported folder to 1e-5. Averaged gradients would have half the norm. What the
    fork cannot do is a sentence."""
    expected = ranks[2](updated, folder_of(""))
    ranks[2].close()
    found = ranks[2](updated, folder_of("fsdp1.patch"))
    for (kind, ours, said), (base, theirs, nothing) in zip(found, expected):
        assert (kind, base) == ("Flat", "FSDPActor") and not nothing
        assert ["param_offload" in said[0], "no checkpoints" in said[1]] == [True, True]
        assert ours.keys() == theirs.keys()
        for name, number in theirs.items():
            torch.testing.assert_close(torch.as_tensor(ours[name]), torch.as_tensor(number),
                                       rtol=1e-5, atol=1e-5, msg=name)


def test_every_fork_is_in_the_table():
    text = (HERE / "forks" / "README.md").read_text()
    for patch in (HERE / "forks").glob("*.patch"):
        assert f"| `{patch.name}` |" in text
