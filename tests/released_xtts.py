"""A tiny, randomly initialised XTTS-v2 in the very format of the release, for tests to read.

The configuration is in model.pth as the pickled objects of coqui-tts that it is in the release;
coqui-tts need not be installed.
"""

import contextlib
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kit.base.torch_file import read_torch_file
from kit.extras.xtts_v2.codec import DVAE
from kit.extras.xtts_v2.model import CLASSES, FIXED
from kit.extras.xtts_v2.tensor_names import MEL_STATS, SPEAKER, VOCODER, to_released
from kit.extras.xtts_v2.vocoder import HiFiGAN, SpeakerEncoder
from kit.model.gpt import SpeechGPT
from kit.settings import GPTConfig

HOLES = (30, 31)  # ids that no piece has
START, STOP = 7, 0
SIZE = 41
SOUND = {"latent_width": 96, "channels": 16, "filters": (8, 8, 8, 8)}
TEXTS = {"text_vocab": SIZE, "max_text": 32, "start_text_id": START, "stop_text_id": STOP}
CODES = {"code_vocab": 34, "max_code": 64, "start_code_id": 32, "stop_code_id": 33}
TRUNK = {"layers": 2, "width": 96, "heads": 3, "dropout": 0.1, "text_stop_input": False}
TINY = GPTConfig(**TRUNK, **TEXTS, **CODES, **FIXED)


def random_model(config: GPTConfig = TINY, seed: int = 0) -> SpeechGPT:
    """A model in eval mode of which every parameter takes part: zeros would hide mistakes."""
    torch.manual_seed(seed)
    model = SpeechGPT(config)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model.eval()


def sound_tensors(
    latent_width: int = 1024, channels: int = 512, filters: tuple[int, ...] = (32, 64, 128, 256)
) -> dict[str, Tensor]:
    """Encoders and vocoder by the release's names, on the meta device; its sizes by default."""
    with torch.device("meta"):
        vocoder = HiFiGAN(latent_width, channels=channels)
        speaker = SpeakerEncoder(filters)
        tensors = {MEL_STATS: torch.empty(80)}
    for name, tensor in vocoder.state_dict().items():
        layer, _, leaf = name.rpartition(".")
        if leaf == "weight" and name.startswith(("ups.", "resblocks.")):  # normalised
            norms = tensor.flatten(1)[:, 0].view(-1, *[1] * (tensor.ndim - 1))
            tensors[f"{VOCODER}{layer}.parametrizations.weight.original0"] = norms
            tensors[f"{VOCODER}{layer}.parametrizations.weight.original1"] = tensor
        else:
            tensors[VOCODER + name] = tensor
    return tensors | {SPEAKER + name: tensor for name, tensor in speaker.state_dict().items()}


POSITIVE = ("running_var", "window", "mel_scale.fb", "mel_stats")


def random_sound(sizes: dict = SOUND) -> dict[str, Tensor]:
    """Encoders and vocoder: larger weights, or variances below 0, would make no numbers of it."""
    torch.manual_seed(2)
    tensors = {}
    for name, empty in sorted(sound_tensors(**sizes).items()):
        is_float = empty.is_floating_point()
        tensors[name] = 0.2 * torch.randn(empty.shape) if is_float else torch.tensor(5)
        if name.endswith(POSITIVE):
            tensors[name] = tensors[name].abs() + 0.5
    return tensors


def random_dvae(config: GPTConfig = TINY) -> dict[str, Tensor]:
    """A DVAE with the codes of `config`, and the sums that training kept of its codebook."""
    torch.manual_seed(2)
    tensors = DVAE(vocab_size=config.start_code, width=12, code_width=6).state_dict()
    tensors["codebook.embed_avg"] = tensors["codebook.embed"].clone()
    tensors["codebook.cluster_size"] = torch.zeros(config.start_code)
    return tensors


