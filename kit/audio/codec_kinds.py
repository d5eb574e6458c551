"""Which codecs there are: chosen by name, made, kept in a file. The one place that lists them.

A preset's section `codec` names its kind, and so does a codec's file.
"""

import dataclasses
from pathlib import Path

from kit.audio.codec import Codec, CodecConfig, CodecError
from kit.audio.mel_codec import MelCodec, MelCodecConfig
from kit.audio.neucodec import NeuCodec
from kit.audio.neucodec_release import NeuCodecConfig
from kit.audio.xtts_codec import XTTSCodec, XTTSCodecConfig
from kit.base.config import ConfigError, build
from kit.base.weights_file import ForeignError, load_module, save_module
from kit.base.words import nearest

# Kind -> its settings, and what is made of them.
CODECS: dict[str, tuple[type, type]] = {
    "mel": (MelCodecConfig, MelCodec),
    "xtts": (XTTSCodecConfig, XTTSCodec),
    "neucodec": (NeuCodecConfig, NeuCodec),
}
DEFAULT = "mel"  # where none is named


def codec_config(values: dict) -> CodecConfig:
    """The settings in plain `values`. Raises ConfigError for an unknown kind, key or value."""
    kind = str(values.get("kind", DEFAULT))
    if kind not in CODECS:
        raise ConfigError(f"There is no codec `{kind}`.{nearest(kind, CODECS)}")
    return build(CODECS[kind][0], values)


def make_codec(config: CodecConfig) -> Codec:
    """The codec that `config` describes, untrained."""
    return CODECS[config.kind][1](config)


def save_codec(codec: Codec, path: Path) -> None:
    """Weights and configuration in one file, written atomically."""
    save_module(path, codec, config=dataclasses.asdict(codec.config))


def load_codec(path: Path, cure: str = "run notebook 01_data_prep.") -> Codec:
    """The codec saved at `path`, in eval mode.

    Raises CodecError, with `cure`, when it is missing, damaged, or of a kind not in `CODECS`.
    """
    return load_module(path, _from_header, CodecError, cure)


def _from_header(header: dict) -> Codec:
    kind = header["config"].get("kind", DEFAULT)
    if kind not in CODECS:
        raise ForeignError(f"a codec of the kind `{kind}`, which is not known here")
    return make_codec(codec_config(header["config"]))
