"""Parts of `make check-gpu` on speaking and around it: decoding, codec, recogniser, monitor.

Each is a generator of rows, so that what it found before it failed is kept. Knows nothing of
training the GPT.
"""

import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from gpu_setting import Setting, checked, seconds, settle, told
from infer_calls import greedy, random_model, request
from rows import result

from kit.audio.mel_codec import MelCodec, MelCodecConfig
from kit.audio.recognizer import Recognizer, RecognizerConfig, train_recognizer
from kit.inference import decoder as decoders
from kit.inference.compare_formats import linear_bytes
from kit.inference.decoder import Decoder, DecoderConfig
from kit.inference.generate import decode
from kit.inference.linear_formats import FORMATS
from kit.model.gpt import SpeechGPT
from kit.tuning.monitor import Monitor

ROOT = Path(__file__).resolve().parent.parent.parent
# with marks for a GPU
TESTS = ("decoder", "preflight", "monitor", "switches", "streaming", "ab_test")


# --- decoding -------------------------------------------------------------------------------


def small_decoding_rows(setting: Setting) -> Iterator[dict]:
    """The demo's size, where a step is all launches."""
    compiled = () if setting.pretended else (("bf16", 1), ("bf16", 8))
    layers = 1 if setting.pretended else 4
    yield from decoding_rows("4 x 256", "S", layers, FORMATS, compiled, setting)


def large_decoding_rows(setting: Setting) -> Iterator[dict]:
    """XTTS-v2's size, where a step is all reading of weights."""
    layers = 1 if setting.pretended else 30
    compiled = () if setting.pretended else (("bf16", 1), ("int8", 1), ("bf16", 8))
    size = "S" if setting.pretended else "L"
    formats = ("fp32", "bf16", "fp16", "int8")
    yield from decoding_rows("30 x 1024", size, layers, formats, compiled, setting)


def decoding_rows(
    size: str, shape: str, layers: int, formats: tuple, compiled: tuple, setting: Setting
) -> Iterator[dict]:
    """Codes a second in every format, eager, by CUDA graphs and compiled; and the same codes."""
    with torch.device(setting.hw.device):
        model = random_model(shape, layers)
    peer = {batch: rate(ready(model, "fp32", "eager"), batch, setting) for batch in (1, 8)}
    wanted = {batch: found[1] for batch, found in peer.items()}
    limit = reading_speed(setting)
    for weights in formats:
        try:
            eager = ready(model, weights, "eager")
        except ValueError as error:
            yield told(f"{size}, {weights}", str(error))
            continue
        own = {batch: said(eager, batch, setting) for batch in (1, 8)}
        for kind in ("eager", "CUDA graphs", "compiled"):
            batches = [b for b in (1, 8) if kind != "compiled" or (weights, b) in compiled]
            for batch in batches:
                decoder = eager if kind == "eager" else ready(model, weights, kind)
                speed, codes = rate(decoder, batch, setting)
                read = linear_bytes(decoder) * speed / batch
                more = {
                    "ran": decoder.ran,
                    "bytes": linear_bytes(decoder),
                    "weights_read_share": read / limit,
                    "codes_as_eager": agreement(codes, own[batch]),
                    "codes_as_fp32": agreement(codes, wanted[batch]),
                    "warm_up_s": sum(decoder.warm_up_s.values()),
                }
                fell_back = "no CUDA graph" in decoder.ran
                same = more["codes_as_eager"] >= (0.99 if weights == "fp32" else 0.5)
                more["status"] = "ok" if same and not fell_back else "off"
                row = f"{size}, {weights}, {kind}, batch {batch}"
                base = peer[batch][0]
                yield result(row, speed, "codes/s", "fp32, eager", base, speed / base, **more)
    yield cache_row(size, model, setting)


