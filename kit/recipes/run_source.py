"""Which recordings a run is made from, and the settings that suit them."""

import dataclasses

from kit.base.config import build, merge
from kit.inference.sampling import GenerateConfig
from kit.recipes.active_run import ActiveRun
from kit.text.normalize import language_code


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSource:
    """The recordings and the text that a run's tokenizer, codec and voice are trained on."""

    data: str = ""  # a folder, a table, an archive or a hf:// name; "": the built-in corpus
    language: str = "am"
    text: str = ""  # a file of more text than the recordings'; "": theirs alone
    phonemes: str = ""  # a language by espeak-ng's name; "": letters
    tokenizer: str = ""  # a SentencePiece model to take as it is; "": one is trained

    def __str__(self) -> str:
        parts = [self.data or "the built-in corpus", f"language {self.language}"]
        if self.text:
            parts.append(f"pieces of {self.text}")
        if self.phonemes:
            parts.append(f"phonemes of {self.phonemes}")
        if self.tokenizer:
            parts.append(f"tokenizer {self.tokenizer}")
        return ", ".join(parts)

    def begin(self, run: ActiveRun) -> None:
        """Record this source; KitError where the run has another one."""
        run.require_permanent("data", str(self))
        run.record(data={"source": dataclasses.asdict(self)})

    def section(self, run: ActiveRun, name: str) -> dict:
        """The preset's section `name`, with the preset's changes for recordings of people.

        The run's own settings override both.
        """
        settings = run.section(name)
        if not self.data:
            return settings
        changes = run.section("recordings").get(name, {})
        return merge(merge(settings, changes), run.settings.get(name, {}))

    def codec_settings(self, run: ActiveRun) -> dict:
        """The codec's section; changes for recordings of people do not apply to other codecs."""
        if "kind" in run.settings.get("codec", {}):
            return run.section("codec")
        return self.section(run, "codec")


def choose_source(run: ActiveRun, asked: RunSource) -> tuple[RunSource, str]:
    """Fill what `asked` leaves empty from the run's record; return it with a line to print."""
    recorded = run.figure("data", "source") or {}
    given = {name: value for name, value in dataclasses.asdict(asked).items() if value}
    if "language" in given:
        given["language"] = language_code(given["language"])
        # However it was spelt when the run started: a run keeps its source, letter by letter.
        if "language" in recorded and language_code(recorded["language"]) == given["language"]:
            given["language"] = recorded["language"]
    source = build(RunSource, recorded, **given)
    if any(value and name not in given for name, value in recorded.items()):
        return source, f"As this run was started: {source}."
    return source, ""


def section_for_run(run: ActiveRun, name: str) -> dict:
    """The section `name`, adapted to the recordings that `run` was started with."""
    return choose_source(run, RunSource())[0].section(run, name)


def sampling_of(run: ActiveRun, **over: object) -> GenerateConfig:
    """The sampling settings for the voice of `run`, with the fields `over` replaced."""
    return build(GenerateConfig, section_for_run(run, "generate"), **over)
