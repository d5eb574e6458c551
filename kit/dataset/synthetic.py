"""Make a speech corpus without a download: espeak-ng speaks random sentences of everyday words.

`make_corpus` writes an LJSpeech folder (`metadata_SPLIT.csv` with `id|text|speaker`, and
`wavs/`), the same byte for byte for the same configuration.
"""

import collections
import dataclasses
import json
import random
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import soundfile

from kit.base.config import read_yaml
from kit.base.errors import KitError
from kit.base.files import digest, make_folder, require_disk, write_atomic
from kit.base.formatting import describe_error
from kit.settings import WORDS, CorpusConfig
from kit.text.espeak import SAMPLE_RATE, Espeak, run_module

HEADER = "id|text|speaker\n"  # of its tables
CLIP_BYTES = 85_000  # of a spoken sentence, on average
AGREEING = ("subject", "verb")  # slots with one row of words for each grammatical form
MAX_FREE_WORDS = 8  # in a sentence of words in random order


class Grammar:
    """Random sentences from a word list: slots in a fixed order, some of them optional."""

    def __init__(self, words: dict, rng: random.Random):
        self.words = words
        self.rng = rng
        slots = [words["and"], *(words[slot] for slot, _ in words["order"] if slot not in AGREEING)]
        rows = [row for slot in AGREEING for row in words[slot]]
        self.known = sorted({word for items in (*slots, *rows) for word in items})

    def clause(self, rare: bool = False) -> list[str]:
        """Return a clause: subject and verb agree, an adjective needs an object.

        A rare clause uses words of the `unseen` list where there are any.
        """
        agreement = self.rng.randrange(len(self.words["subject"]))
        present = {slot for slot, chance in self.words["order"] if self.rng.random() < chance}
        if "object" not in present:
            present.discard("adjective")
        slots = [slot for slot, _ in self.words["order"] if slot in present]
        return [self._word(slot, agreement, rare) for slot in slots]

    def _word(self, slot: str, agreement: int, rare: bool) -> str:
        if slot in AGREEING:
            return self.rng.choice(self.words[slot][agreement])
        known = self.words[slot]
        return self.rng.choice(self.words["unseen"].get(slot, known) if rare else known)

    def sentence(self, longest: int, rare: bool = False) -> list[str]:
        """Return the words or expressions of one or more clauses, joined by a conjunction."""
        if not rare and self.rng.random() < 0.04:
            return [self.rng.choice(self.words["phrase"])]
        words = self.clause(rare)
        while self.rng.random() < 0.25:
            more = [self.rng.choice(self.words["and"]), *self.clause(rare)]
            if len(words) + len(more) > longest:
                break
            words += more
        return words

    def in_any_order(self, longest: int) -> list[str]:
        """Return known words in random order: nothing but the text predicts the next one."""
        return self.rng.choices(self.known, k=self.rng.randint(1, longest))


def load_words(language: str) -> dict:
    """Read the word list of `language`: items by slot, rows of items for `subject` and `verb`.

    Raises KitError for what is not written as in en.yaml.
    """
    path = WORDS / f"{language}.yaml"
    words = read_yaml(path) or {}
    try:
        order = [(slot, float(chance)) for slot, chance in words["order"]]
        slots = ["and", "phrase", *(slot for slot, _ in order if slot not in AGREEING)]
        result = {"order": order}
        result |= {slot: words[slot].split(", ") for slot in slots}
        result |= {slot: [row.split(", ") for row in words[slot]] for slot in AGREEING}
        result["unseen"] = {name: rare.split(", ") for name, rare in words["unseen"].items()}
        if len(result["subject"]) != len(result["verb"]):
            raise ValueError("as many rows are needed for `verb` as for `subject`")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise KitError(
            f"{path} is not written as en.yaml beside it: {describe_error(error)}."
        ) from error
    return result


