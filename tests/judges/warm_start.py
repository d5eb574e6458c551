"""What half an hour of a person gains from a voice that has learnt to read synthetic speech.

`PYTHONPATH=. python tests/judges/warm_start.py --recordings runs/corpus-ru --folder runs/warm`: a
base learns to read what espeak-ng speaks; a person is then learnt from that base, and from scratch,
in as many steps; the judges compare both on sentences of the person that none of the three has
seen, as text or as sound. All three have one codec, the person's, or with `--codec-along N` one
that has also learnt from N of the base's sentences. Each step is a command of the kit in a run of
its own in the folder: interrupted, it resumes where it was. With `--along N` the person's voice
reads N of the base's sentences along, so that it keeps reading while it learns the person's sound.
"""

import argparse
import dataclasses
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import soundfile
from judge_run import REFERENCE_CLIPS, figures
from judges import Judges

from kit.audio.clip import load_wave
from kit.base.files import write_atomic
from kit.inference.voice_files import load_voices
from kit.recipes.open_run import sampling_of
from kit.recipes.start import start
from kit.text.espeak import run_module

VOICES = 3
# Of espeak-ng's usual pace, which is twice that of a person reading aloud. Whisper-base gets 39 %
# of its Russian wrong at this pace, 56 % at the usual one.
PACE = 0.62
JUDGED = 20  # sentences of the person, kept from all but the judges
FEWEST_WORDS, MOST_WORDS = 3, 12  # in a sentence of words in any order
LONGEST_S = 14.0
PERSON = "person"
NO_JUDGE = ["recognizer.steps=50", "recognizer.minutes=0"]  # Whisper judges here

Rows = list[tuple[str, str]]  # name and text
GeneratedCodes = list[tuple[str, str, str]]  # and the speaker


def recordings_of(folder: Path) -> Rows:
    """The rows of an LJSpeech folder that are not too long, in a fixed order of chance."""
    lines = (folder / "metadata.csv").read_text(encoding="utf-8").splitlines()
    rows = [tuple(line.split("|")[:2]) for line in lines]
    random.Random(0).shuffle(rows)
    return [row for row in rows if duration_s(folder, row[0]) <= LONGEST_S]


def duration_s(folder: Path, name: str) -> float:
    return soundfile.info(folder / "wavs" / f"{name}.wav").duration


def first_minutes(folder: Path, rows: Rows, minutes: float) -> Rows:
    ends_s = itertools.accumulate(duration_s(folder, name) for name, _ in rows)
    return [row for row, end_s in zip(rows, ends_s) if end_s <= 60 * minutes]


def any_sentences(rows: Rows, count: int) -> list[str]:
    """The texts of `rows`, and their words in any order, `count` together."""
    texts = [text for _, text in rows][:count]
    words = [word.strip(".,;:!?") for text in texts for word in text.split()]
    chance = random.Random(1)
    while len(texts) < count:
        length = chance.randint(FEWEST_WORDS, MOST_WORDS)
        texts.append(" ".join(chance.choice(words) for _ in range(length)))
    return texts


def write_folder(folder: Path, *parts: tuple[Path, GeneratedCodes]) -> None:
    """An LJSpeech folder of rows whose sound is in other files, the source of each part."""
    wavs = folder / "wavs"
    wavs.mkdir(parents=True, exist_ok=True)
    lines = ["id|text|speaker\n"]
    for source, rows in parts:
        for name, text, speaker in rows:
            link = wavs / f"{name}.wav"
            if not link.exists():
                link.symlink_to((source / "wavs" / link.name).resolve())
            lines.append(f"{name}|{text}|{speaker}\n")
    write_atomic(folder / "metadata.csv", "".join(lines))


def speak_base(folder: Path, language: str, texts: list[str]) -> GeneratedCodes:
    """`texts` spoken into `folder`, by all voices in turns."""
    rows = [(f"base{i:05d}", text, i % VOICES) for i, text in enumerate(texts)]
    wavs = folder / "wavs"
    wavs.mkdir(parents=True, exist_ok=True)
    left = [row for row in rows if not (wavs / f"{row[0]}.wav").exists()]
    for voice in range(VOICES):
        own = [(name, text) for name, text, speaker in left if speaker == voice]
        job = {"folder": str(wavs), "language": language, "speaker": voice, "pace": PACE}
        done = run_module("kit.dataset.synthetic", job | {"rows": own})
        if done.returncode:
            raise RuntimeError(f"espeak-ng could not speak the base: {done.stderr.strip()[-400:]}")
    return [(name, text, f"voice{speaker}") for name, text, speaker in rows]


def ready_base(source: Path, count: int) -> GeneratedCodes:
    """The first `count` rows of a folder, with their voices where its table names them."""
    lines = (source / "metadata.csv").read_text(encoding="utf-8").splitlines()
    named = lines[0] == "id|text|speaker"
    rows = [line.split("|") for line in lines[named : named + count]]
    return [(row[0], row[1], row[2] if named else "voice0") for row in rows]


def kit(folder: Path, run: str, command: str, *words: object) -> None:
    """A command of the kit, once: a mark in its run's folder says that it has ended."""
    mark = folder / "runs" / run / f"{command}-ended"
    if mark.exists():
        return
    env = os.environ | {"KIT_RUNS": str(folder / "runs")}
    line = [sys.executable, "-m", "kit", command, "--run", run, *map(str, words)]
    print("$", *line[2:], flush=True)
    subprocess.run(line, env=env, check=True)
    write_atomic(mark, "")


