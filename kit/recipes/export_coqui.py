"""A fine-tuned XTTS-v2 as the files that coqui-tts loads, with what it takes to speak with them."""

import copy
import dataclasses
import shutil
from pathlib import Path

import torch

from kit.audio.reference import load_reference
from kit.base.files import write_atomic
from kit.base.wav import encode_wav
from kit.batches.code_cache import CodeCache, reference_rows
from kit.dataset.manifest import read_manifest
from kit.inference.voice import Voice
from kit.model.warm_start import extend_positions
from kit.recipes.active_run import ActiveRun
from kit.recipes.release_files import WITH_THEM
from kit.releases.xtts_v2.export import save_xtts
from kit.releases.xtts_v2.model import load_xtts
from kit.releases.xtts_v2.tokenizer import tag_of
from kit.releases.xtts_v2.vocabulary import load_vocabulary

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
REFERENCE = "reference.wav"

README = """# A fine-tuned XTTS-v2

For coqui-tts (`pip install coqui-tts "transformers<5.24"`: a later one breaks its generation); the
kit speaks from the folder `export` beside this one.

    from TTS.tts.configs.xtts_config import XttsConfig
    from TTS.tts.models.xtts import Xtts
    config = XttsConfig()
    config.load_json("config.json")
    model = Xtts.init_from_config(config)
    model.load_checkpoint(config, checkpoint_dir=".", strict=True)
{teach}    latents, speaker = model.get_conditioning_latents(audio_path=["reference.wav"])
    made = model.inference("...", "{tag}", latents, speaker)["wav"]  # 24,000 numbers a second

Neither this model nor its speech may be used commercially: it is made from XTTS-v2, which is under
the Coqui Public Model License (https://coqui.ai/cpml). Whoever is given it, or its speech, must be
given that licence, too.
"""
TEACH = """\
    # coqui-tts does not normalise texts in this language.
    from kit.releases.xtts_v2.tokenizer import teach_language
    teach_language(model.tokenizer, "{language}")
"""
# What coqui-tts 0.28 cleans texts in by itself.
CLEANED = "en es fr de it pt pl tr ru nl cs ar zh-cn ja hu ko hi".split()


def export_for_coqui(
    run: ActiveRun, voice: Voice, release: Path, folder: Path, weights: str = "fp16"
) -> Path:
    """Write `voice` to `folder` as an XTTS-v2, with what `release` has that training left alone.

    model.pth (and the same as model.safetensors), config.json, vocab.json, dvae.pth, mel_stats.pth;
    the recording of the first speaker, the licence, and how to speak. `weights` is fp32 or fp16.
    Raises KitError for a release that is missing or damaged, DiskError where there is no room.
    """
    xtts = load_xtts(release)
    model = extend_positions(voice.model, xtts.model)
    settings = copy.deepcopy(xtts.config)
    tag = tag_of(voice.language)
    languages = settings.setdefault("languages", [])
    if tag not in languages:
        languages.append(tag)
    vocabulary = load_vocabulary(run.folder / "tokenizer.model")
    tuned = dataclasses.replace(xtts, model=model, config=settings, vocabulary=vocabulary)
    save_xtts(tuned, folder, DTYPES[weights])
    teach = "" if tag in CLEANED else TEACH.format(language=voice.language)
    write_atomic(folder / "README.md", README.format(teach=teach, tag=tag))
    for name in WITH_THEM:
        if (release / name).is_file():
            shutil.copyfile(release / name, folder / name)
    rate_hz = voice.codec.input_sample_rate
    wave = load_reference(first_recording(run, voice.speakers[0]), rate_hz)
    write_atomic(folder / REFERENCE, encode_wav(wave.numpy(), rate_hz))
    return folder


def first_recording(run: ActiveRun, speaker: str) -> str:
    """The path of the recording that `speaker` is heard in."""
    cache = CodeCache(run.index())
    row = cache.rows[reference_rows(cache)[speaker]]["id"]
    return next(each.audio for each in read_manifest(run.folder) if each.id == row)
