"""Peak host memory of each rank while an actor starts from a large checkpoint, on two CPU ranks.

    python tools/start_memory.py 1.5b      two minutes, 10 GB of memory, 3 GB of disk for its time

Writes a checkpoint of the shape (tools/shapes.py; bfloat16, two files, drawn weights) into a
temporary folder, and reads it the way a run does: build_actor, shard_model. On a CPU shards lie in
host memory too; on a GPU they do not. "anonymous" leaves out pages of files that are mapped: those
the system takes back when it needs them.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).parent.parent
sys.path[:0] = [str(HERE), str(HERE / "tools")]

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

import models  # noqa: E402
import resharding  # noqa: E402
import shapes  # noqa: E402
from testing_ranks import Ranks  # noqa: E402

GB = 1e9


def write_checkpoint(name: str, folder: Path) -> int:
    """The number of its parameters."""
    shapes.write_shape(name, folder, 1, 8)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    wanted = dict(model.named_parameters())  # a tied one once
    total = sum(x.numel() for x in wanted.values())
    parts, size = [{}, {}], 0
    for key, x in wanted.items():
        parts[2 * size >= total][key] = x.shape
        size += x.numel()
    places = {}
    for i, part in enumerate(parts, 1):
        file = f"model-{i:05}-of-00002.safetensors"
        tensors = {k: torch.empty(s, dtype=torch.bfloat16).normal_(std=0.02) for k, s in part.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    index = dict(metadata=dict(total_size=2 * total), weight_map=places)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def start(world, folder: str) -> dict[str, float]:
    """GB above what the process had before, of this rank: the highest, and at the end."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = {name: kilobytes(name) for name in ("VmRSS", "RssAnon")}
    highest, over = before["RssAnon"], threading.Event()

    def watch() -> None:
        nonlocal highest
        while not over.wait(0.005):
            highest = max(highest, kilobytes("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.monotonic()
    model = models.build_actor(folder, meta=not world.is_main)
    built = time.monotonic() - began
    model = resharding.shard_model(model)
    over.set()
    watcher.join()
    shard = sum(p.to_local().nbytes for p in model.parameters())
    found = dict(
        peak=kilobytes("VmHWM") - before["VmRSS"], anonymous=highest - before["RssAnon"],
        end=kilobytes("RssAnon") - before["RssAnon"],
    )
    gigabytes = {name: 1024 * size / GB for name, size in found.items()}
    return gigabytes | dict(shard=shard / GB, build=built, all=time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=shapes.SHAPES)
    with tempfile.TemporaryDirectory() as folder:
        total = write_checkpoint(parser.parse_args().shape, Path(folder))
        print(f"{total:,} parameters: {2 * total / GB:.2f} GB on the disk, a full float32 copy is "
              f"{4 * total / GB:.2f} GB")
        ranks = Ranks(2, timeout=900)
        print("| rank | its shard | peak | peak, anonymous | at the end | seconds, of them reading |")
        print("|---|---|---|---|---|---|")
        for rank, x in enumerate(ranks(start, folder)):
            print(f"| {rank} | {x['shard']:.2f} | {x['peak']:.2f} | {x['anonymous']:.2f} | "
                  f"{x['end']:.2f} | {x['all']:.0f}, {x['build']:.0f} |")
        ranks.close()


if __name__ == "__main__":
    main()
