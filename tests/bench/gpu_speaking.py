"""Parts of the GPU check on speaking and around it: decoding, codec, recogniser, tests, monitor.

Each is a generator of rows, so that what was measured before a failure is kept.
"""

import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from gpu_setting import Setting, limit_row, note_row, seconds, spread, timed, wait_for_device
from infer_calls import PROMPT, gpt2, greedy, random_model, request
from rows import result

from kit.audio.mel_codec import MelCodec, MelCodecConfig
from kit.audio.recognizer import Recognizer, RecognizerConfig, train_recognizer
from kit.inference.compare_formats import RecordedExample, linear_bytes, teacher_forced_logits
from kit.inference.decoder import Decoder, DecoderConfig
from kit.inference.generate import decode
from kit.inference.linear_formats import FORMATS
from kit.model.gpt import SpeechGPT
from kit.tuning.monitor import Monitor

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
    rows = decode(decoder, texts, cond.to(decoder.device), config, [[0]] * batch)
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


# --- codec, recogniser, latents -------------------------------------------------------------


def codec_rows(setting: Setting) -> Iterator[dict]:
    """The codec trains on the device, lands on the CPU, and gives there what it gives here."""
    device = setting.hw.device
    config = MelCodecConfig(width=32, blocks=2, steps=12, batch=4, griffin_lim_iters=8)
    torch.manual_seed(0)
    waves = [wave(seconds_long) for seconds_long in (0.8, 1.0, 1.3)]
    for precision in ("fp32", setting.precision):
        codec = MelCodec(config)
        losses = [loss for _, loss in codec.fit(waves, device, precision)]
        row = f"codec, {precision}: loss of 12 steps"
        yield falling(row, losses, {p.device.type for p in codec.parameters()})
    mine, here = codec.encode(waves[0][None]), codec.to(device)
    theirs = here.encode(waves[0][None].to(device)).cpu()
    yield limit_row(
        "codec: codes unlike the CPU's", float((theirs != mine).float().mean()), "share", 0.05
    )
    values = here.fsq.dequantize(mine.to(device)).float()
    magnitude = here.decode_values(values)[1].exp().detach()
    sound = here.griffin_lim(magnitude).cpu()
    wanted = here.cpu().griffin_lim(magnitude.cpu())
    off = float((sound - wanted).norm() / wanted.norm())
    yield limit_row("Griffin-Lim: difference from the CPU's", off, "share", 0.02)


def wave(length_s: float) -> torch.Tensor:
    """Something like a voice, (L,)."""
    t = torch.arange(int(22050 * length_s)) / 22050
    tone = sum(torch.sin(2 * math.pi * 140 * k * t) / k for k in range(1, 8))
    return 0.2 * tone * (1 + torch.sin(2 * math.pi * 3 * t)) + 0.01 * torch.randn(len(t))


def falling(row: str, losses: list[float], devices: set[str]) -> dict:
    """A loss that fell, of a module whose weights are on the CPU again."""
    well = math.isfinite(sum(losses)) and losses[-1] < losses[0] and devices == {"cpu"}
    more = {"status": "ok" if well else "off", "weights_on": sorted(devices)}
    return result(row, losses[-1], "loss", "first", losses[0], losses[0] / losses[-1], **more)


def recognizer_rows(setting: Setting) -> Iterator[dict]:
    """The recogniser trains on the device and gives the same transcripts on the CPU."""
    torch.manual_seed(0)
    config = RecognizerConfig(width=32, blocks=2, steps=12, batch=4)
    mels = [torch.randn(80, 60 + 4 * i) - 5 for i in range(8)]
    texts = ["ab", "ba", "aab", "abb", "bab", "bba", "aba", "bb"]
    for precision in ("fp32", setting.precision):
        model = Recognizer(config, "ab")
        training = train_recognizer(model, mels, texts, setting.hw.device, precision)
        losses = [loss for _, loss in training]
        row = f"recogniser, {precision}: loss of 12 steps"
        yield falling(row, losses, {p.device.type for p in model.parameters()})
    mine = model.log_probs(mels[:2])
    theirs = model.to(setting.hw.device).log_probs(mels[:2])
    off = max(float((a - b).abs().max()) for a, b in zip(theirs, mine))
    yield limit_row("recogniser: difference from the CPU's", off, "nats", 0.02)
    gpt = random_model("S", 1)
    cond = request(gpt.config, 1)[1]
    with torch.inference_mode():
        mine = gpt.conditioner(cond)
        theirs = gpt.to(setting.hw.device).conditioner(cond.to(setting.hw.device)).cpu()
    off = float((theirs - mine).norm() / mine.norm())
    yield limit_row("latents of a reference: difference from the CPU's", off, "share", 1e-3)


# --- the machine ----------------------------------------------------------------------------


def monitor_rows(setting: Setting) -> Iterator[dict]:
    """What the monitor reads while the device is kept busy."""
    device, busy_s = setting.hw.device, 0.5 if setting.pretended else 4.0
    block = torch.randn(512 if setting.pretended else 8192, 1024, device=device)
    with Monitor(setting.hw, every_s=busy_s / 8) as monitor:
        until_s = time.monotonic() + busy_s
        while time.monotonic() < until_s:
            for _ in range(20):
                block @ block.mT
            wait_for_device(device)
    summary = monitor.summary()
    if summary["error"] or not summary["count"]:
        yield note_row("monitor", summary["error"] or "it took no sample", "failed")
        return
    memory, held = summary["memory_peak_bytes"], block.nbytes
    plausible = held <= memory <= setting.hw.memory_bytes
    more = {"status": "ok" if plausible else "off", "source": summary["source"]}
    figures = memory / 2**30, "GiB", "all there is", setting.hw.memory_bytes / 2**30, None
    yield result("monitor: memory in use", *figures, **more)
    load = summary["load_mean"]
    if load is None:
        yield note_row("monitor: load", summary["load_note"], "failed")
        return
    status = "ok" if setting.pretended or load > 0.3 else "off"
    yield result("monitor: load of busy seconds", load, "share", status=status)


def test_rows(setting: Setting) -> Iterator[dict]:
    """The suite's own tests that need a GPU; without one they are skipped."""
    files = [str(file) for name in TESTS for file in (ROOT / "tests").glob(f"*/test_{name}.py")]
    # addopts name plugins that need not be installed here.
    options = ["-q", "-o", "addopts=", "-k", "gpu or cuda or pinned", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = ended.stdout.strip().splitlines() or [ended.stderr.strip()[-200:]]
    missing = {line.split("'")[1] for line in lines if "ModuleNotFoundError: No module" in line}
    if missing:
        reason = f"No module named {', '.join(sorted(missing))}"
        yield note_row("tests that need a GPU", reason, "failed")
        return
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    more = {"status": "off" if ended.returncode else "ok", "note": lines[-1], "failed": failed}
    yield result("tests that need a GPU", ended.returncode, "exit code", "", 0, None, **more)
