"""Small and full-size XTTS-v2 of coqui-tts's own classes, at random weights, and their files."""

import json
import logging
from pathlib import Path

import torch
from released_xtts import vocabulary
from torch import Tensor

SMALL = {"layers": 3, "width": 128, "heads": 2, "text_rows": 60, "codes": 34, "start": 5}
VARIED = SMALL | {"codes": 130}  # codes enough to tell speech from a constant
FULL = {"layers": 30, "width": 1024, "heads": 16, "text_rows": 6681, "codes": 1026, "start": 261}


def coqui_config(size: dict):
    """coqui-tts's configuration of an XTTS-v2 of `size`."""
    from TTS.tts.configs.xtts_config import XttsArgs, XttsConfig

    codes = size["codes"]
    gpt = {"layers": size["layers"], "n_model_channels": size["width"], "n_heads": size["heads"]}
    gpt |= {"start_audio_token": codes - 2, "stop_audio_token": codes - 1}
    gpt |= {"num_audio_tokens": codes, "use_perceiver_resampler": True}
    gpt = {f"gpt_{name}": value for name, value in gpt.items()}
    return XttsConfig(model_args=XttsArgs(decoder_input_dim=size["width"], **gpt))


def coqui_xtts(folder: Path, size: dict):
    """An `Xtts` of coqui-tts with random weights, every one of which takes part.

    Writes its vocabulary and its configuration to `folder`.
    """
    threads = torch.get_num_threads()
    logging.disable(logging.WARNING)
    from TTS.tts.layers.xtts.tokenizer import VoiceBpeTokenizer
    from TTS.tts.models.xtts import Xtts

    torch.set_num_threads(threads)  # importing it sets one
    folder.mkdir(parents=True, exist_ok=True)
    holes = (20, 21, size["text_rows"] - 3)
    words = vocabulary(size["text_rows"], size["start"], holes)
    (folder / "vocab.json").write_text(json.dumps(words, ensure_ascii=False), encoding="utf-8")
    config = coqui_config(size)
    config.save_json(str(folder / "config.json"))
    torch.manual_seed(0)
    model = Xtts(config)
    model.tokenizer = VoiceBpeTokenizer(str(folder / "vocab.json"))
    model.init_models()
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    model.mel_stats.copy_(torch.rand(80) + 0.5)
    model.gpt.eval()
    return model


def write_coqui(folder: Path, model) -> Path:
    """model.pth of `model` in `folder`, as coqui-tts writes it."""
    content = {"config": model.config.to_dict(), "model": model.state_dict()}
    torch.save(content, folder / "model.pth")
    return folder


def coqui_dvae(codes: int = 1024):
    """A `DiscreteVAE` of coqui-tts as its trainer makes it, at random weights."""
    from TTS.tts.layers.xtts.dvae import DiscreteVAE

    torch.manual_seed(0)
    sizes = {"channels": 80, "num_tokens": codes, "codebook_dim": 512, "hidden_dim": 512}
    layers = {"num_resnet_blocks": 3, "kernel_size": 3, "num_layers": 2, "positional_dims": 1}
    without = {"normalization": None, "use_transposed_convs": False}
    model = DiscreteVAE(**sizes, **layers, **without).eval()
    # As training leaves it, the codebook is where sounds are: those of some noise.
    with torch.no_grad():
        model.codebook.embed.copy_(model.encoder(5 * torch.randn(1, 80, 4 * codes))[0])
    return model


def opinionated(gpt) -> None:
    """Weights whose greedy codes differ from step to step, as a trained model's do."""
    with torch.no_grad():
        gpt.mel_head.weight *= 20
        gpt.mel_pos_embedding.emb.weight += torch.randn_like(gpt.mel_pos_embedding.emb.weight)
        gpt.text_embedding.weight += torch.randn_like(gpt.text_embedding.weight)


def coqui_speech(model, text: str, language: str, reference: Tensor, **settings) -> Tensor:
    """The waveform (L,) of its greedy inference, conditioned as its release's configuration says.

    `reference` (L,) has 22,050 samples a second.
    """
    latents = model.get_gpt_cond_latents(reference[None], 22_050, length=30, chunk_length=4)
    speaker = model.get_speaker_embedding(reference[None], 22_050)
    greedy = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0}
    with torch.inference_mode():
        made = model.inference(text, language, latents, speaker, **greedy, **settings)
    return torch.as_tensor(made["wav"])


def require_close(actual: Tensor, wanted: Tensor, spread: float = 0.02) -> None:
    """Within 1e-4, where what is wanted spreads by `spread` or more: else it would say nothing."""
    assert actual.shape == wanted.shape
    difference = float((actual - wanted).abs().max())
    print(f"{difference:.1e} where the standard deviation is {float(wanted.std()):.3f}")
    assert difference < 1e-4
    assert wanted.std() > spread


def older_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, by the names that weight normalisation had before."""
    today = ".parametrizations.weight.original"
    renamed = {n.replace(f"{today}0", ".weight_g"): tensor for n, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    return {n.replace(f"{today}1", ".weight_v"): tensor for n, tensor in renamed.items()}


def coqui_loaded(folder: Path):
    """What coqui-tts makes of the files in `folder`, loaded strictly, ready to speak."""
    from TTS.tts.configs.xtts_config import XttsConfig
    from TTS.tts.models.xtts import Xtts

    config = XttsConfig()
    config.load_json(str(folder / "config.json"))
    model = Xtts(config)
    model.load_checkpoint(config, checkpoint_dir=str(folder), eval=True, strict=True)
    return model
