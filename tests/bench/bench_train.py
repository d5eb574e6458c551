"""A training step measured beside its peers, on the CPU of one machine: `make bench-train`.

A step is forward, backward, clipping and AdamW on 2 rows of 60 text ids and 200 codes, 6 layers.
Contestants of a row take turns round by round, in one process; values are medians, a ratio is the
median of the rounds' ratios. Before anything is timed, the kit's model with a peer's weights must
find the peer's loss. Memory is measured in a process of its own for each.

XTTS-v2's full size comes last, 30 layers of 1024: both sides train one batch with the same weights,
references of 6 s and dropout 0.1; coqui-tts computes mels and codes in each step, as its trainer
does, and the kit has them in its cache. coqui-tts and one model of the kit's are in memory
together, with AdamW's moments some 17 GB; memory is measured of the kit alone.

Prints a table and writes the rows (rows.py) into runs/bench/train.json.
"""

import argparse
import functools
import gc
import itertools
import math
import os
from pathlib import Path
from unittest.mock import patch

import torch
import train_steps
from rows import against, apart, native, resident_peak_mb, result, run_parts, step_seconds
from train_steps import CODES, FRAMES, Coqui, Step, kit_step, packed, parts, xtts

from kit.base.hardware import Choice
from kit.model.sequence import EffectiveBatch
from kit.settings import FinetuneConfig, GPTConfig
from kit.training.config import FULL, Base, Finetuning
from kit.training.loop import train

SIZE = "30 x 1024"
COQUI, GPT2 = "coqui-tts GPTTrainer", "transformers GPT2LMHeadModel, SDPA"


def peak_mb(kind: str, rounds: int) -> float:
    """Peak resident memory of a process that makes a few steps of one contestant."""
    config = xtts(512)
    if kind == "coqui":
        step = Coqui(config).step(parts(config)[0], CODES)
    elif kind == "kit":
        step = kit_step(config)
    else:
        step = kit_step(xtts(512, dropout=0.1), FRAMES["6 s"])
    for _ in range(rounds):
        step()
    return resident_peak_mb()


def coqui_rows(width: int, rounds: int, bf16: bool = False) -> list[dict]:
    own, same = xtts(width), xtts(width, dropout=0.1)
    coqui, size = Coqui(own), f"{'bf16' if bf16 else 'fp32'}, {width}"
    train_steps.require_same_loss(own, coqui)
    texts, codes, cond = parts(own, FRAMES["6 s"])
    contestants = {
        "kit": kit_step(own, bf16=bf16),
        "kit, 6 s reference, dropout": kit_step(same, FRAMES["6 s"], bf16),
        "coqui-tts": coqui.step(texts, CODES, bf16),
        "coqui-tts, GPT alone": coqui.gpt_step(texts, codes, cond, bf16),
    }
    if bf16:
        contestants["coqui-tts, fp32"] = coqui.step(texts, CODES)
    kit, kit_same, whole, gpt, *fp32 = step_seconds(contestants, rounds).values()
    presets = f"step, {width}: the kit's preset (bf16) beside the peer's recipe (fp32)"
    return [
        against(f"step, {size}: each as its users run it", kit, COQUI, whole),
        against(f"step, {size}: reference of 6 s and dropout 0.1 in both", kit_same, COQUI, whole),
        against(f"GPT alone, {size}: the same work", kit_same, f"{COQUI}, codes ready", gpt),
        *(against(presets, kit, COQUI, whole) for whole in fp32),
    ]


