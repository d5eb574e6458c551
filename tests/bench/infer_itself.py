"""The kit beside itself: its cache on and off, a second compilation. Rows for `bench_infer.py`."""

import tempfile

import torch
from infer_calls import kit_call, random_model, ready
from rows import apart, result


def cache_rows(layers: int, lengths: tuple[int, ...]) -> list[dict]:
    """Whole calls at size S in fp32, so many codes each, with the key-value cache and without."""
    decoder = ready(random_model("S", layers))
    kit_call(decoder, 2)
    rows = []
    for codes in lengths:
        on, off = (kit_call(decoder, codes, kv_cache=kept).total_s for kept in (True, False))
        row = f"S, fp32: {codes} codes, KV cache on"
        rows.append(result(row, on, "s", "the kit, cache off", off, off / on))
    return rows


def warm_up_row(layers: int) -> dict:
    """Seconds to compile, in a process that is the first to do so and in one that is the second."""
    code = f"import infer_itself as i; print(i.warm_up_s({layers}, {torch.get_num_threads()}))"
    with tempfile.TemporaryDirectory() as folder:
        first, second = (float(apart(code, TORCHINDUCTOR_CACHE_DIR=folder)) for _ in range(2))
    row, peer = "S, int8, compiled: warm-up of a second process", "the kit, first process"
    return result(row, second, "s", peer, first, first / second)


def warm_up_s(layers: int, threads: int) -> float:
    torch.set_num_threads(threads)
    decoder = ready(random_model("S", layers), "int8", True)
    kit_call(decoder, 4)
    return sum(decoder.warm_up_s.values())
