"""The certificate of a training: all proofs hold, and each planted bug fails its own."""

import dataclasses
import itertools
import string
from types import SimpleNamespace

import pytest
import torch
from made_runs import active

from kit.dataset.manifest import read_manifest
from kit.model import gpt, sequence
from kit.model.gpt import SpeechGPT
from kit.recipes import verify
from kit.recipes.training_data import TrainingData
from kit.training import loop
from kit.training.optim import EMA
from kit.training.trainer import Trainer
from kit.tuning import verify as proving

JUDGED = {"loss at the start", "labels", "causality", "gradients", "overfitting", "EMA"}
JUDGED |= {"resumption", "decoding", "tokenizer"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return active(tmp_path_factory.mktemp("verified") / "mine")


def failures(run) -> set[str]:
    *proofs, summary = verify.verify(run)
    failed = set(run.report()["verify"]["failed"])
    assert summary.failed == bool(failed) and len(summary.grid) == len(proofs) + 1
    return failed


def test_every_proof_holds(run):
    assert failures(run) == set()
    proofs = {row["what"]: row for row in run.report()["verify"]["checks"]}
    assert {name for name, proof in proofs.items() if proof["passed"]} == JUDGED
    assert proofs["mixed precision"]["passed"] is None, "the run trains in fp32"
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    assert all(f">{name}</td>" in page for name in proofs)


def shifted(config, texts, codes, cond, pad_to=0, pack=sequence.pack):
    """The targets are two codes ahead."""
    batch = pack(config, texts, codes, cond, pad_to)
    rows = batch.code_indices // batch.tokens.shape[1]
    parts = [batch.code_targets[rows == row].roll(-1) for row in rows.unique()]
    return dataclasses.replace(batch, code_targets=torch.cat(parts))


def mask_off_by_one(size, dtype, device):
    """A code sees the one that it must predict."""
    return torch.full((size, size), float("-inf")).triu(2)


def loss_of_a_pass_alone(
    model, precision, micro, text, code, guide, width, pass_loss=loop.pass_loss
):
    """Each pass is divided by its own targets instead of those of the effective batch."""
    own = (len(micro.text_targets), len(micro.code_targets))
    return pass_loss(model, precision, micro, *own, guide, width)


def position_lost(self, tree, restore=Trainer.restore):
    restore(self, tree)
    self.position = None


def weights_too_large(self, init_weights=SpeechGPT.init_weights):
    init_weights(self)
    with torch.no_grad():
        self.code_head.weight.mul_(20)


def letters_lost(self, *args, init=TrainingData.__init__):
    init(self, *args)
    decode = self.tokenizer.decode
    self.tokenizer.decode = lambda ids: decode(list(ids)[1:])


BUGS = [
    (proving, "pack", shifted, {"labels"}),
    (gpt, "causal_mask", mask_off_by_one, {"causality", "gradients", "decoding"}),
    (SpeechGPT, "eval", lambda self: self.train(), {"decoding"}),  # dropout stays on
    (EMA, "update", lambda self: None, {"EMA"}),
    (loop, "pass_loss", loss_of_a_pass_alone, {"gradients"}),
    (Trainer, "restore", position_lost, {"resumption"}),
    (SpeechGPT, "init_weights", weights_too_large, {"loss at the start"}),
    (loop, "update", lambda trainer, norm, finite: trainer.clear_gradients(), {"overfitting"}),
    (TrainingData, "__init__", letters_lost, {"tokenizer"}),
]
OF_BUGS = [
    pytest.param(*bug, marks=[pytest.mark.long] if i > 1 else []) for i, bug in enumerate(BUGS)
]


@pytest.mark.parametrize("where, name, bug, found", OF_BUGS)
def test_a_planted_bug_fails_its_own_proof(run, monkeypatch, where, name, bug, found):
    monkeypatch.setattr(where, name, bug)
    assert failures(run) == found


class Listener:
    """A recogniser that recognises the texts `transcripts`, one after the other."""

    input_sample_rate = 16_000
    frame_s = 0.02
    alphabet = string.ascii_lowercase

    def __init__(self, transcripts: list[str]):
        self.transcripts = itertools.cycle(transcripts)

    def encode(self, text: str):
        ids = [self.alphabet.find(char) + 1 for char in text]
        return torch.tensor([i for i in ids if i])

    def recognize(self, waves, rate):
        return [self.output(next(self.transcripts)) for _ in waves]

    def output(self, text: str):
        ids = self.encode(text)
        frames = torch.stack([ids, torch.zeros_like(ids)], dim=1).flatten()
        log_probs = torch.full((len(frames), len(self.alphabet) + 1), -9.0)
        log_probs[torch.arange(len(frames)), frames] = 0.0
        loudness = torch.zeros(len(frames))
        return SimpleNamespace(log_probs=log_probs.log_softmax(-1), loudness=loudness)


def test_a_swapped_text_fails_the_proof_about_the_data(run):
    texts = ["the weather is cold", "bread and butter", "she went home", "a red fox"]
    rows = read_manifest(run.folder)

    def proof_of(written: list[str]):
        pairs = zip(rows, written)
        own = [dataclasses.replace(row, text=text) for row, text in pairs]
        return verify.text_matches_sound(Listener(texts), own)

    assert proof_of(texts).passed
    swapped = proof_of([texts[1], texts[0], *texts[2:]])
    assert swapped.passed is False and rows[0].id in swapped.figure
