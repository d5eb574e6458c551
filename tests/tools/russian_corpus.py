"""Real speech to try the kit with: 620 Russian sentences, 99 minutes, read by one man.

`make corpus-ru` writes them as an LJSpeech folder. They are from Debian's package festvox-ru (MSU's
voice for Festival, free to use with its notice, which is copied, too). The package is downloaded or
read from a file, compared with its SHA-256, and unpacked, not installed.
"""

import argparse
import dataclasses
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from kit.base import files
from kit.base.errors import DatasetError, KitError
from kit.base.files import make_folder, write_atomic
from kit.base.formatting import join_names
from kit.base.hub import fetch_file
from kit.dataset.archive import CHUNK_BYTES, archive_suffix, unpack
from kit.notebook.progress import Ticker
from kit.settings import ArchiveConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Package:
    name: str = "festvox-ru_0.5+dfsg-6_all.deb"
    size_bytes: int = 178_728_512
    sha256: str = "21ef3f0f2978ecf2e2eddb367cb0ff4a72572196d28dc69feb84f4177af5e6c4"


PACKAGE = Package()
ADDRESS = "https://deb.debian.org/debian/pool/main/f/festvox-ru/"
NEEDED_BYTES = 800_000_000  # package, the archive in it, and recordings at the same time
NOTICE = "usr/share/doc/festvox-ru/copyright"
AR_MAGIC = b"!<arch>\n"
AR_HEADER_BYTES = 60
AR_MEMBERS = 16  # a Debian package has three or four
FESTIVAL_TRANSCRIPTS = "etc/txt.done.data"
FESTIVAL_LINE = re.compile(r'\(\s*(\S+)\s+"((?:[^"\\]|\\.)*)"\s*\)')
STRESS = re.compile(r"\+(?=[^\W\d_])")
TABLE = "metadata.csv"
ABOUT = """\
From Debian's package festvox-ru 0.5+dfsg-6. Changed: the recordings alone were taken, and
their texts without the marks of stress, as a table in the layout of LJSpeech.
"""


def russian_corpus(
    into: Path, package: Path | None = None, address=ADDRESS, file=PACKAGE, progress=lambda *_: None
) -> Path:
    """Write the recordings to the LJSpeech folder `into`, unless they are there; returns it.

    `package` is Debian's file, None to download it. An interrupted call resumes.
    `progress(done, total)` counts unpacked bytes of the package. Raises KitError, DatasetError or
    DiskError.
    """
    into = Path(into)
    if (into / TABLE).is_file():
        return into
    work = make_folder(into / ".unpacking")
    if package is None:
        files.require_disk(into, NEEDED_BYTES)
        package = work / file.name
        try:
            url = address + file.name.replace("+", "%2B")
            fetch_file(url, package, file.size_bytes, file.sha256)
        except KitError as error:
            fix = "get it elsewhere (`apt-get download festvox-ru` on a Debian) and name it"
            raise KitError(f"{error} Or {fix}: `make corpus-ru PACKAGE=FILE`.") from error
    else:
        package = Path(package)
        require_package(package, file)
    archive = extract_debian_data(package, work)
    unpacked = unpack(archive, work / "package", ArchiveConfig(), progress)
    write_atomic(into / "copyright", (unpacked / NOTICE).read_bytes())
    write_atomic(into / "about.txt", ABOUT)
    move_to_ljspeech(find_festival_voice(unpacked), into)
    shutil.rmtree(work)
    return into


def require_package(package: Path, file: Package) -> None:
    """Raise DatasetError if `package` is not the expected version."""
    if not package.is_file():
        raise DatasetError(f"There is no {package}: is the name right, and the disk mounted?")
    sha256 = files.file_digest(package)
    if sha256 != file.sha256:
        fault = f"{package} is not {file.name}: its SHA-256 is {sha256}, expected {file.sha256}"
        raise DatasetError(f"{fault}. Download it again.")


def extract_debian_data(package: Path, into: Path) -> Path:
    """Copy the member `data.tar.*` of a Debian package (an `ar` archive, deb(5)) into `into`.

    Returns the file, named after the package. Raises DatasetError for a file that is no Debian
    package, or a damaged one.
    """
    with package.open("rb") as file:
        for name, size_bytes in ar_members(file, package):
            if name.startswith("data.tar"):
                return copy_member(file, name, size_bytes, package, make_folder(into))
    raise damaged(package, "it holds no data.tar")


