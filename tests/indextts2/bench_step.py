"""A training step of IndexTTS2's GPT: the kit's beside a plain loop over the package's classes.

Both train all layers on the same clips, with features and codes ready, clip gradients to 1 and
compute in the same precision. The kit puts clips of similar length together, as training does; the
plain loop takes them in random order, pads them, and has torch's AdamW.

    make bench-indextts2        (ARGS=--full: forward and backward at 24 x 1280, 10 GB)
"""

import itertools
import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "bench")]

from published_indextts2 import FULL, encoder, package_model  # noqa: E402
from rows import against, native, run_parts, step_seconds  # noqa: E402
from test_parity import kit_model, package_latents  # noqa: E402

from kit.base.hardware import DTYPES, detect  # noqa: E402
from kit.batches.batching import chunks  # noqa: E402
from kit.model.sequence import EffectiveBatch, pack  # noqa: E402
from kit.settings import SpeedConfig, TrainConfig  # noqa: E402
from kit.training.loop import forward_backward, train  # noqa: E402
from kit.training.trainer import Trainer  # noqa: E402

MIDDLE = {
    **FULL,
    **{"model_dim": 640, "layers": 8, "heads": 10},
    "condition_module": encoder(256, 1024, heads=4, blocks=6),
    "emo_condition_module": encoder(256, 1024, heads=4, blocks=4),
}
ROWS = 4  # of a step
STEPS = 8
CORPUS = 256  # clips
PEER = "a plain loop"
FIGURES = HERE.parent.parent / "runs" / "bench" / "indextts2.json"


def utterances() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Text ids, codes and features (1, 1024, 150) of a corpus: 1.5 to 9 s, mostly near 4 s."""
    generator = torch.Generator().manual_seed(1)
    clips = []
    for _ in range(CORPUS):
        length_s = 4 * torch.empty(1).normal_(0, 0.5, generator=generator).exp()
        length_s = float(length_s.clamp(1.5, 9))
        text = torch.randint(3, 12_000, (round(10 * length_s),), generator=generator)
        codes = torch.randint(0, 8192, (round(50 * length_s),), generator=generator)
        clips.append((text, codes, torch.randn(1, 1024, 150, generator=generator)))  # 3 s
    return clips


def batches() -> tuple[list[list], list[list]]:
    """The kit's batches, from short to long over the whole corpus, and the same clips at random."""
    by_length = list(chunks(sorted(utterances(), key=lambda clip: len(clip[1])), ROWS))
    by_length = by_length[STEPS // 2 :: len(by_length) // STEPS]
    clips = [clip for batch in by_length for clip in batch]
    random.Random(1).shuffle(clips)
    return by_length, list(chunks(clips, ROWS))


class Plain:
    """The package's model in a loop of the usual kind."""

    def __init__(self, model, precision: str):
        self.model = model.train()
        self.dtype = DTYPES[precision]
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01)

    def backward(self, clips: list) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype is torch.bfloat16):
            text_loss, code_loss = self.losses(clips)
            loss = 0.01 * text_loss + code_loss
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return loss.item()

    def losses(self, clips: list) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean cross-entropy of texts and of codes, whose STOP is counted twice, as in the kit."""
        model = self.model
        texts, codes, features = zip(*clips)
        latents = package_latents(model, torch.cat(features))
        text_in, text_out = self.padded(texts, model.start_text_token, model.stop_text_token, 1)
        code_in, code_out = self.padded(codes, model.start_mel_token, model.stop_mel_token, 2)
        text_states = model.text_embedding(text_in) + model.text_pos_embedding(text_in)
        code_states = model.mel_embedding(code_in) + model.mel_pos_embedding(code_in)
        heads = model.text_head, model.mel_head
        logits = model.get_logits(latents, text_states, heads[0], code_states, heads[1])
        return tuple(F.cross_entropy(x, y) for x, y in zip(logits, (text_out, code_out)))

    def padded(self, rows: tuple, start: int, stop: int, stops: int) -> tuple:
        """Inputs from START on, padded with STOP, and their targets; -100 is not counted."""
        ends = [torch.cat((row, row.new_full((stops,), stop))) for row in rows]
        targets = pad_sequence(ends, batch_first=True, padding_value=-100)
        inputs = F.pad(targets[:, :-1], (1, 0), value=start)
        return inputs.masked_fill(inputs < 0, stop), targets

    def step(self, clips: list) -> float:
        loss = self.backward(clips)
        self.optimizer.step()
        return loss


def kit_trainer(theirs, gpt: dict, precision: str) -> Trainer:
    endless = TrainConfig(max_steps=10**9, eval_steps=10**9, lr=1e-5, optimizer="adamw")
    speed = SpeedConfig(sdpa=True, fused_adamw=True, mixed_precision=precision != "fp32")
    trainer = Trainer(kit_model(theirs, gpt).requires_grad_(True), endless, speed, detect())
    assert trainer.applied.precision == precision
    return trainer


def packed(trainer: Trainer, clips: list) -> EffectiveBatch:
    texts, codes, features = zip(*clips)
    config = trainer.model.config
    lists = [t.tolist() for t in texts], [c.tolist() for c in codes]
    return EffectiveBatch(micro=[pack(config, *lists, torch.cat(features))], position={})


def middle_rows(precision: str) -> list[dict]:
    """The steps that see all clips once, at 8 layers of 640."""
    theirs = package_model(MIDDLE)
    by_length, at_random = batches()
    plain = Plain(theirs, precision)
    trainer = kit_trainer(theirs, MIDDLE, precision)
    in_turn = [packed(trainer, group) for group in by_length + at_random]
    events = train(trainer, itertools.cycle(in_turn))
    kit_steps = lambda: sum(next(events).loss for _ in range(STEPS)) / STEPS  # noqa: E731
    steps = {"kit": kit_steps, "kit, the same batches": kit_steps}  # which are the next ones
    steps[PEER] = lambda: sum(map(plain.step, at_random)) / STEPS
    kit, same, peer = step_seconds(steps, 2).values()
    name = f"{STEPS} steps, 8 x 640, {precision}: "
    kinds = {"clips of similar length together": kit, "the peer's batches": same}
    return [against(name + kind, own, PEER, peer) for kind, own in kinds.items()]


def full_rows(precision: str) -> list[dict]:
    """Forward and backward at full size, one after the other: AdamW's moments do not fit twice."""
    clips = batches()[0][STEPS // 2]
    theirs = package_model(FULL)
    trainer = kit_trainer(theirs, FULL, precision)
    batch = packed(trainer, clips)
    trainer.model.train()
    plain = Plain(theirs, precision)

    def kit_pass() -> float:
        loss = forward_backward(trainer, batch)
        trainer.model.zero_grad()
        return float(loss)

    def plain_pass() -> float:
        loss = plain.backward(clips)
        theirs.zero_grad()
        return loss

    kit, peer = step_seconds({"kit": kit_pass, PEER: plain_pass}, 2).values()
    return [against(f"forward and backward, 24 x 1280, {precision}", kit, PEER, peer)]


if __name__ == "__main__":
    rows = full_rows if "--full" in sys.argv else middle_rows
    parts = {name: lambda name=name: rows(name) for name in native(["fp32", "bf16"])}
    run_parts(parts, FIGURES, "../indextts2/requirements.txt")
