"""Export the decoder as `torch.export` programs that run without this kit.

`prefill.pt2` processes a text, `decode_one.pt2` generates a code, README.md says how to call them.

Shapes: T text ids, K latents, P prompt, D width, H heads, d = D / H, N positions of the cache, V
code vocabulary.
"""

import copy
from pathlib import Path

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.base.compiler import keep_device_guard
from kit.base.files import atomic_path, write_atomic
from kit.inference.decoder import Decoder, mean_latents
from kit.inference.export import prepare
from kit.inference.voice import Voice
from kit.model.gpt import SpeechGPT
from kit.model.sequence import GPTConfig

MANUAL = """# A speech GPT as two programs

Text ids and a speaker in, codes out; fp32, CPU, one text at a time. Written with torch {torch}.
A .pt2 file may hold pickles, which run code when loaded: only load files that you trust.

```python
import torch
from safetensors.torch import load_file

prefill = torch.export.load("prefill.pt2").module()
decode_one = torch.export.load("decode_one.pt2").module()
latents = load_file("latents.safetensors")  # of each speaker

@torch.inference_mode()
def speak(ids, speaker):
    codes = []
    prompt = len(ids) + {before}
    logits, cache = prefill(torch.tensor(ids), latents[speaker])
    for code_index in range(1, {codes}):
        code = logits.argmax(-1)  # greedy; or sample
        if code == {stop}:  # STOP; without it the text is truncated
            break
        codes.append(int(code))
        input_pos = torch.tensor([prompt + code_index - 1])
        logits, cache = decode_one(code, torch.tensor([code_index]), input_pos, cache)
    return codes
```

| program | takes | gives |
|---|---|---|
| prefill | text (T,) int64, T from 1 to {longest}; latents {latents} float32 | logits, cache |
| decode_one | code, code_index, input_pos (1,) int64 each; cache | logits, cache |

`logits` (1, {vocabulary}) float32, START ({start}) is -inf; `cache` {cache} float32:
layers, keys and values, batch, heads, positions, width. `decode_one` writes to it in place.
`code_index` is the number of the code in the text, from 1; `input_pos` its position in the cache.

Ids are those of tokenizer.model (SentencePiece), without START and STOP, for text normalised by
`kit.text.normalize` (language `{language}`). The voice's codec decodes codes to audio.
"""


class Prefill(nn.Module):
    """`Decoder.prompt` and `Decoder.prefill` for one row."""

    def __init__(self, decoder: Decoder, model: SpeechGPT):
        super().__init__()
        self.decoder = decoder
        self.config = model.config
        self.text = nn.Buffer(model.text_embedding.weight.detach())
        self.text_position = nn.Buffer(model.text_position.weight.detach())

    def prompt(self, text: Tensor, latents: Tensor) -> Tensor:
        """Return `latents | START text STOP | START` as embeddings (P, D)."""
        c = self.config
        ids = F.pad(F.pad(text, (1, 0), value=c.start_text), (0, 1), value=c.stop_text)
        embedded = F.embedding(ids, self.text) + self.text_position[: ids.shape[0]]
        start = self.decoder.embed(text.new_full((1,), c.start_code), 0)
        return torch.cat((latents, embedded, start))

    def forward(self, text: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
        c = self.config
        decoder = self.decoder
        x = self.prompt(text, latents)
        cache = x.new_zeros(c.layers, 2, 1, c.heads, decoder.max_positions, c.width // c.heads)
        # An explicit causal mask: the length is dynamic.
        later = torch.full((x.shape[0], x.shape[0]), float("-inf")).triu(1)
        for layer, (k, v) in zip(decoder.layers, cache):
            x = layer(x, k, v, 0, later)
        return mask_start_code(decoder.logits(x[-1:]), c), cache


class DecodeOne(nn.Module):
    """`Decoder.step` for one row, with fixed shapes."""

    def __init__(self, decoder: Decoder):
        super().__init__()
        self.decoder = decoder

    def forward(
        self, code: Tensor, code_index: Tensor, input_pos: Tensor, cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        layers = [(k, v) for k, v in cache]
        logits = self.decoder.step(code, code_index, input_pos, layers, None)
        return mask_start_code(logits, self.decoder.config), cache


def mask_start_code(logits: Tensor, config: GPTConfig) -> Tensor:
    """Set the logit of START, which is never generated, to -inf."""
    logits[:, config.start_code].fill_(float("-inf"))
    return logits


@torch.no_grad()
def export_program(voice: Voice, folder: Path) -> Path:
    """Write `voice`'s decoder to `folder` as `torch.export` programs, fp32, CPU, batch 1.

    `latents.safetensors` holds each speaker's conditioning latents; README.md describes inputs,
    shapes and a decoding loop. The kit never loads a .pt2: it may hold pickles.
    """
    folder = prepare(Path(folder))
    model = voice.model
    if model.final_norm.weight.device.type != "cpu":
        model = copy.deepcopy(model).cpu()
    c = model.config
    decoder = Decoder(model, traceable=True)  # shares the model's weights
    decoder.conditioner = None
    decoder.text_embedding = None
    decoder.text_position = None
    latents = {}
    for name in voice.speakers:
        segments = [mel.cpu() for mel in voice.reference_segments(name)]
        latents[name] = mean_latents(model.conditioner, segments).contiguous()
    with atomic_path(folder / "latents.safetensors") as file:
        safetensors.torch.save_file(latents, file)
    write_atomic(folder / "tokenizer.model", voice.tokenizer.file_bytes())
    example = (torch.zeros(5, dtype=torch.long), torch.zeros(c.latents, c.width))
    lengths = {0: torch.export.Dim("text_ids", min=1, max=c.max_text - 2)}
    save_program(folder / "prefill.pt2", Prefill(decoder, model), example, (lengths, None))
    ones = torch.ones(
        3, 1, dtype=torch.long
    ).unbind()  # the same tensor three times would be one input
    cache = torch.zeros(c.layers, 2, 1, c.heads, decoder.max_positions, c.width // c.heads)
    save_program(folder / "decode_one.pt2", DecodeOne(decoder), (*ones, cache))
    write_atomic(folder / "README.md", manual(voice, decoder.max_positions))
    return folder


def save_program(
    path: Path, module: nn.Module, example: tuple, dynamic: tuple | None = None
) -> None:
    """Trace `module` with `example` inputs and write it without them."""
    keep_device_guard()
    program = torch.export.export(module, example, dynamic_shapes=dynamic)
    program.example_inputs = None
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        torch.export.save(program, file)


def manual(voice: Voice, positions: int) -> str:
    """Return the README.md of the programs."""
    c = voice.model.config
    return MANUAL.format(
        torch=torch.__version__,
        language=voice.language,
        longest=c.max_text - 2,
        latents=f"({c.latents}, {c.width})",
        before=c.latents + 3,
        vocabulary=c.code_vocab,
        start=c.start_code,
        stop=c.stop_code,
        codes=c.max_code,
        cache=f"({c.layers}, 2, 1, {c.heads}, {positions}, {c.width // c.heads})",
    )
