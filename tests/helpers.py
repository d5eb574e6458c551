"""One tiny world for many tests: real espeak-ng speech, its tokenizer, codec and code cache.

Each part is made once, when it is first asked for, under the session's temporary KIT_RUNS.
"""

import ast
import contextlib
import dataclasses
import itertools
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import nbformat
import numpy as np
import soundfile
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from kit.audio.clip import load_wave
from kit.audio.codec import save_codec
from kit.audio.mel_codec import MelCodec
from kit.audio.recognizer import Recognizer, alphabet_of, save_recognizer
from kit.audio.spectrogram import Mel
from kit.base.hardware import Hardware
from kit.base.tensor_file import checksum
from kit.batches.code_cache import CodeCache, speaker_references
from kit.batches.code_stream import CodeStream, validation_batches
from kit.batches.encoding import Clip, build_cache, index_columns
from kit.dataset.checks import check_dataset
from kit.dataset.data_report import Finding
from kit.dataset.manifest import Utterance, write_manifest
from kit.dataset.synthetic import load_words, make_corpus
from kit.inference.decoder import Decoder
from kit.inference.decoder_steps import CudaGraphSteps
from kit.inference.voice import Habits, Voice
from kit.inference.voice_files import save_references
from kit.model.gpt import SpeechGPT
from kit.model.sequence import EffectiveBatch, collate, pack
from kit.model.weights import warm_start_model
from kit.settings import (
    CorpusConfig,
    DataConfig,
    GPTConfig,
    ManifestConfig,
    MelCodecConfig,
    RecognizerConfig,
    SpeedConfig,
    TokenizerConfig,
    TrainConfig,
)
from kit.text.espeak import run_module
from kit.text.tokenizer import Tokenizer
from kit.text.train_tokenizer import train_tokenizer
from kit.training.config import Base, Finetuning
from kit.training.run import TrainingRun

torch.set_num_threads(1)  # tiny shapes: a second thread costs more than it brings

RATE = 22050
LINES = ["ሰላም ለሁሉም ይሁን", "ዛሬ ጥሩ ቀን ነው", "ነገ ወደ ቤት እንሄዳለን", "እንዴት ነህ"]
CPU = Hardware(
    device="cpu", name="test", cores=2, ram_bytes=2**33, memory_bytes=2**33, capability=None
)
CORPUS = CorpusConfig(
    utterances=60, held_out=6, unseen=4, long=2, free_order=2, any_order=0.0, speakers=3, workers=1
)
CODEC = MelCodecConfig(
    levels=(4, 3, 5), width=32, blocks=2, griffin_lim_iters=4, steps=25, batch=4, crop_frames=24
)
DATA = DataConfig(effective_batch=8, micro_batch=4, sort_window=32, reference_frames=20, shard=25)
VOCABULARIES = {"text_vocab": 20, "code_vocab": 32, "max_text": 20, "max_code": 40}
REFERENCE = {"latents": 3, "perceiver_heads": 2, "perceiver_head_width": 16, "n_mels": 8}
GPT = GPTConfig(layers=2, width=32, heads=2, **VOCABULARIES, **REFERENCE)
PATIENCE_S = 60.0  # for what another thread does: on a busy machine seconds, mostly none


def until(condition: Callable[[], object], limit_s: float = PATIENCE_S) -> None:
    """Return as soon as `condition()` holds; fail where it does not in time."""
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.01)


def start_and_kill(child, log: Path, lines: int) -> None:
    """Start the process `child` and end it with SIGKILL once its `log` has so many lines."""
    child.start()
    end_s = time.monotonic() + 180
    while child.is_alive() and time.monotonic() < end_s:
        if log.exists() and log.read_bytes().count(b"\n") >= lines:
            break
        time.sleep(0.002)
    child.kill()
    child.join(20)


