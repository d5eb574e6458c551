"""Open recordings of any format: with soundfile, or with PyAV what soundfile does not read.

soundfile reads WAV, AIFF, FLAC and Ogg (Vorbis, Opus). PyAV decodes MP3, M4A, AAC, WMA, WebM, AMR,
and a WAV or FLAC whose header lacks its length or gives more than there is. How much is missing of
a truncated file is known where its header tells the length, which Ogg, AAC and AMR do not.
"""

import contextlib
import itertools
import os
import tempfile
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import soundfile

from kit.base.errors import DatasetError, DiskError
from kit.base.files import disk_errors, file_kind, placeholder_problem, special_file_kind

if TYPE_CHECKING:
    from av.audio.frame import AudioFrame
    from av.audio.stream import AudioStream

# Of recordings; their content decides how they are read.
SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".m4a", ".aac", ".wma")
SOUNDFILE_FORMATS = {"WAV", "WAVEX", "RF64", "W64", "AIFF", "FLAC", "OGG"}
# FFmpeg's other formats include playlists, which make it open other files and addresses.
AV_FORMATS = "aac,aiff,amr,asf,caf,flac,matroska,mov,mp3,ogg,w64,wav"
ESTIMATED = ("aac", "amr", "mp3")  # FFmpeg takes their length from the bit rate
MAX_S = 24 * 3600.0
MAX_MISSING_S = 0.1  # of the length in the header: encoders pad, and round to frames
# Programs that write a WAV into a pipe do not know its length; they declare this much or more.
PIPE_BYTES = 0x7F000000
IN_MEMORY_BYTES = 2**24  # of decoded samples; more are written to a temporary file


@contextlib.contextmanager
def open_audio(path: str, max_s: float = MAX_S) -> Iterator[tuple[soundfile.SoundFile, float]]:
    """Open a recording of which nothing is missing, to be read at any position; yield its seconds.

    PyAV decodes no more than about `max_s` of them. Raises DatasetError with the path for what is
    no recording or incomplete; its cause is an OSError if the file could not be opened or read.
    Raises DiskError if the disk has no room for what PyAV decodes.
    """
    path = os.fspath(path)
    with contextlib.ExitStack() as stack:
        try:
            _require_content(path)
            sound = _opened_by_soundfile(path)
            if sound is not None:
                stack.enter_context(sound)
                frames = sound.frames
                expected = _declared_frames(path, sound)
            else:
                samples = stack.enter_context(tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES))
                form, frames, expected = _decode(path, samples, max_s)
                samples.seek(0)
                sound = stack.enter_context(soundfile.SoundFile(samples, **form))
        except DiskError:
            raise
        except (soundfile.LibsndfileError, OSError) as error:
            # Without the path, which libraries and the system repeat.
            reason = getattr(error, "error_string", None) or error.strerror or error
            raise DatasetError(f"{path} cannot be read as audio: {reason}") from error
        if expected - frames > MAX_MISSING_S * sound.samplerate:
            raise DatasetError(f"{path} is truncated: it has {frames:,} of {expected:,} samples")
        yield sound, max(frames, expected) / sound.samplerate


def duration_s(path: str) -> float:
    """Return the seconds of a recording, by its header where that says it; see `open_audio`."""
    with open_audio(path, max_s=0.0) as (_, seconds):
        return seconds


def _require_content(path: str) -> None:
    """Raise DatasetError for a pipe, an empty file or a web page, OSError if it cannot be read."""
    kind = special_file_kind(path)
    if kind:
        raise DatasetError(f"{path} is {kind}, not a recording")
    if file_kind(Path(path)) == "empty":
        raise DatasetError(f"{path} is empty (0 bytes)")
    problem = placeholder_problem(Path(path))
    if problem:
        raise DatasetError(f"{path} cannot be read as audio: {problem}")


# --- soundfile ------------------------------------------------------------------------------------


def _opened_by_soundfile(path: str) -> soundfile.SoundFile | None:
    """Return the open file, None if soundfile does not read it to its end."""
    try:
        sound = soundfile.SoundFile(path)
    except soundfile.LibsndfileError:
        return None
    with contextlib.suppress(soundfile.LibsndfileError):
        if sound.format in SOUNDFILE_FORMATS and sound.frames:
            sound.seek(sound.frames - 1)
            has_last = len(sound.read(1)) == 1
            sound.seek(0)  # of an Opus, it would otherwise begin with the encoder's delay
            if has_last:
                return sound
    sound.close()
    return None


