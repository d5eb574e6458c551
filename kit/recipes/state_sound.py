"""The last step of training: the sound of the voice is made of what the model knows, too.

A code says roughly how a moment sounds. The state that foretold it knows the text, the speaker and
all that was said before, as XTTS-v2's vocoder is told (Casanova et al. 2024). The codec's decoder
learns from both; the codes, and so all that was prepared and trained with them, stay.
"""

import dataclasses
import random
import time
from pathlib import Path

import torch
from torch import Tensor

from kit.audio.codec import ClipWithStates, Codec
from kit.base.config import build
from kit.base.hardware import on_device
from kit.batches.code_cache import speaker_references
from kit.batches.encoding import load_speech
from kit.dataset.manifest import read_manifest
from kit.inference.finetuned_codec import load_finetuned_codec, save_finetuned_codec
from kit.inference.settings import SoundConfig
from kit.model.gpt import SpeechGPT
from kit.model.sequence import pack
from kit.model.weights import WEIGHTS, load_model
from kit.notebook.progress_line import Ticker
from kit.notebook.result import Result
from kit.recipes.sounds import mel_picture, players_of
from kit.recipes.training_data import TrainingData

ROWS_AT_ONCE = 16
HELD_OUT_CLIPS = 32  # that say what was gained
FEWEST_CLIPS = 20  # to learn from


def learn_sound(data: TrainingData) -> Result:
    """Train the sound on the states of the weights that training left, unless it knows them.

    Where it cannot, because the codec has no such training or the recordings are gone, the result
    says so, and the voice speaks as its codec alone sounds.
    """
    run = data.run
    config = build(SoundConfig, run.section("sound"))
    if not config.steps:
        return Result(line="The sound is made of codes alone: `sound.steps` is 0.")
    codec = data.codec.with_state_inputs(data.model.width)
    if codec is None:
        return Result(line="This codec's sound is not trained on a model's states.")
    weights = [path for path in (run.folder / name for name in WEIGHTS.values()) if path.is_file()]
    models = [load_model(path) for path in weights]
    held_out = stated_clips(data, models, "held_out", HELD_OUT_CLIPS)
    there = load_finetuned_codec(run.folder, weights)
    if there is not None:
        line = "The sound knows the states of these weights already."
        return dataclasses.replace(beside_codes(data, there, held_out), line=line)
    began_s = time.perf_counter()
    clips = stated_clips(data, models, "train", config.clips)
    if len(clips) < FEWEST_CLIPS:
        return Result(
            line=f"The sound stays made of codes alone: {len(clips)} of the recordings are here, "
            f"and it takes {FEWEST_CLIPS} to learn from. Bring them back and run this again."
        )
    before = decoder_error(data, codec, held_out) if held_out else None
    ticker = Ticker("sound step")
    for step, steps in codec.finetune_decoder(clips, config.steps, run.hw.device):
        ticker(step, steps)
    save_finetuned_codec(codec, run.folder, weights)
    figures = {"steps": config.steps, "clips": len(clips)}
    line = f"Sound of codes and states: {config.steps:,} steps on {len(clips):,} recordings"
    if held_out:
        figures["error_of_codes"] = before
        figures["error_of_states"] = after = decoder_error(data, codec, held_out)
        line += f"; error on held-out speech {after:.3f}, {before:.3f} before"
    figures["seconds"] = round(time.perf_counter() - began_s, 1)
    run.record(sound=figures)
    found = beside_codes(data, codec, held_out)
    return dataclasses.replace(found, line=f"{line}.", figures=figures)


def decoder_error(data: TrainingData, codec: Codec, clips: list[ClipWithStates]) -> float:
    """The codec's `decoder_error`, computed on the run's device."""
    with on_device(data.run.hw.device, codec):
        return codec.decoder_error(clips)


def beside_codes(data: TrainingData, codec: Codec, held_out: list[ClipWithStates]) -> Result:
    """A held-out recording, what its codes sound like, and its codes with the model's states."""
    if not held_out:
        return Result(line="")
    clip = held_out[len(held_out) // 2]
    states = clip.states[None].float()
    with on_device(data.run.hw.device, data.codec, codec):
        of_codes = data.codec.decode(clip.codes[None])[0].cpu()
        of_states = codec.decode(clip.codes[None], states=states)[0].cpu()
    waves = {
        "recording": clip.wave,
        "its codes": of_codes,
        "its codes and the model's states": of_states,
    }
    return Result(
        line="",
        pictures=[mel_picture(waves, codec.sample_rate, data.front_end)],
        sounds=players_of(waves, codec.sample_rate),
    )


def stated_clips(
    data: TrainingData, models: list[SpeechGPT], split: str, most: int
) -> list[ClipWithStates]:
    """Up to `most` recordings of `split` that are here, with the states of `models` in turn.

    A sound that has learnt from the last weights and from their average is right for both.
    """
    recordings = {row.id: row.audio for row in read_manifest(data.run.folder)}
    rows = [int(i) for i in data.cache.sample_of_split(split)]
    random.Random(0).shuffle(rows)
    there = []
    for i in rows:
        path = recordings.get(data.cache.rows[i]["id"])
        if path and Path(path).is_file():
            there.append(i)
        if len(there) == most:
            break
    there.sort(key=data.cache.length)  # like lengths together
    references = speaker_references(data.cache, split)
    models = [model.to(data.run.hw.device) for model in models]
    found = []
    tick = Ticker("states of")
    for number, first in enumerate(range(0, len(there), ROWS_AT_ONCE)):
        part = there[first : first + ROWS_AT_ONCE]
        voices = torch.stack([references[data.cache.rows[i]["speaker"]].float() for i in part])
        states = states_of(models[number % len(models)], data, part, voices)
        for i, known in zip(part, states):
            path = recordings[data.cache.rows[i]["id"]]
            wave = load_speech(path, data.codec.sample_rate)
            codes = torch.from_numpy(data.cache.codes[i].astype("int64"))
            found.append(ClipWithStates(wave=wave, codes=codes, states=known))
        tick(len(found), len(there))
    return found


@torch.no_grad()
def states_of(
    model: SpeechGPT, data: TrainingData, rows: list[int], references: Tensor
) -> list[Tensor]:
    """The states (N, D), as half floats, that foretell each code of `rows`, each told all before.

    `references` (B, M, T) are the speakers', a row each.
    """
    codes = [data.cache.codes[i].tolist() for i in rows]
    texts = [data.cache.texts[i].tolist() for i in rows]
    device = model.final_norm.weight.device
    batch = pack(model.config, texts, codes, references).to(device)
    states = model.hidden(batch).flatten(0, 1)[batch.code_indices].half().cpu()
    counts = [len(row) + model.config.stop_targets for row in codes]
    return [known[: len(row)] for known, row in zip(states.split(counts), codes)]
