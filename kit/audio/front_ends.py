"""Which log-mels there are for a voice's references: a preset's section `front_end`, by its `kind`.

The one place that lists them.
"""

from kit.audio.spectrogram import DEFAULT_MEL, Mel, MelConfig
from kit.audio.xtts_mel import XTTSMel, XTTSMelConfig
from kit.base.config import ConfigError, build
from kit.base.words import nearest

# Kind -> its settings, and what is made of them.
FRONT_ENDS: dict[str, tuple[type, type]] = {
    "mel": (MelConfig, Mel),
    "xtts": (XTTSMelConfig, XTTSMel),
}
PLAIN = "mel"  # where no kind is named


def front_end_config(values: dict) -> MelConfig:
    """The settings in plain `values`. Raises ConfigError for an unknown kind, key or value."""
    given = dict(values)
    kind = str(given.pop("kind", PLAIN))
    if kind not in FRONT_ENDS:
        raise ConfigError(f"There is no front end `{kind}`.{nearest(kind, FRONT_ENDS)}")
    return build(FRONT_ENDS[kind][0], given)


def make_front_end(config: MelConfig) -> Mel:
    """The log-mels that `config` describes."""
    return FRONT_ENDS[kind_of(config)][1](config)


def recognizer_mel(config: MelConfig) -> MelConfig:
    """What the recogniser hears where references are heard as `config` says.

    The same, so that both are made once; but XTTS's are scaled for XTTS alone.
    """
    return config if kind_of(config) == PLAIN else DEFAULT_MEL


def kind_of(config: MelConfig) -> str:
    return getattr(config, "kind", PLAIN)
