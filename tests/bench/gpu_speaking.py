"""Parts of the GPU check on speaking and around it: decoding, codec, recogniser, tests, monitor.

Each is a generator of rows, so that what was measured before a failure is kept.
"""

import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
from gpu_setting import Setting, note_row, seconds, spread, timed
from infer_calls import PROMPT, gpt2, greedy, random_model, request
from rows import result

from kit.inference.compare_formats import RecordedExample, linear_bytes, teacher_forced_logits
from kit.inference.decoder import Decoder, DecoderConfig
from kit.inference.generate import decode
from kit.inference.linear_formats import FORMATS
from kit.model.gpt import SpeechGPT

ROOT = Path(__file__).resolve().parent.parent.parent
# Files of the suite with tests for a GPU.
TESTS = ("decoder", "preflight", "monitor", "switches", "streaming", "trials")
AGREEMENT = {"fp32": 0.99, "bf16": 0.95, "fp16": 0.98, "int8": 0.9, "int8-weight-only": 0.9}


# --- decoding -------------------------------------------------------------------------------


def small_decoding_rows(setting: Setting) -> Iterator[dict]:
    """The demo's size, where a step is all kernel launches."""
    layers = 1 if setting.pretended else 4
    compiled = () if setting.pretended else (("bf16", 1), ("bf16", 8))
    yield from decoding_rows("4 x 256", "S", layers, FORMATS, (1, 8), compiled, setting)


def large_decoding_rows(setting: Setting) -> Iterator[dict]:
    """XTTS-v2's size, where a step is all reading of weights."""
    if setting.pretended:
        yield from decoding_rows("30 x 1024", "S", 1, FORMATS, (1, 8), (), setting)
        return
    formats = ("bf16", "fp16", "int8", "fp32")
    compiled = (("bf16", 1), ("int8", 1), ("bf16", 64))
    yield from decoding_rows("30 x 1024", "L", 30, formats, (1, 8, 64), compiled, setting)


def decoding_rows(
    size: str, shape: str, layers: int, formats, batches, compiled, setting: Setting
) -> Iterator[dict]:
    """Codes a second in every format, eager, by CUDA graphs and compiled, beside transformers'.

    Whole calls, prompt included. The formats' logits are compared with fp32's along the same codes
    (teacher forcing): greedy codes of random weights part at the first near tie.
    """
    device = setting.hw.device
    with torch.device(device):
        model = random_model(shape, layers)
    bandwidth = read_bytes_per_s(setting)
    yield result("memory read", bandwidth / 1e9, "GB/s", status="ok")
    peer_s, peer_note = {}, ""
    try:
        peer_s = {batch: peer_seconds(model, batch, setting) for batch in batches}
    except ImportError as error:
        peer_note = str(error)
    row_of_codes = recorded_row(model, setting)
    expected = teacher_forced_logits(ready(model, "fp32", "eager"), row_of_codes)
    for kind in ("CUDA graphs", "compiled", "eager"):
        for weights in formats:
            try:
                decoder = ready(model, weights, kind)
            except ValueError as error:
                yield note_row(f"{size}, {weights}, {kind}", str(error))
                continue
            for batch in batches:
                if kind == "compiled" and (weights, batch) not in compiled:
                    continue
                more = {"note_peer": peer_note} if peer_note else {}
                name = f"{size}, {weights}, {kind}, batch {batch}"
                yield decoding_row(name, decoder, batch, peer_s, bandwidth, setting) | more
            if kind == "compiled" and weights not in {w for w, _ in compiled}:
                continue
            logits = teacher_forced_logits(decoder, row_of_codes)
            agree = float((logits.argmax(-1) == expected.argmax(-1)).float().mean())
            row = f"{size}, {weights}, {kind}: same first choice as fp32, eager"
            wanted = AGREEMENT[weights]
            status = "ok" if agree >= wanted else "off"
            yield result(row, agree, "share", "at least", wanted, agree / wanted, status=status)
    yield cache_row(size, model, setting)