@contextlib.contextmanager
def in_time(seconds: int) -> Iterator[None]:
    """Fail, rather than hang, where the block waits for ever. POSIX only."""

    def late(*_):
        raise AssertionError(f"it waited for more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def spoken_by_espeak(texts: list[str]) -> list[np.ndarray]:
    """Amharic `texts` as fp32 waveforms (T,) from an espeak-ng of their own."""
    rows = [(f"{i:03d}", text) for i, text in enumerate(texts)]
    with tempfile.TemporaryDirectory() as folder:
        job = {"folder": folder, "language": "am", "speaker": 0, "rows": rows}
        run_module("kit.dataset.synthetic", job).check_returncode()
        return [soundfile.read(f"{folder}/{name}.wav", dtype="float32")[0] for name, _ in rows]


# Small, and yet it recognises `few_words` after some seconds.
EAR = {"width": 48, "blocks": 2, "steps": 150, "batch": 6, "lr": 1e-2}


def few_words() -> tuple[list[str], list[np.ndarray]]:
    """Eighty short sentences of eight words, and how espeak-ng speaks them."""
    rng = random.Random(0)
    words = [word for word in load_words("am")["object"] if " " not in word][:8]
    texts = [" ".join(rng.choices(words, k=rng.randint(2, 4))) for _ in range(80)]
    return texts, spoken_by_espeak(texts)


@cache
def world() -> Path:
    """One folder for all of it, also for a test that gives KIT_RUNS another value."""
    return Path(os.environ["KIT_RUNS"]) / "_tests"


@cache
def corpus() -> Path:
    return make_corpus(CORPUS, world() / "corpus")


def usable(
    source: Path, config: ManifestConfig, into: Path
) -> tuple[list[Utterance], list[Finding]]:
    """(kept rows, refusals) of a dataset that can be trained on, as 01 checks it."""
    report = check_dataset(source, config, into)
    report.require_usable(config, Path(into) / "ledger.jsonl")
    return report.kept, report.refused


@cache
def manifest() -> list[Utterance]:
    return usable(corpus(), ManifestConfig(), world())[0]


@cache
def tokenizer() -> Tokenizer:
    lines = [row.text for row in manifest() if row.split == "train"]
    config = TokenizerConfig(vocab_size=410)
    return Tokenizer(train_tokenizer(lines, world() / "tokenizer.model", config))


@cache
def waves() -> list[torch.Tensor]:
    return [load_wave(row.audio, RATE) for row in manifest()]


@cache
def mels() -> list[torch.Tensor]:
    return Mel().log_mels(waves(), RATE)


@cache
def trained_codec() -> tuple[MelCodec, list[float]]:
    """A codec after a few steps, and its losses; also saved as codec.safetensors."""
    torch.manual_seed(0)
    codec = MelCodec(CODEC)
    losses = [loss for _, loss in codec.fit(waves(), "cpu", "fp32")]
    save_codec(codec, world() / "codec.safetensors")
    return codec, losses


@cache
def code_index() -> Path:
    codec = trained_codec()[0]
    return build_cache(manifest(), codec, Mel(), tokenizer(), world() / "codes", "key", DATA)


@cache
def code_cache() -> CodeCache:
    return CodeCache(code_index())


def made_cache(rows: list[dict], texts: list, codes: list, references: list = ()) -> CodeCache:
    """A cache without a file; a row is its id, speaker and split."""
    made = {"shard": Path("made"), "code_check": 0, "reference_check": 0}
    clips = [Clip(place=i, codes=len(row), **made) for i, row in enumerate(codes)]
    names = [(row["id"], row["speaker"], row["split"]) for row in rows]
    cache = object.__new__(CodeCache)
    columns = index_columns(names, texts, clips)
    cache.take(columns, codes.__getitem__, references.__getitem__)
    return cache


def real_config() -> GPTConfig:
    """A tiny model whose vocabularies fit the real tokenizer and codec."""
    sizes = {"text_vocab": tokenizer().vocab_size, "code_vocab": trained_codec()[0].vocab_size + 2}
    return dataclasses.replace(GPT, n_mels=80, max_text=160, max_code=608, **sizes)


def tiny_model(seed: int = 0, **over) -> SpeechGPT:
    """A random model whose zero-initialised conditioning projections take part, too."""
    torch.manual_seed(seed)
    model = SpeechGPT(dataclasses.replace(GPT, **over))
    for parameter in model.parameters():  # biases and zeros would hide mistakes
        parameter.data += 0.02 * torch.randn_like(parameter)
    return model


def opinionated_model(**over) -> SpeechGPT:
    """A random model with opinions: the codes it makes differ, as a trained one's do."""
    model = tiny_model(**over)
    model.code_head.weight.data *= 20
    for table in (model.code_position, model.text_embedding):
        table.weight.data += torch.randn_like(table.weight)
    for layer in model.gpt.h:
        layer.attn.c_attn.weight.data *= 8
        layer.attn.c_proj.weight.data *= 8
    return model.eval()


def opinionated_voice(folder: Path, phonemes: str = "") -> Voice:
    """A random model with opinions, a real tokenizer made of LINES, an untrained codec."""
    pieces = TokenizerConfig(vocab_size=310, phonemes=phonemes)
    tokenizer = Tokenizer(train_tokenizer(LINES, folder / "tokenizer.model", pieces))
    codec = MelCodec(CODEC).eval()
    sizes = {"text_vocab": tokenizer.vocab_size, "code_vocab": codec.vocab_size + 2}
    model = opinionated_model(n_mels=80, **sizes)
    references = {name: torch.randn(80, 12).half() for name in ("alma", "brook")}
    parts = {"model": model, "codec": codec, "tokenizer": tokenizer, "references": references}
    return Voice(**parts, habits=Habits(longest_text=15))


def real_voice() -> Voice:
    """An untrained model between the real tokenizer and codec, with the corpus's speakers."""
    torch.manual_seed(0)
    parts = {"model": SpeechGPT(real_config()), "codec": trained_codec()[0]}
    return Voice(**parts, tokenizer=tokenizer(), references=speaker_references(code_cache()))


def leave_voice_files(folder: Path, voice: Voice) -> None:
    """What a run's folder has beside the model's weights before a voice speaks and is evaluated."""
    save_references(voice.references, folder / "references.safetensors", Habits(longest_text=40))
    for name in ("codec.safetensors", "tokenizer.model"):
        shutil.copy(world() / name, folder / name)
    write_manifest(manifest(), folder)
    alphabet = alphabet_of([row.text for row in manifest()])
    recognizer = Recognizer(RecognizerConfig(width=16, blocks=1), alphabet)
    save_recognizer(recognizer, folder / "recognizer.safetensors")


# A base with fewer text pieces and positions than GPT has: a run that begins with it grew.
IDS = {"start_text_id": 13, "stop_text_id": 14}
BASE = dataclasses.replace(GPT, text_vocab=15, max_code=36, dropout=0.1, **IDS)


def finetune_session(folder: Path, train: TrainConfig, finetuning: Finetuning) -> "Session":
    """A tiny session that begins with a random voice, and a vocabulary that has grown since."""
    base = tiny_model(**vars(BASE))
    known = Base(config=BASE, sha256=checksum(base.state_dict()))
    session = tiny_session(folder, train, **IDS)
    session.first_model = lambda config: warm_start_model(config, base, {17: [1, 2]})
    session.finetuning = dataclasses.replace(finetuning, base=known)
    return session


def finetune_in(folder: str, train: TrainConfig, finetuning: Finetuning) -> list:
    """As `train_in`: also the body of processes that are killed."""
    return list(finetune_session(Path(folder), train, finetuning).run({"ema": True}))


# A graph that is being captured can neither read a result nor copy from Python's memory.
UNCAPTURABLE = ("item", "is_nonzero", "_local_scalar_dense", "nonzero", "lift_fresh")


class PretendedGraph(TorchDispatchMode):
    """A CUDA graph as far as a CPU can have one: operations recorded with the tensors they take.

    A replay runs them again on the same memory, and none of the Python between them.
    """

    def __init__(self):
        super().__init__()
        self.recorded = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # or what is compiled would never be used again

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.overloadpacket.__name__ in UNCAPTURABLE:
            raise RuntimeError(f"CUDA error: {operation} is not permitted when capturing")
        result = operation(*args, **(kwargs or {}))
        self.recorded.append((operation, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for operation, args, kwargs, result in self.recorded:
            again = operation(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again)):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def pool(self) -> None:
        """Its memory is everybody's."""


def pretended_capture(work, undo, pool=None) -> tuple:
    work()
    undo()
    with PretendedGraph() as graph:
        result = work()
    undo()
    return graph, result


def graphed(model: SpeechGPT, monkeypatch, capture=pretended_capture, **config) -> Decoder:
    """`model`'s decoder with its steps as pretended CUDA graphs, on the CPU."""
    monkeypatch.setattr("kit.base.compiler.capture_graph", capture)
    decoder = Decoder(model, **config)
    decoder.compiled = CudaGraphSteps(decoder, compiles=config.get("compile", False))
    return decoder


def random_rows(config: GPTConfig, count: int, seed: int = 0) -> tuple[list, list, torch.Tensor]:
    """`count` rows of unequal length: text ids, codes, reference mels."""
    rng = np.random.default_rng(seed)
    texts = [
        rng.integers(0, config.text_vocab - 2, rng.integers(3, 10)).tolist() for _ in range(count)
    ]
    codes = [rng.integers(0, config.start_code, rng.integers(5, 25)).tolist() for _ in range(count)]
    cond = torch.from_numpy(rng.standard_normal((count, config.n_mels, 12), dtype=np.float32))
    return texts, codes, cond


@torch.no_grad()
def training_states(model: SpeechGPT, text: list[int], codes: list[int], mel: torch.Tensor):
    """The training path's states (N + 1, D), from which each code and what follows is predicted."""
    batch = pack(model.config, [text], [codes], mel[None])
    return model.hidden(batch)[0, batch.code_indices[: len(codes) + 1]]


def effective_batch(config: GPTConfig, rows: tuple, parts=1, position=None) -> EffectiveBatch:
    """`rows` as one optimiser step in `parts` micro-batches."""
    size = len(rows[0]) // parts
    cuts = [slice(i, i + size) for i in range(0, len(rows[0]), size)]
    micro = [pack(config, *(column[cut] for column in rows)) for cut in cuts]
    return EffectiveBatch(micro=micro, position=position or {"epoch": 0, "batch": 0})


def random_batches(config: GPTConfig, position=None, parts: int = 1) -> Iterator[EffectiveBatch]:
    """An endless stream of batches of eight rows; its position is their number."""
    for i in itertools.count((position or {"batch": 0})["batch"]):
        rows = random_rows(config, 8, seed=i)
        yield effective_batch(config, rows, parts, position={"batch": i + 1})


def speech(seconds: float = 1.0, rate: int = RATE) -> np.ndarray:
    """Something like a voice: a swelling tone with overtones, peak 0.5."""
    t = np.arange(int(seconds * rate)) / rate
    wave = sum(np.sin(2 * np.pi * 120 * k * t) / k for k in range(1, 6))
    return (0.5 * wave / np.abs(wave).max()).astype(np.float32)


def dataset(folder: Path, table: str | bytes, clips: dict[str, np.ndarray] | None = None) -> Path:
    """An LJSpeech folder: metadata.csv with `table`, and 16-bit `clips` by id."""
    (folder / "wavs").mkdir(parents=True, exist_ok=True)
    data = table.encode() if isinstance(table, str) else table
    (folder / "metadata.csv").write_bytes(data)
    for name, wave in (clips or {}).items():
        soundfile.write(folder / "wavs" / f"{name}.wav", wave, RATE)
    return folder


SCHEDULE = {"max_steps": 12, "warmup_steps": 3, "schedule": "linear"}
TRAIN = TrainConfig(lr=1e-2, eval_steps=4, save_steps=3, **SCHEDULE)


class Session(TrainingRun):
    """A training whose switches and passes (`grad_accum`) are chosen as it runs."""

    @property
    def state(self):
        return self.trainer

    def run(self, values: dict, stop: threading.Event | None = None):
        switches = dict(values)
        parts = switches.pop("grad_accum", 1)
        self.speed = SpeedConfig(**switches)
        make_batches = self.make_batches
        self.make_batches = lambda position: make_batches(position, parts)
        try:
            yield from self.events(stop.is_set if stop else lambda: False)
        finally:
            self.make_batches = make_batches


def tiny_session(folder: Path, train: TrainConfig = TRAIN, **shape) -> "Session":
    """A training run of a few milliseconds a step, with dropout so that random states matter."""
    config = dataclasses.replace(GPT, **{"dropout": 0.1} | shape)
    held_out = effective_batch(config, random_rows(config, 4, seed=999))
    batches = {"make_batches": partial(random_batches, config), "validation": [held_out]}
    settings = {"model": config, "config": train, "speed": SpeedConfig(), "hw": CPU}
    return Session(folder=Path(folder), **settings, **batches)


def stream_in(folder: str, train: TrainConfig, index: str, shape: dict, workers: int) -> list:
    """`train_in` on real data: a shuffled CodeStream, its batches made by worker processes."""
    config, cache = dataclasses.replace(GPT, dropout=0.1, **shape), CodeCache(Path(index))
    collate_rows = partial(collate, config)

    def make_batches(position, parts):
        data = dataclasses.replace(DATA, micro_batch=max(1, DATA.effective_batch // parts))
        stream = CodeStream(cache, "train", data, collate_rows, position)
        way = "fork" if workers else None  # quick, also in a child of a fork server
        return DataLoader(stream, batch_size=None, num_workers=workers, multiprocessing_context=way)

    session = tiny_session(folder, train)
    session.model, session.make_batches = config, make_batches
    session.validation = validation_batches(CodeStream(cache, "held_out", DATA, collate_rows))
    return list(session.run({"ema": True}))


def train_in(folder: str, train: TrainConfig = TRAIN, values: dict | None = None) -> list:
    """Run a tiny session to its end or its death; also the body of processes that are killed."""
    return list(tiny_session(Path(folder), train).run(values or {"ema": True}))


def unchecked(training):
    """A recipe's `training`; its `run` leaves out the checks of memory and speed (seconds)."""
    training.checks = tuple
    return training


def keep_threads() -> Iterator[None]:
    """A run gives torch as many threads as it is to have: put back for the tests that follow."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run_shown(name: str, start: str, names: dict):
    """Run the cells of a notebook whose ids begin with `start`; return what the last one shows."""
    (path,) = (Path(__file__).parents[1] / "notebooks").glob(f"{name}_*.ipynb")
    cells = nbformat.read(path, as_version=nbformat.NO_CONVERT).cells
    own = [c.source for c in cells if c.cell_type == "code" and c.id.split("-")[0] == start]
    return last_value("\n".join(own), names)


def last_value(source: str, names: dict):
    """Run `source` with `names`, and return the value of its last line, an expression."""
    *body, last = ast.parse(source).body
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)
