"""The kit's GPT with the weights of an XTTS-v2 against coqui-tts's own classes, at random weights.

Small sizes, and the released one, 30 x 1024, which takes minutes (`-m 'not full_size'` leaves it
out).
"""

import shutil

import pytest
import torch
from coqui import FULL, VARIED, coqui_loaded, coqui_xtts, opinionated, write_coqui
from torch import Tensor

from kit.extras.xtts_v2.model import load_xtts, save_xtts
from kit.extras.xtts_v2.tensor_names import to_released
from kit.inference.generate import generate
from kit.model.gpt import SpeechGPT, weighted_loss
from kit.model.sequence import pack
from kit.settings import GenerateConfig

HOP = 1024  # samples of a code
STEPS = 40


def rows(config, count: int = 3):
    """Text ids, codes and references of unequal lengths."""
    random = torch.Generator().manual_seed(3)
    texts = []
    codes = []
    for i in range(count):
        texts.append(torch.randint(8, config.text_vocab - 4, (4 + 3 * i,), generator=random))
        codes.append(torch.randint(0, config.start_code, (20 - 5 * i,), generator=random))
    mels = torch.randn(count, config.n_mels, 50, generator=random)
    return [t.tolist() for t in texts], [c.tolist() for c in codes], mels


def padded(ids: list[list[int]], fill: int) -> tuple[Tensor, Tensor]:
    """Rows of ids in one grid, and their lengths."""
    longest = max(map(len, ids))
    grid = torch.tensor([row + [fill] * (longest - len(row)) for row in ids])
    return grid, torch.tensor([len(row) for row in ids])


def coqui_losses(gpt, texts, codes, mels) -> tuple[Tensor, Tensor, Tensor]:
    """Mean text loss, mean code loss and code logits (B, V, S), as its trainer asks for them."""
    # Its data set fills texts with 0, which is STOP in its vocabularies and the target of each row.
    text, text_lengths = padded(texts, gpt.stop_text_token)
    code, code_lengths = padded(codes, 9)  # a real code: forgetting a mask would show
    return gpt(text, text_lengths, code, code_lengths * HOP, cond_mels=mels[:, None])


def kit_losses(model: SpeechGPT, texts, codes, mels) -> tuple[Tensor, Tensor]:
    batch = pack(model.config, texts, codes, mels)
    text, code = model(batch)
    return text / len(batch.text_targets), code / len(batch.code_targets)


def require_same_logits(gpt, model: SpeechGPT) -> float:
    """Code logits and both losses within 1e-4; returns the largest difference of a logit."""
    largest = 0.0
    texts, codes, mels = rows(model.config)
    with torch.no_grad():
        text_loss, code_loss, wanted = coqui_losses(gpt, texts, codes, mels)
        found_text, found_code = kit_losses(model, texts, codes, mels)
        for i, row in enumerate(codes):
            batch = pack(model.config, texts[i : i + 1], [row], mels[i : i + 1])
            states = model.hidden(batch)[0, batch.code_indices]
            theirs = wanted[i].T[: len(row) + 4]
            largest = max(largest, float((model.code_head(states) - theirs).abs().max()))
    assert largest < 1e-4
    assert wanted.std() > 0.1, "or the tolerance would say nothing"
    assert abs(found_text - text_loss) < 1e-4
    assert abs(found_code - code_loss) < 1e-4
    return largest


def require_same_gradients(gpt, model: SpeechGPT) -> float:
    """Gradients of every weight within 1e-4 of their size; returns the largest share."""
    largest = 0.0
    texts, codes, mels = rows(model.config)
    text_loss, code_loss, _ = coqui_losses(gpt, texts, codes, mels)
    gpt.zero_grad()
    (0.01 * text_loss + code_loss).backward()
    batch = pack(model.config, texts, codes, mels)
    model.zero_grad()
    counts = len(batch.text_targets), len(batch.code_targets)
    weighted_loss(model.config, model(batch), *counts).backward()
    actual = to_released({name: p.grad for name, p in model.named_parameters()})
    wanted = {f"gpt.{name}": p.grad for name, p in gpt.named_parameters()}
    assert actual.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient.norm() > 0, name
        share = float((actual[name] - gradient).norm() / gradient.norm())
        assert share < 1e-4, name
        largest = max(largest, share)
    return largest


