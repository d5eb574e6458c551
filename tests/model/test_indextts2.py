"""IndexTTS2's GPT: which of its tensors are an XTTS-v2's, and what its trunk computes with them.

docs/indextts2.md is what these tests hold to be true.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from released_indextts2 import CONDITIONING, TINY, Sizes, indextts2_shapes, random_indextts2
from released_xtts import write_release, write_tensors
from torch import Tensor, nn

from kit.base.errors import KitError
from kit.inference.generate import generate
from kit.inference.sampling import GenerateConfig
from kit.model.gpt import SpeechGPT
from kit.model.sequence import GPTConfig, pack
from kit.releases.indextts2 import is_indextts2
from kit.releases.xtts_v2.model import load_xtts
from kit.releases.xtts_v2.names import GPT, empty_model, released_name, turned

TEXT = [5, 7, 9, 11, 13]
CODES = [3, 1, 4, 1, 5, 9, 2, 6]


def trunk_config(sizes: Sizes) -> GPTConfig:
    """What of IndexTTS2's GPT the kit's has a field for. Its latents are speaker's and two more."""
    return GPTConfig(
        layers=sizes.layers,
        width=sizes.width,
        heads=sizes.heads,
        text_vocab=sizes.text_rows,
        code_vocab=sizes.codes,
        max_text=sizes.text_positions,
        max_code=sizes.code_positions,
        latents=sizes.speaker.latents + 2,
        start_text_id=0,
        stop_text_id=1,
        start_code_id=sizes.codes - 2,
        stop_code_id=sizes.codes - 1,
        stop_targets=2,
    )


def of_the_trunk(config: GPTConfig) -> dict[str, Tensor]:
    """The kit's tensors, without numbers, but for those of the conditioning."""
    state = empty_model(config).state_dict()
    return {name: tensor for name, tensor in state.items() if not name.startswith("conditioner.")}


def theirs(name: str) -> str:
    """IndexTTS2's name of the kit's tensor `name`."""
    return released_name(name).removeprefix(GPT)


def latents_for(config: GPTConfig) -> Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.randn(1, config.latents, config.width, generator=random)


def given_latents(tensors: dict[str, Tensor], config: GPTConfig) -> SpeechGPT:
    """The kit's model with the trunk in `tensors`, whose reference is latents (B, K, D) as is."""
    model = SpeechGPT(config)
    model.conditioner = nn.Identity()
    names = of_the_trunk(config)
    model.load_state_dict({name: turned(name, tensors[theirs(name)]) for name in names})
    return model.eval()


def test_the_trunk_is_an_xtts_tensor_for_tensor():
    shapes = indextts2_shapes(TINY)
    found = {}
    for name, tensor in of_the_trunk(trunk_config(TINY)).items():
        found[theirs(name)] = tuple(turned(name, tensor).shape)
    rest = {name: shape for name, shape in shapes.items() if name not in found}
    assert found == {name: shape for name, shape in shapes.items() if name not in rest}
    assert all(name.startswith(CONDITIONING) for name in rest)


def test_two_fifths_of_the_file_compute_the_latents():
    counts = {True: 0, False: 0}
    for name, shape in indextts2_shapes(Sizes()).items():
        counts[name.startswith(CONDITIONING)] += math.prod(shape)
    assert counts == {False: 527_080_675, True: 344_019_964}


@torch.no_grad()
def test_logits_are_gpt2s_where_the_latents_are_given():
    """The row that IndexTTS2's own forward pass makes: START text STOP, START codes STOP."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tensors = random_indextts2()
    config = trunk_config(TINY)
    latents = latents_for(config)
    model = given_latents(tensors, config)
    batch = pack(config, [TEXT], [CODES], latents)
    states = model.hidden(batch)[0]
    text = model.text_head(states[batch.text_indices])
    codes = model.code_head(states[batch.code_indices])

    gpt2 = gpt2_of(transformers, tensors)
    text_in = torch.tensor([0, *TEXT, 1])
    code_in = torch.tensor([config.start_code, *CODES, config.stop_code])
    x = torch.cat(
        (
            latents[0],
            tensors["text_embedding.weight"][text_in]
            + tensors["text_pos_embedding.emb.weight"][: len(text_in)],
            tensors["mel_embedding.weight"][code_in]
            + tensors["mel_pos_embedding.emb.weight"][: len(code_in)],
        )
    )
    norm = tensors["final_norm.weight"], tensors["final_norm.bias"]
    states = gpt2(inputs_embeds=x[None]).last_hidden_state[0, config.latents :]
    states = F.layer_norm(states, states.shape[-1:], *norm)
    text_head = tensors["text_head.weight"], tensors["text_head.bias"]
    code_head = tensors["mel_head.weight"], tensors["mel_head.bias"]
    wanted_text = F.linear(states[: len(text)], *text_head)
    wanted_codes = F.linear(states[len(text_in) :], *code_head)
    assert codes.shape == wanted_codes.shape and codes.std() > 0.1
    assert (codes - wanted_codes).abs().max() < 1e-4
    assert (text - wanted_text).abs().max() < 1e-4


def gpt2_of(transformers, tensors: dict[str, Tensor]):
    """transformers' GPT-2 with the trunk in `tensors`, under the very names, all of it there."""
    gpt2 = transformers.GPT2Model(
        transformers.GPT2Config(
            vocab_size=8,
            n_positions=128,
            n_embd=TINY.width,
            n_layer=TINY.layers,
            n_head=TINY.heads,
        )
    ).eval()
    own = {n.removeprefix("gpt."): t for n, t in tensors.items() if n.startswith("gpt.")}
    missing, unexpected = gpt2.load_state_dict(own, strict=False)
    assert not unexpected and set(missing) == {"wte.weight", "wpe.weight"}
    gpt2.wpe.weight.data.zero_()
    return gpt2


def test_the_cached_decoder_speaks_its_codes_where_the_latents_are_given():
    """Each is the likeliest that a pass over all before it finds."""
    config = trunk_config(TINY)
    latents = latents_for(config)
    tensors = random_indextts2()
    tensors["mel_head.weight"] *= 20  # or one code would be the likeliest wherever it looks
    model = given_latents(tensors, config)
    greedy = GenerateConfig(temperature=0, exact_codes=12)
    found = generate(model, [TEXT], latents, greedy)[0].codes.tolist()
    batch = pack(config, [TEXT], [found], latents)
    with torch.no_grad():
        logits = model.code_head(model.hidden(batch)[0, batch.code_indices])
    logits[:, [config.start_code, config.stop_code]] = float("-inf")
    assert found == logits[: len(found)].argmax(-1).tolist()
    assert len(set(found)) > 3


def test_it_is_distinguished_from_an_xtts(tmp_path):
    folder = write_release(tmp_path)
    write_tensors(folder, random_indextts2())
    with pytest.raises(KitError, match=r"is the GPT of IndexTTS2.*w2v-BERT.*MaskGCT"):
        load_xtts(folder)


def test_no_other_model_is_taken_for_it():
    assert is_indextts2(indextts2_shapes(TINY))
    assert not is_indextts2(SpeechGPT(GPTConfig(layers=1, width=32, heads=1)).state_dict())
    assert not is_indextts2([released_name(n) for n in empty_model(GPTConfig()).state_dict()])
