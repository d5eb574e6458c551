"""XTTS-v2 at its released size, spoken by the kit and by coqui-tts: rows for `bench_infer.py`.

Both carry the same random weights and must make the same greedy codes first. The peer's loop is the
one of its own inference, `generate` of its GPT with a key-value cache, in fp32.
"""

import time

import torch
from infer_calls import Call, Clock, kit_call, ready, request, timed
from rows import native
from train_steps import Coqui, xtts

from kit.model.gpt import SpeechGPT
from kit.settings import GPTConfig

COQUI = "coqui-tts GPT.generate, fp32"
FORMATS = {f"{weights}, eager": (weights, False) for weights in ("fp32", "bf16", "int8")}
FORMATS["int8, compiled"] = ("int8", True)


def both_models(layers: int) -> tuple[SpeechGPT, torch.nn.Module]:
    """The kit's model and coqui-tts's GPT with weights under which codes differ."""
    coqui = Coqui(xtts(1024, layers=layers, text_stop_input=False))
    gpt = coqui.gpt.eval()
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
        gpt.mel_head.weight *= 20
        gpt.mel_pos_embedding.emb.weight += torch.randn_like(gpt.mel_pos_embedding.emb.weight)
    model = SpeechGPT(coqui.config).eval()
    coqui.give_weights(model)
    gpt.init_gpt_for_inference()
    return model, gpt


@torch.inference_mode()
def coqui_call(gpt: torch.nn.Module, config: GPTConfig, codes: int) -> Call:
    """Its own way from a reference's mel and text ids to so many greedy codes."""
    texts, cond = request(config, 1)
    clock = Clock()
    started_s = time.perf_counter()
    latents = gpt.get_style_emb(cond).mT
    greedy = {"do_sample": False, "num_beams": 1, "streamer": clock}
    exactly = {"min_new_tokens": codes, "max_new_tokens": codes}
    results = gpt.generate(latents, torch.tensor(texts), **greedy, **exactly)
    return timed(started_s, clock.marks[1:], results)  # the first mark is the prompt's


def xtts_calls(layers: int, codes: int) -> tuple[dict, dict]:
    """What takes turns: the kit's formats and the peer; and what ran in each of the kit's."""
    model, gpt = both_models(layers)
    decoders = {name: ready(model, *FORMATS[name]) for name in native(FORMATS)}
    wanted = coqui_call(gpt, model.config, codes).codes
    results = kit_call(decoders["fp32, eager"], codes).codes
    assert torch.equal(wanted, results), f"not coqui-tts's codes: {wanted}, {results}"
    print(f"  both sides make the same {codes} codes, {len(results.unique())} different ones")
    calls = {name: lambda d=decoder: kit_call(d, codes) for name, decoder in decoders.items()}
    calls["coqui-tts"] = lambda: coqui_call(gpt, model.config, codes)
    return calls, {name: decoder.ran for name, decoder in decoders.items()}
