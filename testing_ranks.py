"""N ranks for the tests: processes joined by gloo that run functions of a test file.

    ranks = Ranks(2)
    ranks(function, *args) -> [what function(world, *args) returned on rank 0, on rank 1]

The processes stay for the next call, so what costs seconds (an engine) is built once; `world` is
what the product's own init_distributed gave. If a rank raises, its traceback is the test's failure;
if one does not answer in time, the test fails; in both cases all ranks are ended and the next call
starts new ones. A failure can thus neither hang the tests nor spoil the next.

They are forked from a server that has imported the heavy modules once: a rank starts in 0.1 s.
`launch` runs the whole program in fresh ranks, the way torchrun does.
"""

import contextlib
import gc
import json
import multiprocessing
import os
import pickle
import random
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
PRELOADED = ["ppo_fsdp"]
# What an engine, and the program around it, import when they start: 3 s a rank.
WITH_VLLM = [
    "vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "vllm.v1.spec_decode.utils",
    "vllm.model_executor.layers.quantization.online.base", "vllm.entrypoints.launchers.cli_args",
    "torch.distributed.tensor.experimental._func_map", "reasoning_gym.factory",
]


def preload(*modules: str) -> None:
    """Before the first rank starts: modules that the server imports for all of them."""
    more = WITH_VLLM if "vllm" in modules else []
    PRELOADED.extend(name for name in [*modules, *more] if name not in PRELOADED)
    FORKS.set_forkserver_preload(PRELOADED)


REWARD = """
def digits(prompt, response, answer):
    return sum(c.isdigit() for c in response) / 8
"""


def write_task(folder: Path, questions: int, more_rewards: str = "") -> None:
    """prompts.jsonl: so many questions of 5 to 40 letters, the same ones each time; reward.py: the
    share of digits in an answer, which a random policy can learn in seconds, and `more_rewards`."""
    draw = random.Random(0)
    rows = [{"question": "".join(draw.choices("abcdefgh", k=draw.randint(5, 40))), "answer": "5"}
            for _ in range(questions)]
    (folder / "reward.py").write_text(REWARD + more_rewards)
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))


class Ranks:
    """`size` processes that answer calls until `close`."""

    def __init__(self, size: int, timeout: float = 120):
        self.size = size
        self.timeout = timeout
        self.processes = []
        self.pipes = []

    def send(self, function, *args) -> None:
        """Have the ranks begin with it, without waiting."""
        if not self.processes:
            self._start()
        request = pickle.dumps((function, args))
        for pipe in self.pipes:
            pipe.send_bytes(request)

    def __call__(self, function, *args, timeout: float | None = None) -> list:
        self.send(function, *args)
        deadline = time.monotonic() + (timeout or self.timeout)
        answers: dict[int, object] = {}
        while len(answers) < self.size:
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                missing = sorted(set(range(self.size)) - set(answers))
                raise AssertionError(f"{function.__name__}: no answer from ranks {missing} in time")
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    answers[rank], failure = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    failure = "its process died\n"
                if failure:
                    self.close()
                    raise AssertionError(f"{function.__name__} failed on rank {rank}:\n{failure}")
        return [answers[rank] for rank in range(self.size)]

    def _start(self) -> None:
        port = free_port()
        for rank in range(self.size):
            ours, theirs = FORKS.Pipe()
            args = (theirs, rank, self.size, port)
            process = FORKS.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _become(rank: int, size: int, port: int) -> None:
    """The environment that torchrun gives to a rank."""
    gc.freeze()  # what the server imported is no garbage: not to be searched by every collection
    os.environ |= dict(RANK=str(rank), WORLD_SIZE=str(size))
    os.environ |= dict(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def _serve(pipe, rank: int, size: int, port: int) -> None:
    import ppo_fsdp

    _become(rank, size, port)
    world = ppo_fsdp.init_distributed()
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            os._exit(0)  # the tests are over
        result, failure = None, ""
        try:
            result = pickle.dumps(function(world, *args))
        except BaseException:
            failure = traceback.format_exc()
        answer = pickle.loads(result) if not failure else None
        pipe.send_bytes(pickle.dumps((answer, failure)))


@dataclass
class Ended:
    """A program that ran: exit status and output of each rank, seconds until the last was gone."""

    status: list[int]
    output: list[str]
    seconds: float


def launch(
    arguments: list[str], size: int, folder: Path, timeout: float = 120, late: float = 0
) -> Ended:
    """`ppo_fsdp.main()` with these arguments on `size` fresh ranks; as torchrun does, the first
    rank that fails takes the others along. Rank 0 starts `late` seconds after the others. A program
    that is not over in time fails the test."""
    start, port = time.monotonic(), free_port()
    files = [folder / f"rank{rank}.txt" for rank in range(size)]
    processes = []
    for rank, file in enumerate(files):
        args = (arguments, rank, size, port, str(file), 0 if rank else late)
        processes.append(FORKS.Process(target=_main, args=args, daemon=True))
        processes[-1].start()
    running = list(processes)
    while running:
        left = start + timeout - time.monotonic()
        wait([process.sentinel for process in running], max(0.0, left))
        running = [process for process in running if process.is_alive()]
        if left <= 0 or any(process.exitcode for process in processes):
            for process in running:
                process.terminate()
                process.join(20)
                process.kill()
                process.join()
            running = []
        assert left > 0, f"not over after {timeout} s:\n" + "\n".join(f.read_text() for f in files)
    status = [process.exitcode for process in processes]
    return Ended(status, [file.read_text() for file in files], time.monotonic() - start)


def _main(arguments, rank, size, port, file, late) -> None:
    output = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    _become(rank, size, port)
    import ppo_fsdp

    time.sleep(late)
    sys.argv = ["ppo_fsdp.py", *arguments]
    ppo_fsdp.main()


@contextlib.contextmanager
def replaced(owner, name: str, value):
    """owner.name is `value` inside: how a test plants a fault."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield original
    finally:
        setattr(owner, name, original)
