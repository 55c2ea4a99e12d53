"""Several nodes: two torchrun agents, each in a network namespace of its own, joined by one cable.

Run alone:  make test-nodes     (Linux, CPU, real vLLM engines; `make test` leaves it out)

A namespace has interfaces, addresses and a loopback of its own: what holds between two of them
holds between two machines that share a disk. Where namespaces are not allowed the two agents share
the loopback (NODES=loopback asks for that); ranks of two nodes then still differ in LOCAL_RANK,
LOCAL_WORLD_SIZE and agent, but any rank could reach any other by 127.0.0.1.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from testing_ranks import free_port, launch, preload

preload("ppo_fsdp", "vllm", "vllm.v1.engine.llm_engine", "vllm.model_executor.models.llama")
HERE = Path(__file__).parent
STEPS = 8
KILLED_AFTER = 2


@dataclass
class Node:
    """Where one agent runs; it sees the other nodes through `interface`."""

    address: str
    interface: str
    prefix: list[str] = field(default_factory=list)  # of a command that is to run there


@pytest.fixture(scope="module")
def nodes():
    """Two nodes; the port is of the first."""
    holders = []
    try:
        if os.environ.get("NODES") == "loopback":
            raise OSError("asked for")
        for place in (["--user", "--map-root-user", "--net"], ["--net"]):
            inside = _inside(holders[0]) if holders else []
            command = [*inside, "unshare", *place, "sh", "-c", "echo; exec sleep 3600"]
            holders.append(subprocess.Popen(command, stdout=subprocess.PIPE))
            if not holders[-1].stdout.readline():
                raise OSError("unshare is not allowed")
        cable = f"ip link add cable type veth peer name cable netns {holders[1].pid}"
        subprocess.run([*_inside(holders[0]), *cable.split()], check=True)
        found = []
        for number, holder in enumerate(holders, 1):
            node = Node(f"10.77.0.{number}", "cable", _inside(holder))
            up = f"ip addr add {node.address}/24 dev cable; ip link set cable up; ip link set lo up"
            subprocess.run([*node.prefix, "sh", "-ec", up], check=True)
            found.append(node)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no network namespaces ({error}): two agents on the loopback")
        found = [Node("127.0.0.1", "lo"), Node("127.0.0.1", "lo")]
    yield found
    for holder in holders:
        holder.kill()
        holder.wait()


def _inside(holder: subprocess.Popen) -> list[str]:
    where = ["--target", str(holder.pid), "--user", "--net", "--preserve-credentials"]
    return ["nsenter", *where]


class Agents:
    """A torchrun on each node, as docs/scaling.md has it, and what they print."""

    def __init__(self, nodes: list[Node], arguments: list[str], folder: Path, ranks: int = 2):
        port, self.processes, self.files = free_port(), [], []
        for number, node in enumerate(nodes):
            command = [
                *node.prefix, sys.executable, "-m", "torch.distributed.run",
                f"--nnodes={len(nodes)}", f"--nproc_per_node={ranks}", f"--node_rank={number}",
                f"--master_addr={nodes[0].address}", f"--master_port={port}",
                str(HERE / "ppo_fsdp.py"), *arguments,
            ]
            environment = os.environ | {"GLOO_SOCKET_IFNAME": node.interface}
            self.files.append(folder / f"node{number}.txt")
            with open(self.files[-1], "w") as output:
                self.processes.append(subprocess.Popen(
                    command, env=environment, stdout=output, stderr=subprocess.STDOUT,
                    start_new_session=True,
                ))

    def output(self, number: int) -> str:
        return self.files[number].read_text()

    def kill(self, number: int) -> None:
        """The agent and everything that it started, at once: the node is gone."""
        agent = psutil.Process(self.processes[number].pid)
        for process in [agent, *agent.children(recursive=True)]:
            process.send_signal(signal.SIGKILL)
        self.processes[number].wait()

    def close(self) -> None:
        for number, process in enumerate(self.processes):
            if process.poll() is None:
                self.kill(number)


def arguments_of(runs: Path, name: str, *more: str) -> list[str]:
    """The one configuration: three mini-batches a step, of a size that no rank count divides."""
    return [
        "--preset", "tiny", "--runs-dir", str(runs), "--run-name", name, "--dtype", "float32",
        "--train-batch-size", "15", "--ppo-mini-batch-size", "5", "--max-num-seqs", "16",
        "--total-training-steps", str(STEPS), "--no-val-before-train", "--val-max-samples", "4",
        "--test-freq", "0", "--sample-freq", "0", "--save-freq", "1", *more,
    ]


def records_of(runs: Path, name: str) -> list[dict]:
    lines = (runs / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


# losses, gradients, what was sampled, what it was worth
SAME = re.compile(r"actor/|critic/|response|training/global_step|perf/total_num_tokens|val-core/")


def check_same(records: list[dict], expected: list[dict]) -> None:
    assert len(records) == len(expected) > 0
    for ours, theirs in zip(records, expected):
        assert ours.keys() == theirs.keys()
        for name in filter(SAME.match, ours):
            where = f"step {ours['training/global_step']}: {name} {ours[name]} {theirs[name]}"
            assert math.isclose(ours[name], theirs[name], rel_tol=1e-5, abs_tol=1e-5), where


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of all runs; `one` is the run on one rank, which the others are held against."""
    folder = tmp_path_factory.mktemp("nodes")
    done = launch(arguments_of(folder, "one"), 1, folder, timeout=600)
    assert done.status == [0], done.output[0]
    return folder


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_one_node_are_not_mathematics(runs, ranks):
    """1, 2 and 4 ranks: the same losses in every step, though 5 prompts divide by none but 1."""
    name = f"{ranks}-ranks"
    done = launch(arguments_of(runs, name, "--save-freq", "-1"), ranks, runs, timeout=600)
    assert set(done.status) == {0}, done.output[0]
    check_same(records_of(runs, name), records_of(runs, "one"))


