"""`python -m kit verify`: is training right, here? Proofs on a run's rows and this machine."""

import copy
import dataclasses
import time
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F

from kit.audio.clip import load_speech
from kit.audio.recognizer import SpeechRecognizer, cer, load_recognizer
from kit.base.hardware import on_device
from kit.dataset.alignment import alignment_score
from kit.dataset.manifest import Utterance, read_manifest
from kit.inference.compare_formats import forced_logits
from kit.inference.decoder import Decoder
from kit.model.gpt import SpeechGPT
from kit.notebook.result import Result
from kit.recipes.open_run import ActiveRun
from kit.recipes.training_data import TrainingData
from kit.tuning.checks import Check, table
from kit.tuning.verify import PROOFS, ROUNDING, Outcome, Subject, code_logits, small_config

EXAMPLES = 8  # rows of the data that the proofs about the model use
SPOKEN = 8  # held-out recordings that go through the codec
MATCHED = 10  # recordings whose text is compared with their sound
DECODED_CODES = 24  # of each row, decoded one after the other
MAX_KL = 1e-6  # nats a code between the model's logits and the decoder's, in fp32
KL_ROUNDINGS = 13  # of the logits, in another number format; the KL divergence is their square
MAX_CODEC_CER = 0.15  # more errors in what comes out of the codec than in the recordings
SAME_LOGITS = "with KV cache, alone and in a batch, the model predicts as it was trained to"
GOOD_CODES = "the codes hold what is said, so a voice that predicts them can be understood"
GOOD_DATA = "recordings and texts belong together"
MAX_JUDGE_CER = 0.5  # of recordings: a worse recogniser cannot tell


def verify(run: ActiveRun) -> Iterator[Result]:
    """Yield a result for each proof, then all of them as a table; `failed` if one fails."""
    began_s = time.perf_counter()
    proofs = []
    for proof in all_proofs(run):
        proofs.append(proof)
        yield Result(line=str(proof))
    failed = [proof.what for proof in proofs if proof.passed is False]
    judged = [proof for proof in proofs if proof.passed is not None]
    seconds = round(time.perf_counter() - began_s, 1)
    line = f"{len(judged) - len(failed)} of {len(judged)} proofs hold, in {seconds:g} s"
    if failed:
        line += f". Do not trust this training: {', '.join(failed)} failed"
    rows = [proof._asdict() for proof in proofs]
    run.record(verify={"checks": rows, "failed": failed, "seconds": seconds})
    yield Result(line=line, grid=table(proofs), failed=bool(failed))


def all_proofs(run: ActiveRun) -> Iterator[Check]:
    data = TrainingData(run)
    subject = subject_of(run, data)
    for name, (proof, shows) in (PROOFS | {"decoding": (decoding, SAME_LOGITS)}).items():
        yield Check(name, *proof(subject), shows)
    yield from recording_proofs(run, data)


def subject_of(run: ActiveRun, data: TrainingData) -> Subject:
    """A small model of the run's kind, its shortest training rows, and its stream of batches."""
    small = copy.copy(data)
    small.model = small_config(data.model)
    rows = data.cache.sample_of_split("train")
    order = rows[np.argsort(data.cache.lengths(rows), kind="stable")][:EXAMPLES]
    examples = [data.cache.example(row) for row in order.tolist()]
    return Subject(
        config=small.model,
        texts=[text for (text,), _, _ in examples],
        codes=[codes for _, (codes,), _ in examples],
        references=torch.cat([reference for *_, reference in examples]),
        stream=lambda position: iter(small.stream(position=position)),
        hw=run.hw,
        precision=run.precision.value,
        decode=data.tokenizer.decode,
    )


def decoding(subject: Subject) -> Outcome:
    """What the decoder with KV cache predicts must be what the trained model computes."""
    # In inference a text always ends with STOP, and nothing is dropped.
    config = dataclasses.replace(subject.config, text_stop_input=True, dropout=0.1)
    short = [codes[:DECODED_CODES] for codes in subject.codes]
    subject = dataclasses.replace(subject, config=config, codes=short)
    model = subject.trainer(1).model.eval()
    formats = dict.fromkeys(("fp32", subject.precision, "int8"))
    errors = {name: decoding_error(model, subject, name) for name in formats}
    bounds = {name: max(MAX_KL, (KL_ROUNDINGS * ROUNDING[name]) ** 2) for name in formats}
    figure = ", ".join(f"{name} {error:.1g} nats" for name, error in errors.items())
    bound = ", ".join(f"{name} {bound:.2g}" for name, bound in bounds.items())
    return figure, bound, all(errors[name] <= bounds[name] for name in formats)


