"""Audio <-> codes with a released NeuCodec: 50 codes a second, of 65,536; output at 24 kHz.

It is not trained here. The decoder (decoder.py), 188 million parameters, is the kit's own and is in
the codec file of a run and a voice. The encoder (encoder.py), 442 million, is that of transformers
and is read from the release when a recording must be encoded. So speaking does not need
transformers.

Shapes: B batch, L samples, N codes, n samples of a window.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor, nn

from kit.audio.codec import Codec
from kit.base.errors import KitError
from kit.releases.neucodec.decoder import HOP, LEVELS, WINDOW, DigitsToLatents, NeuCodecDecoder
from kit.releases.neucodec.encoder import (
    ENCODER_SAMPLE_RATE,
    encode_clip,
    library_tensors,
    load_encoder,
    require_encoder,
)
from kit.releases.neucodec.files import (
    LICENCE,
    NeuCodecConfig,
    neucodec_folder,
    read_tensors,
    require_release_tensors,
    require_version,
)

BESIDE = WINDOW // HOP // 2  # codes to either side whose windows overlap the samples of a code


class NeuCodec(nn.Module, Codec):
    """The codec. Its attributes are named so that its tensors have the names of the release."""

    config_class = NeuCodecConfig
    sample_rate = 24_000
    input_sample_rate = ENCODER_SAMPLE_RATE
    vocab_size = math.prod(LEVELS)

    def __init__(self, config: NeuCodecConfig):
        super().__init__()
        c = config
        self.config = config
        self.quantizer = DigitsToLatents(c.latent_width)
        self.acoustic_decoder = NeuCodecDecoder(c.latent_width, c.width, c.layers, c.heads)

    @property
    def frame_rate(self) -> float:
        """Codes per second."""
        return self.config.frame_rate

    @property
    def context(self) -> int:
        """The number of codes to either side that the samples of a code can depend on."""
        c = self.config
        return BESIDE + c.block - 1 + max(c.before, c.after)

    @property
    def lookahead(self) -> int:
        return BESIDE + self.config.block - 1 + self.config.after

    def load_release(self, progress: Callable) -> str:
        """Load the released weights, fetched if missing; return a description of them.

        Raises KitError if transformers is missing, or for a file that is damaged or of another
        model or version; DownloadError and DiskError if it cannot be fetched.
        """
        require_encoder()  # before anything is fetched
        folder = neucodec_folder(self.config, progress)
        sha256 = require_version(folder, self.config)
        require_release_tensors(folder, library_tensors(self.config))
        self.load_state_dict(read_tensors(folder, list(self.state_dict())))
        self.config = dataclasses.replace(self.config, sha256=sha256)
        return f"the released NeuCodec ({LICENCE}, SHA-256 {sha256[:12]}) in {folder}"

    @cached_property  # not a submodule, so it is not saved in the codec's file
    def encoder(self) -> nn.Module:
        """The encoder, read from the release. Raises as `load_release` does."""
        require_encoder()
        folder = neucodec_folder(self.config)
        require_version(folder, self.config)
        require_release_tensors(folder, library_tensors(self.config))
        return load_encoder(folder, self.config).to(self.device)

    def _apply(self, fn: Callable, recurse: bool = True) -> "NeuCodec":
        """As `nn.Module._apply`, by which `to` works: the encoder moves along."""
        if "encoder" in vars(self):  # it has been loaded
            self.encoder._apply(fn, recurse)
        return super()._apply(fn, recurse)

    @torch.inference_mode()
    def encode(self, wave: Tensor) -> Tensor:
        encoder = self.encoder
        return torch.stack([encode_clip(encoder, row) for row in wave])

    @property
    def device(self) -> torch.device:
        """Where the codec is."""
        return self.quantizer.project_out.weight.device

    @torch.inference_mode()
    def decode(self, codes: Tensor, first: int = 0) -> Tensor:
        codes = codes.to(self.device)
        if not codes.numel():
            return codes.new_zeros(len(codes), 0, dtype=torch.float32)
        if not 0 <= int(codes.min()) <= int(codes.max()) < self.vocab_size:
            raise KitError(f"Codes must lie in 0..{self.vocab_size - 1}, got {codes.unique()}.")
        spans = block_spans(first, codes.shape[1], self.config.block)
        windows = torch.cat([self._windows(codes, start, end) for start, end in spans], dim=1)
        return self.acoustic_decoder.head.sound(windows)

    def _windows(self, codes: Tensor, start: int, end: int) -> Tensor:
        """Decode codes[:, start:end] to windows (B, end - start, n), with context around them."""
        begin = max(0, start - self.config.before)
        around = codes[:, begin : end + self.config.after]
        windows = self.acoustic_decoder(self.quantizer(around))
        return windows[:, start - begin : end - begin]


def block_spans(first: int, count: int, block: int) -> list[tuple[int, int]]:
    """Split `count` codes where positions in the utterance are multiples of `block`.

    The first code is at position `first`. Returns (start, end) pairs, counted from that code.
    """
    cuts = range(block - first % block, count, block)
    starts = [0, *cuts]
    return list(zip(starts, [*cuts, count], strict=True))
