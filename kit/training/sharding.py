"""A model that no device holds with its gradients and moments, spread over all: FSDP2.

PyTorch's `fully_shard` keeps a share of every parameter on each rank, gathers a layer's while it
computes, and leaves each rank its share of the summed gradients; the optimizer and the average work
on shares. Whatever leaves the ranks (a checkpoint, a voice to be heard) is gathered whole, so files
do not tell how they were trained. Each pass is taken by all ranks at once: one that has fewer takes
empty ones. Knows a model and torch.distributed; nothing of steps.

FSDP: Zhao et al. 2023.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from kit.base.config import ConfigError
from kit.base.hardware import Choice, Hardware, choose_precision
from kit.model.gpt import SpeechGPT
from kit.model.sequence import Batch, GPTConfig
from kit.training.ranks import Ranks, buckets
from kit.training.settings import TrainConfig
from kit.training.switches import Ran
from kit.training.trainable import Finetuning

FILLER_FRAMES = 8  # of an empty pass's reference: group norm wants more than one number

# Switches that do not work on shares of parameters, and why.
NOT_SHARDED = {
    "adamw_8bit": "its blocks of moments would lie across shares of the weights (FSDP)",
    "compile": "layers whose weights come and go (FSDP) would be compiled again and again",
    "ema_offload": "the average is spread over the GPUs as the weights are (FSDP)",
}
NO_FP16 = "fp16's scale is not agreed on between shares of the gradients (FSDP)"
REPLICAS = Choice(value="ddp", reason="every process has the whole model")


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard` was called with `model`."""
    return hasattr(model, "set_gradient_divide_factor")


def refused_switches(hw: Hardware) -> dict[str, str]:
    """Switches that are off where parameters are spread, each with its reason."""
    refused = dict(NOT_SHARDED)
    if choose_precision(hw).value == "fp16":
        refused["mixed_precision"] = NO_FP16
    return refused


def parallel_ran(asked: str, parallel: Choice, world: int) -> Ran:
    """The record's row on how `world` processes trained together."""
    return Ran(
        name="parallel",
        label="Several processes",
        asked=asked == parallel.value,
        on=True,
        ran=f"{parallel.value}, {world} of them",
        reason=parallel.reason,
    )


def lost_with_shares(model: SpeechGPT, guide: float) -> tuple[str, ...]:
    """Sentences on what of a run's settings is left out where parameters are spread."""
    if not guide or not is_sharded(model):
        return ()
    return (
        "Guided attention is off: it looks into a layer from outside, where its weights are spread "
        "(speed.parallel: fsdp)",
    )


def require_shardable(config: TrainConfig, finetuning: Finetuning) -> None:
    """Raise ConfigError for what cannot be trained with its weights spread."""
    if config.optimizer == "muon":
        raise ConfigError(
            "train.optimizer = muon: it needs whole matrices, and here (speed.parallel: fsdp) each "
            "process has a share of them. Set train.optimizer=adamw, or speed.parallel=ddp."
        )
    if finetuning.adapters or finetuning.config.tables_first:
        asked = "method = lora" if finetuning.adapters else "tables_first"
        raise ConfigError(
            f"finetune.{asked}: what is frozen cannot be spread (speed.parallel: fsdp), and it "
            "needs no gradients: set speed.parallel=ddp."
        )


def shard(model: SpeechGPT, device: str, world: int) -> None:
    """Spread the parameters of `model`, which may lie on the CPU, over `world` devices."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (world,))
    units = [*model.gpt.h, model]
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    for unit in units:
        # The loss is divided by all targets already: gradients are sums. gloo's own average leaves
        # sums undivided, without a word, so nothing is left to it.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def levelled(model: SpeechGPT, passes: list[Batch], ranks: Ranks) -> list[Batch]:
    """`passes`, with empty ones up to as many as any rank has where the parameters are spread."""
    if not is_sharded(model):
        return passes
    most = max(ranks.all_told(len(passes)))
    return [*passes, *[filler(model.config)] * (most - len(passes))]


def filler(config: GPTConfig) -> Batch:
    """A pass without a target: it adds nothing to losses and gradients."""
    none = torch.zeros(0, dtype=torch.long)
    token = torch.zeros(1, 1, dtype=torch.long)
    return Batch(
        tokens=token,
        positions=token,
        text_at=none,
        text_targets=none,
        code_at=none,
        code_targets=none,
        cond=torch.zeros(1, config.n_mels, FILLER_FRAMES),
    )


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which this rank may have a share; then all ranks ask for it together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gathered(tree: dict, ranks: Ranks) -> dict:
    """`tree` with whole tensors on the main rank's CPU; the others help, and are left with none."""
    found = {}
    for bucket in buckets(list(spread_tensors(tree))):
        found |= zip(map(id, bucket), gathered_together(bucket, ranks))
    return with_whole(tree, found)


def spread_tensors(tree: dict) -> Iterator[Tensor]:
    """Those tensors of `tree` of which this rank has a share."""
    for value in tree.values():
        if isinstance(value, dict):
            yield from spread_tensors(value)
        elif hasattr(value, "full_tensor"):
            yield value


def gathered_together(tensors: list[Tensor], ranks: Ranks) -> list[Tensor | None]:
    """Each of the spread `tensors`, whole, on the main rank's CPU; None on the others.

    They go in one message a rank: one a tensor would be hundreds, each waited for.
    """
    shares = [even_share(tensor) for tensor in tensors]
    mine = torch.cat([share.flatten() for share in shares])
    messages = [torch.empty_like(mine) for _ in range(ranks.world)] if ranks.is_main else None
    dist.gather(mine, messages, group=tensors[0].device_mesh.get_group())
    if messages is None:
        return [None] * len(tensors)
    sizes = [share.numel() for share in shares]
    parts = zip(*(message.cpu().split(sizes) for message in messages))
    return [
        torch.cat(part).view(-1, *tensor.shape[1:])[: len(tensor)]
        for part, tensor in zip(parts, tensors)
    ]


def even_share(tensor: Tensor) -> Tensor:
    """This rank's rows of a spread `tensor`, and zeros for those that other ranks have more."""
    mine = tensor.detach().to_local()
    rows = -(-len(tensor) // tensor.device_mesh.size())
    return F.pad(mine, [0, 0] * (mine.ndim - 1) + [0, rows - len(mine)])


def with_whole(tree: dict, found: dict[int, Tensor | None]) -> dict:
    """`tree` with what was `found` for the tensors of these ids in their places."""
    return {
        name: with_whole(value, found) if isinstance(value, dict) else found.get(id(value), value)
        for name, value in tree.items()
    }


def share_of(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's share of a whole `tensor`, spread as `like` is; itself where that is whole."""
    if not hasattr(like, "full_tensor") or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    device = like.device
    return distribute_tensor(
        tensor.to(device), like.device_mesh, like.placements, src_data_rank=None
    )


def gathered_model(model: SpeechGPT, ranks: Ranks, device: str) -> SpeechGPT | None:
    """A copy of a spread `model` on the main rank; None on the others, which help."""
    weights = gathered(dict(model.state_dict()), ranks)
    if not ranks.is_main:
        return None
    with torch.device("meta"):
        copy = SpeechGPT(model.config)
    copy.load_state_dict(weights, assign=True)
    return copy.to(device).eval()
