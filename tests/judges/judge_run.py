"""`make judges RUN=name`: what judges that nobody here trained find in a run.

Held-out sentences as recorded, through Griffin-Lim from their true magnitudes, through the codec,
and, where the run is trained, as each set of weights reads them: once, and as it speaks by the
preset. It leaves a table, all transcripts in runs/NAME/judges.json, and the figures in the run's
record, where 03_evaluate_ema shows them. What was judged before, of the same files, is not judged
again.
"""

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict

import numpy as np
import torch
from judges import JudgeError, Judgement, Judges, missing
from torch import Tensor

from kit.audio.clip import load_wave
from kit.audio.codec import load_codec
from kit.audio.mel_codec import MelCodec
from kit.base.files import cached_result, digest, file_digest, write_atomic
from kit.base.formatting import text_grid
from kit.dataset.data_report import rows_in_split
from kit.dataset.manifest import read_manifest
from kit.inference.candidates import READER
from kit.inference.voice_files import SOUND, load_voices
from kit.model.weights import WEIGHTS
from kit.recipes.evaluate import judges_table
from kit.recipes.open_run import ActiveRun, sampling_of
from kit.recipes.start import start
from kit.settings import GenerateConfig

SENTENCES = 20
SPEAKING = ("codec.safetensors", "tokenizer.model", "references.safetensors", SOUND, READER)
REFERENCE_CLIPS = 10  # recordings of each speaker, of those trained on, that tell their voice


def true_magnitudes(codec: MelCodec, wave: Tensor) -> Tensor:
    """A clip (L,) made again by Griffin-Lim of its own magnitudes: the best that it could do."""
    with torch.inference_mode():
        return codec.griffin_lim(codec.mel(wave[None])[1].exp())[0]


def by_griffin_lim(codec: MelCodec, wave: Tensor) -> Tensor:
    """A clip (L,) after a round trip without the vocoder."""
    with torch.inference_mode():
        return codec.by_griffin_lim(codec.log_magnitude_of(codec.encode(wave[None])))[0]


class JudgedRun:
    """What of a run is judged: its held-out recordings, its codec, and its voices where trained."""

    def __init__(self, run: ActiveRun, sentences: int):
        self.run = run
        self.rows = read_manifest(run.folder)
        self.language = run.require_figure("data", "language", "01_data_prep")
        self.codec = load_codec(run.folder / "codec.safetensors")
        self.rate_hz = self.codec.sample_rate
        trained = (run.folder / WEIGHTS["raw"]).is_file()
        self.voices = load_voices(run.folder, self.language) if trained else {}
        self.readings = {"read once": sampling_of(run, best_of=1), "as it speaks": sampling_of(run)}
        self.held_out = rows_in_split(self.rows, "held_out")[:sentences]
        if trained:
            speaks = self.voices["raw"].can_speak
            self.held_out = [row for row in self.held_out if speaks(row.text)]
        if not self.held_out:
            raise JudgeError(f"The run `{run.name}` has no held-out sentence to judge.")
        self.texts = [row.text for row in self.held_out]

    def variants(self) -> Iterator[tuple[str, object, Callable[[], list[Tensor]]]]:
        """Each version: its name, what it depends on beside the recordings, its waves (L,)."""
        codec, recordings = self.codec, self.recordings
        yield "recordings", "", lambda: recordings
        if isinstance(codec, MelCodec):
            again = lambda: [true_magnitudes(codec, wave) for wave in recordings]  # noqa: E731
            yield "Griffin-Lim of true magnitudes", asdict(codec.config), again
        again = lambda: list(map(codec.round_trip, recordings))  # noqa: E731
        yield "codec round trip", self.digest_of("codec.safetensors"), again
        if isinstance(codec, MelCodec) and codec.vocoder:
            again = lambda: [by_griffin_lim(codec, wave) for wave in recordings]  # noqa: E731
            yield "the same codes by Griffin-Lim", self.digest_of("codec.safetensors"), again
        for weights, (reading, config) in itertools.product(self.voices, self.readings.items()):
            depends_on = [*self.digest_of(WEIGHTS[weights], *SPEAKING), asdict(config)]
            spoken = functools.partial(self.spoken, weights, config)
            yield f"{weights}, {reading}", depends_on, spoken

    def digest_of(self, *files: str) -> list[str]:
        paths = [self.run.folder / name for name in files]
        return [file_digest(path) for path in paths if path.is_file()]

    @functools.cached_property
    def recordings(self) -> list[Tensor]:
        return [load_wave(row.audio, self.rate_hz) for row in self.held_out]

    def spoken(self, weights: str, config: GenerateConfig) -> list[Tensor]:
        """The held-out sentences (L,) as the voice with `weights` reads them."""
        speakers = [row.speaker for row in self.held_out]
        return [one.wave for one in self.voices[weights].speak(self.texts, speakers, config)]

    def references(self, judges: Judges) -> list[np.ndarray]:
        """The voice of each sentence's speaker, by recordings that are not judged."""
        voices = {}
        for speaker in {row.speaker for row in self.held_out}:
            rows = [row for row in rows_in_split(self.rows, "train") if row.speaker == speaker]
            waves = [load_wave(row.audio, self.rate_hz) for row in rows[:REFERENCE_CLIPS]]
            if not waves:
                raise JudgeError(f"Of {speaker} there is no recording but those to be judged.")
            voices[speaker] = judges.voice_of(waves, self.rate_hz)
        return [voices[row.speaker] for row in self.held_out]