def ready(model: SpeechGPT, weights: str, kind: str) -> Decoder:
    """The decoder of a kind; "CUDA graphs" are of plain steps, as where nothing compiles."""
    if kind != "CUDA graphs":
        return Decoder(model, DecoderConfig(weights=weights, compile=kind == "compiled"))
    plain, decoders.will_compile = decoders.will_compile, lambda *_: (False, "")
    try:
        return Decoder(model, DecoderConfig(weights=weights, compile=True))
    finally:
        decoders.will_compile = plain


def rate(decoder: Decoder, batch: int, setting: Setting) -> tuple[float, torch.Tensor]:
    """Codes a second of whole calls, prompts included, and the codes."""
    codes = said(decoder, batch, setting)
    spent_s = seconds(lambda: said(decoder, batch, setting), setting.hw.device)
    return batch * setting.codes / spent_s, codes


def said(decoder: Decoder, batch: int, setting: Setting, **options) -> torch.Tensor:
    """Greedy codes (B, N)."""
    texts, cond = request(decoder.config, batch)
    config = greedy(setting.codes, **options)
    rows = decode(decoder, texts, cond.to(decoder.device), config, [0] * batch)
    return torch.stack([row.codes for row in rows])


def agreement(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Share of codes that are the same. Greedy rows that part once stay apart."""
    return float((found == wanted).float().mean())


def cache_row(size: str, model: SpeechGPT, setting: Setting) -> dict:
    """The key-value cache on beside off: the same codes, so many times as fast."""
    decoder = ready(model, "fp32", "eager")
    codes = [said(decoder, 1, setting, kv_cache=on) for on in (True, False)]
    times = [
        seconds(lambda on=on: said(decoder, 1, setting, kv_cache=on), setting.hw.device, rounds=1)
        for on in (True, False)
    ]
    speeds = [setting.codes / spent_s for spent_s in times]
    same = agreement(*codes)
    more = {"status": "ok" if same >= 0.99 else "off", "same_codes": same}
    row = f"{size}, fp32: cache on"
    return result(row, speeds[0], "codes/s", "off", speeds[1], speeds[0] / speeds[1], **more)


def reading_speed(setting: Setting) -> float:
    """Bytes a second that this device reads."""
    size = 2**20 if setting.pretended else 2**28
    array = torch.ones(size, device=setting.hw.device)
    return 4 * size / seconds(array.sum, setting.hw.device, rounds=5)


# --- codec, recogniser, latents -------------------------------------------------------------


def codec_rows(setting: Setting) -> Iterator[dict]:
    """The codec trains on the device, lands on the CPU, and gives there what it gives here."""
    device = setting.hw.device
    config = MelCodecConfig(width=32, blocks=2, steps=12, batch=4, griffin_lim_iters=8)
    torch.manual_seed(0)
    waves = [wave(seconds_long) for seconds_long in (0.8, 1.0, 1.3)]
    for precision in ("fp32", setting.precision):
        codec = MelCodec(config)
        found = [loss for _, loss in codec.fit(waves, device, precision)]
        row = f"codec, {precision}: loss of 12 steps"
        yield falling(row, found, {p.device.type for p in codec.parameters()})
    mine, here = codec.encode(waves[0][None]), codec.to(device)
    theirs = here.encode(waves[0][None].to(device)).cpu()
    yield checked("codec: codes unlike the CPU's", 1 - agreement(theirs, mine), "share", 0.05)
    values = here.fsq.dequantize(mine.to(device)).float()
    magnitude = here.decode_values(values)[1].exp().detach()
    sound = here.griffin_lim(magnitude).cpu()
    wanted = here.cpu().griffin_lim(magnitude.cpu())
    off = float((sound - wanted).norm() / wanted.norm())
    yield checked("Griffin-Lim: difference from the CPU's", off, "share", 0.02)


def wave(length_s: float) -> torch.Tensor:
    """Something like a voice, (L,)."""
    t = torch.arange(int(22050 * length_s)) / 22050
    tone = sum(torch.sin(2 * math.pi * 140 * k * t) / k for k in range(1, 8))
    return 0.2 * tone * (1 + torch.sin(2 * math.pi * 3 * t)) + 0.01 * torch.randn(len(t))


def falling(row: str, found: list[float], devices: set[str]) -> dict:
    """A loss that fell, of a module whose weights are on the CPU again."""
    well = math.isfinite(sum(found)) and found[-1] < found[0] and devices == {"cpu"}
    more = {"status": "ok" if well else "off", "weights_on": sorted(devices)}
    return result(row, found[-1], "loss", "first", found[0], found[0] / found[-1], **more)


def recognizer_rows(setting: Setting) -> Iterator[dict]:
    """The recogniser trains on the device, lands on the CPU, and hears there what it hears here."""
    torch.manual_seed(0)
    config = RecognizerConfig(width=32, blocks=2, steps=12, batch=4)
    mels = [torch.randn(80, 60 + 4 * i) - 5 for i in range(8)]
    texts = ["ab", "ba", "aab", "abb", "bab", "bba", "aba", "bb"]
    for precision in ("fp32", setting.precision):
        model = Recognizer(config, "ab")
        found = [
            loss for _, loss in train_recognizer(model, mels, texts, setting.hw.device, precision)
        ]
        row = f"recogniser, {precision}: loss of 12 steps"
        yield falling(row, found, {p.device.type for p in model.parameters()})
    mine = model.log_probs(mels[:2])
    theirs = model.to(setting.hw.device).log_probs(mels[:2])
    off = max(float((a - b).abs().max()) for a, b in zip(theirs, mine))
    yield checked("recogniser: difference from the CPU's", off, "nats", 0.02)
    gpt = random_model("S", 1)
    cond = request(gpt.config, 1)[1]
    with torch.inference_mode():
        mine = gpt.conditioner(cond)
        theirs = gpt.to(setting.hw.device).conditioner(cond.to(setting.hw.device)).cpu()
    off = float((theirs - mine).norm() / mine.norm())
    yield checked("latents of a reference: difference from the CPU's", off, "share", 1e-3)


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
            settle(device)
    found = monitor.summary()
    if found["error"] or not found["count"]:
        yield told("monitor", found["error"] or "it took no sample", "failed")
        return
    memory, held = found["memory_peak_bytes"], block.nbytes
    plausible = held <= memory <= setting.hw.memory_bytes
    more = {"status": "ok" if plausible else "off", "source": found["source"]}
    figures = memory / 2**30, "GiB", "all there is", setting.hw.memory_bytes / 2**30, None
    yield result("monitor: memory in use", *figures, **more)
    load = found["load_mean"]
    if load is None:
        yield told("monitor: load", found["load_note"], "failed")
        return
    busy = setting.pretended or load > 0.3
    yield result(
        "monitor: load of busy seconds",
        load,
        "share",
        "",
        None,
        None,
        status="ok" if busy else "off",
    )


def test_rows(setting: Setting) -> Iterator[dict]:
    """The suite's own tests that need a GPU."""
    if setting.pretended:
        yield told("tests that need a GPU", "no GPU here")
        return
    files = [str(file) for name in TESTS for file in (ROOT / "tests").glob(f"*/test_{name}.py")]
    options = ["-q", "-k", "gpu or cuda or pinned", "-p", "no:cacheprovider", "--durations=0"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    last = (ended.stdout.strip().splitlines() or [ended.stderr.strip()[-200:]])[-1]
    failed = [line for line in ended.stdout.splitlines() if line.startswith("FAILED")]
    more = {"status": "off" if ended.returncode else "ok", "note": last, "failed": failed}
    yield result("tests that need a GPU", ended.returncode, "exit code", "", 0, None, **more)


def device_words(setting: Setting) -> str:
    """The device as its driver names it, with the versions a figure depends on."""
    versions = f"Python {sys.version.split()[0]}, torch {torch.__version__}"
    if setting.pretended:
        return f"no GPU: tiny sizes on {setting.hw.name}; {versions}"
    try:
        query = [
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total",
            "--format=csv,noheader",
        ]
        name = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        name = name.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        name = setting.hw.name
    return f"{name}; {versions}, CUDA {torch.version.cuda}"
