"""Size L on a GPU, compiled on both sides, from one row to 64: rows for `bench_infer.py --gpu`.

Whole calls, prompt included.
"""

import statistics
import time
from collections.abc import Callable

import torch
from infer_calls import PROMPT, gpt2, greedy, random_model, ready, request
from rows import result

from kit.inference.compare_formats import linear_bytes
from kit.inference.decoder import Decoder
from kit.inference.generate import decode

PEER = "transformers GPT2LMHeadModel.generate, bf16 or fp16, static cache, compiled"
LIMIT = "limit: this GPU reading 1 GiB to sum it"


def gpu_rows(layers: int, codes: int) -> list[dict]:
    """Codes a second, and weights read a second against what the memory gives."""
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU here: leave out --gpu, or install torch with CUDA.")
    model = random_model("L", layers)
    half = torch.bfloat16 if torch.cuda.is_bf16_supported(False) else torch.float16
    peer, model, rows = gpt2(model).to("cuda", half), model.cuda(), []
    limit = read_bytes_per_s()
    peer_s = {batch: peer_seconds(peer, codes, batch) for batch in (1, 4, 16, 64)}
    for weights in ("bf16", "int8"):
        decoder = ready(model, weights, compiled=True)
        for batch, other in peer_s.items():
            kit = kit_seconds(decoder, codes, batch)
            row = f"L, GPU, {decoder.ran}, compiled, batch {batch}"
            rates = [batch * codes / seconds for seconds in (kit, other)]
            rows.append(result(row, rates[0], "codes/s", PEER, rates[1], other / kit))
            read = linear_bytes(decoder) * codes / kit
            row = f"{row}: weights read a second"
            rows.append(result(row, read / 1e9, "GB/s", LIMIT, limit / 1e9, read / limit))
    return rows


def seconds(work: Callable[[], object]) -> float:
    """Median seconds of three rounds, the device's included, after two that pay for compiling."""
    spent = []
    for _ in range(5):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        work()
        torch.cuda.synchronize()
        spent.append(time.perf_counter() - started_s)
    return statistics.median(spent[2:])


def kit_seconds(decoder: Decoder, codes: int, batch: int) -> float:
    texts, cond = request(decoder.config, batch)
    cond = cond.to(decoder.device)
    return seconds(lambda: decode(decoder, texts, cond, greedy(codes), [0] * batch))


def peer_seconds(peer, codes: int, batch: int) -> float:
    """A static cache is what makes `generate` compile its step on a GPU."""
    ids = torch.ones(batch, PROMPT, dtype=torch.long, device=peer.device)
    options = {"max_new_tokens": codes, "do_sample": False, "cache_implementation": "static"}
    return seconds(lambda: peer.generate(ids, attention_mask=torch.ones_like(ids), **options))


def read_bytes_per_s() -> float:
    array = torch.ones(2**28, device="cuda")
    return 4 * len(array) / seconds(array.sum)
