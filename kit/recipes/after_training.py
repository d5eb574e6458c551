"""What is trained after the model: a reader that ranks candidates, and the sound of the codec.

The reader transcribes codes, so that the best of several candidates can be chosen. The codec's
decoder learns to use the model's hidden states beside the codes, as XTTS-v2's vocoder does
(Casanova et al. 2024); the codes, and all that was prepared with them, stay.
"""

import dataclasses
import random
import time
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from kit.audio.clip import load_speech
from kit.audio.codec import ClipWithStates, Codec
from kit.audio.recognizer import alphabet_of, recognizer_schedule, train_recognizer
from kit.base.config import build
from kit.base.errors import KitError
from kit.base.hardware import on_device
from kit.batches.batching import chunks
from kit.batches.code_cache import speaker_references
from kit.dataset.manifest import read_manifest
from kit.inference.candidates import (
    READER,
    CodeReader,
    CodeReaderConfig,
    load_matching_reader,
    save_reader,
)
from kit.inference.voice_files import (
    DecoderFinetuneConfig,
    load_finetuned_codec,
    save_finetuned_codec,
)
from kit.model.gpt import SpeechGPT
from kit.model.sequence import pack
from kit.model.weights import WEIGHTS, load_model
from kit.notebook.progress_line import Ticker
from kit.notebook.result import Result
from kit.recipes.run_parts import section_for_run
from kit.recipes.training_data import TrainingData
from kit.recipes.training_samples import mel_picture, players_of

MIN_CLIPS = 20  # to train on
READER_HELD_OUT_ROWS = 64  # to measure the reader on
SHOWN_ROWS = 5  # of them
STATES_BATCH = 16
SOUND_HELD_OUT_CLIPS = 32  # to measure the sound on


def learn_reader(data: TrainingData) -> Result:
    """Train the reader of this run's codes on its recordings, unless there is one already.

    If there are too few recordings, or the preset asks for none, the result says so.
    """
    run = data.run
    config = build(CodeReaderConfig, section_for_run(run, "reader"))
    if not config.rows:
        return Result(line="Candidates are ranked without a code reader: `reader.rows` is 0.")
    held_out_rows = data.cache.sample_of_split("held_out", READER_HELD_OUT_ROWS).tolist()
    held_out = texts_and_codes(data, held_out_rows)
    try:
        existing = load_matching_reader(run.folder, data.parts)
    except KitError:
        existing = None  # a damaged one is trained again
    if existing and existing.config == config:
        return reader_result(existing, held_out, "The reader of these codes is there already")
    rows = data.cache.sample_of_split("train", config.rows).tolist()
    if len(rows) < MIN_CLIPS:
        return Result(
            line=f"Candidates are ranked without a code reader: {len(rows)} recordings are fewer "
            f"than the {MIN_CLIPS} that a reader needs."
        )
    speakers = data.cache.speakers(rows).tolist()
    texts, codes = texts_and_codes(data, balance_speakers(rows, speakers, config.most_repeats))
    torch.manual_seed(0)
    reader = CodeReader(config, alphabet_of(texts), data.codec.levels)
    fit_schedule = recognizer_schedule(reader, list(zip(held_out[1], held_out[0])))
    device, precision = run.hw.device, run.precision.value
    steps = train_recognizer(reader, codes, texts, device, precision, fit_schedule)
    figures = fit_schedule.follow(steps, Ticker("reader step"))
    figures["rows"] = len(rows)
    save_reader(reader, run.path(READER), data.parts)
    run.record(reader=figures)
    line = f"A reader of codes learnt from {len(rows):,} recordings {fit_schedule.ending}"
    return reader_result(reader, held_out, line)


def texts_and_codes(data: TrainingData, rows: list[int]) -> tuple[list[str], list[Tensor]]:
    """The text of each of `rows`, decoded from its tokens, and its codes (N,)."""
    cache = data.cache
    texts = [data.tokenizer.decode(cache.texts[i].tolist()) for i in rows]
    return texts, [torch.from_numpy(cache.codes[i].astype("int64")) for i in rows]


