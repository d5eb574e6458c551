"""A Debian package written by hand: an `ar` archive with a tar of files in it."""

import io
import tarfile
from pathlib import Path


def member(name: str, data: bytes) -> bytes:
    """A member of an `ar` archive, header and padding included."""
    header = f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode()
    return header + data + b"\n" * (len(data) % 2)


def tar_of(files: dict[str, bytes], mode: str = "w:xz") -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return packed.getvalue()


def write_package(path: Path, files: dict[str, bytes], data_name: str = "data.tar.xz") -> Path:
    parts = [
        member("debian-binary", b"2.0\n"),
        member("control.tar.xz", tar_of({"control": b"Package: test"}) + b"odd"),
        member(data_name, tar_of(files)),
    ]
    path.write_bytes(b"!<arch>\n" + b"".join(parts))
    return path
