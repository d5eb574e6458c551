"""Speaking measured beside transformers' GPT-2 and coqui-tts, on one machine: `make bench-infer`.

Two sizes: S is 6 layers of 256, L is 30 of 1024, both with 1,030 codes and a prompt of 128
positions, greedy. Before anything is timed, both sides must make the same codes from the same
weights. Contestants take turns round by round, in one process. A step is the median time between
two codes of a call, sampling and checks included; values are medians of the rounds, a ratio is the
median of the rounds' ratios. Prints a table and writes the rows (rows.py) into
runs/bench/infer.json.
"""

import argparse
import dataclasses
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import infer_calls
import torch
from infer_calls import Call, kit_call, peer_call, random_model, ready
from infer_voice import voice_rows
from infer_xtts import COQUI, xtts_calls
from rows import against, apart, native, result, run_parts, take_turns

from kit.inference.decoder import Decoder
from kit.inference.linear_formats import weight_bytes

PEER = "transformers GPT2LMHeadModel.generate, fp32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured; `--quick` is a smoke test."""

    rounds: int = 5  # that count, at S; one more goes before
    layers: dict[str, int] = dataclasses.field(default_factory=lambda: {"S": 6, "L": 30})
    codes: dict[str, int] = dataclasses.field(default_factory=lambda: {"S": 200, "L": 60})
    cache_codes: tuple[int, int] = (100, 200)  # spoken with the cache off and on
    sentences: int = 200  # spoken by the demo's voice, with each format
    compared: int = 40  # held-out rows whose logits are compared

    def of(self, size: str) -> int:
        """Rounds that count: L takes long and is steady."""
        return self.rounds if size == "S" else max(1, self.rounds // 2)


TINY = {"layers": {"S": 1, "L": 2}, "codes": {"S": 16, "L": 8}, "cache_codes": (8, 16)}
QUICK = Effort(rounds=1, sentences=6, compared=2, **TINY)


def steps(calls: list[Call]) -> list[float]:
    return [call.step_s for call in calls]


@functools.cache
def models(size: str, layers: int, codes: int) -> tuple:
    """The kit's model and its peer, once they are seen to make the same codes."""
    model = random_model(size, layers)
    peer = infer_calls.gpt2(model)
    different = infer_calls.same_codes(model, peer, codes)
    print(f"  {size}: both sides make the same {codes} codes, {different} different ones")
    return model, peer


def size_rows(size: str, effort: Effort, eager: list[str], compiled: list[str]) -> list[dict]:
    """Formats of one size, one row at a time, beside the peer."""
    model, peer = models(size, effort.layers[size], effort.codes[size])
    codes = effort.codes[size]
    decoders = {f"{weights}, eager": ready(model, weights) for weights in native(eager)}
    decoders |= {f"{w}, compiled": ready(model, w, True) for w in native(compiled)}
    calls = {"peer": lambda: peer_call(peer, codes)}
    calls |= {name: lambda d=d: kit_call(d, codes) for name, d in decoders.items()}
    calls["bandwidth"] = infer_calls.read_bytes_per_s
    results = take_turns(calls, effort.of(size))
    other, speed = results.pop("peer"), results.pop("bandwidth")
    rows = [
        against(f"{size}, {n}", steps(c), PEER, steps(other), ran=decoders[n].ran)
        for n, c in results.items()
    ]
    rows += [whole(size, name, calls, other) for name, calls in results.items()]
    if size == "L":
        rows += [share(name, decoders[name], calls, speed) for name, calls in results.items()]
    return rows


def whole(size: str, name: str, calls: list[Call], other: list[Call], peer: str = PEER) -> dict:
    row = f"{size}, {name}: the whole call, a code"
    per_code = lambda calls: [c.total_s / c.codes.shape[1] for c in calls]  # noqa: E731
    return against(row, per_code(calls), peer, per_code(other), "ms a code")


def share(name: str, decoder: Decoder, calls: list[Call], speed: list[float]) -> dict:
    """Weight bytes read a step, per second, against the bandwidth measured in the same rounds."""
    read_bytes = weight_bytes(decoder.layers) + weight_bytes(decoder.code_head)
    rates = [read_bytes / call.step_s for call in calls]
    ratio = statistics.median(a / b for a, b in zip(rates, speed))
    gb, limit = (statistics.median(values) / 1e9 for values in (rates, speed))
    peer = "limit: this machine reading 1 GiB to sum it"
    return result(f"L, {name}: weights read a second", gb, "GB/s", peer, limit, ratio)


def small(effort: Effort) -> list[dict]:
    formats = ["fp32", "bf16", "int8", "int8-weight-only"]
    return size_rows("S", effort, formats, ["fp32", "bf16", "int8"])


def large(effort: Effort) -> list[dict]:
    return size_rows("L", effort, ["fp32", "bf16", "int8"], ["int8"])


def static_rows(effort: Effort) -> list[dict]:
    """The peer's own way to be faster: static cache and compile."""
    model, peer = models("S", effort.layers["S"], effort.codes["S"])
    decoder, codes, options = ready(model, "int8"), effort.codes["S"], infer_calls.static_compiled()
    started_s = time.perf_counter()
    peer_call(peer, codes, **options)
    print(f"  its warm-up takes {time.perf_counter() - started_s:.0f} s")
    theirs = lambda: peer_call(peer, codes, **options)  # noqa: E731
    calls = {"kit": lambda: kit_call(decoder, codes), "peer": theirs}
    kit, other = (steps(results) for results in take_turns(calls, effort.of("S")).values())
    name = f"{PEER}, static cache, compiled"
    return [against("S, int8, eager: beside the peer compiled", kit, name, other)]


def batch_rows(effort: Effort) -> list[dict]:
    """Eight rows at a time: a step, and codes a second of the whole call, prompts included."""
    kinds = (("S", True), ("S", False), ("L", False))
    return [row for size, compiled in kinds for row in one_batch(size, compiled, effort)]


def one_batch(size: str, compiled: bool, effort: Effort) -> list[dict]:
    model, peer = models(size, effort.layers[size], effort.codes[size])
    decoder, codes = ready(model, "int8", compiled), effort.codes[size]
    sides = {"kit": (kit_call, decoder), "peer": (peer_call, peer)}
    calls = {name: functools.partial(*side, codes, batch=8) for name, side in sides.items()}
    kit, other = take_turns(calls, effort.of(size)).values()
    row = f"{size}, int8, {'compiled' if compiled else 'eager'}, batch 8"
    rates, peer_rates = ([8 * codes / call.total_s for call in each] for each in (kit, other))
    ratio = statistics.median(a / b for a, b in zip(rates, peer_rates))
    rate, peer_rate = (statistics.median(values) for values in (rates, peer_rates))
    whole = result(f"{row}: the whole call", rate, "codes/s", PEER, peer_rate, ratio)
    return [against(row, steps(kit), PEER, steps(other), ran=decoder.ran), whole]


def xtts_rows(effort: Effort) -> list[dict]:
    """XTTS-v2's released size beside coqui-tts's own loop: a step, and the whole call."""
    calls, ran = xtts_calls(effort.layers["L"], effort.codes["L"])
    results = take_turns(calls, effort.of("L"))
    other = results.pop("coqui-tts")
    rows = []
    for name, own in results.items():
        row = f"XTTS-v2, {name}"
        rows.append(against(row, steps(own), COQUI, steps(other), ran=ran[name]))
        rows.append(whole("XTTS-v2", name, own, other, COQUI))
    return rows


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
    code = f"import bench_infer as b; print(b.warm_up_s({layers}, {torch.get_num_threads()}))"
    with tempfile.TemporaryDirectory() as folder:
        first, second = (float(apart(code, TORCHINDUCTOR_CACHE_DIR=folder)) for _ in range(2))
    row = "S, int8, compiled: warm-up of a second process"
    return result(row, second, "s", "the kit, first process", first, first / second)


def warm_up_s(layers: int, threads: int) -> float:
    torch.set_num_threads(threads)
    decoder = ready(random_model("S", layers), "int8", True)
    kit_call(decoder, 4)
    return sum(decoder.warm_up_s.values())


PARTS: dict[str, Callable[[Effort], list[dict]]] = {
    "S": small,
    "L": large,
    "static": static_rows,
    "batch": batch_rows,
    "cache": lambda effort: cache_rows(effort.layers["S"], effort.cache_codes),
    "xtts": xtts_rows,
    "warm-up": lambda effort: [warm_up_row(effort.layers["S"])],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke test: tiny, no true figure")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=[*PARTS, "voice"], nargs="*")
    parser.add_argument("--without-full-size", action="store_true", help="no XTTS-v2: 5 GB")
    parser.add_argument("--voice", type=Path, default=Path("runs/demo"), help="a finished run")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    effort = QUICK if options.quick else Effort()
    parts = {name: functools.partial(rows, effort) for name, rows in PARTS.items()}
    if options.without_full_size:
        del parts["xtts"]
    asked = options.only or []
    if "voice" in asked or (options.voice / "report.json").is_file():
        counts = (effort.sentences, effort.compared)
        parts["voice"] = functools.partial(voice_rows, options.voice, *counts)
    path = options.folder / ("infer-quick.json" if options.quick else "infer.json")
    parts = {name: rows for name, rows in parts.items() if name in (asked or parts)}
    run_parts(parts, path, "infer-requirements.txt")


if __name__ == "__main__":
    main()