@torch.inference_mode()
def decoding_error(model: SpeechGPT, subject: Subject, weights: str) -> float:
    """The largest mean KL divergence in nats, of one row alone and of all rows together."""
    decoder = Decoder(model, weights=weights)
    # START is never sampled: the decoder may give it no probability.
    sampled = torch.arange(model.config.code_vocab) != model.config.start_code
    errors = []
    for count in (1, len(subject.codes)):
        batch = subject.batch(count, count).micro[0].to(subject.hw.device)
        logits = code_logits(model, batch).flatten(0, 1)[batch.code_indices].cpu()
        codes = [row.tolist() for row in subject.codes[:count]]
        counts = [len(row) + model.config.stop_targets for row in codes]
        rows = list(zip([row.tolist() for row in subject.texts], codes, subject.references))
        stepped = forced_logits(decoder, rows).cpu()
        for row, wanted in enumerate(logits.split(counts)):
            last = len(codes[row]) + 1  # the first STOP's
            wanted = wanted[:last, sampled].log_softmax(-1)
            got = stepped[:last, row, sampled].log_softmax(-1)
            kl = F.kl_div(got, wanted, log_target=True, reduction="none").sum(-1)
            errors.append(kl.mean().item())
    return max(errors)


def recording_proofs(run: ActiveRun, data: TrainingData) -> Iterator[Check]:
    """What became of text and sound: ids, codes, and whether they belong together."""
    rows = read_manifest(run.folder)
    held_out = [row for row in rows if row.split == "held_out"] or rows
    yield text_round_trip(data, held_out)
    path = run.path("recognizer.safetensors")
    if not path.is_file():
        return
    recognizer = load_recognizer(path)
    codec = data.codec
    rows = held_out[:SPOKEN]
    texts = [row.text for row in rows]
    waves = [load_speech(row.audio, codec.input_sample_rate) for row in rows]
    with on_device(run.hw.device, recognizer, codec):
        before = cer(recognizer.transcribe_waves(waves, codec.input_sample_rate), texts)
        if before > MAX_JUDGE_CER:
            why = f"the recogniser mistakes {before:.0%} of the letters: train it longer"
            yield Check("codec", why, "none", None, GOOD_CODES)
            yield Check("data", why, "none", None, GOOD_DATA)
            return
        if codec.decodes:
            decoded = [codec.decode(codec.encode(wave[None])).cpu()[0] for wave in waves]
            after = cer(recognizer.transcribe_waves(decoded, codec.sample_rate), texts)
            figure = f"CER {before:.1%} of recordings, {after:.1%} of their codes"
            passed = after <= before + MAX_CODEC_CER
            yield Check("codec", figure, f"{MAX_CODEC_CER:.0%} more", passed, GOOD_CODES)
        yield text_matches_sound(recognizer, held_out[:MATCHED])


def text_round_trip(data: TrainingData, rows: list[Utterance]) -> Check:
    """Held-out texts must survive the tokenizer; where it spells otherwise, the spelling does."""
    lost = []
    for row in rows:
        spelt = data.tokenizer.spell(row.text)
        if data.tokenizer.decode(data.tokenizer.encode(row.text)).strip() != spelt:
            lost.append(row.text)
    example = f"; such as {lost[0]!r}" if lost else ""
    figure = f"{len(lost)} of {len(rows)} texts come back changed{example}"
    shows = "every held-out text can be spelt, and comes back from its ids"
    return Check("tokenizer", figure, "none", not lost, shows)


def text_matches_sound(recognizer: SpeechRecognizer, rows: list[Utterance]) -> Check:
    """Each recording must fit its own text better than the text of the next one."""
    if len(rows) < 2:
        why = "one recording alone cannot be compared"
        return Check("data", why, "none", None, GOOD_DATA)
    rate = recognizer.input_sample_rate
    outputs = recognizer.recognize([load_speech(row.audio, rate) for row in rows], rate)
    wrong = []
    for row, following, output in zip(rows, [*rows[1:], rows[0]], outputs, strict=True):
        own = alignment_score(recognizer, output, row.text).score
        other = alignment_score(recognizer, output, following.text).score
        if own <= other:
            wrong.append(row.id)
    example = f": {', '.join(wrong[:3])}" if wrong else ""
    figure = f"{len(wrong)} of {len(rows)} recordings fit another's text better{example}"
    return Check("data", figure, "none", not wrong, GOOD_DATA)
