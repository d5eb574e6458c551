"""What torchrun starts for test_prepare_ranks.py: two ranks share work that does nothing."""

import dataclasses
import os
import sys
import time

from kit.base.errors import DatasetError, KitError
from kit.recipes.prepare_parts import RankGroup
from kit.training.ranks import follow_orders, join_ranks

LOADED = []


def load() -> str:
    LOADED.append(os.environ["RANK"])
    return "tools of another"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counting:
    """Counts, at its own pace; that of rank 1 breaks off where it is to fail."""

    parts: list[float]
    fails: bool

    def __call__(self, tools: str, tell) -> str:
        assert tools == ("own tools" if os.environ["RANK"] == "0" else "tools of another")
        for part in self.parts:
            time.sleep(0.3)
            tell(part)
        if self.fails and os.environ["RANK"] == "1":
            raise DatasetError("The drive of rank 1 is gone.")
        return os.environ["RANK"]


def main() -> int:
    ranks = join_ranks()
    if not ranks.is_main:
        follow_orders(ranks)
        return 0
    group = RankGroup(ranks, load)
    jobs = [Counting(parts=[1.0, 2.0], fails=False), Counting(parts=[2.5] * 3 + [1], fails=False)]
    found = group.do(jobs, "own tools", lambda done: print(f"done: {done}"))
    print(f"of the main rank: {found}, loaded by it: {len(LOADED)}")
    jobs = [dataclasses.replace(job, fails=True) for job in jobs]
    try:
        group.do(jobs, "own tools", lambda done: None)
    except KitError as error:
        print(f"the error: {error}")
        return 2  # as the command does
    return 0


if __name__ == "__main__":
    sys.exit(main())
