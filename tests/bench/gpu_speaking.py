"""Parts of the GPU check on speaking, at XTTS-v2's size (30 x 1024).

Each is a generator of rows, so that what was measured before a failure is kept. Whole calls are
timed, prompt and sampling included.
"""

import statistics
from collections.abc import Iterator

import torch
from gpu_setting import Setting, note_row, read_bytes_per_s, seconds, spread, timed
from gpu_training import profile_rows, profiled
from infer_calls import PROMPT, gpt2, greedy, random_model, request, static_compiled
from rows import result

from kit.base.hardware import DTYPES, silence_profiler
from kit.inference.compare_formats import RecordedExample, forced_logits
from kit.inference.decoder import Decoder
from kit.inference.generate import decode
from kit.inference.linear_formats import weight_bytes
from kit.model.gpt import SpeechGPT
from kit.settings import GenerateConfig

AGREEMENT = {"bf16": 0.94, "fp16": 0.98, "int8": 0.9}  # of first choices, with fp32's
# As people set XTTS-v2: what sampling adds to a greedy code.
SAMPLED = {"temperature": 0.75, "top_k": 50, "top_p": 0.85, "repetition_penalty": 5.0}


def large_model(setting: Setting) -> SpeechGPT:
    with torch.device(setting.hw.device):
        return random_model("S", 1) if setting.pretended else random_model("L", 30)


def half(setting: Setting) -> str:
    return "fp32" if setting.pretended else setting.precision


def ready(model: SpeechGPT, weights: str, kind: str) -> Decoder:
    how = {"compile": kind == "compiled", "graphs": kind == "CUDA graphs"}
    return Decoder(model, weights=weights, **how)


def speak(decoder: Decoder, batch: int, config: GenerateConfig) -> torch.Tensor:
    """Codes (B, N)."""
    texts, cond = request(decoder.config, batch)
    rows = decode(decoder, texts, cond.to(decoder.device), config, [[0]] * batch)
    return torch.stack([row.codes for row in rows])


def kernel_rows(setting: Setting) -> Iterator[dict]:
    """The kernels of a code, for one sentence and for 64, by kind and the longest by name."""
    model = large_model(setting)
    batches = (1, 2) if setting.pretended else (1, 64)
    for weights in (half(setting), "int8"):
        yield from code_rows(model, "CUDA graphs", weights, batches, setting)


def code_rows(
    model: SpeechGPT, kind: str, weights: str, batches: tuple, setting: Setting
) -> Iterator[dict]:
    """The kernels of a code, for each number of sentences in `batches`."""
    silence_profiler()
    count = 6 if setting.pretended else 24
    decoder = ready(model, weights, kind)
    for batch in batches:
        speak(decoder, batch, greedy(count))
        figures = profiled(lambda: speak(decoder, batch, greedy(count)), setting)  # noqa: B023
        what = f"a code in {weights}, {batch} sentences, {kind}, prompt included"
        yield from profile_rows(what, figures, count)


def layer_rows(setting: Setting) -> Iterator[dict]:
    """A layer compiled and the step recorded: how fast, how soon, and its kernels."""
    model = large_model(setting)
    if setting.pretended:
        yield from speed_rows(model, [("CUDA graphs", half(setting))], (1,), {}, setting)
        return
    cases = [("CUDA graphs", half(setting)), ("compiled", half(setting)), ("compiled", "int8")]
    yield from speed_rows(model, cases[:2], (1, 64), {}, setting)
    yield from code_rows(model, *cases[1], (1, 64), setting)
    yield from speed_rows(model, cases[2:], (1,), {}, setting)


