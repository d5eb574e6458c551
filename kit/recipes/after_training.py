"""What is trained after the model: a reader of codes, and the codec's decoder.

The reader transcribes codes, so that the best of several candidates can be chosen. The decoder
learns to use the model's hidden states beside the codes, as XTTS-v2's vocoder does (Casanova et al.
2024); the codes, and all that was prepared with them, stay.

Shapes: N codes, D the model's width.
"""

import random
import time
from collections import Counter
from functools import partial
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
from kit.batches.word_spans import WHOLE
from kit.dataset.manifest import read_manifest
from kit.inference import candidates, voice_files
from kit.inference.candidates import CodeReader
from kit.model.gpt import SpeechGPT
from kit.model.sequence import pack
from kit.model.weights import WEIGHTS, load_model
from kit.notebook.plots import mel_picture
from kit.notebook.progress import Ticker
from kit.notebook.result import Result, players_of
from kit.recipes.open_run import section_for_run
from kit.recipes.training_data import TrainingData
from kit.settings import CodeReaderConfig, DecoderFinetuneConfig

MIN_CLIPS = 20  # to train on
READER_PARTS = 8  # of each recording, as training learns them, that it also learns
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
    without = "Candidates are ranked without a code reader:"
    if not config.rows:
        return Result(line=f"{without} `reader.rows` is 0.")
    sample = data.cache.sample_of_split("held_out", READER_HELD_OUT_ROWS)
    held_out = texts_and_codes(data, sample.tolist())
    try:
        existing = candidates.load_matching_reader(run.folder, data.parts)
    except KitError:
        existing = None  # a damaged one is trained again
    if existing and existing.config == config:
        return reader_result(existing, held_out, "The reader of these codes is there already")
    rows = data.cache.sample_of_split("train", config.rows).tolist()
    if len(rows) < MIN_CLIPS:
        few = f"{len(rows)} recordings are fewer than the {MIN_CLIPS} that a reader needs."
        return Result(line=f"{without} {few}")
    speakers = data.cache.speakers(rows).tolist()
    rows = balance_speakers(rows, speakers, config.most_repeats)
    texts, codes = texts_and_codes(data, rows, READER_PARTS)
    torch.manual_seed(0)
    reader = CodeReader(config, alphabet_of(texts), data.codec.levels)
    fit_schedule = recognizer_schedule(reader, list(zip(held_out[1], held_out[0])))
    device, precision = run.hw.device, run.precision.value
    steps = train_recognizer(reader, codes, texts, device, precision, fit_schedule)
    figures = fit_schedule.follow(steps, Ticker("reader step"))
    candidates.save_reader(reader, run.path(candidates.READER), data.parts)
    run.record(reader=figures | {"rows": len(rows)})
    line = f"A reader of codes learnt from {len(rows):,} recordings {fit_schedule.ending}"
    return reader_result(reader, held_out, line)


def texts_and_codes(
    data: TrainingData, rows: list[int], parts: int = 0
) -> tuple[list[str], list[Tensor]]:
    """Texts and codes (N,) of `rows`, and of up to `parts` parts of each that training learns."""
    stream = data.stream()
    texts, codes = [], []
    for i in rows:
        for cut in (WHOLE, *stream.parts(i, parts)):
            ids, row_codes = data.cache.texts[i], stream.caches[cut.speed].codes[i]
            texts.append(data.tokenizer.decode(ids[cut.texts].tolist()))
            codes.append(torch.from_numpy(row_codes[cut.codes].astype("int64")))
    return texts, codes


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
    texts, codes = (column[:SHOWN_ROWS] for column in held_out)
    headings = ("held-out text", "read from the recording's codes")
    grid = [headings, *zip(texts, reader.transcribe(codes))] if texts else ()
    return Result(line=f"{line}.", grid=grid)


