"""One micro-batch on several ranks: sequence parallel, "Ulysses" (arXiv 2309.14509).

    outside attention   each of the U ranks has T/U tokens of a pack, all heads
    inside              all T tokens, 1/U of the heads: one exchange on the way in, one on the way
                        out, and the same two in the backward
    at the end          every rank has the outputs of all K response tokens

Every collective of it is in this file. models.py calls the PackShare that comes with a pack; nobody
else knows that a pack is shared.

    T  packed tokens of the pack     K  its response tokens     k  those of this rank
"""

import dataclasses
import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def share_pack(pack: Any, size: int) -> Any:
    """`pack` (data.Pack) as this rank sees it when `size` consecutive ranks compute it together:
    its slice of the tokens, and the outputs x_r of the response tokens that are predicted there.

        dL/dtheta = sum_r dL/dx_r dx_r/dtheta

    Position ids, and the borders of the sequences, are those of the whole pack, so a sequence goes
    on across a cut. The networks return all [K] outputs on every rank of the group, in the pack's
    order, so each has the same loss L, and differentiates it by its own x_r. FSDP2 sums gradients
    over the ranks: that is the sum above, and there is no factor.
    Test: test_ulysses.py::test_a_shared_pack_gives_the_outputs_and_gradients_of_the_whole
    """
    if size == 1:
        return pack
    group = _sequence_group(size)
    width, rest = divmod(len(pack.input_ids), size)
    if rest:
        raise ValueError(f"{size} ranks cannot share {len(pack.input_ids)} tokens: use pad_to")
    start = dist.get_rank(group) * width
    tokens = slice(start, start + width)
    ends = pack.hidden_rows.new_tensor([tokens.start, tokens.stop])
    first, last = torch.searchsorted(pack.hidden_rows, ends).tolist()  # places rise within a pack
    return dataclasses.replace(
        pack,
        input_ids=pack.input_ids[tokens],
        position_ids=pack.position_ids[tokens],
        hidden_rows=pack.hidden_rows[first:last] - start,
        targets=pack.targets[first:last],
        share=PackShare(group, size, first, len(pack.targets) - last),
    )


@functools.cache
def _sequence_group(size: int) -> dist.ProcessGroup:
    """The `size` consecutive ranks that this one is among. Collective when first asked for."""
    return dist.new_subgroups(size)[0]


@dataclasses.dataclass
class PackShare:
    """What the ranks of a shared pack exchange."""

    group: dist.ProcessGroup
    size: int
    before: int  # response tokens of the pack that lower ranks have
    after: int  # and higher ones

    def whole_sequence(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """[T/U, heads, d] each, of this rank's tokens -> [T, heads/U, d], of this rank's heads.

        One exchange for all three. Key-value heads that do not divide by U are copied, side by
        side, up to the next number that does: query heads i .. i + g - 1 still find theirs at i/g.
        """
        copies = 1
        while key.shape[1] * copies % self.size:
            copies += 1
        if copies > 1:
            key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
        parts = [x.unflatten(1, (self.size, -1)).transpose(0, 1) for x in (query, key, value)]
        mixed = self.exchange(torch.cat(parts, dim=2))  # [U, T/U, heads/U, d]: part s is of slice s
        return mixed.flatten(0, 1).split([part.shape[2] for part in parts], dim=1)

    def whole_heads(self, out: Tensor) -> Tensor:
        """The way back: [T, heads/U, d] -> [T/U, heads, d]."""
        parts = self.exchange(out.unflatten(0, (self.size, -1)))  # [U, T/U, heads/U, d]
        return parts.transpose(0, 1).flatten(1, 2)

    def exchange(self, x: Tensor) -> Tensor:
        """x [U, ...]: part s goes to rank s of the group, and rank s's comes in its place."""
        return _Exchange.apply(x, self.group)

    def gather(self, x: Tensor) -> Tensor:
        """x [k] of this rank's response tokens -> [K] of all. The others' are constants here: every
        rank computes the same loss, and differentiates it by its own tokens alone."""
        whole = F.pad(x.detach(), (self.before, self.after))
        dist.all_reduce(whole, group=self.group)  # one rank has the number, the others 0
        return torch.cat([whole[: self.before], x, whole[self.before + len(x) :]])


class _Exchange(torch.autograd.Function):
    """All-to-all of equal parts. What went from rank a to rank b has its gradient on b: the way
    back is the same exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(gradient, ctx.group), None