def judged_run(run: ActiveRun, sentences: int) -> dict[str, Judgement]:
    """The judgement of every variant, each kept in the run's folder once it is made."""
    data = JudgedRun(run, sentences)
    judges = Judges(data.language, run.folder.parent / "judges")
    references = data.references(judges)
    rows = [(row.audio, row.text, row.speaker) for row in data.held_out]
    judgements = {}
    for name, depends_on, waves in data.variants():

        def make(waves: Callable[[], list[Tensor]] = waves) -> dict:
            return asdict(judges.judge(waves(), data.texts, data.rate_hz, references))

        path = run.path("judged", f"{len(judgements)}.json")
        key = digest(name, rows, data.language, depends_on)
        judgements[name] = Judgement(**cached_result(path, key, make))
        print(f"{name}: {figures(judgements[name])}", flush=True)
    return judgements


def figures(judgement: Judgement) -> str:
    return (
        f"Whisper CER {judgement.cer:.1%}, DNSMOS {judgement.dnsmos:.2f}, similarity "
        f"{judgement.similarity:.3f} ({judgement.clips} clips, {judgement.wall_s:.0f} s)"
    )


def write_judgements(run: ActiveRun, judgements: dict[str, Judgement]) -> dict[str, dict]:
    """judges.json in the run's folder with the transcripts; its record gets the figures alone."""
    rows = {name: asdict(judgement) for name, judgement in judgements.items()}
    write_atomic(run.path("judges.json"), json.dumps(rows, indent=1, ensure_ascii=False))
    keys = ("cer", "dnsmos", "similarity", "clips")
    scores = {name: {key: row[key] for key in keys} for name, row in rows.items()}
    model = run.folder / WEIGHTS["raw"]
    weights = file_digest(model) if model.is_file() else ""
    run.record(judges={"heard": scores, "weights": weights})
    return scores


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", default="", help="the run's name (KIT_RUN, or demo)")
    parser.add_argument("--sentences", type=int, default=SENTENCES, help="held out, the first ones")
    options = parser.parse_args(words)
    if missing():
        print(f"Not installed: {', '.join(missing())}. `make judges` installs it.", file=sys.stderr)
        return 2
    run = start(options.run)
    try:
        judgements = judged_run(run, options.sentences)
    except (ValueError, RuntimeError, OSError) as error:
        if not type(error).__module__.startswith(("kit.", "judges")):
            raise
        print(error, file=sys.stderr)
        return 2
    print(text_grid(judges_table(write_judgements(run, judgements))))
    print(f"All transcripts: {run.folder / 'judges.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
