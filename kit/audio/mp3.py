"""How much sound an MP3 holds, counted by its frames.

libsndfile reads an MP3 as far as its Xing header says, or estimates the length from the first
frame: of two joined files it reads one, of a variable bit rate any part.
"""

import functools
import mmap
from typing import BinaryIO, NamedTuple

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


class FrameHeader(NamedTuple):
    size_bytes: int
    samples: int  # per channel
    rate_hz: int
    channels: int
    side_bytes: int  # header and side information, which a Xing header follows


class Mp3Scan(NamedTuple):
    """The audio frames of an MP3; samples are per channel."""

    samples: int  # of all frames, a wrong Xing header's own included
    decodable: int  # of them, before the first damage
    end: int  # byte after the last frame
    problem: str  # what is missing or damaged, as a phrase
    header_is_right: bool  # there is a Xing header, and it says no less than there is
    xing_at: int  # its first byte, 0 if there is none


def scan_mp3(file: BinaryIO) -> Mp3Scan | None:
    """Return the frames of an MP3; None for another format, or a free bit rate."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        position = _skip_tags(data, 0)
        first = frame_header(data, position)
        if first is None or not _is_frame(data, position, first):
            return None
        return _walk(data, position, first)


def _walk(data: mmap.mmap, start: int, first: FrameHeader) -> Mp3Scan:
    xing_at, declared = _xing(data, start, first)
    size_bytes = len(data)
    position = end = start
    frames = 0
    decodable = None
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
        if damage and not problem:
            problem = damage
            decodable = frames
        frames += 1
        position += header.size_bytes
        end = position
    counted = frames - bool(xing_at)
    header_is_right = bool(xing_at) and (declared == counted or declared > counted + 1)
    return Mp3Scan(
        samples=frames * first.samples,
        decodable=(frames if decodable is None else decodable) * first.samples,
        end=end,
        problem=problem,
        header_is_right=header_is_right,
        xing_at=xing_at,
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


def _xing(data: mmap.mmap, position: int, first: FrameHeader) -> tuple[int, int]:
    """Return the first byte of the Xing header in the first frame and its number of frames."""
    at = position + first.side_bytes
    if data[at : at + 4] not in (b"Xing", b"Info"):
        return 0, 0
    has_frames = data[at + 7] & 1
    return at, int.from_bytes(data[at + 8 : at + 12], "big") if has_frames else 0


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
    """Return how many bytes after `position` the next frame or tag begins, or the end is."""
    at = position + 1
    while (at := data.find(b"\xff", at)) >= 0:
        header = frame_header(data, at)
        if header and _is_frame(data, at, header):
            return at - position
        at += 1
    return len(data) - position
