"""What each option is worth: seconds and peak memory, one setting after the other in one run.

    python tools/knobs.py update                            one GPU: options of the networks
    torchrun --nproc_per_node 2 tools/knobs.py ranks        the same, of several ranks
    python tools/knobs.py engine                            options of vLLM, a process each

`update` and `ranks`: one pass over a batch of drawn answers (256 prompts of 512 tokens, answers
uniform between 512 and 1,024, mini-batches of 64) by the program's own functions, no engine on the
card: the two forward-only passes and the two updates, median of 2 after 1. `engine`: the same
prompts with 512 answer tokens each, by rollout.generate, weights as vLLM draws them.
--shape tiny runs on any machine and says that it runs, nothing else.
"""

import argparse
import contextlib
import faulthandler
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

# Each line: a name and what differs from the first.
UPDATE = {
    "base: nothing recomputed, compiled, packs of 32k": "",
    "gradient_checkpointing mlp": "--gradient-checkpointing mlp",
    "gradient_checkpointing full": "--gradient-checkpointing full",
    "ppo_max_token_len_per_gpu 8192": "--ppo-max-token-len-per-gpu 8192",
    "use_dynamic_bsz off, 8 sequences": "--no-use-dynamic-bsz --ppo-micro-batch-size-per-gpu 8",
    "param_offload and optimizer_offload": "--param-offload --optimizer-offload",
    "use_torch_compile off": "--no-use-torch-compile",
    "offload_policy": "--offload-policy",
    "enable_activation_offload": "--enable-activation-offload",
}
RANKS = {
    "base: FSDP2 over all ranks": "",
    "forward_prefetch 1": "--forward-prefetch 1",
    "forward_prefetch 2, backward_prefetch 2": "--forward-prefetch 2 --backward-prefetch 2",
    "reshard_after_forward off": "--no-reshard-after-forward",
    "fsdp_size 1 (replicated)": "--fsdp-size 1",
    "ulysses_sequence_parallel_size 2": "--ulysses-sequence-parallel-size 2",
}
ENGINE = {
    "base": {},
    "cudagraph_capture_sizes 1, 2, 4": dict(cudagraph_capture_sizes=(1, 2, 4)),
    "max_num_batched_tokens 2048": dict(max_num_batched_tokens=2048),
    "max_num_batched_tokens 32768": dict(max_num_batched_tokens=32768),
    "gpu_memory_utilization 0.2": dict(gpu_memory_utilization=0.2),
    "kv_cache_gib 1": dict(kv_cache_gib=1.0),
    "log-probs of every answer": dict(log_prob_fraction=1.0),
}


def drawn_batch(prompts: int, length: int, shortest: int, longest: int):
    import data

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(shortest, longest + 1, (prompts,), generator=generator).tolist()
    rollouts = []
    for index, answer in enumerate(lengths):
        ids = torch.randint(10, 60, (length + answer,), generator=generator).tolist()
        prompt = data.Prompt(index, ids[:length], "1", "")
        rollouts.append(data.Rollout(prompt, ids[length:], "length", score=float(index % 2)))
    return data.collate(rollouts)


