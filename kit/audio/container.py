"""Open recordings and tell their lengths, with what libsndfile takes on trust checked.

libsndfile reads a truncated WAV, RF64, W64, AIFF or Ogg as a shorter recording. It reads a FLAC or
MP3 only as far as its header says, or as it estimates from the first frame: one of two joined MP3
files, and any part of an MP3 with a variable bit rate. It reads the first of two joined Ogg files,
and gives a FLAC of unknown length 13 million years. M4A, AAC, WMA and WebM are decoded by PyAV
where it is installed.
"""

import contextlib
import functools
import io
import itertools
import mmap
import os
import tempfile
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import soundfile

from kit.base.errors import DatasetError
from kit.base.files import disk_errors

# Of recordings; their content decides how they are read.
SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".m4a", ".aac", ".wma")
MAX_FRAMES = 2**32  # a day at 48 kHz
FLAC = b"fLaC"
FLAC_TOTAL = range(21, 26)  # bytes of its header with the total frames: 36 bits, 0 is unknown
OGG_PAGE_HEAD_BYTES = 27
OGG_FIRST_PAGE = 2  # flag
OGG_LAST_PAGE = 4  # flag
APPARENT_SIZE = 1000  # of an MP3, times its size: no frame is so much larger than the mean
# Lengths that programs write into a pipe for "unknown": SoX, arecord, mplayer, FFmpeg, espeak-ng.
PLACEHOLDERS = (range(0x7F000000, 0x80000001), range(0xFFFF0000, 0x100000000))
# Formats that libsndfile does not read, by their first bytes; those of MP4 begin at its fifth.
AV_FORMATS = {
    b"\x30\x26\xb2\x75\x8e\x66\xcf\x11": "WMA",
    b"\x1a\x45\xdf\xa3": "WebM or Matroska",
    b"#!AMR": "AMR",
    b"ADIF": "AAC",
}
MAX_MISSING_S = 0.25  # of the duration in the header: encoders pad, and round to frames
# MP3.
KBITS = {  # of each bit rate index from 1, by (is MPEG 1, layer)
    (True, 1): range(32, 449, 32),
    (True, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (True, 3): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (False, 1): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (False, 2): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (False, 3): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
RATES_HZ = (44_100, 48_000, 32_000)  # of MPEG 1
RATE_DIVISORS = {3: 1, 2: 2, 0: 4}  # by the version's bits: MPEG 1, 2 and 2.5
MAX_GAP_BYTES = 1000  # that libsndfile's decoder skips between two frames


class Layout(NamedTuple):
    """Where a container's chunks are, and how their lengths are written."""

    start: int = 12  # byte of the first chunk
    name_bytes: int = 4
    length_bytes: int = 4
    order: str = "little"  # byte order of a length
    counts_head: bool = False  # whether a length includes the chunk's own name and length
    align: int = 2  # bytes
    data: bytes = b"data"  # start of the name of the data chunk


LAYOUTS = {
    b"RIFF": Layout(),
    b"RF64": Layout(),
    b"BW64": Layout(),
    b"FORM": Layout(order="big", data=b"SSND"),  # AIFF
    b"riff": Layout(start=40, name_bytes=16, length_bytes=8, counts_head=True, align=8),  # W64
}


class AudioLength(NamedTuple):
    """Length of a file in frames (one sample per channel each)."""

    frames: int  # that are there, as far as was checked
    expected: int  # by the header; `frames` where it does not say
    problem: str = ""  # what is missing at the end, as a phrase


class FrameHeader(NamedTuple):
    size_bytes: int
    samples: int  # per channel
    rate_hz: int
    channels: int
    side_bytes: int  # header and side information, which a Xing header follows


class Mp3Scan(NamedTuple):
    """The audio frames of an MP3 without a right Xing header; samples are per channel."""

    samples: int  # of all frames, a wrong Xing header's own included
    decodable: int  # of them, before the first damage
    end: int  # byte after the last frame
    problem: str  # what is missing or damaged, as a phrase
    xing_at: int  # first byte of a wrong Xing header, 0 if there is none


@contextlib.contextmanager
def open_audio(path: str) -> Iterator[tuple[soundfile.SoundFile, AudioLength]]:
    """Open a recording for reading from its start, and return its length by the header.

    A FLAC or MP3 is read to its end, whatever its header says; one of unknown length is counted.
    Raises soundfile.LibsndfileError, DatasetError or OSError when it cannot be opened.
    """
    probe = _probe(path)
    with _decoder(probe) as sound:
        frames = sound.frames
        expected = round(frames / probe.share)
        max_frames = MAX_FRAMES
        if probe.head.startswith(FLAC):
            total = probe.head[FLAC_TOTAL.start : FLAC_TOTAL.stop]
            frames = expected = int.from_bytes(total, "big") % 2**36 or _count_frames(probe)
            # Silence takes the fewest bytes: 10 for 65,535 frames.
            max_frames = min(MAX_FRAMES, 8192 * probe.size_bytes)
        elif probe.mp3:
            frames = probe.mp3.decodable
            expected = probe.mp3.samples
        if frames > max_frames:
            raise DatasetError(f"{path} has an impossible header: it says {frames:,} samples")
        yield sound, AudioLength(frames, expected, probe.problem)


def count_decodable(path: str) -> AudioLength:
    """Return how much can be decoded, which a FLAC or MP3 header cannot tell; raises likewise."""
    with open_audio(path) as (sound, length):
        must_decode = sound.format in ("FLAC", "MP3")
    if length.problem or not must_decode:
        return length
    frames = _count_frames(_probe(path))
    if frames >= length.expected:
        return AudioLength(frames, frames)
    problem = f"truncated: it has {frames:,} of {length.expected:,} samples"
    return AudioLength(frames, length.expected, problem)


def duration_s(path: str) -> float:
    """Return the seconds of a recording by its header; raises as `open_audio` does."""
    with open_audio(path) as (sound, length):
        return length.expected / sound.samplerate


def open_seekable(path: str, frames: int) -> contextlib.AbstractContextManager:
    """Open a recording of `frames` frames as a SoundFile to read at any position."""
    return _decoder(_probe(path), frames)


class _Probe(NamedTuple):
    """What the bytes of a file say of it, before it is decoded."""

    path: str
    head: bytes
    size_bytes: int
    problem: str = ""  # what is missing at the end, as a phrase
    share: float = 1.0  # of the sound that is there
    mp3: Mp3Scan | None = None  # of one that libsndfile would not read to its end
    zero_length_at: int = 0  # as `_zero_length_at`


def _probe(path: str) -> _Probe:
    with open(path, "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes == 0:
            raise DatasetError(f"{path} is empty (0 bytes)")
        head = file.read(64)  # enough to recognise every format
        if head.startswith(FLAC) and len(head) < FLAC_TOTAL.stop:
            raise DatasetError(f"{path} is truncated: it ends within its header")
        fields = {}
        if head.startswith(b"OggS"):
            fields["problem"] = _scan_ogg(file, size_bytes)
        elif head[:4] in LAYOUTS:
            fields = _scan_chunks(file, head, size_bytes)
        elif head.startswith(b"ID3") or frame_header(head, 0):
            mp3 = _scan_mp3(file)
            if mp3:
                fields = {"problem": mp3.problem, "mp3": mp3}
    return _Probe(path, head, size_bytes, **fields)


def _joined_error(file: BinaryIO) -> DatasetError:
    return DatasetError(
        f"{file.name} is several recordings joined byte by byte, of which only the first would be "
        "read: split it, or convert each by itself and join their samples"
    )


def _count_frames(probe: _Probe) -> int:
    """Count the frames that can be decoded, up to the end or the first damage."""
    frames = 0
    with _decoder(probe) as sound:
        while frames <= MAX_FRAMES:
            try:
                block = sound.read(2**14, dtype="int16", always_2d=True)
            except soundfile.LibsndfileError:
                return frames
            frames += len(block)
            if len(block) == 0:
                return frames
    raise DatasetError(f"{probe.path} has more than {MAX_FRAMES:,} samples")


@contextlib.contextmanager
def _decoder(probe: _Probe, frames: int = 0) -> Iterator[soundfile.SoundFile]:
    """Open a file to be read to its end; a FLAC as if its header gave `frames`, 0 for unknown."""
    with contextlib.ExitStack() as stack:
        if probe.head.startswith(FLAC):
            total = bytearray(frames.to_bytes(len(FLAC_TOTAL), "big"))
            total[0] |= probe.head[FLAC_TOTAL.start] & 0xF0  # the other half has bits per sample
            flac = stack.enter_context(_PatchedFile(probe.path, FLAC_TOTAL.start, bytes(total)))
            sound = soundfile.SoundFile(flac) if frames else _ForwardOnly(flac)
        elif probe.mp3:
            sound = soundfile.SoundFile(stack.enter_context(_WholeMp3(probe.path, probe.mp3)))
        elif format_name := _needs_av(probe.head):
            sound = stack.enter_context(_decoded_by_av(probe.path, format_name))
        elif probe.zero_length_at:
            unknown = b"\xff" * 4
            wav = _PatchedFile(probe.path, probe.zero_length_at, unknown)
            sound = soundfile.SoundFile(stack.enter_context(wav))
        else:
            sound = soundfile.SoundFile(probe.path)
        stack.enter_context(sound)
        if sound.subtype == "OPUS":
            sound.seek(0)  # else the encoder's delay is read, and as much of the end is not
        yield sound


class _ForwardOnly(soundfile.SoundFile):
    """A file read from its start: libsndfile cannot seek in a FLAC of unknown length."""

    def seekable(self) -> bool:
        return False


class _PatchedFile(io.FileIO):
    """A file that reads as if it had the bytes `patch` at `position`."""

    def __init__(self, path: str, position: int, patch: bytes):
        super().__init__(path)
        self.position = position
        self.patch = patch

    def readinto(self, buffer) -> int:
        start = self.tell()
        read_bytes = super().readinto(buffer)
        view = memoryview(buffer).cast("B")
        for position, byte in enumerate(self.patch, self.position):
            if start <= position < start + read_bytes:
                view[position - start] = byte
        return read_bytes


class _WholeMp3(_PatchedFile):
    """An MP3 without its Xing header, that seems so long that any estimate is long enough."""

    def __init__(self, path: str, scan: Mp3Scan):
        super().__init__(path, scan.xing_at, bytes(4) if scan.xing_at else b"")
        self.end = scan.end

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END:
            return super().seek(APPARENT_SIZE * self.end + offset)
        return super().seek(offset, whence)

    def readinto(self, buffer) -> int:
        view = memoryview(buffer).cast("B")
        left = self.end - self.tell()
        if left < -self.end:  # an ID3 tag is looked for at the apparent end
            view[:] = bytes(len(view))
            return len(view)
        return super().readinto(view[: max(left, 0)])


def _scan_chunks(file: BinaryIO, head: bytes, size_bytes: int) -> dict:
    """Return the fields of the `_Probe` of a WAV or AIFF; DatasetError if another one follows."""
    layout = LAYOUTS[head[:4]]
    chunks = _chunks(file, layout, layout.start)
    data = next((chunk for chunk in chunks if chunk[0].startswith(layout.data)), None)
    if data is None:
        return {}
    _, start, length_bytes = data
    if head[:4] in (b"RF64", b"BW64"):  # too large for the chunk's own field
        length_bytes = int.from_bytes(head[28:36], "little")
    if not 0 <= length_bytes < 2 ** (8 * layout.length_bytes) - 1:  # unknown
        return {}
    end = start + length_bytes
    if end < size_bytes:
        file.seek(end)
        following = file.read(layout.align + 3)  # with or without padding
        aligned = -(-end // layout.align) * layout.align
        names = (name for name, _, _ in _chunks(file, layout, aligned))
        if head[:4] in following or any(name.startswith(head[:4]) for name in names):
            raise _joined_error(file)
    missing_bytes = end - size_bytes
    # 1 is a missing pad byte. A pipe's writer puts a placeholder where it cannot return.
    if missing_bytes > 1 and not any(length_bytes in lengths for lengths in PLACEHOLDERS):
        return {
            "problem": f"truncated: {missing_bytes:,} bytes of sound are missing, by its header",
            "share": max(length_bytes - missing_bytes, 1) / length_bytes,
        }
    # A writer that was killed, or wrote to a pipe, leaves it so; libsndfile would read nothing.
    if head.startswith(b"RIFF") and length_bytes == 0:
        return {"zero_length_at": _zero_length_at(file, start, size_bytes)}
    return {}


def _chunks(file: BinaryIO, layout: Layout, position: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield (name, first byte, length in bytes) of each chunk from byte `position` on."""
    head_bytes = layout.name_bytes + layout.length_bytes
    size_bytes = os.fstat(file.fileno()).st_size
    file.seek(position)
    chunk = file.read(head_bytes)
    while len(chunk) == head_bytes:
        length_bytes = int.from_bytes(chunk[layout.name_bytes :], layout.order)
        length_bytes -= head_bytes if layout.counts_head else 0
        start = file.tell()
        yield chunk[: layout.name_bytes], start, length_bytes
        end = start + max(length_bytes, 0)
        if end > size_bytes:
            return
        file.seek(-(-end // layout.align) * layout.align)
        chunk = file.read(head_bytes)


def _zero_length_at(file: BinaryIO, start: int, size_bytes: int) -> int:
    """Return where a WAV says that its data length is 0, if sound follows at `start`; else 0."""
    layout = LAYOUTS[b"RIFF"]
    end = start  # of what follows and may be other chunks
    for name, chunk_start, chunk_bytes in _chunks(file, layout, start):
        if not (name.isascii() and name.decode("ascii").isprintable()):
            break
        end = chunk_start + chunk_bytes + chunk_bytes % layout.align
    has_sound = abs(size_bytes - end) > 1  # 1 is a missing pad byte
    return start - layout.length_bytes if has_sound else 0


def _scan_ogg(file: BinaryIO, size_bytes: int) -> str:
    """Return what is missing at the end; DatasetError if a second stream follows the first."""
    position = 0
    has_sound = False
    is_complete = False  # the last page is there, and flagged as the last
    while True:
        file.seek(position)
        page = file.read(OGG_PAGE_HEAD_BYTES + 255)
        if len(page) < OGG_PAGE_HEAD_BYTES or not page.startswith(b"OggS"):
            return "" if is_complete else "truncated: its last page is missing"
        is_first = bool(page[5] & OGG_FIRST_PAGE)
        if is_first and has_sound:
            raise _joined_error(file)
        has_sound = has_sound or not is_first
        segments = page[OGG_PAGE_HEAD_BYTES : OGG_PAGE_HEAD_BYTES + page[26]]
        position += OGG_PAGE_HEAD_BYTES + page[26] + sum(segments)
        is_complete = bool(page[5] & OGG_LAST_PAGE) and position <= size_bytes


# --- MP3: sound counted by its frames -----------------------------------------------------------


def _scan_mp3(file: BinaryIO) -> Mp3Scan | None:
    """Return the frames of an MP3; None if libsndfile reads them all, or for another format."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = _skip_tags(data, 0)
        first = frame_header(data, start)
        if first is None or not _is_frame(data, start, first):  # or a free bit rate
            return None
        return _walk(data, start, first)


def _walk(data: mmap.mmap, start: int, first: FrameHeader) -> Mp3Scan | None:
    """Go from frame to frame; None if the Xing header of the `first` one is right."""
    size_bytes = len(data)
    position = end = start
    frames = decodable = 0
    problem = ""
    while position < size_bytes:
        header = frame_header(data, position)
        if header is None:
            position += _tag_bytes(data, position) or _gap_bytes(data, position)
            continue
        if position + header.size_bytes > size_bytes:
            problem = problem or "truncated: it ends within an MP3 frame"
            break
        damage = ""
        if (header.rate_hz, header.channels) != (first.rate_hz, first.channels):
            damage = (
                f"joined from recordings of {first.rate_hz:,} Hz in {first.channels} channels and "
                f"{header.rate_hz:,} Hz in {header.channels}: split it, or convert it to WAV"
            )
        elif position - end > MAX_GAP_BYTES and _skip_tags(data, end) != position:
            damage = f"damaged: {position - end:,} bytes at byte {end:,} are no MP3 frames"
        problem = problem or damage
        frames += 1
        if not problem:
            decodable += 1
        position += header.size_bytes
        end = position
    xing_at = start + first.side_bytes
    xing = data[xing_at : xing_at + 12]
    has_xing = xing[:4] in (b"Xing", b"Info") and len(xing) == 12
    if has_xing:
        declared = int.from_bytes(xing[8:], "big") if xing[7] & 1 else 0
        if declared == frames - 1 or declared > frames:  # it says no less than there is
            return None
    return Mp3Scan(
        samples=frames * first.samples,
        decodable=decodable * first.samples,
        end=end,
        problem=problem,
        xing_at=xing_at if has_xing else 0,
    )


def frame_header(data: bytes, position: int) -> FrameHeader | None:
    """Parse the four bytes at `position`; None if no frame of a known size begins there."""
    return _parsed(int.from_bytes(data[position : position + 4], "big"))


@functools.lru_cache(maxsize=4096)
def _parsed(word: int) -> FrameHeader | None:
    version = word >> 19 & 3
    layer = 4 - (word >> 17 & 3)
    kbit_index = word >> 12 & 15
    rate_index = word >> 10 & 3
    if word >> 21 != 0x7FF or version == 1 or layer == 4:
        return None
    if kbit_index in (0, 15) or rate_index == 3:
        return None
    is_mpeg_1 = version == 3
    bits = 1000 * KBITS[is_mpeg_1, layer][kbit_index - 1]
    rate_hz = RATES_HZ[rate_index] // RATE_DIVISORS[version]
    padding = word >> 9 & 1
    channels = 1 if word >> 6 & 3 == 3 else 2
    samples = {1: 384, 2: 1152, 3: 1152 if is_mpeg_1 else 576}[layer]
    if layer == 1:
        size_bytes = 4 * (12 * bits // rate_hz + padding)
    else:
        size_bytes = samples // 8 * bits // rate_hz + padding
    side_bytes = {(True, 2): 36, (True, 1): 21, (False, 2): 21, (False, 1): 13}[is_mpeg_1, channels]
    return FrameHeader(size_bytes, samples, rate_hz, channels, side_bytes)


def _is_frame(data: mmap.mmap, position: int, header: FrameHeader) -> bool:
    """Tell whether another frame, a tag or the end follows: a header alone occurs by chance."""
    following = position + header.size_bytes
    at_end = following >= len(data)
    return at_end or bool(frame_header(data, following)) or bool(_tag_bytes(data, following))


def _tag_bytes(data: mmap.mmap, position: int) -> int:
    """Return the length of the ID3 or APE tag that begins at `position`, 0 for none."""
    head = data[position : position + 32]
    if head.startswith(b"ID3") and len(head) > 10:
        size = sum((head[6 + i] & 127) << 7 * (3 - i) for i in range(4))
        has_footer = head[5] & 16
        return 10 + size + (10 if has_footer else 0)
    if head.startswith(b"TAG"):
        return 128
    if head.startswith(b"APETAGEX") and len(head) == 32:
        is_header = head[23] & 32
        return 32 + (int.from_bytes(head[12:16], "little") if is_header else 0)
    return 0


def _skip_tags(data: mmap.mmap, position: int) -> int:
    while length := _tag_bytes(data, position):
        position += length
    return position


def _gap_bytes(data: mmap.mmap, position: int) -> int:
    """Return how many bytes after `position` the next frame begins, or else the file ends."""
    start = position + 1
    while (start := data.find(b"\xff", start)) >= 0:
        header = frame_header(data, start)
        if header and _is_frame(data, start, header):
            return start - position
        start += 1
    return len(data) - position


def _needs_av(head: bytes) -> str:
    """Return the name of a format that only PyAV reads; "" for others."""
    if head[4:8] == b"ftyp":
        return "M4A"
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0:  # MP3 has a layer here
        return "AAC"
    return next((name for start, name in AV_FORMATS.items() if head.startswith(start)), "")


@contextlib.contextmanager
def _decoded_by_av(path: str, name: str) -> Iterator[soundfile.SoundFile]:
    """Decode a recording into a temporary file of float32, which can be read at any position."""
    try:
        import av
    except ImportError as error:
        raise DatasetError(
            f"{path} is {name}, which needs PyAV: `pip install av`, and run again"
        ) from error

    with tempfile.TemporaryFile() as samples:
        try:
            rate_hz, channels, declared_s = _decode_by_av(path, samples)
        except av.FFmpegError as error:
            reason = error.strerror or error
            raise DatasetError(
                f"{path} is {name} and truncated or damaged ({reason}): copy or export it again"
            ) from error
        seconds = samples.tell() / (4 * channels * rate_hz)  # float32
        if declared_s - seconds > MAX_MISSING_S:
            raise DatasetError(
                f"{path} is truncated: it has {seconds:.1f} of {declared_s:.1f} s of sound"
            )
        samples.seek(0)
        raw = {"format": "RAW", "subtype": "FLOAT", "endian": "LITTLE"}
        with soundfile.SoundFile(samples, samplerate=rate_hz, channels=channels, **raw) as sound:
            yield sound


def _decode_by_av(path: str, samples: BinaryIO) -> tuple[int, int, float]:
    """Write the first audio stream to `samples`; return its rate, channels and declared seconds."""
    import av

    with av.open(str(path)) as container:
        if not container.streams.audio:
            raise DatasetError(f"{path} has no sound")
        stream = container.streams.audio[0]
        # A bare AAC or AMR stream has no duration: it is estimated there.
        has_duration = container.duration and container.format.name not in ("aac", "amr")
        declared_s = container.duration / av.time_base if has_duration else 0.0
        to_float = av.AudioResampler(format="flt")  # rate and channels are the first frame's
        rate_hz = 0
        for frame in itertools.chain(container.decode(stream), [None]):  # None: what it holds back
            if frame and not rate_hz:
                rate_hz = frame.sample_rate  # of HE-AAC, twice the rate in the header
                channels = frame.layout.nb_channels
            blocks = to_float.resample(frame) if rate_hz else []
            with disk_errors(tempfile.gettempdir()):
                for block in blocks:
                    samples.write(block.to_ndarray().astype("<f4").tobytes())
    if not rate_hz:
        raise DatasetError(f"{path} is truncated: it has a header and 0 samples")
    return rate_hz, channels, declared_s
