"""Plants every fault of failures.py in a run on two ranks, sees how it ends, and resumes it.

    python tools/drills.py                 all, some minutes; writes the table of docs/operating.md
    python tools/drills.py full-disk ...   these; prints their rows

The runs are of the tiny model with a real vLLM on a CPU: four steps, each saved. The fault comes in
step 3 on rank 1. A run that it has ended is then resumed without the fault, and its numbers are
held against those of a run that had none. (The checkpoint that is cut is the last.)

Where a rank is killed it is torchrun that must see it. The others start by testing_ranks.launch,
which ends ranks as torchrun does and spares each of them a minute of imports.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"  # of all ranks: other threads give other last digits

import failures  # noqa: E402
import replay  # noqa: E402
from metrics import read_lines  # noqa: E402
from testing_ranks import launch, preload  # noqa: E402

PAGE = ROOT / "docs" / "operating.md"
BEGIN, END = "<!-- drills: written by tools/drills.py -->\n", "<!-- drills: end -->\n"
STEPS, FAULT = 4, 3
GOES_ON = ("hanging-grader", "slow-rank")
KILLS = ("dead-rank", "kill-during-save")
# what a rank or torchrun says of the cause
ALARM = rf"alarm, step {FAULT}: (?:a rank|the reward)"
SAID = re.compile(rf"^(?:error|{ALARM}|passed over).*|Signal 9.*", re.MULTILINE)
REWARD = "def digits(prompt, response, answer):\n    return sum(map(str.isdigit, response)) / 8\n"


def arguments_of(runs: Path, name: str, *more: str) -> list[str]:
    return [
        "--preset", "tiny", "--runs-dir", str(runs), "--run-name", name, "--no-val-before-train",
        "--total-training-steps", str(STEPS), "--train-batch-size", "16", "--val-max-samples", "4",
        "--test-freq", "0", "--sample-freq", "0", "--save-freq", "1", "--max-ckpt-to-keep", "0",
        "--check-published-freq", "1", "--reward-timeout", "2",
        "--reward", f"{runs / 'reward.py'}:digits", *more,
    ]


def torchrun(arguments: list[str], runs: Path) -> tuple[int, str, float]:
    """(exit status, output, when the last rank was gone)"""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               str(ROOT / "ppo_fsdp.py"), *arguments]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    output = runs / "output.txt"
    with open(output, "w") as file:
        agent = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
    ranks: set[psutil.Process] = set()
    while agent.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            ranks |= set(psutil.Process(agent.pid).children(recursive=True))
        time.sleep(0.1)
    psutil.wait_procs(ranks, timeout=60)
    return agent.returncode, output.read_text(), time.time()


def forked(arguments: list[str], runs: Path) -> tuple[int, str, float]:
    """The same, without torchrun."""
    done = launch(arguments, 2, runs, timeout=600)
    return max(map(abs, done.status)), "\n".join(done.output), time.time()


def drill(kind: str, runs: Path, plain: list[dict]) -> str:
    """The row of one fault."""
    folder = runs / kind
    step = STEPS if kind == "truncated-checkpoint" else FAULT  # the newest is what matters
    inject = ["--inject", f"{kind}@{step}"]
    start = torchrun if kind in KILLS else forked
    status, output, gone = start(arguments_of(runs, kind, *inject), runs)
    seconds = gone - (folder / "metrics.jsonl").stat().st_mtime  # the last line before the fault
    said = SAID.findall(output)
    ended = f"{seconds:.0f}" if status else "goes on"
    kept = f"all {len(read_lines(folder / 'metrics.jsonl'))} steps"
    if kind not in GOES_ON:
        status, output, _ = forked(arguments_of(runs, kind, "--resume", "latest"), runs)
        said += SAID.findall(output)
        first = int(re.search(r"resuming from .*step_(\d+),", output)[1])
        records = read_lines(folder / "metrics.jsonl")
        differ = [x for pair in zip(plain, records, strict=True) for x in replay.differing(*pair)]
        assert status == 0 and not differ, (kind, output, differ[:3])
        kept = f"checkpoints 1 to {first}; resumed, all that followed was, digit by digit, "
        kept += "as without it"
    text = said[0].replace(str(runs), "runs").replace("|", "\\|") if said else "nothing"
    text = re.sub(r"\s+", " ", text).strip()
    text = text if len(text) <= 220 else text[:220].rpartition(" ")[0] + " ..."
    return f"| `{kind}` | `{text}` | {ended} | {kept} |"


def main(kinds: list[str]) -> None:
    preload("ppo_fsdp", "vllm", "vllm.v1.engine.llm_engine", "vllm.model_executor.models.llama")
    with tempfile.TemporaryDirectory() as scratch:
        runs, rows = Path(scratch), []
        (runs / "reward.py").write_text(REWARD)
        status, output, _ = forked(arguments_of(runs, "plain"), runs)
        assert status == 0, output
        plain = read_lines(runs / "plain" / "metrics.jsonl")
        for kind in kinds or failures.FAULTS:
            rows.append(drill(kind, runs, plain))
            print(rows[-1], flush=True)
    if not kinds:
        head = "| `--inject` | what is said | seconds until all are gone | what is kept |\n"
        table = head + "|---|---|---|---|\n" + "".join(f"{row}\n" for row in rows)
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + table + END + rest.partition(END)[2])


if __name__ == "__main__":
    main(sys.argv[1:])
