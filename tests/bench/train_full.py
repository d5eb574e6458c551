"""XTTS-v2 at its released size, 30 layers of 1024, as it is fine-tuned: rows for `bench_train.py`.

Both sides train the same batch with the same weights, references of 6 s and dropout 0.1. coqui-tts
computes mels and codes in each step, as its trainer does; the kit has them in its cache. coqui-tts
and one model of the kit's are in memory together, with AdamW's moments some 17 GB; memory is
measured of the kit alone, in processes of their own.
"""

import gc
import itertools
from pathlib import Path
from unittest.mock import patch

from rows import against, apart, native, result, step_seconds
from train_steps import (
    CODES,
    FRAMES,
    Coqui,
    Step,
    kit_state,
    packed,
    parts,
    require_same_loss,
    xtts,
)

from kit.base.hardware import Choice
from kit.model.sequence import EffectiveBatch, GPTConfig
from kit.training.config import FULL, Base, FinetuneConfig, Finetuning
from kit.training.loop import train

COQUI = "coqui-tts GPTTrainer, fp32"
SIZE = "30 x 1024"


def released_size() -> GPTConfig:
    return xtts(1024, layers=30, dropout=0.1, text_stop_input=False)


def adapters() -> Finetuning:
    """As in a run: the base is in a file, which is read when they are merged, not here."""
    base = Base(config=released_size(), sha256="", weights=Path("start.safetensors"))
    return Finetuning(config=FinetuneConfig(method="lora"), base=base)


def finetuning_step(bf16: bool = False, finetuning: Finetuning = FULL, **speed) -> Step:
    """A step of the kit's own loop, on codes and mels of 6 s that are ready."""
    config = released_size()
    batch = EffectiveBatch(micro=[packed(config, FRAMES["6 s"])], position={})
    state = kit_state(config, bf16, finetuning, **speed)
    events = train(state, itertools.repeat(batch))
    return lambda: next(events).loss


def full_size_rows(rounds: int) -> list[dict]:
    """The kit's step in fp32, as its users run it, and with adapters, each beside coqui-tts's."""
    config = released_size()
    coqui = Coqui(config)
    require_same_loss(config, coqui)
    texts, codes, cond = parts(config, FRAMES["6 s"])
    theirs = {"coqui-tts": coqui.step(texts, CODES)}
    alone = {"coqui-tts, GPT alone": coqui.gpt_step(texts, codes, cond)}
    kinds = {
        "fp32, the same batch": lambda: finetuning_step(),
        "bf16 in the kit, fp32 in the peer's recipe": lambda: finetuning_step(bf16=True),
        "bf16 and adapters in the kit": lambda: finetuning_step(bf16=True, finetuning=adapters()),
    }
    rows = []
    for kind in native(kinds):
        contestants = {kind: kinds[kind](), **theirs, **(alone if not rows else {})}
        kit, whole, *gpt = step_seconds(contestants, rounds).values()
        rows.append(against(f"fine-tuning step, {SIZE}: {kind}", kit, COQUI, whole))
        for other in gpt:
            row = f"fine-tuning step, {SIZE}: fp32, the GPT alone"
            rows.append(against(row, kit, f"{COQUI}, codes ready", other))
        del contestants  # 7 GB, before the next are made
        gc.collect()
    return rows


def full_size_memory_rows() -> list[dict]:
    """Peak resident memory of two steps: adapters beside the whole model, the same switches."""
    rows = []
    for how, speed in (
        ("fp32", {}),
        ("bf16", {"bf16": True}),
        ("bf16, layers recomputed", {"bf16": True, "gradient_checkpointing": True}),
    ):
        whole, part = (peak_apart(lora, speed) for lora in (False, True))
        row = f"peak resident memory, {SIZE}, {how}: adapters, {part / whole:.2f} of the whole"
        rows.append(result(row, part, "MB", "the kit, the whole model", whole, whole / part))
        print(f"  {row} ({part:,.0f} of {whole:,.0f} MB)", flush=True)
    return rows


def peak_apart(lora: bool, speed: dict) -> float:
    return float(apart(f"import train_full as t; print(t.peak_of({lora}, {speed}))"))


def peak_of(lora: bool, speed: dict) -> float:
    """Peak resident memory in MB of a process that makes two steps.

    In bf16 where the processor would be quicker without it, too: it takes no other memory there.
    """
    chosen = Choice(value="bf16", reason="memory alone is measured")
    with patch("kit.training.switches.choose_precision", lambda hw: chosen):
        step = finetuning_step(finetuning=adapters() if lora else FULL, **speed)
    for _ in range(2):
        step()
    return resident_peak_mb()


def resident_peak_mb() -> float:
    """Peak resident memory of this process so far.

    Not getrusage's: that is of the process which started this one, if that was larger.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6
