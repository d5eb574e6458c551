"""A training step of IndexTTS2's GPT: the kit's beside a plain loop over the package's classes.

Both train all layers on the same rows, with features and codes ready, and clip gradients to 1. The
plain loop pads the rows of a batch as they come and runs in fp32 with torch's AdamW; the kit puts
rows of similar length together and runs as its users run it, and once as the plain loop does.

    make bench-indextts2        (ARGS=--full: forward and backward at 24 x 1280, 10 GB)
"""

import itertools
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "bench")]

from published_indextts2 import FULL, package_model  # noqa: E402
from rows import record, table  # noqa: E402
from test_parity import kit_model, package_latents  # noqa: E402
from train_turns import against, seconds  # noqa: E402

from kit.base.hardware import detect  # noqa: E402
from kit.model.sequence import EffectiveBatch, pack  # noqa: E402
from kit.training.config import TrainConfig  # noqa: E402
from kit.training.loop import forward_backward, train  # noqa: E402
from kit.training.switches import SpeedConfig  # noqa: E402
from kit.training.trainer import Trainer  # noqa: E402

ENCODER = {"output_size": 256, "linear_units": 1024, "attention_heads": 4}
MIDDLE = FULL | {
    "model_dim": 640,
    "layers": 8,
    "heads": 10,
    "condition_module": FULL["condition_module"] | ENCODER,
    "emo_condition_module": FULL["emo_condition_module"] | ENCODER,
}
ROWS = 4  # of a step
FRAMES = 150  # 3 s
PEER = "a plain loop, fp32"
FIGURES = HERE.parent.parent / "runs" / "bench" / "indextts2.json"


def utterances(count: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Text ids, codes and features (1, 1024, 150) of clips of 1.5 to 9 s, mostly near 4 s."""
    random = torch.Generator().manual_seed(1)
    clips = []
    for _ in range(count):
        length_s = float((4 * torch.empty(1).normal_(0, 0.5, generator=random).exp()).clamp(1.5, 9))
        text = torch.randint(3, 12_000, (round(10 * length_s),), generator=random)
        codes = torch.randint(0, 8192, (round(50 * length_s),), generator=random)
        clips.append((text, codes, torch.randn(1, 1024, FRAMES, generator=random)))
    return clips


def batches(clips: list, by_length: bool) -> list[list]:
    if by_length:
        clips = sorted(clips, key=lambda clip: len(clip[1]))
    return [clips[i : i + ROWS] for i in range(0, len(clips), ROWS)]


class Plain:
    """The package's model in a loop of the usual kind."""

    def __init__(self, model):
        self.model = model.train()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01)

    def backward(self, clips: list) -> float:
        model = self.model
        text_losses, code_losses = self.losses(clips)
        loss = 0.01 * text_losses + code_losses
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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


def kit_trainer(theirs, gpt: dict, **speed) -> Trainer:
    endless = TrainConfig(max_steps=10**9, eval_steps=10**9, lr=1e-5, optimizer="adamw")
    model = kit_model(theirs, gpt).requires_grad_(True)
    return Trainer(model, endless, SpeedConfig(sdpa=True, fused_adamw=True, **speed), detect())


def packed(trainer: Trainer, clips: list) -> EffectiveBatch:
    texts, codes, features = zip(*clips)
    config = trainer.model.config
    lists = [t.tolist() for t in texts], [c.tolist() for c in codes]
    return EffectiveBatch(micro=[pack(config, *lists, torch.cat(features))], position={})


def kit_steps(trainer: Trainer, groups: list[list]):
    events = train(trainer, itertools.cycle([packed(trainer, group) for group in groups]))
    return lambda: sum(next(events).loss for _ in groups) / len(groups)


def middle_rows() -> list[dict]:
    """Four steps that see 16 clips once, at 8 layers of 640."""
    theirs = package_model(MIDDLE)
    clips = utterances(4 * ROWS)
    as_they_come, by_length = batches(clips, False), batches(clips, True)
    contestants = {}
    for name, precision, groups in (
        ("fp32, the same batches", False, as_they_come),
        ("as it is used: bf16 where the processor has it, rows of similar length", True, by_length),
    ):
        trainer = kit_trainer(theirs, MIDDLE, mixed_precision=precision)
        contestants[f"{name} ({trainer.applied.precision})"] = kit_steps(trainer, groups)
    plain = Plain(theirs)
    contestants[PEER] = lambda: sum(map(plain.step, as_they_come)) / len(as_they_come)
    found = seconds(contestants, 2)
    other = found.pop(PEER)
    return [against(f"4 steps, 8 x 640: {name}", kit, PEER, other) for name, kit in found.items()]


def full_rows() -> list[dict]:
    """Forward and backward at full size, one after the other: AdamW's moments do not fit twice."""
    clips = utterances(2)
    theirs = package_model(FULL)
    trainer = kit_trainer(theirs, FULL, mixed_precision=True)
    batch = packed(trainer, clips)
    trainer.model.train()

    def ours() -> float:
        forward_backward(trainer, batch)
        trainer.model.zero_grad()
        return 0.0

    plain = Plain(theirs)

    def other() -> float:
        loss = plain.backward(clips)
        theirs.zero_grad()
        return loss

    kit, peer = seconds({"kit": ours, PEER: other}, 2).values()
    name = f"forward and backward, 24 x 1280: as it is used ({trainer.applied.precision})"
    return [against(name, kit, PEER, peer)]


if __name__ == "__main__":
    measured = full_rows() if "--full" in sys.argv else middle_rows()
    table(measured)
    record(measured, "indextts2", FIGURES)
