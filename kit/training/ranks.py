"""The processes (ranks) that train one run together, started by torchrun; built on gloo and NCCL.

Rank 0, the main one, runs the recipe: it decides, writes files and prints. Where the others can
help it broadcasts an order, and each calls its `follow(ranks)`, until there is none. Orders are
pickled, so they hold plain values.
"""

import contextlib
import datetime
import functools
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kit.base.errors import KitError
from kit.base.hardware import is_oom, set_cuda_defaults

BUCKET_BYTES = 25 * 2**20  # of gradients that are summed together, as in DistributedDataParallel
LARGE_BYTES = 2**20  # of a gradient that is summed alone, in place
# Longest wait in a collective: the main rank may plan or evaluate for long. `await_call` waits for
# longer work.
TIMEOUT = datetime.timedelta(hours=6)
ANOTHER_ENDED = "processes that work together has ended"  # in the error of one that did not fail
POLL_S = 0.1


class RankLost(RuntimeError):
    """Another process of the same run has ended."""


class Ranks:
    """A single process: the main rank of one, so that the loop never checks how many there are."""

    rank = 0  # of this process, from 0
    world = 1  # number of ranks
    several = False  # whether torchrun started this process
    lost = False  # whether another rank is known to have ended

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sums(self, *numbers: float) -> tuple[float, ...]:
        """Each of `numbers`, summed over the ranks."""
        return numbers

    def any(self, condition: bool) -> bool:
        """Whether `condition` is true on any rank."""
        return condition

    def all_gather(self, value) -> list:
        """The `value` of every rank, by rank."""
        return [value]

    def from_main(self, compute: Callable):
        """Return `compute()` of the main rank on every rank; the others do not call it."""
        return compute()

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients of `parameters` over the ranks, in place."""

    def await_call(self) -> None:
        """Wait without a time limit until the main rank calls the others to `from_main`."""

    def call(self) -> None:
        """Call the other ranks; for the main one."""

    def barrier(self) -> None:
        """Wait until all ranks are here."""

    def share(self, items: Sequence) -> Sequence:
        """This rank's share of `items`."""
        return items[self.rank :: self.world]

    def leave(self) -> None:
        """Leave the process group."""


ALONE = Ranks()


class SeveralRanks(Ranks):
    """One of the processes that torchrun started; all of them call every method together.

    Each method raises RankLost when another process has ended.
    """

    several = True

    def __init__(self):
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.calls = 0  # by the main rank so far

    def sums(self, *numbers: float) -> tuple[float, ...]:
        total = torch.tensor(numbers, dtype=torch.float64)
        self._reduce(total)
        return tuple(type(n)(t) for n, t in zip(numbers, total.tolist()))

    def any(self, condition: bool) -> bool:
        return self.sums(int(condition))[0] > 0

    def all_gather(self, value) -> list:
        values = [None] * self.world
        with self._together():
            dist.all_gather_object(values, value)
        return values

    def from_main(self, compute: Callable):
        result = [compute() if self.is_main else None]
        with self._together():
            dist.broadcast_object_list(result, src=0, device=torch.device("cpu"))
        return result[0]

    @functools.cached_property
    def _store(self) -> dist.Store:
        """Numbers that all ranks share, in torchrun's store."""
        address = os.environ["MASTER_ADDR"]
        store = dist.TCPStore(address, int(os.environ["MASTER_PORT"]), is_master=False)
        # The store outlives processes that torchrun restarts after a failure.
        return dist.PrefixStore(f"kit {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)

    def add(self, name: str, more: int) -> int:
        """Add `more` to the shared number `name`; returns the sum."""
        with self._together():
            return self._store.add(name, more)

    def await_call(self) -> None:
        # Not in `from_main`: a collective times out, and blocks signals meanwhile.
        self.calls += 1
        while self.add("calls", 0) < self.calls:
            time.sleep(POLL_S)

    def call(self) -> None:
        self.calls += 1
        self.add("calls", 1)

    def barrier(self) -> None:
        # Not dist.barrier, which would block signals meanwhile.
        with self._together():
            others = dist.all_reduce(torch.zeros(1), async_op=True)
        while not others.is_completed():
            time.sleep(POLL_S)
        with self._together():
            others.wait()

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        # Not by DistributedDataParallel, which sends gradients during the last backward pass: the
        # others would wait forever for a rank that has no row in this batch, or runs out of memory.
        training = [p for p in parameters if p.requires_grad]
        for p in training:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        if self.world == 1:
            return
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
        if not self.lost:
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


def join_ranks() -> Ranks:
    """Join the processes that torchrun started; without torchrun, a single `Ranks`.

    Each takes a GPU of its own where there are any. Call it before CUDA is used. Raises KitError
    when there are too few.
    """
    if "LOCAL_RANK" not in os.environ or not dist.is_available():
        return Ranks()
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if take_card() else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT)
    return SeveralRanks()


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
    with contextlib.suppress(RankLost, KeyboardInterrupt):  # the main rank or torchrun says why
        while (order := broadcast_order(ranks)) is not None:
            order.follow(ranks)
    ranks.leave()


def broadcast_order(ranks: Ranks, order=None):
    """Broadcast the main rank's `order`; return it on every rank. None: nothing is left to do."""
    if ranks.is_main:
        ranks.call()
    else:
        with interruptible():  # it may wait for hours, and has nothing to finish
            ranks.await_call()
    return ranks.from_main(lambda: order)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block on SIGINT or SIGTERM.

    Elsewhere ranks other than the main one ignore both: the main one handles them.
    """
    with contextlib.ExitStack() as restored:
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.signal(number, signal.default_int_handler)
            restored.callback(signal.signal, number, before)
        yield
