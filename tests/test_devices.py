"""What is on the run's device beside the model: codecs, vocoders, recogniser, reader, front ends.

No GPU is needed. Fake tensors of torch's have shapes and devices but no values: every operation on
tensors of two devices is refused, as on a GPU. And a pretended GPU: modules are sent to a device,
and stay.
"""

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import helpers
import pytest
import torch
from helpers import CPU, DATA, GPT, opinionated_voice, real_voice, trained_codec
from released_xtts import random_dvae, random_sound, settings
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from kit.audio.codec import AudioStream, mels_and_codes
from kit.audio.mel_codec import MelCodec
from kit.audio.recognizer import Recognizer
from kit.audio.spectrogram import Mel
from kit.base.hardware import on_device, set_cuda_defaults
from kit.batches.encoding import encode
from kit.extras.long_recordings import recipe as more_data
from kit.extras.xtts_v2.codec import xtts_codec
from kit.inference.candidates import READER, CodeReader, pad_codes, save_reader
from kit.inference.evaluate import gate_evaluator
from kit.inference.export import export_voice, load_export
from kit.inference.voice import Voice
from kit.inference.voice_files import load_voice
from kit.model.weights import WEIGHTS, save_model
from kit.recipes import evaluation_data, train, training_data
from kit.recipes.start import start
from kit.settings import (
    CodeReaderConfig,
    GenerateConfig,
    MelCodecConfig,
    RecognizerConfig,
    SpeedConfig,
)
from kit.training.ranks import ALONE, follow_orders
from kit.training.switches import apply

GPU = dataclasses.replace(CPU, device="cuda", capability=(8, 0))
SMALL = {"width": 32, "blocks": 2, "griffin_lim_iters": 2, "state_width": 16}
SOUNDED = {"vocoder_steps": 1, "vocoder_width": 32, "vocoder_blocks": 1}


# Each with the width of its states.
CODECS = {
    "mel": (lambda: MelCodec(MelCodecConfig(**SMALL, **SOUNDED)), 16),
    "xtts": (lambda: xtts_codec(random_sound(), random_dvae(), settings()), 96),
}
each_codec = pytest.mark.parametrize("name", ["mel", pytest.param("xtts", marks=pytest.mark.long)])


