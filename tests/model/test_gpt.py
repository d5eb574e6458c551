"""The model against references nobody here wrote, and the guarantees of packed rows."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import GPT, random_rows, tiny_model
from torch import nn

from kit.base.errors import KitError
from kit.model.gpt import Trunk, attention_weights, explicit_attention, summed_loss, weighted_loss
from kit.model.sequence import EffectiveBatch, pack
from kit.settings import GPTConfig
from kit.tuning.memory_plan import count_parameters

TRUNK = {"layers": 30, "width": 1024, "heads": 16, "text_vocab": 6681, "code_vocab": 1026}
CONDITIONER = {"latents": 32, "cond_blocks": 6, "perceiver_layers": 2, "perceiver_heads": 8}
XTTS_V2 = GPTConfig(**TRUNK, **CONDITIONER, max_text=404, max_code=608, perceiver_head_width=64)


def rows(count=4):
    return random_rows(GPT, count)


def code_logits(model, batch):
    return model.code_head(model.hidden(batch))


def gradients(model, parts) -> torch.Tensor:
    """All gradients of the token-weighted loss over micro-batches, as one vector."""
    model.zero_grad()
    text, code = (sum(len(getattr(p, f"{k}_targets")) for p in parts) for k in ("text", "code"))
    for part in parts:
        weighted_loss(model.config, model(part), text, code).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_the_published_size_has_the_published_number_of_parameters():
    assert count_parameters(XTTS_V2) == 441_018_563


def test_attention_weights_are_those_of_the_layers():
    model, batch = tiny_model(dropout=0.5), pack(GPT, *rows())
    weights = model.attention(batch)
    assert not model.training, "without dropout"
    layer, x = model.gpt.h[0], model.inputs(batch)
    attended = layer.attn(layer.ln_1(x))
    values = layer.attn.qkv(layer.ln_1(x))[2]
    by_hand = layer.attn.c_proj((weights[0] @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(by_hand, attended)
    length = GPT.latents + batch.tokens.shape[1]
    for each in weights:
        assert each.shape == (len(batch.tokens), GPT.heads, length, length)
        torch.testing.assert_close(each.sum(-1), torch.ones(each.shape[:3]))
        assert not each.triu(1).any(), "nobody looks ahead"
    assert len(weights) == GPT.layers


def test_fused_attention_is_explicit_softmax():
    model, batch = tiny_model(), pack(GPT, *rows())
    both = []
    for fused in (True, False):
        for layer in model.gpt.h:
            layer.attn.fused = fused
        both.append((code_logits(model, batch), gradients(model, [batch])))
    (logits, grads), (expected_logits, expected_grads) = both
    assert (logits - expected_logits).abs().max() < 1e-5
    assert (grads - expected_grads).norm() < 1e-5 * expected_grads.norm()


def test_explicit_attention_of_large_queries_stays_within_fp16():
    """Their product is beyond its range, and an eighth of it is not."""
    q = torch.full((1, 1, 3, 64), 40.0)
    k = q + torch.arange(3.0)[:, None]
    v = torch.randn(1, 1, 3, 64)
    y = explicit_attention(q.half(), k.half(), v.half(), is_causal=True)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.allclose(y.float(), expected, atol=0.02)


def test_the_causal_mask_within_the_matmul_changes_no_bit():
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 2, 7, 64)  # of a head of 64 numbers, whose scale of 1/8 is exact
    later = torch.ones(7, 7, dtype=torch.bool).triu(1)
    expected = ((q / 8) @ k.mT).masked_fill(later, float("-inf")).softmax(-1)
    with torch.inference_mode():
        assert attention_weights(q, k, is_causal=True).equal(expected)
    attention_weights(q.requires_grad_(), k, is_causal=True).sum().backward()


def test_dropout_of_attention_keeps_the_mean():
    q = torch.randn(1, 2, 400, 8)
    y = explicit_attention(q, q, torch.ones_like(q), dropout_p=0.5, is_causal=True)
    assert y.mean().item() == pytest.approx(1, abs=0.05)


def test_losses_of_any_number_of_targets_need_few_shapes():
    torch.manual_seed(0)
    head, shapes = nn.Linear(8, 5), set()
    head.register_forward_hook(lambda layer, inputs, logits: shapes.add(logits.shape))
    states = torch.randn(300, 8)
    for count in (1, 64, 65, 180):
        at, targets = torch.randint(300, (count,)), torch.randint(5, (count,))
        actual = summed_loss(head, states, at, targets)
        logits = F.linear(states[at], head.weight, head.bias)
        torch.testing.assert_close(actual, F.cross_entropy(logits, targets, reduction="sum"))
    assert shapes == {(64, 5), (128, 5), (192, 5)}


def test_the_first_loss_is_that_of_guessing():
    torch.manual_seed(0)
    model = tiny_model(code_vocab=500).requires_grad_(False)
    model.init_weights()
    config = dataclasses.replace(GPT, code_vocab=500)
    batch = pack(config, *random_rows(config, 8))
    per_code = model(batch)[1].item() / len(batch.code_targets)
    assert per_code == pytest.approx(np.log(500), rel=0.02)


def test_a_row_without_text_stop_is_one_in_which_it_is_masked():
    model = tiny_model(text_stop_input=False)
    texts, codes, cond = rows(1)
    with_stop = pack(dataclasses.replace(GPT, text_stop_input=True), texts, codes, cond)
    x, stop = model.inputs(with_stop), GPT.latents + 1 + len(texts[0])
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    seen[stop + 1 :, stop] = False  # no query sees text STOP but itself
    for layer in model.gpt.h:
        q, k, v = layer.attn.qkv(layer.ln_1(x))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + layer.attn.c_proj(attended.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.ln_2(x))
    x = model.final_norm(model.gpt.ln_f(x))
    unseen = torch.cat((x[:, GPT.latents : stop], x[:, stop + 1 :]), dim=1)
    batch = pack(model.config, texts, codes, cond)
    torch.testing.assert_close(model.hidden(batch), unseen)
    assert batch.text_targets[-1] == GPT.stop_text, "it is still learnt"


def trunk_reference(trunk: Trunk, config: GPTConfig) -> nn.Module:
    """torch's own transformer with the trunk's weights."""
    approximate = {"gelu_new": "tanh", "gelu": "none"}[config.activation_function]
    shape = {"d_model": config.width, "nhead": config.heads, "dim_feedforward": 4 * config.width}
    how = {"activation": lambda x: F.gelu(x, approximate=approximate), "norm_first": True}
    layer = nn.TransformerEncoderLayer(**shape, **how, dropout=0, batch_first=True)
    reference = nn.TransformerEncoder(layer, config.layers, trunk.ln_f, enable_nested_tensor=False)
    for mine, theirs in zip(trunk.h, reference.layers):
        theirs.self_attn.in_proj_weight.data = mine.attn.c_attn.weight.data
        theirs.self_attn.in_proj_bias.data = mine.attn.c_attn.bias.data
        own = (mine.attn.c_proj, mine.mlp.c_fc, mine.mlp.c_proj, mine.ln_1, mine.ln_2)
        out = theirs.self_attn.out_proj
        others = (out, theirs.linear1, theirs.linear2, theirs.norm1, theirs.norm2)
        for a, b in zip(own, others):
            b.load_state_dict(a.state_dict())
    return reference


@pytest.mark.parametrize("activation", ["gelu_new", "gelu"])
def test_the_trunk_is_torchs_own_transformer(activation):
    model = tiny_model(activation_function=activation)
    trunk, x = model.gpt.train(), torch.randn(2, 13, GPT.width)
    mask = nn.Transformer.generate_square_subsequent_mask(13)
    expected = trunk_reference(trunk, model.config)(x, mask=mask, is_causal=True)
    assert (trunk(x) - expected).abs().max() < 1e-5


def test_the_loss_is_cross_entropy_of_the_next_token_by_hand():
    model, (texts, codes, cond) = tiny_model(), rows(1)
    c, batch = GPT, pack(GPT, texts, codes, cond)
    h = model.hidden(batch)[0]
    text = [*texts[0], c.text_vocab - 1]
    code = [*codes[0], *[c.stop_code] * 4]
    summed = functools.partial(F.cross_entropy, reduction="sum")
    text_loss = summed(model.text_head(h)[: len(text)], torch.tensor(text))
    code_loss = summed(model.code_head(h[len(text) + 1 :])[: len(code)], torch.tensor(code))
    expected = (text_loss, code_loss)
    sums = model(batch)
    torch.testing.assert_close(sums, expected)
    loss = weighted_loss(c, sums, len(text), len(code))
    torch.testing.assert_close(loss, 0.01 * expected[0] / len(text) + expected[1] / len(code))


def test_text_and_reference_reach_the_codes():
    model, (texts, codes, cond) = tiny_model(), rows(1)
    before = code_logits(model, pack(GPT, texts, codes, cond))[0, -1]
    other_text = [[(t + 1) % 18 for t in texts[0]]]
    for changed in ((other_text, codes, cond), (texts, codes, torch.randn_like(cond))):
        assert not torch.allclose(before, code_logits(model, pack(GPT, *changed))[0, -1], atol=1e-5)


def test_logits_do_not_depend_on_padding_and_other_rows():
    model, (texts, codes, cond) = tiny_model(), rows(5)
    together = code_logits(model, pack(GPT, texts, codes, cond, pad_to=60))
    for i in range(5):
        row = slice(i, i + 1)
        alone = code_logits(model, pack(GPT, texts[row], codes[row], cond[row]))[0]
        assert (together[i, : len(alone)] - alone).abs().max() < 1e-5


@pytest.mark.parametrize("cuts", [(1,) * 6, (5, 1), (1, 2, 3)], ids=str)
def test_any_split_of_a_batch_gives_the_gradients_of_the_whole(cuts):
    model, (texts, codes, cond) = tiny_model(), rows(6)
    whole = gradients(model, [pack(GPT, texts, codes, cond)])
    ends = [sum(cuts[: i + 1]) for i in range(len(cuts))]
    spans = [slice(end - size, end) for end, size in zip(ends, cuts)]
    split = gradients(model, [pack(GPT, texts[s], codes[s], cond[s]) for s in spans])
    assert (split - whole).norm() <= 1e-6 * whole.norm()


@pytest.mark.parametrize(("text", "codes"), [(19, 5), (5, 37)])
def test_rows_that_do_not_fit_are_refused_with_the_limits(text, codes):
    with pytest.raises(ValueError, match=r"longer than the model's 20 text and 40 code positions"):
        pack(GPT, [[1] * text], [[1] * codes], torch.zeros(1, 8, 4))
    batch = pack(GPT, [[1] * 18], [[1] * 36], torch.zeros(1, 8, 4))
    assert batch.tokens.shape == (1, 60) and torch.isfinite(tiny_model()(batch)[1])


def packed_by_hand(config: GPTConfig, texts, codes, width: int) -> dict[str, list]:
    """The sequence of each row, written out in plain loops."""
    packed = {name: [] for name in ("tokens", "positions")}
    packed |= {f"{kind}_{what}": [] for kind in ("text", "code") for what in ("indices", "targets")}
    for row, (text, code) in enumerate(zip(texts, codes)):
        text_in = [config.start_text, *text, *[config.stop_text] * config.text_stop_input]
        code_in = [config.start_code, *code, *[config.stop_code] * (config.stop_targets - 1)]
        tokens = text_in + [config.text_vocab + c for c in code_in]
        positions = [*range(len(text_in)), *(config.max_text + i for i in range(len(code_in)))]
        padding = [0] * (width - len(tokens))
        packed["tokens"].append(tokens + padding)
        packed["positions"].append(positions + padding)
        packed["text_indices"] += [row * width + i for i in range(len(text) + 1)]
        packed["text_targets"] += [*text, config.stop_text]
        first = row * width + len(text_in)
        packed["code_indices"] += range(first, first + len(code_in))
        packed["code_targets"] += [*code, *[config.stop_code] * config.stop_targets]
    return packed


@pytest.mark.parametrize("stop", [True, False])
@pytest.mark.parametrize(("stop_targets", "width"), [(1, 60), (4, 60), (4, 70)])
def test_packed_rows_are_those_of_plain_loops(stop, stop_targets, width):
    config = dataclasses.replace(GPT, text_stop_input=stop, stop_targets=stop_targets)
    texts, codes, cond = rows(5)
    texts[0] = codes[1] = []
    arrays = [[np.array(ids, dtype=np.int32) for ids in column] for column in (texts, codes)]
    expected = packed_by_hand(config, texts, codes, width)
    for columns in ((texts, codes), arrays):
        batch = pack(config, *columns, cond, pad_to=width)
        assert {name: getattr(batch, name).tolist() for name in expected} == expected
    counts = EffectiveBatch(micro=[batch, batch], position={})
    added = 1 + stop + stop_targets  # START and STOP of the text, START and STOP of the codes
    assert counts.tokens == 2 * sum(len(t) + len(c) + added for t, c in zip(texts, codes))
    assert counts.text_targets == 2 * len(expected["text_targets"])
    assert counts.code_targets == 2 * len(expected["code_targets"])


def test_start_and_stop_ids_are_those_of_the_configuration():
    ids = {"start_text_id": 7, "stop_text_id": 0, "start_code_id": 3, "stop_code_id": 31}
    config = dataclasses.replace(GPT, **ids)
    batch = pack(config, [[5, 6]], [[1, 2]], torch.zeros(1, 8, 4))
    codes = [config.text_vocab + code for code in (3, 1, 2, 31, 31, 31)]
    assert batch.tokens.tolist() == [[7, 5, 6, 0, *codes]]
    assert batch.text_targets.tolist() == [5, 6, 0]
    assert batch.code_targets.tolist() == [1, 2, 31, 31, 31, 31]


WRONG = [("start_text_id", {"start_text_id": 4, "stop_text_id": 4}), ("width", {"heads": 5})]
WRONG += [("start_code_id", {"stop_code_id": 30})]  # where START is


@pytest.mark.parametrize(("field", "over"), WRONG)
def test_impossible_ids_and_shapes_are_refused(field, over):
    with pytest.raises(KitError, match=f"GPTConfig.{field}"):
        dataclasses.replace(GPT, **over)