def _declared_frames(path: str, sound: soundfile.SoundFile) -> int:
    """Return the length in the header: of a truncated WAV or AIFF, soundfile gives what is there.

    0 where the header does not say.
    """
    if sound.format in ("FLAC", "OGG"):
        return sound.frames
    try:
        with wave.open(path, "rb") as header:
            frames = header.getnframes()
            frame_bytes = header.getnchannels() * header.getsampwidth()
    except (wave.Error, EOFError):  # another coding than plain integers
        with _opened_by_av(path) as stream:
            return round(_declared_s(stream) * sound.samplerate)
    return frames if frames * frame_bytes < PIPE_BYTES else 0


# --- PyAV -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened_by_av(path: str) -> Iterator["AudioStream"]:
    """Yield a file's first audio stream; DatasetError, also while it is decoded."""
    import av  # speaking needs none of it

    # Without "replace", a tag that is not UTF-8 would end it.
    how = {"options": {"format_whitelist": AV_FORMATS}, "metadata_errors": "replace"}
    try:
        with open(path, "rb") as file, av.open(file, **how) as container:
            streams = container.streams.audio
            if not streams or streams[0].codec_context is None:
                raise DatasetError(f"{path} has no sound that can be decoded")
            yield streams[0]
    except av.FFmpegError as error:
        raise DatasetError(
            f"{path} cannot be read as audio ({error.strerror}): it is something else, or "
            "truncated or damaged; copy or export it again"
        ) from error


def _decode(
    path: str, samples: tempfile.SpooledTemporaryFile, max_s: float
) -> tuple[dict, int, int]:
    """Write a recording, or a little over `max_s` seconds of it, to `samples` as floats.

    Returns how soundfile opens them, how many frames (a sample a channel) there are, of which the
    rest is counted if the header does not say how many, and how many it says there are.
    """
    import av

    resampler = av.AudioResampler(format="flt")
    rate_hz = channels = frames = 0
    with _opened_by_av(path) as stream:
        declared_s = _declared_s(stream)
        try:
            for block in itertools.chain.from_iterable(map(resampler.resample, _frames(stream))):
                rate_hz = block.sample_rate  # of HE-AAC twice that in the header
                channels = block.layout.nb_channels
                if frames <= max_s * rate_hz:
                    with disk_errors(tempfile.gettempdir()):
                        samples.write(block.to_ndarray().tobytes())
                elif declared_s:
                    frames = max(frames, round(declared_s * rate_hz))
                    break
                frames += block.samples
        except av.FFmpegError:
            raise
        except ValueError as error:  # of the resampler
            raise DatasetError(
                f"{path} is joined from recordings of different rates or channels: split it, or "
                "convert it to WAV"
            ) from error
        if not frames:
            raise DatasetError(f"{path} is truncated: it has a header and 0 samples")
        kind = stream.container.format.name
        if kind in ESTIMATED:
            declared_s = 0.0
            # An MP3 that tells its encoder's delay tells its length, too, which soundfile reads;
            # FFmpeg takes it for an estimate where the size of the file does not fit.
            if kind == "mp3" and stream.start_time:
                declared_s = soundfile.info(path).duration
    form = {"samplerate": rate_hz, "channels": channels, "subtype": "FLOAT", "format": "RAW"}
    return form | {"endian": "CPU"}, frames, round(declared_s * rate_hz)


def _frames(stream: "AudioStream") -> Iterator["AudioFrame"]:
    import av

    for packet in stream.container.demux(stream):
        try:
            yield from packet.decode()
        except av.error.InvalidDataError:
            if stream.container.format.name != "mp3":
                raise
            # Tags between the frames, where files were joined, are no sound.


def _declared_s(stream: "AudioStream") -> float:
    """Return the seconds in the header, or FFmpeg's estimate; 0 if it has none."""
    import av

    if stream.duration:
        return float(stream.duration * stream.time_base)
    if len(stream.container.streams) > 1:  # of a film, it may be the length of the picture
        return 0.0
    return (stream.container.duration or 0) / av.time_base
