"""`python -m kit onnx`: a voice for onnxruntime; `speak_onnx.py` beside it needs no kit.

`prompt.onnx` processes a text, `step.onnx` generates a code, `sound.onnx` decodes codes.

Shapes: T text ids, K latents, P prompt, Q new positions, N positions of the cache or so far, D
width, H heads, d = D / H, V code vocabulary.
"""

import copy
import importlib
import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.audio.mel_codec import MelCodec
from kit.base.errors import KitError
from kit.base.files import atomic_folder, file_digest, write_atomic
from kit.extras.onnx.real_sound import Sound
from kit.extras.onnx.speak_onnx import FILES, SUMS
from kit.inference.decoder import Decoder, mean_latents
from kit.inference.export import load_export, read_card
from kit.inference.voice import Voice
from kit.model.gpt import SpeechGPT
from kit.notebook.result import Result
from kit.recipes.exports import export_folder
from kit.recipes.speak import megabytes
from kit.settings import GenerateConfig
from kit.text.tokenizer import Tokenizer

CARD = "voice-onnx.json"
SCRIPT = "speak_onnx.py"
FORMAT = 1  # of the folder
MAX_BYTES = 2**31 - 2**24  # of an ONNX file, and room for its graph
# Settings of `GenerateConfig` that speak_onnx.py has, and their types there.
SAMPLING = {
    "temperature": float,
    "top_p": float,
    "repetition_penalty": float,
    "top_k": int,
    "seed": int,
}


def export_for_onnxruntime(
    run: str,
    voice: str = "",  # an exported voice, or hf://OWNER/NAME (the run's export/)
) -> Result:
    """Write onnx/ in the folder of the exported `voice` ("": that of `run`), with its settings.

    Raises KitError for a missing package and for a voice that ONNX cannot hold.
    """
    export = export_folder(voice, run)
    folder = export_onnx(load_export(export), export / "onnx", read_card(export).settings)
    how = 'Speak: python speak_onnx.py "..." --out speech.wav'
    return Result(line=f"{folder}: {megabytes(folder)}. {how}")