def vocabulary(size: int = SIZE, start: int = START, holes: tuple[int, ...] = HOLES) -> dict:
    """A vocabulary as tokenizers writes it; special pieces stand among the others, too."""
    special = {STOP: "[STOP]", 1: "[UNK]", 2: "[SPACE]", 3: "[en]", start: "[START]"}
    pieces = {special.get(i, chr(0x61 + i)): i for i in range(size) if i not in holes}
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": i, "content": special[i], "special": True, **off} for i in sorted(special)]
    model = {"type": "BPE", "dropout": None, "unk_token": "[UNK]", "fuse_unk": False}
    model |= dict.fromkeys(("continuing_subword_prefix", "end_of_word_suffix"))
    model |= {"vocab": pieces, "merges": []}
    steps = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    steps["pre_tokenizer"] = {"type": "Whitespace"}
    return {"version": "1.0", "added_tokens": added, **steps, "model": model}


def settings(config: GPTConfig = TINY) -> dict:
    """config.json, as far as a loader looks at it; START and STOP are left to the vocabulary."""
    gpt = {"layers": config.layers, "n_model_channels": config.width, "n_heads": config.heads}
    gpt |= {"max_text_tokens": config.max_text - 2, "max_audio_tokens": config.max_code - 3}
    gpt |= {"max_prompt_tokens": 70, "number_text_tokens": config.text_vocab}
    gpt |= {"start_text_token": None, "stop_text_token": None, "use_perceiver_resampler": True}
    gpt |= {"num_audio_tokens": config.code_vocab, "start_audio_token": config.start_code}
    gpt |= {"stop_audio_token": config.stop_code}
    arguments = {f"gpt_{name}": value for name, value in gpt.items()}
    arguments |= {"decoder_input_dim": config.width, "d_vector_dim": 512}
    arguments["cond_d_vector_in_each_upsampling_layer"] = True
    return {"model": "xtts", "model_args": arguments, "languages": ["en"], "temperature": 0.75}


def write_release(folder: Path, config: GPTConfig = TINY, model: SpeechGPT | None = None) -> Path:
    """The files of a release in `folder`, sound and DVAE included, all of it random."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = (model or random_model(config)).state_dict()
    tensors = {name: t.detach().contiguous() for name, t in to_released(weights).items()}
    tensors.update(random_sound(SOUND | {"latent_width": config.width}))
    described = settings(config)
    words = vocabulary(config.text_vocab, config.start_text)
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "vocab.json").write_text(json.dumps(words, ensure_ascii=False), encoding="utf-8")
    with pickled_settings(described) as pickled:
        torch.save({"config": pickled, "model": tensors}, folder / "model.pth")
    torch.save(random_dvae(config), folder / "dvae.pth")
    torch.save(tensors["mel_stats"].clone(), folder / "mel_stats.pth")
    return folder


MODULES = {
    "XttsConfig": "TTS.tts.configs.xtts_config",
    "XttsArgs": "TTS.tts.models.xtts",
    "BaseDatasetConfig": "TTS.config.shared_configs",
}


@contextlib.contextmanager
def pickled_settings(described: dict) -> Iterator[object]:
    """`described` as objects of classes named as coqui-tts's, which only the block can pickle."""
    modules = {name: types.ModuleType(name) for name in ("TTS", *MODULES.values())}
    classes = [type(name, (), {"__module__": module}) for name, module in MODULES.items()]
    for each in classes:
        setattr(modules[each.__module__], each.__name__, each)
    whole, inner, dataset = (each() for each in classes)
    dataset.path = "somewhere"
    inner.__dict__.update(described["model_args"])
    whole.__dict__.update(described, model_args=inner, datasets=[dataset])
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        yield whole


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """What model.pth in `folder` holds, apart from its configuration."""
    found = read_torch_file(folder / "model.pth", CLASSES)["model"]
    return {name: tensor.clone() for name, tensor in found.items()}


def write_tensors(folder: Path, tensors: dict, name: str = "model.pth", **more) -> Path:
    """Write `tensors` as a checkpoint with a plain configuration, as coqui-tts itself does."""
    described = json.loads((folder / "config.json").read_text())
    torch.save({"config": described, "model": tensors, **more}, folder / name)
    return folder / name