def decoding_row(
    name: str, decoder: Decoder, batch: int, peer_s: dict, bandwidth: float, setting: Setting
) -> dict:
    device = setting.hw.device
    first_s = timed(lambda: speak(decoder, batch, setting), device)
    rounds = [timed(lambda: speak(decoder, batch, setting), device) for _ in range(3)]
    speed = batch * setting.codes / statistics.median(rounds)
    read = linear_bytes(decoder) * speed / batch
    fell_back = "no CUDA graph" in decoder.ran or "not compiled" in decoder.ran
    more = {"ran": decoder.ran, "spread": spread(rounds), "first_call_s": first_s}
    more |= {"warm_call_s": statistics.median(rounds), "weights_read_share": read / bandwidth}
    more["status"] = "off" if fell_back else "ok"
    if batch not in peer_s:
        return result(name, speed, "codes/s", **more)
    peer = batch * setting.codes / peer_s[batch]
    half = "fp32" if setting.pretended else setting.precision
    peer_name = f"transformers GPT2LMHeadModel.generate, {half}"
    return result(name, speed, "codes/s", peer_name, peer, speed / peer, **more)


def ready(model: SpeechGPT, weights: str, kind: str) -> Decoder:
    how = {"compile": kind == "compiled", "graphs": kind == "CUDA graphs"}
    return Decoder(model, DecoderConfig(weights=weights, **how))


def speak(decoder: Decoder, batch: int, setting: Setting, **options) -> torch.Tensor:
    """Greedy codes (B, N)."""
    texts, cond = request(decoder.config, batch)
    config = greedy(setting.codes, **options)
    rows = decode(decoder, texts, cond.to(decoder.device), config, [0] * batch)
    return torch.stack([row.codes for row in rows])


def recorded_row(model: SpeechGPT, setting: Setting) -> RecordedExample:
    """A text and codes, the same each time."""
    texts, cond = request(model.config, 1)
    random = torch.Generator().manual_seed(1)
    codes = torch.randint(0, model.config.start_code, (setting.codes,), generator=random)
    return texts[0], codes.tolist(), cond[0]


def peer_seconds(model: SpeechGPT, batch: int, setting: Setting) -> float:
    """Median seconds of transformers' `generate`, half precision where there is a GPU."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = torch.float32 if setting.pretended else dtypes.get(setting.precision, torch.float32)
    peer = gpt2(model).to(setting.hw.device, dtype)
    ids = torch.ones(batch, PROMPT, dtype=torch.long, device=setting.hw.device)
    options = {"max_new_tokens": setting.codes, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    work = lambda: peer.generate(ids, attention_mask=mask, **options)  # noqa: E731
    return seconds(work, setting.hw.device, rounds=2)


def cache_row(size: str, model: SpeechGPT, setting: Setting) -> dict:
    """The key-value cache on beside off: the same codes, so many times as fast."""
    decoder = ready(model, "fp32", "eager")
    codes = [speak(decoder, 1, setting, kv_cache=on) for on in (True, False)]
    times = [
        seconds(lambda on=on: speak(decoder, 1, setting, kv_cache=on), setting.hw.device, rounds=1)
        for on in (True, False)
    ]
    speeds = [setting.codes / each for each in times]
    same = float((codes[0] == codes[1]).float().mean())
    more = {"status": "ok" if same >= 0.99 else "off", "same_codes": same}
    row = f"{size}, fp32: cache on"
    return result(row, speeds[0], "codes/s", "off", speeds[1], speeds[0] / speeds[1], **more)


def read_bytes_per_s(setting: Setting) -> float:
    """Bytes a second that this device reads to sum a gibibyte."""
    size = 2**20 if setting.pretended else 2**28
    array = torch.ones(size, device=setting.hw.device)
    return 4 * size / seconds(array.sum, setting.hw.device, rounds=5)


def cudnn_rows(setting: Setting) -> Iterator[dict]:
    """Speaking with cuDNN's attention on and off: the first call and the next one."""
    if setting.pretended:
        yield note_row("speaking with cuDNN's attention", "only a GPU has it")
        return
    with torch.device("cuda"):
        model = random_model("L", 30)
    calls = {}
    for on in (False, True):
        torch.backends.cuda.enable_cudnn_sdp(on)
        decoder = ready(model, setting.precision, "eager")
        calls[on] = [timed(lambda d=decoder: speak(d, 1, setting), "cuda") for _ in range(2)]
    torch.backends.cuda.enable_cudnn_sdp(False)
    for number, call in enumerate(("first", "second")):
        off_ms, on_ms = 1000 * calls[False][number], 1000 * calls[True][number]
        row = f"speaking, {setting.precision}, eager, cuDNN attention off: {call} call"
        yield result(row, off_ms, "ms", "on", on_ms, on_ms / off_ms, status="ok")