def require_same_latents(gpt, model: SpeechGPT) -> float:
    """What a reference becomes within 1e-4; returns the largest difference."""
    mels = torch.randn(2, 80, 130, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        wanted = gpt.get_style_emb(mels).mT
        largest = float((model.conditioner(mels) - wanted).abs().max())
    assert largest < 1e-4
    return largest


def require_same_codes(gpt, model: SpeechGPT, steps: int = STEPS) -> list[int]:
    """Greedy codes of the kit's cached decoder against `generate` of coqui-tts; returns them."""
    texts, _, mels = rows(model.config, 1)
    with torch.inference_mode():
        latents = gpt.get_style_emb(mels).mT
        asked = {"do_sample": False, "num_beams": 1, "min_new_tokens": steps}
        asked["suppress_tokens"] = [gpt.start_audio_token]  # no sound; the kit never draws it
        gpt.init_gpt_for_inference()
        wanted = gpt.generate(latents, torch.tensor(texts), max_new_tokens=steps, **asked)[0]
    greedy = GenerateConfig(temperature=0, exact_codes=steps)
    actual = generate(model, texts, mels, greedy)[0].codes
    assert actual.tolist() == wanted.tolist()
    return actual.tolist()


def test_logits_are_those_of_coqui(small):
    require_same_logits(small[1].gpt, load_xtts(small[0]).model)


def test_gradients_are_those_of_coqui(small):
    require_same_gradients(small[1].gpt, load_xtts(small[0]).model)


def test_latents_are_those_of_coqui(small):
    require_same_latents(small[1].gpt, load_xtts(small[0]).model)


def test_dropout_falls_in_the_same_places(small):
    """With the same random numbers, state for state."""
    gpt = small[1].gpt
    model = load_xtts(small[0]).model
    x = torch.randn(2, 17, model.config.width)
    try:
        gpt.train()
        gpt.gpt.set_attn_implementation("eager")
        torch.manual_seed(7)
        wanted = gpt.gpt(inputs_embeds=x).last_hidden_state
    finally:
        gpt.eval()
        gpt.gpt.set_attn_implementation("sdpa")
    for layer in model.gpt.h:
        layer.attn.fused = False
    torch.manual_seed(7)
    assert (model.gpt.train()(x) - wanted).abs().max() < 1e-4
    assert model.config.dropout == 0.1


def test_greedy_codes_are_those_of_coqui(tmp_path):
    theirs = coqui_xtts(tmp_path, VARIED)
    opinionated(theirs.gpt)
    model = load_xtts(write_coqui(tmp_path, theirs)).model
    codes = require_same_codes(theirs.gpt, model)
    assert len(codes) == STEPS and len(set(codes)) > 10


def test_a_round_trip_leaves_the_logits(small, tmp_path):
    """coqui-tts's file, the kit's model, the kit's file, coqui-tts's model."""
    xtts = load_xtts(small[0])
    with torch.no_grad():
        xtts.model.code_head.bias += 0.5  # as if it had been trained
    save_xtts(xtts, tmp_path)
    again = coqui_loaded(tmp_path)
    assert again.gpt.start_text_token == xtts.vocabulary.start
    assert again.gpt.stop_text_token == xtts.vocabulary.stop
    require_same_logits(again.gpt, xtts.model)
    require_same_codes(again.gpt, xtts.model, steps=10)
    for name, tensor in small[1].state_dict().items():
        if not name.startswith("gpt."):
            assert torch.equal(again.state_dict()[name], tensor), name


def test_a_half_precision_export_is_loaded_strictly(small, tmp_path):
    xtts = load_xtts(small[0])
    save_xtts(xtts, tmp_path, dtype=torch.float16)
    again = coqui_loaded(tmp_path)
    for name, weight in to_released(xtts.model.half().float().state_dict()).items():
        assert torch.equal(again.state_dict()[name], weight), name


@pytest.fixture
def room(tmp_path):
    """A folder for some GB, which does not stay."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.full_size(gib=10)
def test_the_released_size(room):
    """30 x 1024: parameters, the file's size, logits, gradients, latents, codes, both ways."""
    theirs = coqui_xtts(room / "coqui", FULL)
    xtts = load_xtts(write_coqui(room / "coqui", theirs))
    assert sum(p.numel() for p in xtts.model.parameters()) == 441_018_563
    print("logits", require_same_logits(theirs.gpt, xtts.model))
    print("latents", require_same_latents(theirs.gpt, xtts.model))
    print("gradients", require_same_gradients(theirs.gpt, xtts.model))
    theirs.gpt.zero_grad()
    del xtts
    opinionated(theirs.gpt)
    xtts = load_xtts(write_coqui(room / "coqui", theirs))
    codes = require_same_codes(theirs.gpt, xtts.model)
    print("codes", codes)
    assert len(set(codes)) > 10
    del theirs
    save_xtts(xtts, room / "kit")
    assert (room / "kit" / "model.pth").stat().st_size == pytest.approx(1_867_929_118, rel=1e-3)
    assert require_same_codes(coqui_loaded(room / "kit").gpt, xtts.model) == codes
