"""The kit's exceptions. To only show a sentence to the user, catch KitError."""


class KitError(ValueError):
    """The user's input, files or machine do not allow this; the message says what to change."""


class DatasetError(KitError):
    """Recordings, a table or a text that cannot be used."""


class DamagedFileError(KitError):
    """A file of weights, codes or a checkpoint is damaged, or belongs to something else."""


class DownloadError(KitError):
    """A file could not be fetched."""


class DiskError(OSError):
    """A file could not be written: the disk is full, read-only or gone. The message has the fix."""


class LockError(KitError):
    """Another process holds what this one needs."""


class SpeechError(KitError):
    """A text, voice or setting that cannot be spoken with."""


class TrainError(KitError):
    """Training cannot continue."""


class Diverged(TrainError):
    """The loss was not finite too often in a row; an earlier checkpoint may still help."""