def learn_sound(data: TrainingData) -> Result:
    """Train the codec's decoder on the hidden states of the final weights, unless it is trained.

    If that cannot be done, the result says why, and the voice sounds as its codec alone does.
    """
    run = data.run
    config = build(DecoderFinetuneConfig, section_for_run(run, "decoder_finetune"))
    if not config.steps:
        return Result(line="The sound is made of codes alone: `decoder_finetune.steps` is 0.")
    codec = data.codec.with_state_inputs(data.model.width)
    if codec is None:
        return Result(line="This codec's decoder cannot be trained on hidden states.")
    paths = [run.folder / name for name in WEIGHTS.values()]
    weights = [path for path in paths if path.is_file()]
    models = [load_model(path) for path in weights]
    held_out = clips_with_states(data, models, "held_out", SOUND_HELD_OUT_CLIPS)
    existing = voice_files.load_finetuned_codec(run.folder, weights)
    if existing is not None:
        line = "The decoder was trained on hidden states of these weights before."
        return compare_sounds(data, existing, held_out, line=line)
    start_s = time.perf_counter()
    clips = clips_with_states(data, models, "train", config.clips)
    if len(clips) < MIN_CLIPS:
        recordings = len(data.cache.rows_in_split("train"))
        return Result(
            line=f"The sound stays made of codes alone: {len(clips)} of the {recordings} "
            f"recordings to learn from are here, and it takes {MIN_CLIPS}. Record more, or bring "
            "them back and run this again."
        )
    figures = {"steps": config.steps, "clips": len(clips)}
    line = f"Sound of codes and states: {config.steps:,} steps on {len(clips):,} recordings"
    if held_out:
        with on_device(run.hw.device, codec):
            figures["error_of_codes"] = codec.decoder_error(held_out)
    ticker = Ticker("sound step")
    try:
        for step, steps in codec.finetune_decoder(clips, config.steps, run.hw.device):
            ticker(step, steps)
    except KitError as error:  # the voice is there without it
        return Result(line=f"The sound stays made of codes alone. {error}")
    voice_files.save_finetuned_codec(codec, run.folder, weights)
    if held_out:
        with on_device(run.hw.device, codec):
            figures["error_of_states"] = codec.decoder_error(held_out)
        before, after = figures["error_of_codes"], figures["error_of_states"]
        line += f"; error on held-out speech {after:.3f}, {before:.3f} before"
    figures["seconds"] = round(time.perf_counter() - start_s, 1)
    run.record(sound=figures)
    return compare_sounds(data, codec, held_out, line=f"{line}.", figures=figures)


def compare_sounds(
    data: TrainingData, codec: Codec, held_out: list[ClipWithStates], **result
) -> Result:
    """A held-out recording, decoded from its codes, and from codes and hidden states.

    `result` are more fields of the Result.
    """
    if not held_out:
        return Result(**result)
    clip = held_out[len(held_out) // 2]
    states = clip.states[None].float()
    with on_device(data.run.hw.device, data.codec, codec):
        of_codes = data.codec.decode(clip.codes[None])[0].cpu()
        of_states = codec.decode(clip.codes[None], states=states)[0].cpu()
    with_states = "its codes and the model's states"
    waves = {"recording": clip.wave, "its codes": of_codes, with_states: of_states}
    draw = partial(mel_picture, waves, codec.sample_rate, data.front_end)
    return Result(pictures=[draw], sounds=players_of(waves, codec.sample_rate), **result)


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
    sample.sort(key=lambda i: int(cache.lengths([i])[0]))  # similar lengths together
    references = speaker_references(cache, split)
    device = data.run.hw.device
    models = [model.to(device) for model in models]
    clips = []
    tick = Ticker("hidden states")
    for number, batch in enumerate(chunks(sample, STATES_BATCH)):
        model = models[number % len(models)]
        texts = [cache.texts[i].tolist() for i in batch]
        codes = [cache.codes[i].tolist() for i in batch]
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