def update(names: dict[str, str], shape: str, out: Path, share: slice, prompts: int) -> None:
    """All settings in this process."""
    import bench
    import models
    import ppo_fsdp
    import shapes

    folder = Path(tempfile.mkdtemp())
    if shape == "tiny":
        path, sizes, mini = models.resolve_model("tiny", HERE.parent / ".cache"), (16, 24, 8, 24), 8
    else:
        shapes.write_shape(shape, folder, 1, 16)
        path, sizes, mini = str(folder), (prompts, 512, 512, 1024), prompts // 4
    world, batch = ppo_fsdp.init_distributed(), drawn_batch(*sizes)
    if torch.cuda.is_available():
        torch._dynamo.config.recompile_limit = 64
        models.build_actor = bench.drawn_on_the_gpu(models.build_actor)
        models.build_critic = bench.drawn_on_the_gpu(models.build_critic)
    options = ["--model-path", path, "--random-weights", "--train-batch-size", str(sizes[0]),
               "--ppo-mini-batch-size", str(mini), "--ppo-max-token-len-per-gpu", "32768",
               "--max-prompt-length", str(sizes[1]), "--max-response-length", str(sizes[3]),
               "--entropy-coeff", "0", "--gradient-checkpointing", "none"]
    found = {}
    for name, given in list(names.items())[share]:
        faulthandler.dump_traceback_later(100)  # where it hangs, if it does
        try:
            found[name] = one_update([*options, *given.split()], batch, world)
        except (RuntimeError, ValueError, SystemExit) as error:
            found[name] = {"error": str(error)[:400]}
        if world.is_main:
            print(name, json.dumps(found[name]), flush=True)
            out.write_text(json.dumps(found, indent=1))
        gc.collect()  # FSDP2's modules are cycles: they would stay for the next setting's peak
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def one_update(options: list[str], batch, world) -> dict:
    import bench
    import data
    import ppo_fsdp
    import resharding
    from config import parse_config

    config = parse_config(options, False)
    config.dtype = "bfloat16" if world.device.type == "cuda" else "float32"
    networks = ppo_fsdp.build_networks(config, config.model_path, world, 10)
    run = types.SimpleNamespace(config=config, world=world, **dict(
        zip(("actor", "critic", "reference"), networks)))
    mask = batch.response_mask.to(world.device)
    zeros = torch.zeros(mask.shape, device=mask.device)
    exp = ppo_fsdp.Experience(mask, zeros - 5, None, zeros, torch.randn_like(zeros), zeros, None)
    mini = data.mini_batches(len(batch.lengths), config.ppo_mini_batch_size, 1, 0, 0)

    def each(step, learner):
        metrics = ppo_fsdp.Metrics(world)
        for rows in mini:
            with resharding.on_device(learner.model):  # as in ppo_update
                step(batch, exp, rows, run, metrics)

    works = {
        "log-probs": lambda: ppo_fsdp.forward_all(run.actor.model, batch, run, temperature=1.0,
                                                  return_entropy=True),
        "values": lambda: ppo_fsdp.forward_all(run.critic.model, batch, run),
        "critic update": lambda: each(ppo_fsdp.update_critic, run.critic),
        "actor update": lambda: each(ppo_fsdp.update_actor, run.actor),
    }
    found = {}
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    for name, work in works.items():
        found[name] = bench.seconds(work, 2, 1)
    found["all"] = sum(found.values())
    if torch.cuda.is_available():
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return found


def engine(name: str, shape: str) -> dict:
    """One setting, in its own process."""
    import bench
    import models
    import ppo_fsdp
    import rollout
    import shapes

    folder = Path(tempfile.mkdtemp())
    if shape == "tiny":
        path, sizes = models.resolve_model("tiny", HERE.parent / ".cache"), (8, 24, 16)
    else:
        shapes.write_shape(shape, folder, 1, 16)
        path, sizes = str(folder), (256, 512, 512)
    world, settings = ppo_fsdp.init_distributed(), dict(ENGINE[name])
    fraction = settings.pop("log_prob_fraction", 0.0)
    batch = drawn_batch(*sizes[:2], 1, 1)
    prompts = [ppo_fsdp.data.Prompt(i, row.tolist(), "1", "") for i, row in enumerate(batch.prompts)]
    start = time.perf_counter()
    sampler = rollout.build_engine(
        path, [], dtype=torch.bfloat16 if torch.cuda.is_available() else torch.float32,
        max_model_len=sizes[1] + sizes[2], free_cache_engine=False, rank=world.rank,
        world_size=world.size, **settings)
    started = time.perf_counter() - start
    sampler.has_weights = True  # those that vLLM drew

    def generate():
        rollout.generate(sampler, prompts, max_tokens=sizes[2], seed=0, step=1, ignore_eos=True,
                         log_prob_fraction=fraction)
        sampler.reset_cache()

    took = bench.seconds(generate, 3, 1)
    return {"generate_s": took, "tokens_s": sizes[0] * sizes[2] / took, "start_s": started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("update", "ranks", "engine"))
    parser.add_argument("--shape", default="0.5b")
    parser.add_argument("--out", type=Path, default=HERE.parent / "runs" / "bench" / "knobs.json")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--share", default="0:99", help="which settings, a slice")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    share = slice(*(int(place) for place in given.share.split(":")))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    if given.what != "engine":
        update(dict(update=UPDATE, ranks=RANKS)[given.what], given.shape, given.out, share,
               given.prompts)
    elif given.one:
        given.out.write_text(json.dumps(engine(given.one, given.shape)))
    else:
        found = {}
        for name in list(ENGINE)[share]:
            with tempfile.TemporaryDirectory() as folder, contextlib.suppress(
                subprocess.TimeoutExpired
            ):
                file = Path(folder) / "found.json"
                command = [sys.executable, __file__, "engine", "--shape", given.shape, "--one", name]
                done = subprocess.run([*command, "--out", str(file)], timeout=240, text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                found[name] = {"error": done.stdout[-400:]}
                if file.exists():
                    found[name] = json.loads(file.read_text())
            print(name, json.dumps(found.get(name, "too slow")), flush=True)
            given.out.write_text(json.dumps(found, indent=1))
    sys.stdout.flush()
    os._exit(0)  # no teardown of the ranks or of vLLM


if __name__ == "__main__":
    main()
