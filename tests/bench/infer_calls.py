"""The calls that `bench_infer.py` measures: the kit's decoder, and transformers' GPT-2 beside it.

A call reads a prompt of 128 positions and makes so many greedy codes, all included: on the kit's
side its conditioning encoder, sampling and checks, too. Both models carry the same weights.

Shapes: B rows, N codes.
"""

import dataclasses
import statistics
import time

import torch
from torch import Tensor, nn

from kit.inference.decoder import Decoder
from kit.inference.generate import decode_stream
from kit.model.gpt import SpeechGPT
from kit.settings import GenerateConfig, GPTConfig

PROMPT, FRAMES, CODE_VOCAB = 128, 86, 1030  # positions, mel frames of the reference, codes
SHAPES = {"S": {"width": 256, "heads": 4}, "L": {"width": 1024, "heads": 16}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    step_s: float  # median seconds between two codes: what a user waits for, after the prompt
    total_s: float  # the whole call, prompt included
    codes: Tensor  # (B, N)


def random_model(size: str, layers: int) -> SpeechGPT:
    """Random weights; also what begins as zero or one is stirred, so that all takes part."""
    torch.manual_seed(0)
    model = SpeechGPT(GPTConfig(layers=layers, code_vocab=CODE_VOCAB, **SHAPES[size])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


def ready(model: SpeechGPT, weights: str = "fp32", compiled: bool = False) -> Decoder:
    return Decoder(model, weights=weights, compile=compiled)


def request(config: GPTConfig, batch: int) -> tuple[list[list[int]], Tensor]:
    """Texts in one voice that fill a prompt of 128 positions, the same each time."""
    random = torch.Generator().manual_seed(0)
    room = PROMPT - config.latents - 3  # START and STOP of the text, START of the codes
    texts = torch.randint(3, config.text_vocab - 2, (batch, room), generator=random)
    cond = torch.randn(1, config.n_mels, FRAMES, generator=random)
    return texts.tolist(), cond.expand(batch, -1, -1)


def greedy(codes: int, kv_cache: bool = True) -> GenerateConfig:
    return GenerateConfig(temperature=0, exact_codes=codes, kv_cache=kv_cache)


def kit_call(decoder: Decoder, codes: int, kv_cache: bool = True) -> Call:
    """The kit's own generator on a CPU, where it yields at every code."""
    texts, cond = request(decoder.config, 1)
    started_s, marks, said = time.perf_counter(), [], None
    for said in decode_stream(decoder, texts, cond, greedy(codes, kv_cache), [(0, 0)]):  # noqa: B007
        marks.append(time.perf_counter())
    return timed(started_s, marks, torch.stack([row.codes for row in said.spoken()]))


def timed(started_s: float, marks: list[float], codes: Tensor) -> Call:
    total_s = time.perf_counter() - started_s
    step_s = statistics.median(b - a for a, b in zip(marks, marks[1:]))
    return Call(step_s=step_s, total_s=total_s, codes=codes)


class Clock:
    """A streamer, as `generate` takes one: notes when each code came."""

    def __init__(self):
        self.marks: list[float] = []

    def put(self, codes: Tensor) -> None:
        self.marks.append(time.perf_counter())

    def end(self) -> None: ...


def gpt2(model: SpeechGPT):
    """transformers' GPT2LMHeadModel of `model`'s size, with its weights where it has a place."""
    from transformers import GPT2Config, GPT2LMHeadModel

    c = model.config
    sizes = {"vocab_size": c.code_vocab, "n_positions": PROMPT + c.max_code - 1}
    sizes |= {"n_embd": c.width, "n_layer": c.layers, "n_head": c.heads}
    # Nothing ends a row: it makes the requested number of codes.
    endless = {"bos_token_id": None, "eos_token_id": None}
    peer = GPT2LMHeadModel(GPT2Config(tie_word_embeddings=False, **sizes, **endless)).eval()
    trunk = model.gpt.state_dict()
    # Its layers keep (inputs, outputs), torch's (outputs, inputs).
    trunk = {name: w.t() if w.dim() == 2 else w for name, w in trunk.items()}
    trunk["wte.weight"] = model.code_embedding.weight
    # The prompt comes as embeddings; the first code is fed at position 128, as the kit's second.
    positions = model.code_position.weight[1:]
    trunk["wpe.weight"] = torch.cat((positions.new_zeros(PROMPT, c.width), positions))
    peer.transformer.load_state_dict(trunk)
    peer.lm_head.load_state_dict({"weight": model.code_head.weight})
    return peer


def peer_call(peer, codes: int) -> Call:
    """`generate`, greedy, with its key-value cache."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, CODE_VOCAB - 2, (1, PROMPT), generator=random)
    clock, started_s = Clock(), time.perf_counter()
    options = {"attention_mask": torch.ones_like(ids), "streamer": clock}
    results = peer.generate(ids, max_new_tokens=codes, do_sample=False, **options)
    return timed(started_s, clock.marks[1:], results[:, PROMPT:])  # the first mark is the prompt's


def static_compiled() -> dict:
    """Options of `generate` that compile the peer's step over a static cache, also on a CPU."""
    from transformers import CompileConfig

    config = CompileConfig(mode="default", fullgraph=False)
    config._compile_all_devices = True  # else only accelerators are compiled for
    return {"cache_implementation": "static", "compile_config": config}


@torch.inference_mode()
def same_codes(model: SpeechGPT, peer, codes: int) -> int:
    """Assert that both models make the same codes of one prompt; how many different ones."""
    decoder = ready(model)
    texts, cond = request(model.config, 1)
    prompt, _ = decoder.prompt(texts, cond)
    plain = peer.transformer.ln_f, peer.lm_head
    # For this alone, the peer gets what GPT-2 lacks: the kit's second norm and its head's bias.
    peer.transformer.ln_f = nn.Sequential(plain[0], model.final_norm)
    peer.lm_head = model.code_head
    inputs = {"inputs_embeds": prompt, "attention_mask": prompt.new_ones(prompt.shape[:2]).long()}
    inputs["suppress_tokens"] = [model.config.start_code, model.config.stop_code]
    results = peer.generate(max_new_tokens=codes, do_sample=False, **inputs)[0]
    peer.transformer.ln_f, peer.lm_head = plain
    wanted = kit_call(decoder, codes).codes[0]
    assert torch.equal(wanted, results), f"not the codes transformers makes: {wanted}, {results}"
    return len(wanted.unique())
