"""Counts the collectives of one optimizer step and of a publish, and their bytes, on CPU ranks.

    python tools/collectives.py        a minute; prints the table of docs/scaling.md ("counted")

The model is `tiny-untied` (a random Llama of two blocks). What is counted are calls as they reach
torch's dispatcher, FSDP2's own included; bytes are those of the whole tensor that is gathered,
scattered or summed, so a rank sends and receives (W - 1) / W of them (twice that in an all-reduce).
"""

import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent.parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import data  # noqa: E402
import models  # noqa: E402
import resharding  # noqa: E402
from testing_ranks import Ranks  # noqa: E402

KINDS = {"allgather": "all-gather", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter",
         "allreduce": "all-reduce", "all_reduce": "all-reduce", "alltoall": "all-to-all"}


class Counted(TorchDispatchMode):
    """calls[kind] and bytes[kind] of the collectives inside."""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::")
        kinds = [kind for word, kind in KINDS.items() if word in name]
        if space in ("c10d", "_c10d_functional") and kinds:
            tensors = [x for x in tree_leaves((args, result)) if isinstance(x, torch.Tensor)]
            self.calls[kinds[0]] += 1
            self.bytes[kinds[0]] += max(x.numel() * x.element_size() for x in tensors)
        return result


def count(world, rows: int, parts: int, reshard: bool, fsdp_size: int) -> dict[str, Counted]:
    """One update of `parts` micro-batches, as update_actor has it without the clipping of its
    gradients, and the gathers of a publish."""
    path = models.resolve_model("tiny-untied", HERE / ".cache")
    model = resharding.shard_model(
        models.build_actor(path), resharding.make_mesh(fsdp_size), torch.float32,
        reshard_after_forward=reshard,
    )
    rollouts = [
        data.Rollout(data.Prompt(i, [5] * 8, "1", ""), [6] * 8, "length") for i in range(rows)
    ]
    batch = data.collate(rollouts)
    found = {name: Counted() for name in ("forward and backward", "publish")}
    with found["forward and backward"], resharding.kept_whole(model):
        for i in range(parts):
            model.set_requires_gradient_sync(i == parts - 1)
            model(data.pack(batch, list(range(i, rows, parts)))).sum().backward()
    with found["publish"]:
        for _ in resharding.full_params(model, torch.bfloat16):
            pass
    return {name: (dict(c.calls), dict(c.bytes)) for name, c in found.items()}


def main() -> None:
    print("| ranks | micro-batches | reshard_after_forward | fsdp_size | part | collectives |")
    print("|---|---|---|---|---|---|")
    for size in (1, 2, 4):
        ranks = Ranks(size)
        for parts, reshard, fsdp_size in ((1, True, 0), (3, True, 0), (3, False, 0), (3, True, 2)):
            if fsdp_size and size < 4:
                continue
            found = ranks(count, 6, parts, reshard, fsdp_size)[0]
            for part, (calls, sizes) in found.items():
                if part != "forward and backward" and (parts, reshard, fsdp_size) != (1, True, 0):
                    continue
                words = [f"{n} {kind}, {sizes[kind]:,} bytes" for kind, n in calls.items()]
                setting = f"{size} | {parts} | {'yes' if reshard else 'no'} | {fsdp_size or size}"
                print(f"| {setting} | {part} | {'; '.join(words) or 'none'} |")
        ranks.close()


if __name__ == "__main__":
    main()
