"""What was made once is not made again; what was made of something else, or is damaged, is."""

import math

import pytest

from kit.base.result_cache import cached_result


class Work:
    """Counts how often it was done."""

    def __init__(self):
        self.times = 0

    def __call__(self) -> dict:
        self.times += 1
        return {"text": "ሰላም", "times": self.times, "score": -math.inf}


def test_a_result_is_made_once_for_each_key(tmp_path):
    work = Work()
    path = tmp_path / "deep" / "result.json"
    first = cached_result(path, "a", work)
    assert first == cached_result(path, "a", work) and work.times == 1
    assert cached_result(path, "b", work)["times"] == 2
    assert cached_result(path, "b", work)["times"] == 2
    assert "ሰላም" in path.read_text(encoding="utf-8")


def test_a_result_whose_files_are_gone_is_made_again(tmp_path):
    work = Work()
    path = tmp_path / "result.json"
    cached_result(path, "a", work)
    assert cached_result(path, "a", work, lambda value: value["times"] == 1)["times"] == 1
    assert cached_result(path, "a", work, lambda value: value["times"] > 1)["times"] == 2


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"key": "a"}', b"\xff", b"[" * 99_999])
def test_a_damaged_file_is_reported_and_costs_the_work_alone(tmp_path, data):
    path = tmp_path / "result.json"
    path.write_bytes(data)
    with pytest.warns(UserWarning, match=r"result\.json is damaged .* made again"):
        assert cached_result(path, "a", Work())["times"] == 1
    assert cached_result(path, "a", Work())["times"] == 1
