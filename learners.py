"""What is trained: actor and critic, each a sharded network with an optimizer and a schedule, and
the frozen reference beside them.

Who wants another optimizer, another schedule, or other networks to start from, changes this file.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import models
import resharding
from config import Config


@dataclass
class Learner:
    """A sharded network in training, with its optimizer and learning-rate schedule."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR


def build_networks(
    config: Config, path: str, world: Any, num_steps: int, critic_path: str = ""
) -> tuple[Learner, Learner | None, nn.Module | None]:
    """(actor, critic or None, frozen reference or None), sharded; rank 0 reads, the others
    receive."""
    compute_dtype = getattr(torch, config.dtype)
    updates = config.ppo_epochs * config.train_batch_size // config.ppo_mini_batch_size
    mesh, masters = resharding.make_mesh(config.fsdp_size), (torch.float32, config.offload_policy)
    names = "reshard_after_forward", "forward_prefetch", "backward_prefetch"

    def build(builder: Callable, path: str, dtype: torch.dtype, on_host: bool) -> nn.Module:
        torch.manual_seed(config.seed)
        model = builder(
            path, dtype, meta=not world.is_main, random_weights=config.random_weights,
            gradient_checkpointing=config.gradient_checkpointing,
            compile=config.use_torch_compile and world.device.type == "cuda",
            enable_activation_offload=config.enable_activation_offload,
        )
        _refuse_unequal(model)
        settings = {name: getattr(config, name) for name in names}
        settings["offload_policy"] = on_host
        return resharding.shard_model(model, mesh, compute_dtype, **settings)

    actor = build(models.build_actor, path, *masters)
    if config.rollout_only:
        return Learner(actor, None, None), None, None
    actor = make_learner(actor, config.lr, config, updates * (num_steps - config.critic_warmup))
    critic = reference = None
    if config.adv_estimator == "gae":
        critic = build(models.build_critic, critic_path or path, *masters)
        critic = make_learner(critic, config.critic_lr, config, updates * num_steps)
    if config.use_kl_in_reward or config.use_kl_loss:
        # Never trained, so no float32 masters: less memory, the same numbers. Its passes run
        # without gradient; with requires_grad off besides, each block would be compiled twice.
        reference = build(models.build_actor, path, compute_dtype, config.ref_param_offload)
    return actor, critic, reference


def _refuse_unequal(model: nn.Module) -> None:
    """What rank 0 sends, the others must expect: else NCCL waits for ever, and gloo takes the bytes
    for what they are not. Collective."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    each = [None] * dist.get_world_size()
    dist.all_gather_object(each, {(name, tuple(x.shape), x.dtype) for name, x in tensors})
    for rank, found in enumerate(each):
        if found != each[0]:
            odd = min(map(str, found ^ each[0]))
            raise ValueError(
                f"rank {rank} has another network than rank 0, they differ in {odd}: give every "
                "machine the same model folder and the same version of transformers"
            )


class ShardAdamW(torch.optim.AdamW):
    """AdamW on this rank's rows as plain tensors. It works element by element, so the numbers are
    the same; but through DTensor each of a few hundred weights costs the host 0.1 ms a step."""

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            # what to_local() gives, in a third of the time
            tensors[:] = [getattr(x, "_local_tensor", x) for x in tensors]
        return has_complex


def make_learner(model: nn.Module, lr: float, config: Config, total_steps: int) -> Learner:
    """AdamW on the float32 shards; the schedule counts optimizer steps that were taken."""
    decay = config.weight_decay
    optimizer = ShardAdamW(model.parameters(), lr=lr, weight_decay=decay, fused=True)
    for owner, away in ((model, config.param_offload), (optimizer, config.optimizer_offload)):
        if away:
            resharding.offload(owner)

    def factor(done: int) -> float:
        """Of the learning rate in optimizer step `done` + 1: never 0 within the run."""
        if done < config.lr_warmup_steps:
            return (done + 1) / config.lr_warmup_steps
        left = (total_steps - done) / max(1, total_steps - config.lr_warmup_steps)
        left = min(1.0, max(0.0, left))
        shapes = dict(constant=1.0, linear=left, cosine=(1 - math.cos(math.pi * left)) / 2)
        return shapes[config.lr_scheduler_type]

    return Learner(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor))
