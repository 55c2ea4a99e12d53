"""Where the weights live: split over the ranks for training, whole inside the engine for rollouts.

    training   FSDP2: rank r of W holds the r-th part of the rows of each parameter, as float32
               masters. A block's full weights, in the compute dtype, exist from just before its
               forward or backward until just after.
    rollout    vLLM holds a full (or tensor-parallel) copy of its own. `publish_weights` renews it:
               cast the shard, gather it, hand (name, tensor) to vLLM's loader, next parameter.
    disk       a checkpoint holds the shards and what the optimizers keep of them, to be cut anew
               over any number of ranks, and the whole weights as a Hugging Face folder.

Every collective on weights and gradients is in this file; FSDP2 issues its own inside the modules'
forward and backward. One sum, no mean: nothing here divides by the number of ranks.
"""

import contextlib
import copy
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor

import checkpoints
import offloading
from checkpoints import CheckpointError, reason


def make_mesh(fsdp_size: int = 0) -> DeviceMesh:
    """The ranks as rows of `fsdp_size` that share one copy of the weights; 0: all in one row.

    Short rows (HSDP) gather less, hold more, and add their gradients up over rows. Collective.
    """
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = dist.get_world_size()
    if fsdp_size in (0, ranks):
        return init_device_mesh(kind, (ranks,), mesh_dim_names=("shard",))
    shape = (ranks // fsdp_size, fsdp_size)
    return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    param_dtype: torch.dtype = torch.bfloat16,
    reduce_dtype: torch.dtype = torch.float32,
    reshard_after_forward: bool = True,
    offload_policy: bool = False,
    forward_prefetch: int = 0,
    backward_prefetch: int = 0,
) -> nn.Module:
    """Shard `model` in place over `mesh` (all ranks by default): one FSDP2 group a decoder block,
    one for the rest; where each rank holds all of it on its device, one group for everything.

    Rank 0 comes with real weights, the others may come with meta tensors: each weight is broadcast
    from rank 0 and cut. Collective. Parameters keep their dtype (float32 masters), compute is in
    `param_dtype`, gradients are summed over the ranks in `reduce_dtype`. With `offload_policy`
    parameters and gradients are on the host, and so is what an optimizer does with them; a block's
    come for its forward and backward. The two prefetches: so many blocks are gathered ahead of the
    one at work; 0: as FSDP2 does by itself.
    """
    device = _device()
    _refuse_lower_precision(hf_model(model), param_dtype)
    weights = dict(_named_tensors(model)) if dist.get_rank() == 0 else {}
    model.to("meta")
    hf_model(model).tie_weights()  # moving a module to another device unties what was tied
    mesh = mesh or make_mesh()
    # else there is nothing to gather block by block
    sharded = mesh["shard"].size() > 1 or offload_policy
    settings = dict(
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
        reshard_after_forward=reshard_after_forward,
        offload_policy=OffloadPolicy(),
    )
    if offload_policy:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    blocks = decoder_blocks(model) if sharded else []
    for module in [*blocks, model]:
        fully_shard(module, **settings)
    _set_prefetch([model, *blocks], forward_prefetch, backward_prefetch)
    model.reshards = reshard_after_forward
    model.keeps_weights = not (reshard_after_forward and sharded)
    model.to_empty(device="cpu" if offload_policy else device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    with torch.no_grad():
        for name, tensor in _named_tensors(model):
            _fill(tensor, weights.pop(name, None), device)
    for module in fsdp_modules(model):
        # Losses are sums over global counts (losses.aggregate), so ranks are added up, not
        # averaged. Both calls are needed: the factor alone asks gloo for an operation that it does
        # not have.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return model


def _device() -> torch.device:
    """Where this rank computes."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _set_prefetch(order: list[FSDPModule], forward: int, backward: int) -> None:
    """`order` is that of the forward, the root first. Of the modules before (behind) each so many
    are gathered while it computes. The lists are the same on every rank, and so is then the order
    of the gathers."""
    for i, module in enumerate(order):
        if forward:
            module.set_modules_to_forward_prefetch(order[i + 1 : i + 1 + forward])
        if backward:
            behind = order[:0:-1] if i == 0 else order[i - 1 : 0 : -1]  # the root's backward: first
            module.set_modules_to_backward_prefetch(behind[:backward])


def _refuse_lower_precision(hf: nn.Module, param_dtype: torch.dtype) -> None:
    """Some classes list modules that must be computed in float32 (a router's bias). A block is cast
    as a whole, so it would cast them too."""
    lists = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    kept = {name for attribute in lists for name in getattr(hf, attribute, None) or ()}
    parts = {part for name, _ in hf.named_parameters() for part in name.split(".")}
    if param_dtype != torch.float32 and kept & parts:
        raise ValueError(
            f"{type(hf).__name__} keeps {sorted(kept & parts)} in float32, and {param_dtype} would "
            "lower them: use --dtype float32, or another model"
        )


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters (a tied one once), then buffers, each in the order of their names: the same on
    every rank."""
    yield from sorted(model.named_parameters())
    yield from sorted(model.named_buffers())


def _fill(tensor: Tensor, weight: Tensor | None, device: torch.device) -> None:
    """Fill `tensor` (or this rank's shard of it) with rank 0's `weight`, one full tensor alive at a
    time."""
    if dist.get_rank() == 0:
        full = weight.to(device, tensor.dtype)
    else:
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    dist.broadcast(full, src=0)
    if isinstance(tensor, DTensor):
        # src_data_rank=None: every rank has the data already, so each only cuts its own piece
        full = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor, full = tensor.to_local(), full.to_local()
    tensor.copy_(full)


def decoder_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that transformers says not to split, in order of execution."""
    names = set(hf_model(model)._no_split_modules)
    return [module for module in model.modules() if type(module).__name__ in names]


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def hf_model(model: nn.Module) -> nn.Module:
    """The transformers model inside Actor or Critic: its parameter names are the ones the world
    knows."""
    return getattr(model, "hf", model)


@contextlib.contextmanager
def kept_whole(model: nn.Module) -> Iterator[None]:
    """Within it, weights that were gathered once stay whole: one gather for all the micro-batches
    of an optimizer step or a pass. Without effect where memory forbids it
    (reshard_after_forward)."""
    if model.keeps_weights:
        model.set_reshard_after_forward(False)
        model.set_reshard_after_backward(False)
    yield
    if model.keeps_weights:
        model.set_reshard_after_forward(model.reshards)
        model.set_reshard_after_backward(True)
        _reshard(model)


def _reshard(model: nn.Module) -> None:
    """After a forward without a backward the parameters are plain, unsharded tensors."""
    for module in fsdp_modules(model):
        module.reshard()


def offload(owner: nn.Module | torch.optim.Optimizer) -> int:
    """The shards of a network's weights, or an optimizer's moments, go to pinned host memory, and
    their memory on the device is free. Returns the bytes that went.

    Until `onload` a forward or an optimizer's step is an error; publish_weights, full_params and
    checkpoints read (and fill) what is on the host.
    """
    if not hasattr(owner, "host"):
        owner.host = {}
        if isinstance(owner, nn.Module):  # before FSDP2's own hook, which would read the shards
            owner.register_forward_pre_hook(_refuse_away, prepend=True)
        else:
            owner.register_step_pre_hook(_refuse_away)
    if isinstance(owner, nn.Module):
        _reshard(owner)
    owner.away = True
    return offloading.send(_parts(owner), owner.host)


def onload(owner: nn.Module | torch.optim.Optimizer) -> int:
    """The way back. Returns the bytes that came."""
    owner.away = False
    return offloading.fetch(_parts(owner), owner.host)


@contextlib.contextmanager
def on_device(*owners: nn.Module | torch.optim.Optimizer) -> Iterator[None]:
    """Within it, those that were offloaded are on the device; then they go back."""
    away = [owner for owner in owners if getattr(owner, "away", False)]
    for owner in away:
        onload(owner)
    yield
    for owner in away:
        offload(owner)


def _parts(owner: nn.Module | torch.optim.Optimizer) -> list[Tensor]:
    """This rank's part of each weight, or of each moment."""
    tensors = []
    if isinstance(owner, nn.Module):
        tensors = list(owner.parameters())
    else:
        for state in owner.state.values():  # a count of steps has no dimension
            tensors += [tensor for tensor in state.values() if tensor.ndim]
    return [_local(tensor.detach()) for tensor in tensors]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _refuse_away(owner: nn.Module | torch.optim.Optimizer, *_) -> None:
    if owner.away:
        raise RuntimeError(f"the tensors of this {type(owner).__name__} are offloaded: onload them")


def _where_it_is(tensor: Tensor, owner: nn.Module | torch.optim.Optimizer) -> Tensor:
    """`tensor` of `owner`, or, while that is offloaded, the same over its host memory."""
    tensor = tensor.detach()
    if not getattr(owner, "away", False):
        return tensor
    local = offloading.on_host(_local(tensor), owner.host)
    if not isinstance(tensor, DTensor):
        return local
    return DTensor(local, tensor._spec, requires_grad=False)


def _saved_buffers(hf: nn.Module) -> list[tuple[str, Tensor]]:
    """Those that a model folder holds, in the order of their names."""
    saved = hf.state_dict().keys()
    return [(name, buffer) for name, buffer in sorted(hf.named_buffers()) if name in saved]


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """{Hugging Face name: this rank's part} of parameters and saved buffers, a tied one once."""
    _reshard(model)
    hf = hf_model(model)
    tensors = [*hf.named_parameters(), *_saved_buffers(hf)]
    return {name: _where_it_is(tensor, model) for name, tensor in tensors}


def full_params(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor) of every parameter and saved buffer, tied ones once.
    Collective: all ranks iterate to the end together. Each shard is cast to `dtype` before it is
    gathered: half the bytes."""
    for name, tensor in saved_tensors(model).items():
        tensor = tensor.to(_device())
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def publish_weights(model: nn.Module, engine: Any, route: str = "auto") -> int:
    """Make the engine sample from `model`: every weight replaced, every cache of the old ones
    dropped.

    Collective. `engine` is rollout.Engine. Returns the number of bytes that each engine was handed.
    Two routes with the same result, bit by bit: "direct" gathers into vLLM's own storage, without
    a copy in between; "portable" hands whole tensors to vLLM's loader. "auto" is direct where
    `place_weights` allows it, and says once why not.
    """
    if route != "portable" and engine.views is None:
        engine.views, reason = place_weights(model, engine)
        if reason and dist.get_rank() == 0:
            print(f"weights go through vLLM's loader: {reason}", flush=True)
    direct = route != "portable" and bool(engine.views)
    if route == "direct" and not direct:
        reason = place_weights(model, engine)[1]
        raise ValueError(f"no direct route: {reason}; use auto or portable")
    sent = _publish_direct(model, engine) if direct else _publish_portable(model, engine)
    engine.has_weights = True
    engine.reset_cache()
    return sent


def _publish_portable(model: nn.Module, engine: Any) -> int:
    sent = 0
    exhausted = False

    def stream():
        nonlocal sent, exhausted
        for name, tensor in full_params(model, engine.dtype):
            sent += tensor.nbytes
            yield name, tensor
        exhausted = True

    engine.load_weights(stream())
    if not exhausted:
        raise RuntimeError("vLLM stopped reading the weights before the last one")
    return sent


@torch.no_grad()
def _publish_direct(model: nn.Module, engine: Any) -> int:
    """Both sides keep a weight as rows, in the same order, so that a gather of the shards is
    already vLLM's (fused) weight."""
    _reshard(model)
    shards, views = [], []
    for name, parameter in hf_model(model).named_parameters():
        shards.append(_where_it_is(parameter.to_local(), model))
        views.append(engine.views[name])
    group = parameter.device_mesh["shard"].get_group()
    if group.size() == 1 and shards[0].device == views[0].device:
        torch._foreach_copy_(views, shards)  # one kernel for all: reads float32, writes bfloat16
    else:
        for view, shard in zip(views, shards):
            shard = shard.to(view.device, non_blocking=True).to(view.dtype)
            dist.all_gather_into_tensor(view, shard, group)
    return sum(view.nbytes for view in views)


def place_weights(model: nn.Module, engine: Any) -> tuple[dict[str, Tensor], str]:
    """({Hugging Face name: the rows of vLLM's storage where it belongs}, ""), or ({}, why the
    direct route cannot be taken): tensor parallel, quantised or repacked weights, uneven shards."""
    if engine.num_engines != dist.get_world_size():
        return {}, "each engine spans several ranks"
    if engine.repacks:
        return {}, "on a CPU vLLM computes with packed copies of its weights"
    for name, _ in _saved_buffers(hf_model(model)):
        return {}, f"{name} is a buffer, which vLLM's loader alone knows to place"
    _reshard(model)
    parameters = dict(hf_model(model).named_parameters())
    held, views = engine.weights(), {}
    if unknown := sorted(set(held) - set(parameters)):
        return {}, f"nothing fills vLLM's {unknown[0]}"
    for name, parameter in parameters.items():
        parts = {part.data_ptr(): part for part in held.get(name, [])}  # a tied one comes twice
        rows = parameter.shape[0]
        if any(word in name for word in ("embed_tokens", "lm_head")):
            # vLLM rounds the vocabulary up; no id reads those rows
            parts = {place: part[:rows] for place, part in parts.items()}
        if [part.shape for part in parts.values()] != [parameter.shape]:
            return {}, f"vLLM keeps {name} in another form"
        if rows % parameter.device_mesh["shard"].size():
            return {}, f"the {rows} rows of {name} do not divide over the ranks"
        [views[name]] = parts.values()
    return views, ""


@torch.no_grad()
def check_published(model: nn.Module, engine: Any, pack: Any, max_gap: float) -> float:
    """Proof of a publish: every engine holds the trainer's weights, bit for bit in its dtype, and
    computes with them what the trainer computes.

    The second is measured on a probe batch: `pack` (data.Pack) holds a few sequences, both sides
    score the tokens that it predicts, at temperature 1. Returns the worst engine's mean |log-prob
    by the engine - log-prob by the trainer|, in nats. Collective; if any engine holds another
    weight or is above `max_gap` all ranks raise, since training on its samples would be silently
    wrong. Neither half alone is enough: log-probs do not depend on the embeddings of tokens outside
    the probe and hide a small fault behind bfloat16's rounding; weights say nothing of a norm's
    epsilon or a rotary base.
    """
    stale = stale_weights(model, engine)
    with on_device(model):
        ours = model(pack).float().cpu()
    borders = pack.cu_seqlens.tolist()
    sequences = [pack.input_ids[start:end].tolist() for start, end in zip(borders, borders[1:])]
    scored = torch.zeros(borders[-1])
    for start, log_probs in zip(borders, engine.score(sequences)):
        scored[start : start + len(log_probs)] = torch.tensor(log_probs)
    theirs = scored[pack.hidden_rows.cpu()]  # place t holds the log-prob of token t + 1
    gap = (ours - theirs).abs().mean().nan_to_num(nan=math.inf).to(pack.input_ids.device)
    dist.all_reduce(gap, op=dist.ReduceOp.MAX)
    if stale or gap.item() > max_gap:
        raise RuntimeError(
            "the engine does not hold the published weights: its log-probs differ from the "
            f"trainer's by {gap.item():.4g} nats a token on average; the limit is {max_gap:g}; "
            f"{len(stale)} weights are not the trainer's ({', '.join(stale[:4]) or 'none'}). "
            "Nothing was trained on its answers. Does this vLLM load the whole architecture?"
        )
    return gap.item()


def stale_weights(model: nn.Module, engine: Any) -> list[str]:
    """Names of the weights that differ in any bit from the trainer's, in any engine. Collective.

    A weight that vLLM holds under another name (experts) is left to the log-probs. Of one that it
    holds in another order (GPT-NeoX) this would be a false alarm.
    """
    members = dist.get_world_size() // engine.num_engines
    held, stale = engine.weights(), []
    for name, full in full_params(model, engine.dtype):
        for part in held.get(name, []):
            ours = _part_of(full, part.shape, dist.get_rank() % members, members)
            theirs = part[tuple(slice(size) for size in ours.shape)]  # the rest is padding
            if not torch.equal(ours, theirs.to(ours.dtype)) and name not in stale:
                stale.append(name)
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, stale)
    return sorted(set().union(*of_ranks))


def _part_of(full: Tensor, shape: torch.Size, member: int, members: int) -> Tensor:
    """The block of `full` that `member` of a tensor-parallel group holds in a tensor of `shape`.

    A dimension is whole on every member, cut evenly (the last ones padded), or, with more members
    than key-value heads, cut into fewer parts than members, which neighbours hold alike.
    """
    where = []
    for size, whole in zip(shape, full.shape):
        copies = max(1, members * size // whole)
        start = member // copies * size
        where.append(slice(start, start + size))
    return full[tuple(where)]


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale all gradients so that their norm over all parameters and ranks is at most `max_norm`:

        g <- g min(1, max_norm / |g|)

    Returns |g|, the norm before it, the same number on every rank.
    Source: arXiv 1211.5063 algorithm 1.
    Test: test_resharding.py::test_the_gradient_norm_is_that_of_the_whole
    """
    norm = nn.utils.clip_grad_norm_(list(model.parameters()), max_norm)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


# ------------------------------------------------------------------------------------ checkpoints


def save_checkpoint(
    root: str | Path, step: int,
    actor: nn.Module, actor_optimizer: torch.optim.Optimizer,
    critic: nn.Module | None = None, critic_optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None, controller: Any = None, critic_scheduler: Any = None, *,
    tokenizer: Any = None, export_dtype: torch.dtype = torch.bfloat16,
    score: float | None = None, keep: int = 0, notes: dict[str, Any] | None = None,
) -> Path:
    """Write root/step_<step>; checkpoints.py has the layout. Then the newest `keep` checkpoints
    stay, and beside them the one of the highest `score`; 0: all. `notes` are the caller's, and must
    fit into JSON.

    Collective; `root` is one folder that all ranks see. Whatever fails on whichever rank, all raise
    CheckpointError, and what was there before is still there.
    """
    final = Path(root) / f"step_{step:06d}"
    unfinished = checkpoints.unfinished(final)
    networks = dict(actor=(actor, actor_optimizer), critic=(critic, critic_optimizer))
    networks = {name: pair for name, pair in networks.items() if pair[0] is not None}
    counters = dict(scheduler=scheduler, critic_scheduler=critic_scheduler, controller=controller)
    parts = {name: part.state_dict() for name, part in counters.items() if part is not None}
    state = _rng_states()
    for name, (model, optimizer) in networks.items():
        parts[name] = optimizer.state_dict()["param_groups"]
        state |= _state_of(name, model, optimizer)
    try:
        _on_rank_0(lambda: checkpoints.begin(unfinished))
        dcp.save(state, storage_writer=_Writer(unfinished / "state"))
        for name, (model, _) in networks.items():
            folder = unfinished / ("hf" if name == "actor" else f"hf_{name}")
            export_hf(model, folder, tokenizer, export_dtype)
        facts = dict(step=step, ranks=dist.get_world_size(), score=score, notes=notes, parts=parts)
        facts["files"] = _fingerprints(unfinished / "state")
        _on_rank_0(lambda: checkpoints.complete(unfinished, final, facts, keep))
    except (CheckpointError, dcp.api.CheckpointException) as error:
        # of a full disk: give it back
        _on_rank_0(lambda: shutil.rmtree(unfinished, ignore_errors=True))
        raise CheckpointError(
            f"checkpoint {final} was not written: {_cause(error)}; the older ones are whole: "
            "when that is mended, --resume latest goes on from the newest"
        ) from error
    return final


def load_checkpoint(
    root: str | Path,
    actor: nn.Module, actor_optimizer: torch.optim.Optimizer,
    critic: nn.Module | None = None, critic_optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None, controller: Any = None, critic_scheduler: Any = None,
) -> int:
    """Fill everything given from the newest complete checkpoint under `root` (or from `root`, if it
    is one checkpoint's folder). Returns its step.

    Collective. The number of ranks may be another than at the save. CheckpointError, on all ranks,
    if something given is not in it, has other names or shapes there, or cannot be read.
    """
    folder = find_checkpoint(root)
    facts = checkpoints.read_facts(folder)
    networks = dict(actor=(actor, actor_optimizer), critic=(critic, critic_optimizer))
    networks = {name: pair for name, pair in networks.items() if pair[0] is not None}
    counters = dict(scheduler=scheduler, critic_scheduler=critic_scheduler, controller=controller)
    counters = {name: part for name, part in counters.items() if part is not None}
    state = _rng_states()
    try:
        for name in [*networks, *counters]:
            if name not in facts["parts"]:
                raise CheckpointError(f"it holds no {name}: the run that saved it had none")
        found = _fingerprints(folder / "state")
        damaged = [name for name, entry in facts["files"].items() if found.get(name) != entry]
        if damaged:  # reading alone would not notice every changed byte, and train on
            raise CheckpointError(f"{folder / 'state' / damaged[0]} is damaged")
        reader = dcp.FileSystemReader(folder / "state")
        saved = reader.read_metadata().state_dict_metadata
        for name, (model, optimizer) in networks.items():
            _check_same_model(name, model, saved)
            _allocate(name, model, optimizer, saved, facts["parts"][name])
            state |= _state_of(name, model, optimizer)
        state = {key: tensor for key, tensor in state.items() if key in saved}
        dcp.load(state, storage_reader=reader)
    except (CheckpointError, dcp.api.CheckpointException) as error:
        raise CheckpointError(
            f"cannot resume from {folder}: {_cause(error)}; --resume takes the folder of any other"
        ) from error
    for name, part in counters.items():
        part.load_state_dict(facts["parts"][name])
    _rng_states(state)
    return facts["step"]


def find_checkpoint(root: str | Path) -> Path:
    """The newest complete checkpoint under `root`, or `root` itself if that is one; nothing is an
    error, never a fresh start. Rank 0 looks, all ranks know. Collective."""
    return _on_rank_0(lambda: checkpoints.find(Path(root).resolve()))


def check_folder(folder: Path) -> None:
    """Rank 0 makes `folder`, and every rank must be able to write there. Collective."""
    probe = folder / f".probe-{dist.get_rank()}"
    try:
        _on_rank_0(lambda: folder.mkdir(parents=True, exist_ok=True))
        _together(lambda: (probe.write_text("probe"), probe.unlink()))
    except CheckpointError as error:
        raise CheckpointError(
            f"cannot write into {folder}: {error}; --runs-dir must be a folder that all ranks share"
        ) from error


# ---- what is in a checkpoint


def _state_of(name: str, model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """{actor/<weight>: tensor, actor.exp_avg/<weight>: tensor, ...}: the very tensors, to be saved
    or to be filled. An optimizer that has made no step yet has none."""
    state = {f"{name}/{key}": tensor for key, tensor in saved_tensors(model).items()}
    for key, parameter in hf_model(model).named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items():
            state[f"{name}.{kind}/{key}"] = _where_it_is(value, optimizer)
    return state


def _check_same_model(name: str, model: nn.Module, saved: dict[str, Any]) -> None:
    here = {f"{name}/{key}": tensor.shape for key, tensor in saved_tensors(model).items()}
    there = {key: entry.size for key, entry in saved.items() if key.startswith(f"{name}/")}
    for key in sorted(here.keys() | there.keys()):
        if here.get(key) != there.get(key):
            sizes = [list(x[key]) if key in x else "absent" for x in (there, here)]
            raise CheckpointError(f"it is of another model: {key} is {sizes[0]}, not {sizes[1]}")


def _allocate(
    name: str, model: nn.Module, optimizer: Any, saved: dict[str, Any], groups: list[dict]
) -> None:
    """Give `optimizer` tensors for all that the checkpoint has of it, and its parameter groups."""
    parameters = dict(hf_model(model).named_parameters())
    optimizer.state.clear()
    for key, entry in saved.items():
        part, _, weight = key.partition("/")
        if part.startswith(f"{name}."):
            parameter = parameters[weight]
            like = parameter.detach() if entry.size == parameter.shape else None
            if like is None:  # the count of steps; on the device, as a fused optimizer wants it
                like = torch.empty(entry.size, device=parameter.device)
            kind, dtype = part.removeprefix(f"{name}."), entry.properties.dtype
            optimizer.state[parameter][kind] = torch.zeros_like(like, dtype=dtype)
    if getattr(optimizer, "away", False):
        offload(optimizer)
    for group, kept in zip(optimizer.param_groups, groups):
        for key in kept.keys() - {"params"}:  # JSON has lists where torch has tuples
            group[key] = tuple(kept[key]) if isinstance(kept[key], list) else kept[key]


def _rng_states(restore: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """torch's random generators on this rank, as they are or after `restore`. Nothing of ours draws
    from them: prompts, mini-batches and samples are functions of (seed, step). They are kept for a
    fork that does; a rank that the saved run did not have keeps its own."""
    states = {}
    for kind, module in (("cpu", torch), ("cuda", torch.cuda)):
        if kind == "cpu" or torch.cuda.is_available():
            key = f"rng/{kind}/{dist.get_rank()}"
            if restore and key in restore:
                module.set_rng_state(restore[key])
            states[key] = module.get_rng_state()
    return states


class _Writer(dcp.FileSystemWriter):
    def write_data(self, *args) -> Any:
        """torch covers what the disk said with an error of its own: no word of a full disk."""
        try:
            return super().write_data(*args)
        except RuntimeError as error:
            raise error.__context__ or error


def _fingerprints(folder: Path) -> dict[str, list]:
    """{name: [bytes, SHA-256]} of the files in `folder`; each rank reads every W-th. Collective."""
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    parts = _together(lambda: checkpoints.fingerprints(sorted(folder.iterdir())[mine]))
    return {name: entry for part in parts for name, entry in part.items()}


def _together(work: Callable[[], Any]) -> list:
    """[what work() returned on rank 0, on rank 1, ...]. If it failed on any, every rank raises the
    same sentence: none is left waiting for one that is gone. Collective."""
    result = failure = None
    try:
        result = work()
    except Exception as error:
        failure = f"{reason(error)} (rank {dist.get_rank()})"
    answers = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (result, failure))
    for _, failure in answers:
        if failure is not None:
            raise CheckpointError(failure)
    return [result for result, _ in answers]


def _on_rank_0(work: Callable[[], Any]) -> Any:
    """Rank 0's work(), its result on every rank. Collective."""
    return _together(lambda: work() if dist.get_rank() == 0 else None)[0]


def _cause(error: BaseException) -> str:
    """One line of what went wrong; of the failures that torch collects from ranks, the first."""
    if isinstance(error, dcp.api.CheckpointException):
        rank, (first, _) = min(error.failures.items())
        return f"{reason(first)} (rank {rank})"
    return reason(error)


# ---- export

SAFETENSORS_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}


def export_hf(
    model: nn.Module, folder: str | Path, tokenizer: Any = None, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write `model` as a Hugging Face folder: config, generation config, tokenizer, and the weights
    in `dtype`, a tied one once.

    Collective. The weights stream: one full tensor at a time is gathered, and rank 0 appends it to
    the file (safetensors: length of the header, header, bytes).
    """
    folder, hf = Path(folder), hf_model(model)
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in saved_tensors(model).items():
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        start, end = end, end + tensor.numel() * kind.itemsize
        header[name] = {"dtype": SAFETENSORS_DTYPES[kind], "shape": list(tensor.shape)}
        header[name]["data_offsets"] = [start, end]
    text = bytes(json.dumps(header), "utf-8")
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    weights = full_params(model, dtype)

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = copy.deepcopy(hf.config)
        # the class below FSDP2's, which puts one of its own in front
        original = next(kind for kind in type(hf).__mro__ if not issubclass(kind, FSDPModule))
        config.architectures, config.dtype = [original.__name__], dtype
        config.save_pretrained(folder)
        if getattr(hf, "generation_config", None) is not None:
            hf.generation_config.to_json_file(folder / "generation_config.json")
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        with open(folder / "model.safetensors", "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, tensor in weights:
                file.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())

    def write_or_follow() -> None:
        try:
            if dist.get_rank() == 0:
                write()
        finally:
            for _ in weights:  # all ranks gather all of them, whatever rank 0's disk says
                pass

    _together(write_or_follow)