def ar_members(file: BinaryIO, package: Path) -> Iterator[tuple[str, int]]:
    """Yield name and size in bytes of each member, with `file` at the member's first byte."""
    if file.read(len(AR_MAGIC)) != AR_MAGIC:
        raise DatasetError(f"{package} is no Debian package: name a file that ends in .deb.")
    for _ in range(AR_MEMBERS):
        header = file.read(AR_HEADER_BYTES)
        if not header:
            return
        size = header[48:58].strip()
        if len(header) != AR_HEADER_BYTES or not header.endswith(b"`\n") or not size.isdigit():
            raise damaged(package, "a member's header is damaged")
        start = file.tell()
        yield header[:16].decode("ascii", "replace").strip().rstrip("/"), int(size)
        file.seek(start + int(size) + int(size) % 2)  # members begin at even offsets


def copy_member(file: BinaryIO, name: str, size_bytes: int, package: Path, into: Path) -> Path:
    path = into / f"{package.stem}.{name}"
    if not archive_suffix(path):
        fault = f"{package} uses a compression not supported here ({name})"
        raise DatasetError(f"{fault}: unpack it with `dpkg-deb -x`.")
    present_bytes = package.stat().st_size - file.tell()
    if present_bytes < size_bytes:
        raise damaged(package, f"it has {present_bytes:,} of {size_bytes:,} bytes of {name}")
    if path.is_file() and path.stat().st_size == size_bytes:
        return path
    with files.atomic_path(path) as part, part.open("wb") as target:
        for start in range(0, size_bytes, CHUNK_BYTES):
            target.write(file.read(min(CHUNK_BYTES, size_bytes - start)))
    return path


def damaged(package: Path, reason: str) -> DatasetError:
    fault = f"{package} is damaged or incompletely downloaded"
    return DatasetError(f"{fault} ({reason}): download it again.")


def find_festival_voice(folder: Path) -> Path:
    """Return the folder below `folder` with a Festival voice's recordings.

    FestVox (Black and Lenzo) keeps what a voice was built from: `etc/txt.done.data`, a line
    `( id "text" )` for each recording, and `wav/id.wav`. Raises DatasetError unless there is one.
    """
    tables = sorted(Path(folder).rglob(FESTIVAL_TRANSCRIPTS))
    if len(tables) != 1:
        found = f"{len(tables) or 'no'} Festival voices with {FESTIVAL_TRANSCRIPTS}"
        raise DatasetError(f"{folder} holds {found}: expected one.")
    return tables[0].parent.parent


def read_festival_transcripts(path: Path) -> dict[str, str]:
    """Return the text of each recording by id, in the table's order. Raises DatasetError.

    The `+` before a stressed vowel is removed: only some words have it.
    """
    texts = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        match = FESTIVAL_LINE.fullmatch(line.strip())
        if not match:
            raise DatasetError(f'{path}, line {number}: expected ( id "text" ), got {line[:80]!r}.')
        text = re.sub(r"\\(.)", r"\1", match[2])
        texts[match[1]] = STRESS.sub("", text).replace("|", " ").strip()
    return texts


def move_to_ljspeech(voice: Path, into: Path) -> int:
    """Move a Festival voice's recordings to `into`/wavs and write metadata.csv; return the count.

    The table is written last, so it is there only if all recordings are. An interrupted call is
    resumed. Raises DatasetError when recordings are missing.
    """
    texts = read_festival_transcripts(voice / FESTIVAL_TRANSCRIPTS)
    wavs = make_folder(Path(into) / "wavs")
    missing = []
    for name in texts:
        source, target = voice / "wav" / f"{name}.wav", wavs / f"{name}.wav"
        if source.is_file():
            with files.disk_errors(target):
                os.replace(source, target)
        elif not target.is_file():
            missing.append(name)
    if missing:
        lacking = f"{len(missing)} of its {len(texts)} recordings ({join_names(missing)})"
        raise DatasetError(f"{voice} lacks {lacking}: unpack it again.")
    write_atomic(Path(into) / TABLE, "".join(f"{name}|{text}\n" for name, text in texts.items()))
    return len(texts)


def corpus_command(words: list[str] | None = None) -> int:
    """`python tests/tools/russian_corpus.py --into FOLDER [--package FILE]`; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, required=True, help="the folder to write")
    parser.add_argument("--package", type=Path, help="Debian's file, if you have it")
    options = parser.parse_args(words)
    try:
        folder = russian_corpus(options.into, options.package, progress=Ticker("bytes"))
    except KeyboardInterrupt:
        print("Stopped. What was downloaded is kept: the same command resumes.")
        return 130
    except (ValueError, OSError) as error:
        if not type(error).__module__.startswith("kit."):
            raise
        print(error, file=sys.stderr)
        return 2
    print(f"620 recordings, 99 minutes of Russian: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(corpus_command())