def decoding_rows(setting: Setting) -> Iterator[dict]:
    """1, 8 and 64 sentences at a time, beside transformers' `generate`."""
    model = large_model(setting)
    batches = (1, 2) if setting.pretended else (1, 8, 64)
    peers = {}
    try:
        peer = gpt2(model).to(setting.hw.device, DTYPES[half(setting)])
        peers = {batch: peer_seconds(peer, batch, setting) for batch in batches}
    except ImportError as error:
        yield note_row("transformers", str(error))
    cases = [("CUDA graphs", half(setting))]
    if not setting.pretended:
        cases += [("compiled", half(setting)), ("CUDA graphs", "int8"), ("compiled", "int8")]
    yield from speed_rows(model, cases, batches, peers, setting)
    if not peers or setting.pretended:
        return
    static_s = peer_seconds(peer, 1, setting, **static_compiled())
    speed = setting.codes / static_s
    yield result("transformers, static cache, compiled, batch 1", speed, "codes/s", status="ok")


def speed_rows(
    model: SpeechGPT, cases: list, batches: tuple, peers: dict, setting: Setting
) -> Iterator[dict]:
    """Codes a second of each kind and format, and how often its first choice is that of fp32.

    Along the same codes (teacher forcing): greedy codes of random weights part at a near tie.
    """
    example = recorded_example(model, setting)
    expected = forced_logits(ready(model, "fp32", "eager"), [example]).argmax(-1)
    bandwidth = read_bytes_per_s(setting)
    for kind, weights in cases:
        decoder = ready(model, weights, kind)
        for batch in batches:
            name = f"30 x 1024, {weights}, {kind}, batch {batch}"
            yield speed_row(name, decoder, batch, peers.get(batch), bandwidth, setting)
        config = GenerateConfig(exact_codes=setting.codes, **SAMPLED)
        work = lambda: speak(decoder, 1, config)  # noqa: B023, E731
        speed = setting.codes / seconds(work, setting.hw.device)
        yield result(f"30 x 1024, {weights}, {kind}, sampled, batch 1", speed, "codes/s")
        choices = forced_logits(decoder, [example]).argmax(-1)
        agree = float((choices == expected).float().mean())
        wanted = AGREEMENT.get(weights, 0.99)
        row = f"30 x 1024, {weights}, {kind}: same first choice as fp32, eager"
        status = "ok" if agree >= wanted else "off"
        yield result(row, agree, "share", "at least", wanted, agree / wanted, status=status)


def speed_row(
    name: str,
    decoder: Decoder,
    batch: int,
    peer_s: float | None,
    bandwidth: float,
    setting: Setting,
) -> dict:
    device = setting.hw.device
    config = greedy(setting.codes)
    first_s = timed(lambda: speak(decoder, batch, config), device)
    rounds = [timed(lambda: speak(decoder, batch, config), device) for _ in range(3)]
    call_s = statistics.median(rounds)
    speed = batch * setting.codes / call_s
    fell_back = "no CUDA graph" in decoder.ran or "not compiled" in decoder.ran
    more = {"ran": decoder.ran, "spread": spread(rounds), "first_call_s": first_s}
    more["warm_call_s"] = call_s
    read_bytes = weight_bytes(decoder.layers) + weight_bytes(decoder.code_head)
    more["weights_read_share"] = read_bytes * setting.codes / call_s / bandwidth
    more["status"] = "off" if fell_back else "ok"
    if peer_s is None:
        return result(name, speed, "codes/s", **more)
    peer = batch * setting.codes / peer_s
    peer_name = "transformers GPT2LMHeadModel.generate, dynamic cache"
    return result(name, speed, "codes/s", peer_name, peer, speed / peer, **more)


def recorded_example(model: SpeechGPT, setting: Setting) -> RecordedExample:
    """A text and codes, the same each time."""
    texts, cond = request(model.config, 1)
    random = torch.Generator().manual_seed(1)
    codes = torch.randint(0, model.config.start_code, (setting.codes,), generator=random)
    return texts[0], codes.tolist(), cond[0]


def peer_seconds(peer, batch: int, setting: Setting, **more) -> float:
    """Median seconds of transformers' `generate`."""
    ids = torch.ones(batch, PROMPT, dtype=torch.long, device=setting.hw.device)
    options = {"max_new_tokens": setting.codes, "do_sample": False, "pad_token_id": 0} | more
    mask = torch.ones_like(ids)
    work = lambda: peer.generate(ids, attention_mask=mask, **options)  # noqa: E731
    return seconds(work, setting.hw.device, rounds=2)
