"""The kit beside itself: its cache on and off, bytes of INT8 and fp32, a second compilation.

Rows for `bench_infer.py`; no other program is here.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from infer_calls import kit_call, random_model, ready, request
from rows import result

from kit.inference.compare_formats import linear_bytes
from kit.inference.decoder import Decoder
from kit.inference.linear_formats import weight_bytes


def cache_rows(layers: dict[str, int], lengths: tuple[int, ...]) -> list[dict]:
    """Whole calls in fp32, so many codes each, with the key-value cache and without."""
    rows = []
    for size in layers:
        decoder = ready(random_model(size, layers[size]))
        kit_call(decoder, 2)
        for codes in lengths:
            on = kit_call(decoder, codes).total_s
            if size == "S":
                how, off = "the kit, cache off", kit_call(decoder, codes, kv_cache=False).total_s
            else:  # minutes
                how, off = "the kit, cache off: every 20th step x 20", off_seconds(decoder, codes)
            row = f"{size}, fp32: {codes} codes, KV cache on"
            rows.append(result(row, on, "s", how, off, off / on))
    return rows


@torch.inference_mode()
def off_seconds(decoder: Decoder, codes: int, every: int = 20) -> float:
    """Seconds of `codes` steps without a cache, each the prompt and all codes before it again."""
    texts, cond = request(decoder.config, 1)
    x = decoder.prompt(texts, cond)[0]
    spent = []
    for number in range(every // 2, codes + every // 2, every):
        row = torch.cat((x, x[:, :1].expand(-1, number, -1)), dim=1)
        started_s = time.perf_counter()
        decoder.prefill(row, [0], 0)
        spent.append(time.perf_counter() - started_s)
    return codes * statistics.mean(spent)


def bytes_rows(layers: dict[str, int]) -> list[dict]:
    """What INT8 leaves of the linear layers, and of all that speaks (embeddings, conditioner)."""
    rows = []
    for size in layers:
        model = random_model(size, layers[size])
        full, int8 = ready(model), ready(model, "int8")
        for what, count in (("linear layers", linear_bytes), ("whole decoder", weight_bytes)):
            mb, full_mb = count(int8) / 1e6, count(full) / 1e6
            row = f"{size}, int8: {what}, {mb / full_mb:.1%} of fp32"
            rows.append(result(row, mb, "MB", "the kit, fp32", full_mb, full_mb / mb))
    return rows


def warm_up_row(layers: int) -> dict:
    """Seconds to compile, in a process that is the first to do so and in one that is the second."""
    code = f"import infer_itself as i; print(i.warm_up_s({layers}, {torch.get_num_threads()}))"
    here = Path(__file__).resolve().parent
    paths, times = os.pathsep.join([str(here), str(here.parent.parent)]), []
    with tempfile.TemporaryDirectory() as folder:
        own = {"PYTHONPATH": paths, "TORCHINDUCTOR_CACHE_DIR": folder}
        for _ in range(2):
            command = [sys.executable, "-c", code]
            run = subprocess.run(
                command, env=os.environ | own, stdout=subprocess.PIPE, text=True, check=True
            )
            times.append(float(run.stdout.splitlines()[-1]))
    first, second = times
    row, peer = "S, int8, compiled: warm-up of a second process", "the kit, first process"
    return result(row, second, "s", peer, first, first / second)


def warm_up_s(layers: int, threads: int) -> float:
    torch.set_num_threads(threads)
    decoder = ready(random_model("S", layers), "int8", True)
    kit_call(decoder, 4)
    return sum(decoder.warm_up_s.values())
