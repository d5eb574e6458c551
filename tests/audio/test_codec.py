"""However codes come in, the pieces of sound are one utterance, from a state that stays small."""

import itertools
import random

import pytest
import torch
from helpers import CODEC, trained_codec
from torch import Tensor

from kit.audio.codec import AudioStream
from kit.audio.mel_codec import MelCodec

PER_CODE = CODEC.hop_length * CODEC.frames_per_code


@pytest.fixture(scope="module")
def codec() -> MelCodec:
    return trained_codec()[0]


def some_codes(codec: MelCodec, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, codec.vocab_size, (count,), generator=generator)


def cut(codes: Tensor, seed: int) -> list[Tensor]:
    """`codes` in pieces of random length, some of them empty."""
    rng = random.Random(seed)
    ends = sorted(rng.randint(0, len(codes)) for _ in range(seed % 7 * 5))
    return [codes[a:b] for a, b in itertools.pairwise([0, *ends, len(codes)])]


def streamed(stream: AudioStream, pieces: list[Tensor]) -> Tensor:
    return torch.cat([*map(stream.push, pieces), stream.finish()])


@pytest.mark.parametrize("count", [0, 1, 15, 60, 200])
@pytest.mark.parametrize("seed", range(3))
def test_the_pieces_join_to_the_whole(codec, count, seed):
    codes = some_codes(codec, count)
    first, longest = [(8, 64), (1, 1), (3, 20)][seed]
    stream = AudioStream(codec, first=first, longest=longest)
    wave = streamed(stream, cut(codes, seed + 7 * count))
    assert wave.shape == (count * PER_CODE,)
    assert torch.allclose(wave, codec.decode(codes[None])[0], atol=1e-5)


def test_the_first_sound_comes_as_soon_as_it_is_settled_and_pieces_grow_to_the_longest(codec):
    stream, codes = AudioStream(codec, first=5), some_codes(codec, 100)
    counts = [len(stream.push(code)) for code in codes.split(1)]
    assert not any(counts[: codec.context + 4])
    assert counts[codec.context + 4] == 5 * PER_CODE
    stream = AudioStream(codec, first=2, longest=16)
    lengths = [len(stream.push(code)) // PER_CODE for code in some_codes(codec, 120).split(1)]
    assert [n for n in lengths if n][:6] == [2, 4, 8, 16, 16, 16]


def test_the_state_does_not_grow(codec):
    stream = AudioStream(codec, first=2, longest=16)
    for codes in some_codes(codec, 1000).split(5):
        stream.push(codes)
        assert len(stream.codes) <= 2 * codec.context + 16 + 5


def test_after_the_end_another_utterance_begins(codec):
    stream = AudioStream(codec)
    for count in (70, 0, 5, 70):
        codes = some_codes(codec, count)
        wave = streamed(stream, [codes])
        assert torch.allclose(wave, codec.decode(codes[None])[0], atol=1e-5)


def test_sound_made_of_states_comes_in_pieces_that_join_too(codec):
    torch.manual_seed(0)
    stated = codec.with_state_inputs(5)
    torch.nn.init.normal_(stated.from_state.weight)
    codes, states = some_codes(codec, 70), torch.randn(70, 5)
    whole = stated.decode(codes[None], states=states[None])[0]
    stream = AudioStream(stated, speaker=torch.zeros(0))
    pieces = [stream.push(*pair) for pair in zip(codes.split(3), states.split(3))]
    wave = torch.cat([*pieces, stream.finish()])
    assert wave.shape == whole.shape and torch.allclose(wave, whole, atol=1e-5)
    assert not torch.allclose(whole, stated.decode(codes[None])[0], atol=1e-3)
