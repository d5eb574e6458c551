"""The processes that work on one run together: who they are, what they share, what they agree on.

`torchrun` starts them, and each makes its `Ranks` by `join_ranks`. A process alone is one, too: its
answers are its own and cost nothing, so the loop asks without knowing how many there are. The first
of several, the main one, decides, writes and speaks; what it found the others are told. Knows
torch.distributed; nothing of what is trained.
"""

import contextlib
import datetime
import functools
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kit.base.errors import KitError, TrainError
from kit.base.hardware import is_oom
from kit.training import checkpoint
from kit.training.launch import ANOTHER_ENDED

BUCKET_BYTES = 25 * 2**20  # of gradients that are sent together, as DistributedDataParallel's
LARGE_BYTES = 2**20  # of one that is sent alone, as it lies
# Between two words of the main process. It may plan, or hear a voice, for long; one that has died
# is noticed at once, by its closed connection. What may take longer still (recordings are fetched,
# networks trained) is waited for by `await_call`, which looks again and again.
WAIT = datetime.timedelta(hours=6)
LOOK_S = 0.1  # between two looks
PARTING_S = 0.5


class RankLost(RuntimeError):
    """Another process of the same run has ended, so nothing more can be done together."""


class Ranks:
    """One process alone: the main one of one, and whatever is asked of all is asked of it."""

    rank = 0  # of this process, from 0
    world = 1  # how many there are
    several = False  # whether torchrun has started them
    lost = False  # whether one of them is known to have ended

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sums(self, *numbers: float) -> tuple[float, ...]:
        """Each of `numbers`, summed over the ranks."""
        return numbers

    def any(self, here: bool) -> bool:
        """Whether it is so on any rank."""
        return here

    def all_told(self, value) -> list:
        """The `value` of every rank, by rank."""
        return [value]

    def from_main(self, find: Callable):
        """What `find()` returns on the main rank, on every rank; the others do not call it."""
        return find()

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leave the sum over the ranks in the gradients of `parameters`, alike on each."""

    def await_call(self) -> None:
        """Wait, however long, until the main rank has called the others to `from_main`."""

    def call(self) -> None:
        """Call the other ranks, on the main one."""

    def share(self, items: Sequence) -> Sequence:
        """Those of `items` that are this rank's to do."""
        return items[self.rank :: self.world]

    def leave(self) -> None:
        """Take part in nothing any more."""


ALONE = Ranks()