def gpt2_rows(width: int, rounds: int) -> list[dict]:
    """Equal tokens, layers, width and joint vocabulary; the kit has its reference to read, too."""
    own, dropping = (GPTConfig(width=width, heads=width // 64, dropout=p) for p in (0.0, 0.1))
    batch = packed(own)
    with torch.no_grad():
        model = train_steps.gpt2(own, batch.tokens.shape[1])
        start = model(input_ids=batch.tokens, labels=batch.tokens).loss
    near = math.log(own.text_vocab + own.code_vocab)
    assert abs(start - near) < 0.5, f"{GPT2} starts at {start:.2f}, ln(V) is {near:.2f}"
    contestants = {
        "kit": kit_step(own),
        "kit, dropout": kit_step(dropping),
        "GPT-2": train_steps.gpt2_step(own, batch, dropout=0.1),
        "GPT-2, no dropout": train_steps.gpt2_step(own, batch, dropout=0.0),
    }
    kit, dropped, whole, bare = step_seconds(contestants, rounds).values()
    size = f"fp32, {width}, {batch.tokens.numel()} tokens"
    return [
        against(f"step, {size}: each as its users run it", kit, GPT2, whole),
        against(f"step, {size}: dropout 0.1 in both", dropped, f"{GPT2}, dropout 0.1", whole),
        against(f"step, {size}: no dropout in either", kit, f"{GPT2}, no dropout", bare),
    ]


def memory_rows() -> list[dict]:
    kinds = ("kit", "kit, 6 s", "coqui")
    kit, same, coqui = (apart("bench_train.peak_mb", kind, 3) for kind in kinds)
    rows = {"each as its users run it": kit, "reference of 6 s and dropout 0.1 in both": same}
    return [
        result(f"peak resident memory, fp32, 512: {how}", mb, "MB", COQUI, coqui, coqui / mb)
        for how, mb in rows.items()
    ]


# --- at the released size ---------------------------------------------------------------------


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
    state = train_steps.kit_state(config, bf16, finetuning, **speed)
    events = train(state, itertools.repeat(batch))
    return lambda: next(events).loss


def full_size_rows(rounds: int) -> list[dict]:
    """The kit's step in fp32, as its users run it, and with adapters, each beside coqui-tts's."""
    config = released_size()
    coqui = Coqui(config)
    train_steps.require_same_loss(config, coqui)
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
        rows.append(against(f"fine-tuning step, {SIZE}: {kind}", kit, f"{COQUI}, fp32", whole))
        for other in gpt:
            row = f"fine-tuning step, {SIZE}: fp32, the GPT alone"
            rows.append(against(row, kit, f"{COQUI}, fp32, codes ready", other))
        del contestants  # 7 GB, before the next are made
        gc.collect()
    return rows


def full_size_memory_rows() -> list[dict]:
    """Peak resident memory of two steps: adapters beside the whole model, the same switches."""
    rows, recomputed = [], {"bf16": True, "gradient_checkpointing": True}
    kinds = {"fp32": {}, "bf16": {"bf16": True}, "bf16, layers recomputed": recomputed}
    for how, speed in kinds.items():
        whole, part = (apart("bench_train.peak_of", lora, speed) for lora in (False, True))
        row = f"peak resident memory, {SIZE}, {how}: adapters, {part / whole:.2f} of the whole"
        rows.append(result(row, part, "MB", "the kit, the whole model", whole, whole / part))
        print(f"  {row} ({part:,.0f} of {whole:,.0f} MB)", flush=True)
    return rows


def peak_of(lora: bool, speed: dict) -> float:
    """Peak resident memory in MB of a process that makes two steps."""
    # Also where the processor would be quicker without bf16: it takes no other memory there.
    chosen = Choice(value="bf16", reason="memory alone is measured")
    with patch("kit.training.switches.choose_precision", lambda hw: chosen):
        step = finetuning_step(finetuning=adapters() if lora else FULL, **speed)
    for _ in range(2):
        step()
    return resident_peak_mb()


PARTS = {
    "memory": lambda rounds: memory_rows(),
    "coqui": lambda rounds: coqui_rows(512, rounds),
    "coqui-1024": lambda rounds: coqui_rows(1024, max(3, rounds // 2)),
    "bf16": lambda rounds: coqui_rows(512, rounds, bf16=True),
    "transformers": lambda rounds: gpt2_rows(512, rounds) + gpt2_rows(1024, max(3, rounds // 2)),
    "full-memory": lambda rounds: full_size_memory_rows(),
    "full": lambda rounds: full_size_rows(min(3, rounds)),
}
FULL_SIZE = ("full-memory", "full")  # minutes, and 17 GB of memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6, help="that count; one more goes before")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", choices=PARTS, nargs="*")
    parser.add_argument("--without-full-size", action="store_true", help="no 30 x 1024: 17 GB")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the figures are the CPU's, whatever else is there
    torch.set_num_threads(options.threads)
    left_out = FULL_SIZE if options.without_full_size else ()
    names = native(options.only or [name for name in PARTS if name not in left_out])
    parts = {name: functools.partial(PARTS[name], options.rounds) for name in names}
    run_parts(parts, options.folder / "train.json", "train-requirements.txt")


if __name__ == "__main__":
    main()
