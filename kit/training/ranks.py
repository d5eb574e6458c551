"""The processes (ranks) that train one run together, started by torchrun; built on gloo and NCCL.

Rank 0, the main one, runs the recipe: it decides, writes files and prints. Where the others can
help it broadcasts an order, and each calls its `follow(ranks)`, until there is none. Orders are
pickled, so they hold plain values.
"""

import contextlib
import datetime
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kit.base.errors import KitError
from kit.base.hardware import is_oom, set_cuda_defaults

BUCKET_BYTES = 25 * 2**20  # of gradients that are summed together, as in DistributedDataParallel
LARGE_BYTES = 2**20  # of a gradient that is summed alone, in place
# Longest wait in a collective: the main rank may plan, evaluate or train other parts for hours. A
# process that ends is noticed at once.
TIMEOUT = datetime.timedelta(days=7)
ANOTHER_ENDED = "processes that work together has ended"  # in the error of one that did not fail
POLL_S = 0.1


class RankLost(RuntimeError):
    """Another process of the same run has ended."""


class Ranks:
    """This process among those that train together; all of them call every method together.

    A single process is the main rank of one, so that the loop never checks how many there are. Each
    method raises RankLost when another process has ended.
    """

    def __init__(self, rank: int = 0, world: int = 1):
        self.rank = rank  # of this process, from 0
        self.world = world  # number of ranks
        self.lost = False  # whether another rank is known to have ended

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def several(self) -> bool:
        return self.world > 1

    def sums(self, *numbers: float) -> tuple[float, ...]:
        """Each of `numbers`, summed over the ranks."""
        if not self.several:
            return numbers
        total = torch.tensor(numbers, dtype=torch.float64)
        self._reduce(total)
        return tuple(type(n)(t) for n, t in zip(numbers, total.tolist()))

    def any(self, condition: bool) -> bool:
        """Whether `condition` is true on any rank."""
        return self.sums(int(condition))[0] > 0

    def all_gather(self, value) -> list:
        """The `value` of every rank, by rank."""
        values = [value] * self.world
        if self.several:
            with self._together():
                dist.all_gather_object(values, value)
        return values

    def from_main(self, compute: Callable):
        """Return `compute()` of the main rank on every rank; the others do not call it."""
        result = [compute() if self.is_main else None]
        if self.several:
            with self._together():
                dist.broadcast_object_list(result, src=0, device=torch.device("cpu"))
        return result[0]

    def share(self, items: Sequence) -> Sequence:
        """This rank's share of `items`."""
        return items[self.rank :: self.world]

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if not self.several:
            return
        # Not dist.barrier, which would block signals meanwhile.
        with self._together():
            others = dist.all_reduce(torch.zeros(1), async_op=True)
        while not others.is_completed():
            time.sleep(POLL_S)
        with self._together():
            others.wait()

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients of `parameters` over the ranks, in place."""
        if not self.several:
            return
        # Not by DistributedDataParallel, which sends gradients during the last backward pass: the
        # others would wait forever for a rank that has no row in this batch, or runs out of memory.
        training = [p for p in parameters if p.requires_grad]
        for p in training:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        for gradients in buckets([p.grad for p in training]):
            if len(gradients) == 1 and gradients[0].is_contiguous():
                self._reduce(gradients[0])
                continue
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            self._reduce(flat)
            parts = flat.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts):
                gradient.copy_(part.view_as(gradient))

    def leave(self) -> None:
        """Leave the process group."""
        if self.several and not self.lost:
            dist.destroy_process_group()
            # gloo's threads still have to free their last tensors. If Python ends before, the
            # process crashes.
            time.sleep(0.5)

    def _reduce(self, tensor: Tensor) -> None:
        with self._together():
            dist.all_reduce(tensor)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if is_oom(error):
                raise
            self.lost = True
            message = f"Another of the {self.world} {ANOTHER_ENDED}, or cannot be reached."
            raise RankLost(message) from error


ALONE = Ranks()


def join_ranks() -> Ranks:
    """Join the processes that torchrun started; without torchrun, a single `Ranks`.

    Each takes a GPU of its own where there are any. Call it before CUDA is used. Raises KitError
    when there are too few.
    """
    if "LOCAL_RANK" not in os.environ or os.environ.get("WORLD_SIZE") == "1":
        return Ranks()
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if take_card() else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT)
    return Ranks(dist.get_rank(), dist.get_world_size())


def take_card() -> bool:
    """Let this process see only one GPU, as number 0; returns whether there is one.

    Raises KitError when this machine has fewer GPUs than processes.
    """
    cards = torch.cuda.device_count()  # asks the driver, does not initialise CUDA
    if not cards:
        return False
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if processes > cards:
        raise KitError(
            f"torchrun started {processes} processes on this machine, which has {cards} GPUs: each "
            f"trains on one of its own. Give --nproc-per-node={cards}."
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(cards)))
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[int(os.environ["LOCAL_RANK"])]
    return True


def require_same(ranks: Ranks, what: str, value) -> None:
    """Raise KitError unless `value` is the same on all ranks; `what` names it."""
    values = ranks.all_gather(value)
    if any(other != values[0] for other in values):
        raise KitError(
            f"The processes that are to train together differ in {what}, by rank: "
            f"{', '.join(map(str, values))}. Start them on equal devices, with the same files."
        )


def buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Group `tensors`: large ones alone, others of one type together up to BUCKET_BYTES."""
    bucket = []
    size_bytes = 0
    for tensor in tensors:
        if tensor.nbytes >= LARGE_BYTES:
            yield [tensor]
            continue
        size_bytes += tensor.nbytes
        if bucket and (size_bytes > BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
            size_bytes = tensor.nbytes
        bucket.append(tensor)
    if bucket:
        yield bucket


def seed_rank(ranks: Ranks, seed: int, step: int) -> None:
    """Seed this rank's dropout from `step` on; the main rank keeps its random state."""
    if not ranks.is_main:
        torch.manual_seed(random.Random(f"{seed} {ranks.rank} {step}").getrandbits(63))


def follow_orders(ranks: Ranks) -> None:
    """Follow the main rank's orders until there are none, or until the main rank has ended."""
    set_cuda_defaults()
    with contextlib.suppress(RankLost):  # the main rank or torchrun says why
        while (order := broadcast_order(ranks)) is not None:
            order.follow(ranks)
    ranks.leave()


def broadcast_order(ranks: Ranks, order=None):
    """Broadcast the main rank's `order`; return it on every rank. None: nothing is left to do."""
    return ranks.from_main(lambda: order)