class SeveralRanks(Ranks):
    """This process among those that torchrun started; every method is called by all of them.

    Each raises RankLost where one of the others has ended.
    """

    several = True

    def __init__(self):
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.calls = 0  # of the main rank, so far

    def sums(self, *numbers: float) -> tuple[float, ...]:
        total = torch.tensor(numbers, dtype=torch.float64)
        self._reduce(total)
        return tuple(type(n)(t) for n, t in zip(numbers, total.tolist()))

    def any(self, here: bool) -> bool:
        return self.sums(int(here))[0] > 0

    def all_told(self, value) -> list:
        found = [None] * self.world
        with self._together():
            dist.all_gather_object(found, value)
        return found

    def from_main(self, find: Callable):
        found = [find() if self.is_main else None]
        with self._together():
            dist.broadcast_object_list(found, src=0, device=torch.device("cpu"))
        return found[0]

    @functools.cached_property
    def _store(self) -> dist.Store:
        """Numbers and words that all of them see, where torchrun keeps its own."""
        address = os.environ["MASTER_ADDR"]
        store = dist.TCPStore(address, int(os.environ["MASTER_PORT"]), is_master=False)
        # It outlives processes that torchrun starts again after a failure.
        return dist.PrefixStore(f"kit {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)

    def add(self, name: str, more: int) -> int:
        """Add `more` to the number `name`, which is all ranks' and 0 at first; what it is now."""
        with self._together():
            return self._store.add(name, more)

    def write(self, name: str, text: str) -> None:
        """Leave `text` for `read` on any rank."""
        with self._together():
            self._store.set(name, text)

    def read(self, name: str) -> str:
        with self._together():
            return self._store.get(name).decode()

    def await_call(self) -> None:
        # Not in `from_main`: a collective ends after WAIT, and hears no signal meanwhile.
        self.calls += 1
        while self.add("calls", 0) < self.calls:
            time.sleep(LOOK_S)

    def call(self) -> None:
        self.calls += 1
        self.add("calls", 1)

    def hand_out(self, values: Sequence | None = None):
        """The one of the main rank's `values` that is for this rank, by number."""
        found = [None]
        with self._together():
            dist.scatter_object_list(found, list(values) if self.is_main else None, src=0)
        return found[0]

    def meet(self, look: Callable[[], None] = lambda: None) -> None:
        """Wait, up to WAIT, until all ranks have come here; `look()` now and then meanwhile."""
        with self._together():
            others = dist.all_reduce(torch.zeros(1), async_op=True)
        while not others.is_completed():
            look()
            time.sleep(LOOK_S)
        with self._together():
            others.wait()

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        # Not by DistributedDataParallel, which sends them from within the last backward pass: a
        # rank without a row in this batch has no such pass, one that runs out of memory does not
        # end it, and the others would wait for them for ever. After the passes all ranks know that
        # all are done. What it sends in between it sends behind the computation; of a step with
        # several passes that is little.
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
            # gloo's threads need Python once more, to let go of the last tensors they were given;
            # one that finds it gone takes the process down with it.
            time.sleep(PARTING_S)

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
            raise self.lose() from error

    def lose(self) -> RankLost:
        """Know that one of the others has ended; the error that says so."""
        self.lost = True
        return RankLost(f"Another of the {self.world} {ANOTHER_ENDED}, or cannot be reached.")


def join_ranks(own_card: bool = True) -> Ranks:
    """This process's place among those that torchrun has started; alone where it has not.

    Each takes a GPU of its own where there are any, and raises KitError where there are too few:
    unless `own_card` is False, for work in which they may share one. Call it before CUDA is used.
    """
    if "LOCAL_RANK" not in os.environ or not dist.is_available():
        return Ranks()
    if not dist.is_initialized():
        gpus = own_card and take_card()
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=WAIT)
    return SeveralRanks()


def take_card() -> bool:
    """Leave this process one GPU to see, which is then number 0 to it; whether there is one.

    Raises KitError where this machine has fewer than processes.
    """
    cards = torch.cuda.device_count()  # asks the driver, and does not begin to use CUDA
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
    """Raise TrainError unless `value` is the same on all ranks; `what` it is of."""
    told = ranks.all_told(value)
    if any(each != told[0] for each in told):
        raise TrainError(
            f"The processes that are to train together differ in {what}, by rank: "
            f"{', '.join(map(str, told))}. Start them on equal devices, with the same files."
        )


def buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """The large ones of `tensors` alone, the others together up to BUCKET_BYTES, of one type."""
    bucket, size_bytes = [], 0
    for tensor in tensors:
        if tensor.nbytes >= LARGE_BYTES:
            yield [tensor]
            continue
        size_bytes += tensor.nbytes
        if bucket and (size_bytes > BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size_bytes = [], tensor.nbytes
        bucket.append(tensor)
    if bucket:
        yield bucket


def random_states(ranks: Ranks) -> dict:
    """The random numbers' state of every rank: the main one's as it is alone, with the others'."""
    main, *others = ranks.all_told(checkpoint.random_state())
    if others:
        main["ranks"] = {str(rank): state for rank, state in enumerate(others, start=1)}
    return main


def restore_random_states(saved: dict, ranks: Ranks, seed: int, step: int) -> None:
    """Give this rank the state that `random_states` has of it, or where it has none a new one."""
    state = saved if ranks.is_main else saved.get("ranks", {}).get(str(ranks.rank))
    if state is None:
        seed_rank(ranks, seed, step)
    else:
        checkpoint.restore_random_state(state)


def seed_rank(ranks: Ranks, seed: int, step: int) -> None:
    """Let this rank draw other dropout than the rest from `step` on; the main one draws as ever."""
    if not ranks.is_main:
        torch.manual_seed(random.Random(f"{seed} {ranks.rank} {step}").getrandbits(63))