@pytest.fixture
def fake(monkeypatch) -> Iterator[FakeTensorMode]:
    """Tensors without values, also on "cuda"; a question that only a value could answer is passed.

    Checks of codes, lengths and loudness wait for a value: "0", "yes" and "1.0" let them pass.
    """
    monkeypatch.setattr(Tensor, "__int__", lambda self: 0)
    monkeypatch.setattr(Tensor, "__bool__", lambda self: True)
    monkeypatch.setattr(Tensor, "__float__", lambda self: 1.0)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def on_fake_gpu(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """`module` in eval mode, its weights and buffers fake and on "cuda"."""
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                moved = mode.from_tensor(weight.detach()).to("cuda")
                part._parameters[name] = nn.Parameter(moved, requires_grad=False)
        for name, buffer in part._buffers.items():
            part._buffers[name] = mode.from_tensor(buffer).to("cuda")
    return module.eval()


def devices(tensors: list[Tensor]) -> set[str]:
    return {tensor.device.type for tensor in tensors}


def made(make: Callable[[], nn.Module], mode: FakeTensorMode) -> nn.Module:
    """A real module, made outside of the fake, and then moved."""
    with torch.utils._python_dispatch._disable_current_modes():
        module = make()
    return on_fake_gpu(module, mode)


@each_codec
def test_a_codec_on_a_gpu_encodes_clips_that_are_on_the_cpu(fake, name):
    codec = made(CODECS[name][0], fake)
    waves = [torch.randn(20_000), torch.randn(9_000)]
    assert devices([codec.encode(waves[0][None]), *codec.encode_clips(waves)]) == {"cuda"}
    assert devices([codec.round_trip(waves[0])]) == {"cpu"}
    for front_end in (codec.mel, made(Mel, fake)):
        mels, codes = mels_and_codes(codec, front_end, waves)
        assert devices([*mels, *codes]) == {"cuda"}
    mels, codes = mels_and_codes(codec, Mel(), waves)
    assert (devices(mels), devices(codes)) == ({"cpu"}, {"cuda"})


@each_codec
def test_a_codec_on_a_gpu_decodes_codes_and_states_wherever_they_are(fake, name):
    make, state_width = CODECS[name]
    codec = made(make, fake)
    codes = torch.randint(0, 32, (2, 40))
    assert codec.decode(codes, 3).device.type == "cuda"
    stream = AudioStream(codec)
    pieces = [stream.push(torch.randint(0, 32, (200,))), stream.finish()]
    assert devices(pieces) == {"cpu"} and len(pieces[0])
    voice = Voice(model=SimpleNamespace(config=GPT), codec=codec, tokenizer=None, references={})
    assert voice.sound(codes[0].to("cuda"), None, "anybody").device.type == "cpu"
    speaker = torch.randn(codec.speaker_width)
    for device in ("cpu", "cuda"):
        codes = torch.randint(0, 32, (40,), device=device)
        states = torch.randn(40, state_width, device=device)
        sound = codec.decode(codes[None], states=states[None], speaker=speaker[None])
        assert sound.device.type == "cuda"
        stream = AudioStream(codec, speaker=speaker)
        assert devices([stream.push(codes, states), stream.finish()]) == {"cpu"}


def test_losses_and_latents_are_made_on_a_gpu_and_transcripts_leave_it(fake):
    codec = made(CODECS["mel"][0], fake)
    loss = codec.loss(torch.randn(2, codec.config.crop_samples, device="cuda"))
    recognizer = made(lambda: Recognizer(RecognizerConfig(width=32, blocks=2), "ab"), fake)
    outputs = recognizer.recognize([torch.randn(20_000), torch.randn(9_000)], 22_050)
    assert devices([tensor for clip in outputs for tensor in clip]) == {"cpu"}
    mel = recognizer.front_end.clip_mel(torch.randn(9_000), 16_000)
    assert devices(recognizer.log_probs([mel]))
    reader = made(lambda: CodeReader(CodeReaderConfig(width=32, blocks=2), "ab", (8, 5)), fake)
    rows = pad_codes([torch.randint(0, 40, (n,), device="cuda") for n in (12, 7)])
    model = made(helpers.tiny_model, fake)
    latents = model.conditioner(torch.randn(2, GPT.n_mels, 40, device="cuda"))
    assert devices([loss, rows, reader(rows), latents]) == {"cuda"}


@pytest.fixture
def moves(monkeypatch) -> list[tuple[str, str]]:
    """Which modules were sent to which device, in order; they stay."""
    found = []

    def to(module: nn.Module, device) -> nn.Module:
        found.append((type(module).__name__, str(device)))
        return module

    monkeypatch.setattr(nn.Module, "to", to)
    return found


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run as 01 and 02 leave it, on a machine that says it has a GPU."""
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    run = start("devices", "tiny")
    voice = real_voice()
    for name in WEIGHTS.values():
        save_model(voice.model, run.path(name))
    helpers.leave_voice_files(run.folder, voice)
    run.record(data={"language": "am", "codes": str(helpers.code_index())})
    return dataclasses.replace(run, hw=GPU)


def test_evaluation_long_recordings_and_voice_are_on_the_runs_device(run, moves):
    evaluation_data.EvaluationData(run, 4)
    on_gpu = [name for name, device in moves if device == "cuda"]
    assert sorted(on_gpu) == ["MelCodec"] * 3 + ["Recognizer"] + ["SpeechGPT"] * 2
    moves.clear()
    more_data.LongRecordings(run)
    assert moves == [("Recognizer", "cuda")]
    moves.clear()
    reader = CodeReader(CodeReaderConfig(width=16, blocks=1), "ab", trained_codec()[0].levels)
    save_reader(reader, run.path(READER), training_data.TrainingData(run).parts)
    load_voice(run.folder, WEIGHTS["raw"], "am", "cuda")
    assert sorted(moves) == [(name, "cuda") for name in ("CodeReader", "MelCodec", "SpeechGPT")]


def test_the_codec_visits_for_a_sample_and_modules_return_after_an_error(tmp_path, moves):
    voice = opinionated_voice(tmp_path)
    row = SimpleNamespace(text="ሰላም ነው", speaker="alma")
    state = SimpleNamespace(model=voice.model, averaged=torch.no_grad)
    config = GenerateConfig(exact_codes=5, best_of=1)
    log = train.SampleLog(SimpleNamespace(trainer=state), voice, row, config, tmp_path / "samples")
    (tmp_path / "samples").mkdir()
    log.speak(1)
    assert (tmp_path / "samples" / "step-0000001.wav").is_file()
    assert moves == [("MelCodec", "cpu")] * 2
    assert not any(weight.is_inference() for weight in voice.codec.parameters())
    codec, without_weights = nn.Linear(2, 2, device="meta"), nn.Module()
    with pytest.raises(ZeroDivisionError), on_device("meta", codec, None, without_weights):
        assert 1 / 0
    assert codec.weight.device.type == "meta"


def test_at_the_gate_codec_and_recogniser_visit_the_models_device(tmp_path, moves, monkeypatch):
    seen = []
    found = SimpleNamespace(figures=lambda: {"cer": 0.5})
    score = lambda *_: seen.extend(moves) or (found, [])  # noqa: E731
    monkeypatch.setattr("kit.inference.evaluate.score", score)
    recognizer = Recognizer(RecognizerConfig(width=16, blocks=1), "ab")
    gate = gate_evaluator(opinionated_voice(tmp_path), [], recognizer, GenerateConfig())
    model = nn.Module()  # of which only its device is asked
    model.final_norm = SimpleNamespace(weight=SimpleNamespace(device="cuda"))
    assert gate(model) == {"cer": 0.5}
    assert seen == [("MelCodec", "cuda"), ("Recognizer", "cuda")]
    assert moves[2:] == [("MelCodec", "cpu"), ("Recognizer", "cpu")]


def test_what_is_encoded_on_a_gpu_comes_to_the_cpu_before_it_is_written(monkeypatch):
    class OnGPU:
        """A tensor whose values cannot be read where they are."""

        def __init__(self, tensor: Tensor):
            self.cpu = lambda: tensor

    found = [[OnGPU(torch.randn(80, 30 + i)) for i in range(3)]]
    found.append([OnGPU(torch.arange(10 + i)) for i in range(3)])
    monkeypatch.setattr("kit.batches.encoding.mels_and_codes", lambda *_: found)
    rows = [row for row in helpers.manifest() if row.split == "train"][:3]
    shard = encode(rows, trained_codec()[0], Mel(), DATA)
    assert shard["code_counts"].sum() == 33 and shard["references"].shape == (3, 80, 20)


@pytest.fixture
def torch_defaults() -> Iterator[None]:
    """cuDNN attention and TF32 convolutions on, as torch begins; put back afterwards."""
    before = torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cudnn.allow_tf32
    set_cuda_defaults.cache_clear()
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.backends.cudnn.allow_tf32 = True
    yield
    torch.backends.cuda.enable_cudnn_sdp(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


DOORS = {
    "a recipe or a command begins": lambda folder: start("doors", "tiny"),
    "another rank follows": lambda folder: follow_orders(ALONE),
    "an exported voice is loaded": lambda folder: load_export(
        export_voice(opinionated_voice(folder), folder / "voice", "fp32")
    ),
    "a model trains": lambda folder: apply(helpers.tiny_model(), SpeedConfig(), CPU),
}


@pytest.mark.parametrize("door", DOORS)
def test_cudnn_attention_is_off_wherever_work_begins(torch_defaults, tmp_path, monkeypatch, door):
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    DOORS[door](tmp_path)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert not torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = True  # as the switch `tf32` does
    set_cuda_defaults()
    assert torch.backends.cudnn.allow_tf32, "set once in a process, so that a switch stays"
