"""A group of several processes, pretended in one: jobs travel, and are done one after the other."""

import pickle

from kit.base.processes import WorkGroup


class PretendedGroup(WorkGroup):
    """`fails` is the number of the process whose job is not done; then all end, as after a kill."""

    def __init__(self, size: int, fails: int | None = None):
        self.size = size
        self.fails = fails

    def do(self, jobs, tools, progress):
        assert len(jobs) == self.size
        done = 0.0

        def tell(more: float) -> None:
            nonlocal done
            done += more
            progress(done)

        found = []
        for number, job in enumerate(jobs):
            if number == self.fails:
                raise KeyboardInterrupt
            found.append(pickle.loads(pickle.dumps(job))(tools, tell))
        return found[0]