def _lives(process: psutil.Process) -> bool:
    """A process that has ended, and that nobody has waited for yet, does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_two_nodes_and_the_death_of_one(nodes, runs):
    """2 x 2 ranks: the steps are those of one rank. Then node 1 is gone (its agent and ranks get
    SIGKILL): within 60 seconds node 0 has ended by itself, with one sentence that says what
    happened and what to do, and no rank of it is left. One node of 1 x 2 ranks goes on from the
    last checkpoint, and its run is in the end that of one rank which never stopped."""
    agents = Agents(nodes, arguments_of(runs, "nodes"), runs)
    try:
        kept = runs / "nodes" / "checkpoints" / f"step_{KILLED_AFTER:06d}" / "checkpoint.json"
        deadline = time.monotonic() + 600
        while not kept.exists():
            ended = [process.poll() for process in agents.processes]
            assert ended == [None, None], agents.output(0) + agents.output(1)
            assert time.monotonic() < deadline, agents.output(0) + agents.output(1)
            time.sleep(0.05)
        ranks = psutil.Process(agents.processes[0].pid).children(recursive=True)
        agents.kill(1)
        deadline = time.monotonic() + 60
        status = agents.processes[0].wait(timeout=60)
        while any(map(_lives, ranks)):
            assert time.monotonic() < deadline, [rank for rank in ranks if _lives(rank)]
            time.sleep(0.1)
    finally:
        agents.close()
    output = agents.output(0)
    assert status == 1 and "of 8 steps done" not in output
    by_ranks = output.split("torch/distributed/elastic")[0]
    lines = [line for line in by_ranks.splitlines() if line.startswith("error")]
    assert len(lines) == 1 and "--resume latest" in lines[0], output
    assert "Traceback" not in by_ranks, output
    done = records_of(runs, "nodes")
    assert KILLED_AFTER <= len(done) < STEPS, "the run was over before the node was gone"
    check_same(done, records_of(runs, "one")[: len(done)])

    again = launch(arguments_of(runs, "nodes", "--resume", "latest"), 2, runs, timeout=600)
    assert again.status == [0, 0], again.output[0]
    step = re.search(r"resuming from .*step_0*(\d+),", again.output[0])
    assert step and KILLED_AFTER <= int(step[1]) <= len(done), again.output[0]
    check_same(records_of(runs, "nodes"), records_of(runs, "one"))
