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
from collections.abc import Callable
from pathlib import Path

import infer_calls
import torch
from infer_calls import Call, kit_call, peer_call, random_model, ready
from infer_xtts import COQUI, xtts_calls
from rows import against, native, result, run_parts, take_turns

PEER = "transformers GPT2LMHeadModel.generate, fp32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured; `--quick` is a smoke test."""

    rounds: int = 5  # that count, at S; one more goes before
    layers: dict[str, int] = dataclasses.field(default_factory=lambda: {"S": 6, "L": 30})
    codes: dict[str, int] = dataclasses.field(default_factory=lambda: {"S": 200, "L": 60})
    cache_codes: tuple[int, int] = (100, 200)  # spoken with the cache off and on

    def of(self, size: str) -> int:
        """Rounds that count: L takes long and is steady."""
        return self.rounds if size == "S" else max(1, self.rounds // 2)


TINY = {"layers": {"S": 1, "L": 2}, "codes": {"S": 16, "L": 8}, "cache_codes": (8, 16)}
QUICK = Effort(rounds=1, **TINY)


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
    results = take_turns(calls, effort.of(size))
    other = results.pop("peer")
    rows = [
        against(f"{size}, {n}", steps(c), PEER, steps(other), ran=decoders[n].ran)
        for n, c in results.items()
    ]
    return rows + [whole(size, name, calls, other) for name, calls in results.items()]


def whole(size: str, name: str, calls: list[Call], other: list[Call], peer: str = PEER) -> dict:
    row = f"{size}, {name}: the whole call, a code"
    per_code = lambda calls: [c.total_s / c.codes.shape[1] for c in calls]  # noqa: E731
    return against(row, per_code(calls), peer, per_code(other), "ms a code")


def small(effort: Effort) -> list[dict]:
    formats = ["fp32", "bf16", "int8", "int8-weight-only"]
    return size_rows("S", effort, formats, ["fp32", "bf16", "int8"])


def large(effort: Effort) -> list[dict]:
    return size_rows("L", effort, ["fp32", "bf16", "int8"], ["int8"])


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


PARTS: dict[str, Callable[[Effort], list[dict]]] = {
    "S": small,
    "L": large,
    "cache": lambda effort: cache_rows(effort.layers["S"], effort.cache_codes),
    "xtts": xtts_rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke test: tiny, no true figure")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=PARTS, nargs="*")
    parser.add_argument("--without-full-size", action="store_true", help="no XTTS-v2: 5 GB")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    effort = QUICK if options.quick else Effort()
    parts = {name: functools.partial(rows, effort) for name, rows in PARTS.items()}
    if options.without_full_size:
        del parts["xtts"]
    path = options.folder / ("infer-quick.json" if options.quick else "infer.json")
    parts = {name: rows for name, rows in parts.items() if name in (options.only or parts)}
    run_parts(parts, path, "infer-requirements.txt")


if __name__ == "__main__":
    main()