def balance_speakers(rows: list[int], speakers: list[str], max_repeats: int) -> list[int]:
    """Repeat `rows` of speakers with few of them, up to `max_repeats` times, and shuffle."""
    counts = Counter(speakers)
    largest = max(counts.values())
    repeats = {speaker: min(max_repeats, largest // count) for speaker, count in counts.items()}
    balanced = [row for row, speaker in zip(rows, speakers) for _ in range(repeats[speaker])]
    random.Random(0).shuffle(balanced)
    return balanced


def reader_result(
    reader: CodeReader, held_out: tuple[list[str], list[Tensor]], line: str
) -> Result:
    """`line`, and the reader's transcripts of some held-out recordings."""
    texts, codes = (column[:SHOWN_ROWS] for column in held_out)
    if not texts:
        return Result(line=f"{line}.")
    headings = ("held-out text", "read from the recording's codes")
    return Result(line=f"{line}.", grid=[headings, *zip(texts, reader.transcribe(codes))])


def learn_sound(data: TrainingData) -> Result:
    """Train the codec's decoder on the hidden states of the final weights, unless it is trained.

    If that cannot be done, the result says why, and the voice sounds as its codec alone does.
    """
    run = data.run
    config = build(DecoderFinetuneConfig, run.section("decoder_finetune"))
    if not config.steps:
        return Result(line="The sound is made of codes alone: `decoder_finetune.steps` is 0.")
    codec = data.codec.with_state_inputs(data.model.width)
    if codec is None:
        return Result(line="This codec's decoder cannot be trained on hidden states.")
    paths = [run.folder / name for name in WEIGHTS.values()]
    weights = [path for path in paths if path.is_file()]
    models = [load_model(path) for path in weights]
    held_out = clips_with_states(data, models, "held_out", SOUND_HELD_OUT_CLIPS)
    existing = load_finetuned_codec(run.folder, weights)
    if existing is not None:
        line = "The decoder was trained on hidden states of these weights before."
        return dataclasses.replace(compare_sounds(data, existing, held_out), line=line)
    start_s = time.perf_counter()
    clips = clips_with_states(data, models, "train", config.clips)
    if len(clips) < MIN_CLIPS:
        return Result(
            line=f"The sound stays made of codes alone: {len(clips)} of the recordings are here, "
            f"and it takes {MIN_CLIPS} to learn from. Bring them back and run this again."
        )
    figures = {"steps": config.steps, "clips": len(clips)}
    line = f"Sound of codes and states: {config.steps:,} steps on {len(clips):,} recordings"
    if held_out:
        with on_device(run.hw.device, codec):
            figures["error_of_codes"] = codec.decoder_error(held_out)
    ticker = Ticker("sound step")
    for step, steps in codec.finetune_decoder(clips, config.steps, run.hw.device):
        ticker(step, steps)
    save_finetuned_codec(codec, run.folder, weights)
    if held_out:
        with on_device(run.hw.device, codec):
            after = codec.decoder_error(held_out)
        figures["error_of_states"] = after
        line += f"; error on held-out speech {after:.3f}, {figures['error_of_codes']:.3f} before"
    figures["seconds"] = round(time.perf_counter() - start_s, 1)
    run.record(sound=figures)
    result = compare_sounds(data, codec, held_out)
    return dataclasses.replace(result, line=f"{line}.", figures=figures)


def compare_sounds(data: TrainingData, codec: Codec, held_out: list[ClipWithStates]) -> Result:
    """A held-out recording, decoded from its codes, and from codes and hidden states."""
    if not held_out:
        return Result(line="")
    clip = held_out[len(held_out) // 2]
    states = clip.states[None].float()
    with on_device(data.run.hw.device, data.codec, codec):
        of_codes = data.codec.decode(clip.codes[None])[0].cpu()
        of_states = codec.decode(clip.codes[None], states=states)[0].cpu()
    with_states = "its codes and the model's states"
    waves = {"recording": clip.wave, "its codes": of_codes, with_states: of_states}
    return Result(
        line="",
        pictures=[mel_picture(waves, codec.sample_rate, data.front_end)],
        sounds=players_of(waves, codec.sample_rate),
    )


def clips_with_states(
    data: TrainingData, models: list[SpeechGPT], split: str, max_clips: int
) -> list[ClipWithStates]:
    """Up to `max_clips` recordings of `split` that exist, with the states of `models` in turn.

    A decoder trained on the last weights and on their average fits both. The states (N, D), half
    precision, are those that predict the codes.
    """
    cache = data.cache
    rows = read_manifest(data.run.folder)
    recordings = {row.id: row.audio for row in rows if Path(row.audio).is_file()}
    sample = [int(i) for i in cache.sample_of_split(split)]
    random.Random(0).shuffle(sample)
    sample = [i for i in sample if cache.rows[i]["id"] in recordings][:max_clips]
    sample.sort(key=cache.length)  # similar lengths together
    references = speaker_references(cache, split)
    device = data.run.hw.device
    models = [model.to(device) for model in models]
    clips = []
    tick = Ticker("hidden states")
    for number, batch in enumerate(chunks(sample, STATES_BATCH)):
        model = models[number % len(models)]
        texts, codes = (
            [column[i].tolist() for i in batch] for column in (cache.texts, cache.codes)
        )
        mels = torch.stack([references[cache.rows[i]["speaker"]].float() for i in batch])
        packed = pack(model.config, texts, codes, mels).to(device)
        with torch.no_grad():
            states = model.hidden(packed).flatten(0, 1)[packed.code_indices].half().cpu()
        lengths = [len(row) + model.config.stop_targets for row in codes]
        for i, row, row_states in zip(batch, codes, states.split(lengths)):
            wave = load_speech(recordings[cache.rows[i]["id"]], data.codec.sample_rate)
            states_of_codes = row_states[: len(row)]
            clip = ClipWithStates(wave=wave, codes=torch.tensor(row), states=states_of_codes)
            clips.append(clip)
        tick(len(clips), len(sample))
    return clips
