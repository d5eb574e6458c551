"""The kit's exceptions and its kind of warning. To only show a sentence, catch KitError."""

import warnings


class KitError(ValueError):
    """The user's input, files or machine do not allow this; the message says what to change.

    `field` names the setting that is wrong, where it is one; `python -m kit` ends with `exit_code`.
    """

    def __init__(self, *arguments, field: str = "", exit_code: int = 2):
        super().__init__(*arguments)
        self.field = field
        self.exit_code = exit_code


class SettingError(KitError):
    """A setting of `owner`, a class or section, is wrong; `rest` is the message after its name."""

    def __init__(self, owner: str, rest: str, field: str = ""):
        super().__init__(owner, rest, field=field)  # both, for pickle
        self.rest = rest

    def __str__(self) -> str:
        return "".join(self.args)


class DatasetError(KitError):
    """Recordings, a table or a text that cannot be used."""


class DamagedFileError(KitError):
    """A file of weights, codes or a checkpoint is damaged, or belongs to something else."""


class InUse(KitError):
    """Another process does this at the moment; the message says which."""


class DiskError(OSError):
    """A file could not be written: the disk is full, read-only or gone. The message has the fix."""


class SpeechError(KitError):
    """A text, voice or setting that cannot be spoken with."""


class Diverged(KitError):
    """The loss was not finite too often in a row; an earlier checkpoint may still help."""


class Note(UserWarning):
    """Something the user should know that stops nothing; shown as one sentence."""


_default_format = warnings.formatwarning


def show_plain_notes() -> None:
    """From now on a warning that is a Note shows as its sentence alone."""
    warnings.formatwarning = _format


def _format(message, category, filename, lineno, line=None) -> str:
    if issubclass(category, Note):
        return f"Note: {message}\n"
    return _default_format(message, category, filename, lineno, line)