def train_all(folder: Path, options: argparse.Namespace) -> Rows:
    """Everything up to the judges; returns the sentences that are left to them."""
    source = options.recordings
    rows = recordings_of(source)
    judged, rows = rows[:JUDGED], rows[JUDGED:]
    person = [(*row, PERSON) for row in first_minutes(source, rows, options.minutes)]
    if options.base:
        spoken = options.base.resolve()
        base = ready_base(spoken, options.sentences)
    else:
        spoken = folder / "spoken"
        texts = any_sentences(rows[len(person) :], options.sentences)
        base = speak_base(spoken, options.language, texts)
    write_folder(folder / "person", (source, person))
    write_folder(folder / "base", (spoken, base))
    for name, count in (("both", options.along), ("codec", options.codec_along)):
        along = random.Random(2).sample(base, count)
        write_folder(folder / name, (source, person), (spoken, along))
    common = ("--language", options.language)
    preset = ("--preset", options.preset, "--set", *NO_JUDGE, *options.set)

    def prepare(run: str, data: str, *words: object) -> None:
        kit(folder, run, "setup", *preset)
        kit(folder, run, "prepare", "--data", folder / data, *common, *words)

    def take_codec(run: str, of: str) -> None:
        kit(folder, run, "setup", *preset)
        codec = folder / "runs" / run / "codec.safetensors"
        if not codec.exists():
            shutil.copyfile(folder / "runs" / of / codec.name, codec)

    if options.codec_along:
        prepare("codec", "codec")
        take_codec("from-nothing", "codec")
    prepare("from-nothing", "person")
    take_codec("base", "from-nothing")
    prepare("base", "base")
    kit(folder, "base", "train", "--max-steps", options.base_steps)
    prepare("from-base", "both", "--base-model", folder / "runs" / "base")
    for run in learnt_from(options):
        kit(folder, run, "train", "--max-steps", options.steps)
    return judged


def learnt_from(options: argparse.Namespace) -> tuple[str, ...]:
    """The runs that learn the person."""
    return ("from-base",) if options.no_control else ("from-base", "from-nothing")


def judge_all(folder: Path, options: argparse.Namespace, judged: Rows) -> dict:
    """What the judges find in the recordings, the codec, and each run's weights."""
    os.environ["KIT_RUNS"] = str(folder / "runs")
    judges = Judges(options.language, folder / "judges")
    source = options.recordings
    runs = {name: start(name) for name in (*learnt_from(options), "base")}
    voices = {name: load_voices(run.folder, options.language) for name, run in runs.items()}
    codec = voices["from-base"]["raw"].codec
    rate_hz = codec.sample_rate
    texts = [text for _, text in judged]

    def waves_of(rows: Rows) -> list:
        return [load_wave(str(source / "wavs" / f"{name}.wav"), rate_hz) for name, _ in rows]

    others = recordings_of(source)[JUDGED : JUDGED + REFERENCE_CLIPS]
    reference = [judges.voice_of(waves_of(others), rate_hz)] * len(texts)
    results = {}

    def judge(name: str, waves: list) -> None:
        results[name] = judges.judge(waves, texts, rate_hz, reference)
        print(f"{name}: {figures(results[name])}", flush=True)

    recorded = waves_of(judged)
    judge("recordings", recorded)
    judge("codec's round trip", [codec.round_trip(wave) for wave in recorded])
    for name, run in runs.items():
        ways = {"read once": sampling_of(run, best_of=1), "as it speaks": sampling_of(run)}
        for weights, voice in voices[name].items():
            speaker = PERSON if PERSON in voice.speakers else voice.speakers[0]
            for way, settings in ways.items():
                said = voice.speak(texts, speaker, settings)
                for number, speech in enumerate(said[:3]):
                    path = folder / f"{name}-{weights}-{way.replace(' ', '-')}-{number}.wav"
                    soundfile.write(path, speech.wave.numpy(), rate_hz)
                judge(f"{name}, {weights}, {way}", [speech.wave for speech in said])
    return {name: dataclasses.asdict(judgement) for name, judgement in results.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recordings", type=Path, required=True, help="an LJSpeech folder")
    parser.add_argument("--language", default="ru")
    parser.add_argument("--folder", type=Path, default=Path("runs/warm"))
    parser.add_argument("--preset", default="cpu")
    parser.add_argument("--minutes", type=float, default=30, help="of the person")
    parser.add_argument("--sentences", type=int, default=16000, help="of synthetic speech")
    parser.add_argument("--base-steps", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=150, help="on the person, for each of the two")
    parser.add_argument("--base", type=Path, help="an LJSpeech folder that another engine spoke")
    parser.add_argument("--set", nargs="*", default=[], help="values of the preset, of all runs")
    parser.add_argument("--along", type=int, default=0, help="of the base's sentences, read along")
    parser.add_argument("--codec-along", type=int, default=0, help="of them, for the codec")
    parser.add_argument("--no-control", action="store_true", help="no voice trained from scratch")
    options = parser.parse_args()
    folder = options.folder.resolve()
    options.recordings = options.recordings.resolve()
    results = judge_all(folder, options, train_all(folder, options))
    write_atomic(folder / "judged.json", json.dumps(results, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
