"""Work is shared out by what it is: nothing is left out, done twice, or moved by its neighbours."""

import pytest
from shared_work import PretendedGroup

from kit.base.processes import SINGLE_PROCESS

CLIPS = [f"/recordings/{number}.wav" for number in range(4000)]


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_every_item_is_one_process_s(size):
    group = PretendedGroup(size)
    for shares in (group.split_by_key(CLIPS, str), group.split_evenly(CLIPS)):
        assert len(shares) == size
        assert sorted(clip for share in shares for clip in share) == sorted(CLIPS)
        counts = [len(share) for share in shares]
        assert max(counts) < 1.2 * min(counts), "about as many each"


def test_a_share_by_content_does_not_depend_on_earlier_items():
    group = PretendedGroup(4)
    whole = group.split_by_key(CLIPS, str)
    fewer = group.split_by_key(CLIPS[1001::3], str)
    assert all(set(some) <= set(share) for some, share in zip(fewer, whole))


def test_few_items_are_dealt_out_evenly():
    assert PretendedGroup(3).split_evenly("abcd") == ["ad", "b", "c"]


def test_a_process_alone_does_all_of_it():
    def work(tools, advance):
        for _ in range(3):
            advance(tools)
        return "done"

    reported = []
    assert SINGLE_PROCESS.do([work], 2, reported.append) == "done" and reported == [2, 4, 6]