class Prompt(nn.Module):
    """`Decoder.prompt` and `Decoder.prefill` for one row."""

    def __init__(self, decoder: Decoder, model: SpeechGPT):
        super().__init__()
        self.decoder = decoder
        self.text = nn.Buffer(model.text_embedding.weight.detach())
        self.text_position = nn.Buffer(model.text_position.weight.detach())

    def forward(self, text: Tensor, latents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.decoder.config
        ids = F.pad(F.pad(text, (1, 0), value=c.start_text), (0, 1), value=c.stop_text)
        embedded = F.embedding(ids, self.text) + self.text_position[: ids.shape[0]]
        start = self.decoder.embed(text.new_full((1,), c.start_code), 0)
        x = torch.cat((latents, embedded, start))
        later = torch.full((x.shape[0], x.shape[0]), float("-inf")).triu(1)
        return run_layers(self.decoder, x, None, later)


class Step(nn.Module):
    """`Decoder.step` for one row: the caller appends `new` to the cache, which is not copied."""

    def __init__(self, decoder: Decoder):
        super().__init__()
        self.decoder = decoder

    def forward(
        self, code: Tensor, code_index: Tensor, cache: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return run_layers(self.decoder, self.decoder.embed(code, code_index), cache, None)


def run_layers(
    decoder: Decoder, x: Tensor, cache: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits (1, V), the state (1, D) and new keys and values (Q, layers, 2, H, d).

    `x` (Q, D) are the new positions, `cache` (N, layers, 2, H, d) those before.
    """
    new = []
    for index, layer in enumerate(decoder.layers):
        q, *written = layer.qkv(x, 1)  # (1, H, Q, d)
        new.append(torch.stack([part[0].transpose(0, 1) for part in written], dim=1))
        if cache is not None:
            before = cache[:, index].permute(1, 2, 0, 3)  # (2, H, N, d)
            written = [torch.cat((old[None], part), dim=2) for old, part in zip(before, written)]
        h = F.scaled_dot_product_attention(q, *written, attn_mask=mask)
        x = layer.add_heads(x, h.transpose(1, 2).reshape(x.shape))
    state = decoder.final_state(x[-1:])
    logits = decoder.code_head(state)
    logits[:, decoder.config.start_code].fill_(float("-inf"))  # never generated
    return logits, state, torch.stack(new, dim=1)


def traceable_parts(voice: Voice) -> tuple[dict[str, tuple], dict[str, Tensor]]:
    """Return the graphs of the GPT on the CPU, and each speaker's latents (K, D).

    A graph is a module, examples of its inputs, and which of their dimensions vary.
    """
    model = voice.model
    if model.final_norm.weight.device.type != "cpu":
        model = copy.deepcopy(model).cpu()
    decoder = Decoder(model, traceable=True)
    decoder.conditioner = decoder.text_embedding = decoder.text_position = None  # not of a step
    latents = {}
    for name in voice.speakers:
        segments = [mel.cpu() for mel in voice.reference_segments(name)]
        latents[name] = mean_latents(model.conditioner, segments).contiguous()
    c = model.config
    one = torch.ones(1, dtype=torch.long)
    prompt = {"text": one.repeat(5), "latents": torch.zeros(c.latents, c.width)}
    cache = torch.zeros(9, c.layers, 2, c.heads, c.width // c.heads)
    step = {"code": one, "code_index": one.clone(), "cache": cache}
    text_ids = torch.export.Dim("text_ids", min=1, max=c.max_text - 2)
    positions = torch.export.Dim("positions", min=2, max=decoder.max_positions)
    graphs = {
        "prompt": (Prompt(decoder, model), prompt, {"text": {0: text_ids}}),
        "step": (Step(decoder), step, {"cache": {0: positions}}),
    }
    return graphs, latents


@torch.no_grad()
def export_onnx(voice: Voice, folder: Path, sampling: GenerateConfig | None = None) -> Path:
    """Write `voice` to `folder` for onnxruntime, in fp32.

    `latents.npz` holds the speakers' conditioning latents (speakers, K, D). `sampling` are the
    recommended settings (None: the defaults); guidance, candidates and retries do not apply.
    Raises KitError for a missing package and for a voice that ONNX cannot hold.
    """
    try:
        importlib.import_module("onnxscript")  # torch.onnx needs it
    except ImportError as error:
        raise KitError(
            f"An ONNX export needs a package ({error}): pip install onnx onnxscript onnxruntime"
        ) from error
    require_supported(voice)
    graphs, latents = traceable_parts(voice)
    sound = {"codes": torch.ones(1, 7, dtype=torch.long)}
    if voice.decodes_from_states:
        sound["states"] = torch.zeros(1, 7, voice.model.config.width)
    lengths = {name: {1: torch.export.Dim.DYNAMIC} for name in sound}
    graphs["sound"] = (Sound(voice.codec), sound, lengths)
    quiet = warnings.catch_warnings(action="ignore")  # torch.onnx warns of itself
    with quiet, atomic_folder(folder, (CARD,)) as new:
        for name, (module, inputs, dynamic) in graphs.items():
            torch.onnx.export(
                module.eval(),
                kwargs=inputs,
                f=new / f"{name}.onnx",
                input_names=list(inputs),
                output_names=["wave"] if name == "sound" else ["logits", "state", "new"],
                dynamic_shapes={name: dynamic.get(name, {}) for name in inputs},
                opset_version=18,
                dynamo=True,
                external_data=False,
                verbose=False,
            )
        np.savez(new / "latents.npz", latents=torch.stack(list(latents.values())).numpy())
        write_atomic(new / "tokenizer.model", voice.tokenizer.file_bytes())
        shutil.copyfile(Path(__file__).with_name(SCRIPT), new / SCRIPT)
        card = describe(voice, sampling or GenerateConfig())
        write_atomic(new / CARD, json.dumps(card, indent=2, ensure_ascii=False) + "\n")
        sums = "".join(f"{file_digest(new / name)}  {name}\n" for name in FILES)
        write_atomic(new / SUMS, sums)
    return Path(folder)


def require_supported(voice: Voice) -> None:
    """Raise KitError for a codec, tokenizer or size that the export does not support."""
    if not isinstance(voice.codec, MelCodec):
        kind = voice.codec.config.kind
        raise KitError(f"The codec `{kind}` has no ONNX export, only the built-in codec `mel` has.")
    if not isinstance(voice.tokenizer, Tokenizer):
        raise KitError(
            "The tokenizer of a released XTTS has no ONNX export, only SentencePiece models have."
        )
    if voice.tokenizer.phonemes:
        raise KitError("A voice of phonemes needs espeak-ng to read: it has no ONNX export.")
    size = sum(weight.numel() for weight in voice.model.parameters()) * 4
    if size > MAX_BYTES:
        raise KitError(f"An ONNX file holds up to 2 GB, the weights need {size / 1e9:.1f} GB.")


def describe(voice: Voice, sampling: GenerateConfig) -> dict:
    """Return the contents of voice-onnx.json."""
    c = voice.model.config
    sampling = voice.within(sampling)
    max_text = c.max_text - 2
    return {
        "format_version": FORMAT,
        "language": voice.language,
        "speakers": voice.speakers,
        "sample_rate": voice.codec.sample_rate,  # Hz
        "stop_code": c.stop_code,
        "max_codes": c.max_code - 1,
        "max_text_ids": min(voice.habits.longest_text or max_text, max_text),
        "max_codes_per_text_id": sampling.max_codes_per_text_id,
        "uses_states": voice.decodes_from_states,
        "sampling": {name: kind(getattr(sampling, name)) for name, kind in SAMPLING.items()},
    }
