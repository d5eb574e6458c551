"""Which recordings a run is made from: those asked for, or else those it was begun with."""

import dataclasses
from pathlib import Path

from kit.base.config import build, merge
from kit.base.errors import KitError
from kit.dataset.archive import ArchiveConfig
from kit.dataset.fetch import fetch_dataset
from kit.dataset.huggingface import HubConfig
from kit.dataset.synthetic import CorpusConfig, make_corpus
from kit.inference.sampling import GenerateConfig
from kit.notebook.progress_line import Ticker
from kit.recipes.active_run import ActiveRun
from kit.streams.open import require_known_format


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSource:
    """Recordings and their texts, and what text pieces are learned from."""

    data: str = ""  # a folder, a table, an archive or a hf:// name; "": the built-in corpus
    language: str = "am"
    text: str = ""  # a file of more text than the recordings'; "": theirs alone
    phonemes: str = ""  # a language by espeak-ng's name; "": letters

    def __str__(self) -> str:
        parts = [self.data or "the built-in corpus", f"language {self.language}"]
        if self.text:
            parts.append(f"pieces of {self.text}")
        if self.phonemes:
            parts.append(f"phonemes of {self.phonemes}")
        return ", ".join(parts)

    def begin(self, run: ActiveRun) -> None:
        """Note for later commands what was asked for; KitError when it is not this run's source.

        Also where `text` cannot be read: that is told before every recording is.
        """
        run.require_permanent("data", str(self))
        self.text_stamp()
        run.record(data={"source": dataclasses.asdict(self)})

    def set_permanent(self, run: ActiveRun) -> None:
        """Keep `run` to this source for its life: recordings were found there, no misspelt name."""
        run.set_permanent("data", str(self))

    def fetch(self, run: ActiveRun) -> Path:
        """The folder with the recordings, which are fetched, unpacked or spoken where they lack."""
        if self.data:
            return fetch_dataset(
                self.data,
                run.path("unpacked"),
                build(ArchiveConfig, run.section("archive")),
                build(HubConfig, run.section("hub")),
                Ticker("bytes unpacked"),
            )
        corpus = build(CorpusConfig, run.section("corpus"), language=self.language)
        return make_corpus(corpus, run.path("corpus"), Ticker("spoken"))

    def section(self, run: ActiveRun, name: str) -> dict:
        """The preset's section `name`, and over it what people's recordings need.

        What was set for the run alone lies over both.
        """
        settings = run.section(name)
        if not self.data:
            return settings
        people = run.section("recordings").get(name, {})
        return merge(merge(settings, people), run.settings.get(name, {}))

    def codec_settings(self, run: ActiveRun) -> dict:
        """The codec's section; of what people need nothing is meant for a codec of another kind."""
        chosen = "kind" in run.settings.get("codec", {})
        return run.section("codec") if chosen else self.section(run, "codec")

    def text_stamp(self) -> tuple:
        """Changes when the file `text` does, however large it is."""
        if not self.text:
            return ()
        path = Path(self.text)
        if not path.is_file():
            raise KitError(f"There is no {path}: is the name right, and the disk mounted?")
        require_known_format(path)
        found = path.stat()
        return (str(path.absolute()), found.st_size, found.st_mtime_ns)


def choose_source(run: ActiveRun, asked: RunSource) -> tuple[RunSource, list[str]]:
    """What is `asked` for, and what that leaves empty as `run` was begun; and lines to tell so."""
    begun = run.figure("data", "source") or {}
    wanted = {name: value for name, value in dataclasses.asdict(asked).items() if value}
    source = build(RunSource, begun, **wanted)
    kept = [name for name, value in begun.items() if value and name not in wanted]
    return source, [f"As this run was begun: {source}."] if kept else []


def section_as_begun(run: ActiveRun, name: str) -> dict:
    """The section `name`, as the recordings that `run` was begun with need it."""
    source, _ = choose_source(run, RunSource())
    return source.section(run, name)


def sampling_of(run: ActiveRun, **over: object) -> GenerateConfig:
    """How the voice of `run` speaks, as its recordings need it; `over` lies over that."""
    return build(GenerateConfig, section_as_begun(run, "generate"), **over)