def sentences(config: CorpusConfig) -> dict[str, list[str]]:
    """Return texts by split. No two neighbours of `held_out`, `long`, `free_order` are in `train`.

    An expression counts as one word. Raises KitError when the word list is too small.
    """
    known = load_words(config.language)
    grammar = Grammar(known, random.Random(f"{config.language} {config.seed}"))
    # A generator of its own, so that the other splits are the same with and without these.
    free = Grammar(known, random.Random(f"{config.language} {config.seed} any order"))
    held_out = _draw(lambda: grammar.sentence(8), config.held_out, lambda w: len(w) >= 3)
    long = _draw(lambda: grammar.sentence(22), config.long, lambda w: len(w) >= 18)
    rare = {word for slot in grammar.words["unseen"].values() for word in slot}

    def has_rare(words: list[str]) -> bool:
        return len(words) >= 3 and not rare.isdisjoint(words)

    unseen = _draw(lambda: grammar.sentence(8, rare=True), config.unseen, has_rare)
    longest = min(MAX_FREE_WORDS, config.max_words)
    free_order = _draw(
        lambda: free.in_any_order(MAX_FREE_WORDS), config.free_order, lambda w: len(w) >= 3
    )
    banned = {pair for words in held_out + long + free_order for pair in zip(words, words[1:])}

    def keep(words: list[str]) -> bool:
        return banned.isdisjoint(zip(words, words[1:]))

    mixed = round(config.any_order * config.utterances)
    ordered = config.utterances - mixed
    train = _draw(lambda: grammar.sentence(config.max_words), ordered, keep, distinct=False)
    train += _draw(lambda: free.in_any_order(longest), mixed, keep, distinct=False)
    splits = {"train": train, "held_out": held_out, "unseen": unseen}
    splits |= {"long": long, "free_order": free_order}
    return {split: [" ".join(words) for words in rows] for split, rows in splits.items()}


def _draw(draw: Callable, count: int, keep: Callable, distinct: bool = True) -> list[list[str]]:
    chosen = []
    seen = set()
    for _ in range(1000 * count + 1):
        if len(chosen) == count:
            return chosen
        words = draw()
        if keep(words) and not (distinct and tuple(words) in seen):
            chosen.append(words)
            seen.add(tuple(words))
    raise KitError(f"The word list yields only {len(chosen)} of the {count} sentences asked for.")


def speak_rows(job: dict) -> None:
    """Speak `job["rows"]` ((id, text) pairs) with one speaker into `job["folder"]`.

    `job["pace"]`, if given, multiplies the speaker's speed.
    """
    espeak = Espeak(job["language"])
    espeak.speaker(job["speaker"], job.get("pace", 1.0))
    for name, text in job["rows"]:
        soundfile.write(f"{job['folder']}/{name}.wav", espeak.say(text), SAMPLE_RATE)


def _speak_in_process(job: dict) -> int:
    mark = Path(job["folder"]).parent / "spoken" / digest(job)
    if not mark.exists():
        # A new process for each job: espeak-ng keeps state from one call to the next.
        run = run_module("kit.dataset.synthetic", job)
        if run.returncode:
            raise RuntimeError(f"espeak-ng could not speak the corpus: {run.stderr.strip()[-400:]}")
        write_atomic(mark, "")
    return len(job["rows"])


def make_corpus(config: CorpusConfig, folder: Path, progress: Callable = lambda *_: None) -> Path:
    """Write the corpus as an LJSpeech folder; resume an interrupted one, keep a finished one.

    `progress(done, total)` counts utterances. The id of an utterance starts with its split (train,
    held_out, unseen, long, free_order). Raises DiskError, before it starts, when the disk is too
    small, and RuntimeError when speaking fails.
    """
    folder = Path(folder).resolve()
    mark = folder / "complete"
    # The number of workers changes nothing.
    key = digest(HEADER, dataclasses.replace(config, workers=1))
    if mark.exists() and mark.read_text(encoding="utf-8") == key:
        return folder
    started = folder / "begun"
    # What is there is another configuration's.
    if not started.exists() or started.read_text(encoding="utf-8") != key:
        shutil.rmtree(folder / "spoken", ignore_errors=True)
        mark.unlink(missing_ok=True)
        for table in folder.glob("metadata*.csv"):
            table.unlink()
        write_atomic(started, key)
    wavs = make_folder(folder / "wavs")
    require_disk(folder, config.utterances * CLIP_BYTES)
    rows = collections.defaultdict(list)  # of each speaker
    tables = collections.defaultdict(list)
    for split, texts in sentences(config).items():
        for i, text in enumerate(texts):
            name, speaker = f"{split}_{i:06d}", i % config.speakers
            rows[speaker].append((name, text))
            tables[split].append(f"{name}|{text}|voice{speaker}\n")
    jobs = []
    for speaker, own in sorted(rows.items()):
        common = {"folder": str(wavs), "language": config.language, "speaker": speaker}
        jobs += [common | {"rows": own[i : i + 500]} for i in range(0, len(own), 500)]
    done = 0
    with ThreadPoolExecutor(config.workers) as pool:
        for count in pool.map(_speak_in_process, jobs):
            done += count
            progress(done, sum(map(len, rows.values())))
    for split, lines in tables.items():
        write_atomic(folder / f"metadata_{split}.csv", "".join([HEADER, *lines]))
    write_atomic(mark, key)
    return folder


if __name__ == "__main__":
    speak_rows(json.load(sys.stdin))
