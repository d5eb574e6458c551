"""The kit's GPT with the weights of an IndexTTS2 against the package's own classes."""

import pytest
import torch
import torch.nn.functional as F
from published_indextts2 import FULL, package_model
from torch import Tensor

from kit.extras.indextts2.model import file_name, gpt_config
from kit.extras.xtts_v2.model import build_model
from kit.extras.xtts_v2.tensor_names import to_released
from kit.inference.generate import generate
from kit.model.gpt import SpeechGPT, weighted_loss
from kit.model.sequence import pack
from kit.settings import GenerateConfig

FRAMES = 60
STEPS = 40


def kit_model(theirs, gpt: dict) -> SpeechGPT:
    config = gpt_config({"gpt": gpt}, "config.yaml")
    return build_model(theirs.state_dict(), config, "the release", "IndexTTS2", file_name)


def row(model: SpeechGPT, seed: int = 3) -> tuple[list[int], list[int], Tensor]:
    """Text ids, codes and features of one utterance."""
    random = torch.Generator().manual_seed(seed)
    c = model.config
    text = torch.randint(3, c.text_vocab - 1, (9,), generator=random)
    codes = torch.randint(0, c.start_code, (20,), generator=random)
    return text.tolist(), codes.tolist(), torch.randn(1, 1024, FRAMES, generator=random)


def package_latents(theirs, features: Tensor) -> Tensor:
    """The 34 latents, as `inference_speech` puts them together."""
    rows = len(features)
    length = torch.full((rows,), features.shape[-1])
    speaker = theirs.get_conditioning(features, length)
    emotion = theirs.get_emovec(features.mT, length)
    lengths = theirs.speed_emb(torch.tensor([[1, 0]])).expand(rows, -1, -1)
    return torch.cat((speaker + emotion[:, None], lengths), dim=1)


def package_logits(theirs, text, codes, features) -> tuple[Tensor, Tensor]:
    """Text and code logits (1, V, S) of the rows that its forward pass makes."""
    latents = package_latents(theirs, features)
    text_in = torch.tensor([[theirs.start_text_token, *text, theirs.stop_text_token]])
    code_in = torch.tensor([[theirs.start_mel_token, *codes, theirs.stop_mel_token]])
    text_in = theirs.text_embedding(text_in) + theirs.text_pos_embedding(text_in)
    code_in = theirs.mel_embedding(code_in) + theirs.mel_pos_embedding(code_in)
    heads = theirs.text_head, theirs.mel_head
    return theirs.get_logits(latents, text_in, heads[0], code_in, heads[1])


def require_same_logits(theirs, model: SpeechGPT) -> float:
    text, codes, features = row(model)
    batch = pack(model.config, [text], [codes], features)
    with torch.no_grad():
        latents = package_latents(theirs, features)
        assert (model.conditioner(features) - latents).abs().max() < 1e-4
        wanted_text, wanted = package_logits(theirs, text, codes, features)
        states = model.hidden(batch)[0]
        largest = (model.code_head(states[batch.code_indices]) - wanted[0].T).abs().max()
        found_text = model.text_head(states[batch.text_indices])
    assert (found_text - wanted_text[0].T[: len(found_text)]).abs().max() < 1e-4
    assert wanted.std() > 0.1 and largest < 1e-4
    return float(largest)


def require_same_gradients(theirs, model: SpeechGPT) -> float:
    text, codes, features = row(model)
    text_logits, code_logits = package_logits(theirs, text, codes, features)
    text_targets = torch.tensor([[*text, 1]])
    code_targets = torch.tensor([[*codes, *[theirs.stop_mel_token] * 2]])
    theirs.zero_grad()
    text_loss = F.cross_entropy(text_logits[:, :, :-1], text_targets)
    (0.01 * text_loss + F.cross_entropy(code_logits, code_targets)).backward()
    batch = pack(model.config, [text], [codes], features)
    model.zero_grad()
    counts = len(batch.text_targets), len(batch.code_targets)
    weighted_loss(model.config, model(batch), *counts).backward()
    actual = to_released({n: p.grad for n, p in model.named_parameters()}, file_name)
    wanted = {name: p.grad for name, p in theirs.named_parameters()}
    assert actual.keys() == wanted.keys()
    largest = 0.0
    for name, gradient in wanted.items():
        if name.endswith("linear_k.bias"):  # adds the same to all scores of a query: 0 but rounding
            continue
        assert gradient.norm() > 0, name
        share = float((actual[name] - gradient).norm() / gradient.norm())
        assert share < 1e-4, name
        largest = max(largest, share)
    return largest


def package_codes(theirs, text, features, steps: int = STEPS) -> list[int]:
    if not hasattr(theirs, "inference_model"):
        theirs.post_init_gpt2_config(kv_cache=True)
    with torch.inference_mode():
        codes, _ = theirs.inference_speech(
            features.mT,
            torch.tensor([text]),
            cond_lengths=torch.tensor([features.shape[-1]]),
            emo_cond_lengths=torch.tensor([features.shape[-1]]),
            do_sample=False,
            num_beams=1,
            max_generate_length=steps,
            suppress_tokens=[theirs.start_mel_token, theirs.stop_mel_token],
        )
    return codes[0].tolist()


def kit_codes(model: SpeechGPT, text, features, steps: int = STEPS) -> list[int]:
    greedy = GenerateConfig(temperature=0, exact_codes=steps)
    return generate(model, [text], features, greedy)[0].codes.tolist()


def require_same_codes(theirs, model: SpeechGPT, steps: int = STEPS) -> None:
    text, _, features = row(model)
    actual = kit_codes(model, text, features, steps)
    assert actual == package_codes(theirs, text, features, steps)
    assert len(set(actual)) > 3


def test_logits_and_latents_are_those_of_the_package(small):
    require_same_logits(small[1], kit_model(small[1], small_gpt()))


def test_gradients_are_those_of_the_package(small):
    require_same_gradients(small[1], kit_model(small[1], small_gpt()))


def test_greedy_codes_are_those_of_its_generation(small):
    """Whose first code has position 2, where a pass over all of them gives it 1."""
    require_same_codes(small[1], kit_model(small[1], small_gpt()))


def small_gpt() -> dict:
    from published_indextts2 import SMALL

    return SMALL


@pytest.mark.full_size(gib=17)
def test_it_is_the_package_at_full_size():
    theirs = package_model(FULL)
    model = kit_model(theirs, FULL)
    print("largest difference of a logit:", require_same_logits(theirs, model))
    print("largest share of a gradient:", require_same_gradients(theirs, model))
    require_same_codes(theirs, model, 12)
