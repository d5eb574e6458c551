"""Type a sentence, hear it; what each way of running the model costs; a voice to take away.

Each step draws what it found and records its own figures.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from kit.base.errors import SpeechError
from kit.inference.evaluate import save_samples
from kit.inference.export import export_voice, load_export
from kit.inference.torch_export import export_program
from kit.inference.voice import remark
from kit.notebook.panel.speak_panel import SpeakPanel
from kit.notebook.result import Result
from kit.recipes.active_run import ActiveRun
from kit.recipes.run_voice import RunVoice
from kit.recipes.sounds import mel_picture
from kit.recipes.speak_costs import SpeakingCosts

SETTINGS = {  # of GenerateConfig
    "temperature": "0 takes the likeliest code, 1 draws as the model weighs them",
    "top_k": "only so many of the likeliest codes are drawn from; 0: all",
    "top_p": "only the likeliest that make up this share",
    "guidance": "how far from what is likely without the text; 1: not at all",
    "candidates": "readings of a text; the best is kept: likely, and along the text",
    "follow": "what going along the text weighs beside being likely; 0: nothing",
    "retries": "of a reading that found no end, each at half the temperature",
    "seed": "another number, another reading",
}


class Speaking(RunVoice):
    """The voice of a run, ready to speak; what its ways of running cost is asked of `costs`."""

    def __init__(self, run: ActiveRun, sentence: str = "", story: str = ""):
        super().__init__(run, sentence, story)
        self.costs = SpeakingCosts(self)

    def run(self) -> Iterator[Result]:
        """Every step in turn; what was measured of this voice before is not measured again."""
        yield self.say()
        yield self.formats()
        yield self.stream()
        yield from self.costs.run()
        yield self.say_in_each_format()
        yield self.export()
        yield self.programs()

    def say(
        self, text: str = "", speaker: str = "", weights: str = "", reference: str = ""
    ) -> Result:
        """`text`, of any length, as sound, its spectrogram, and the parts it was said in.

        Empty: the example, the first speaker, fp32. With a `reference`, a recording's path, whoever
        speaks in it speaks. Raises as `speech` does.
        """
        if speaker and reference:
            raise SpeechError(
                f"Who is to speak: {speaker!r} of this voice, or who speaks in {reference}? Name "
                "one of the two."
            )
        text = text or self.sentence
        speech = self.speech(text, speaker or self.speaker, weights, reference)
        line = f"{len(speech.wave) / self.rate_hz:.1f} s of speech"
        end = remark(speech, self.sampling)
        grid = []
        if len(speech.parts) > 1:
            line = f"{len(speech.parts)} parts, {line}"
            end = end or "every part found its end"
            grid.append(("said in one go", "text ids"))
            grid.extend((part, str(len(self.voice.ids(part)))) for part in speech.parts)
        waves = {"What was said": speech.wave}
        return Result(
            line=f"{line}; {end}" if end else line,
            pictures=[mel_picture(waves, self.rate_hz, self.voice.front_end)],
            sounds=[self.sound(speech, speech.text)],
            grid=grid,
        )

    def panel(self) -> None:
        """Show a text box, the voices, the number formats and a button that speaks.

        A recording of somebody, uploaded, takes the place of the voices.
        """
        choices = {"voice": self.voice.speakers, "weights": list(self.voices)}
        SpeakPanel(self.panel_speech, self.sentence, choices, reference=True).run()

    def panel_speech(
        self, text: str, choice: dict[str, str], reference: str = ""
    ) -> tuple[bytes, str]:
        """`text` as a WAV file, and what a listener should know of it; mostly nothing."""
        speech = self.speech(text, choice["voice"], choice["weights"], reference)
        return self.sound(speech, text).wav_bytes(), remark(speech, self.sampling)

    def settings(self) -> Result:
        """How the codes are drawn."""
        grid = [("setting", "now", "what it does")]
        for name, meaning in SETTINGS.items():
            grid.append((name, str(getattr(self.sampling, name)), meaning))
        return Result(line="How the voice draws its codes", grid=grid)

    def formats(self) -> Result:
        """What the number formats turned into on this machine."""
        ran = {name: voice.decoder.ran for name, voice in self.voices.items()}
        return Result(line=f"The voice is ready in {len(ran)} number formats", figures=ran)

    def say_in_each_format(self) -> Result:
        """The same sentence in every number format, read once; kept as the run's typed samples."""
        sounds = []
        waves = {}
        for name, voice in self.voices.items():
            speech = voice.speak([self.sentence], self.speaker, self.read_once)[0]
            cut = "" if speech.stopped else " (cut at the length limit)"
            sounds.append(self.sound(speech, name + cut))
            waves[name.replace(", ", "-")] = ([self.sentence], [speech.wave])
        samples = self.active_run.report().get("samples", [])
        samples = [sample for sample in samples if sample["split"] != "typed"]
        samples += save_samples(waves, "typed", self.rate_hz, self.active_run.folder)
        self.active_run.record(samples=samples)
        return Result(line=f"{self.sentence}, in {len(sounds)} number formats", sounds=sounds)

    def stream(self) -> Result:
        """The sentence as it comes, piece by piece, against what is made in one go."""
        pieces = []
        cut = ""
        try:
            for piece in self.voice.stream(self.sentence, self.speaker, self.sampling):
                pieces.append(piece)
        except SpeechError as error:  # a stream says after its sound that it found no end
            if not pieces:
                raise
            cut = f"\n{error}"
        once = replace(self.read_once, retries=0)
        whole = self.voice.speak([self.sentence], self.speaker, once)[0].wave
        joined = torch.cat(pieces)
        apart = float((joined - whole).abs().max())
        lengths_s = ", ".join(f"{len(piece) / self.rate_hz:.2f}" for piece in pieces)
        return Result(
            line=f"Pieces of {lengths_s} s; the largest difference to the whole is {apart:.1e} of "
            f"full scale{cut}"
        )

    def export(self, weights: str = "fp16") -> Result:
        """The voice in one folder, its weights fp32, fp16, bf16 or int8; read back, it speaks."""
        folder = self.active_run.path("export")
        export_voice(self.voice, folder, weights, self.sampling)
        exported = load_export(folder, self.active_run.hw.device)
        before = self.voice.speak([self.sentence], self.speaker, self.read_once)[0]
        again = exported.speak([self.sentence], self.speaker, self.read_once)[0]
        same = "the same codes as before"
        if not torch.equal(again.codes, before.codes):
            same = f"other codes than before, as {weights} rounds the weights"
        size_mb = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
        return Result(
            line=f"{folder}: {size_mb:.1f} MB; {same}",
            sounds=[self.sound(again, "Said by the exported voice")],
        )

    def programs(self) -> Result:
        """The decoder as `torch.export` programs, for those who serve elsewhere."""
        folder = export_program(self.voice, self.active_run.path("programs"))
        grid = [("file", "MB")]
        for file in sorted(folder.iterdir()):
            grid.append((file.name, f"{file.stat().st_size / 1e6:.1f}"))
        return Result(line=f"{folder}: two programs, and how to call them", grid=grid)
