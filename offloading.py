"""What leaves the device while nobody needs it, and is back before somebody does.

    weights, moments   between the phases that use them       resharding.offload, onload
    activations        from the forward of their block until the backward of the block behind it

The host's memory is pinned, and copies run on a stream of their own, beside the arithmetic. On a
CPU the same code copies from host to host: no memory is gained, and every number is the same.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

SMALL = 4096  # bytes; what autograd keeps below that stays


def _runtime() -> Any:
    """torch.cuda, or torch.cpu, which has streams by name and runs everything in order."""
    return torch.cuda if torch.cuda.is_available() else torch.cpu


@functools.cache
def _copies() -> Any:
    """The stream of all copies, to the host and back: they keep their order."""
    return _runtime().Stream()


def _on_copies() -> Any:
    """A context whose work begins when all that was asked for until now is done."""
    _copies().wait_stream(_runtime().current_stream())
    return _runtime().stream(_copies())


def _pinned(like: Tensor) -> Tensor:
    return torch.empty_like(like, device="cpu", pin_memory=torch.cuda.is_available())


# ------------------------------------------------------------------------------------ phases


def send(tensors: Iterable[Tensor], host: dict[int, Tensor]) -> int:
    """Copy the storage of each to `host` and free it; the bytes that went. The tensors, and every
    view of them, stay what they are but have no memory. The buffers in `host` are used again."""
    sent, kept = 0, dict(host)
    host.clear()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        size, buffer = storage.nbytes(), kept.get(storage._cdata)
        if size:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            if buffer is None or buffer.nbytes != size:
                buffer = _pinned(whole)
            with _on_copies():
                buffer.copy_(whole, non_blocking=True)
            if whole.is_cuda:
                whole.record_stream(_copies())  # freed now, used by others when it is copied
            storage.resize_(0)
            sent += size
        if buffer is not None:
            host[storage._cdata] = buffer
    return sent


def fetch(tensors: Iterable[Tensor], host: dict[int, Tensor]) -> int:
    """Give each its storage back, filled from `host`; the bytes that came."""
    came = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        buffer = host.get(storage._cdata)
        if buffer is not None and not storage.nbytes():
            storage.resize_(buffer.nbytes)
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            with _on_copies():
                whole.copy_(buffer, non_blocking=True)
            came += buffer.nbytes
    _runtime().current_stream().wait_stream(_copies())
    return came


def on_host(tensor: Tensor, host: dict[int, Tensor]) -> Tensor:
    """The numbers of a tensor that was sent, where they are: the same shape over host memory."""
    if torch.cuda.is_available():
        _copies().synchronize()
    buffer = host.get(tensor.untyped_storage()._cdata)
    if buffer is None:  # it never had any memory
        return tensor
    whole = buffer.view(tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


# ------------------------------------------------------------------------------------ activations


class Activations:
    """What one block keeps for its backward. Two blocks are on the device at a time: in the
    forward the one at work and the one whose copies are under way, in the backward the one at work
    and the one before it, which comes meanwhile."""

    def __init__(self, before: "Activations | None", stay: set[int]):
        self.before = before  # of the block before this one
        self.stay = stay  # storages that are not this block's own
        self.places: dict[tuple, int] = {}
        self.here: list[Tensor] = []
        self.host: list[Tensor] = []

    def pack(self, tensor: Tensor) -> Any:
        """Called by autograd in place of keeping `tensor`; what it gives is kept instead."""
        storage = tensor.untyped_storage()._cdata
        if tensor.nbytes < SMALL or storage in self.stay:
            return tensor.detach()
        # one tensor may be kept by several functions; `here` keeps the storage from being reused
        key = storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        key = *key, tensor._version
        if key not in self.places:
            self.places[key] = len(self.host)
            self.here.append(tensor.detach())
            self.host.append(_pinned(tensor))
            with _on_copies():
                self.host[-1].copy_(self.here[-1], non_blocking=True)
        return self, self.places[key]

    def end_forward(self) -> None:
        """The block before has left by now: its memory is free for the next one."""
        self.copied = _copies().record_event()
        if self.before is not None:
            _runtime().current_stream().wait_event(self.before.copied)
            self.before.here = []

    def come(self) -> None:
        if not self.here:
            device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
            self.here = [torch.empty_like(x, device=device) for x in self.host]
            with _on_copies():
                for here, host in zip(self.here, self.host):
                    here.copy_(host, non_blocking=True)
            self.copied = _copies().record_event()

    @staticmethod
    def unpack(packed: Any) -> Tensor:
        """Called by the backward. The first call of a block finds it here, or nearly, and sends for
        the block before."""
        if isinstance(packed, Tensor):
            return packed
        block, place = packed
        block.come()
        _runtime().current_stream().wait_event(block.copied)
        if block.before is not None:
            block.before.come()
            block.before = None
        return block.here[place]


def offload_activations(blocks: list[nn.Module]) -> None:
    """From now on the activations of each of `blocks` (in order of execution) are on the host
    between its forward and its backward. Where a block is computed again in the backward
    (gradient checkpointing), that is its input alone."""
    before: Activations | None = None

    def run(block: nn.Module, compute: Callable, *args, **kwargs) -> Any:
        nonlocal before
        if not torch.is_grad_enabled():
            return compute(*args, **kwargs)
        # The first is the block's input. Weights are not activations, and what all blocks are given
        # beside it (rotary angles) would go once for each of them.
        _, *shared = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        stay = {x.untyped_storage()._cdata for x in [*block.parameters(), *shared]}
        kept = Activations(before if block is not blocks[0] else None, stay)
        with saved_tensors_hooks(kept.pack, Activations.unpack):
            output = compute(*args, **kwargs)
        kept.end_forward()
        # autograd alone holds what the last one kept, and through it the others
        before = kept if block is not blocks[-1] else None
        return output

    for block in blocks:
        # transformers computes a block by its checkpointing function where it has one
        checkpoints = getattr(block, "gradient_checkpointing", False)
        name = "_gradient_checkpointing_func" if checkpoints else "forward"
        setattr(block, name, functools.partial(run, block, getattr(block, name)))
