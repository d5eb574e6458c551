"""A published PyTorch file is read without running anything in it, or refused in a sentence."""

import collections
import io
import os
import pickle
import random
import zipfile
from pathlib import Path

import pytest
import torch

from kit.base.errors import DamagedFileError
from kit.base.torch_file import read_torch_file, require_backed

CLASS = "somewhere.else.Settings"


class Calls:
    """Pickled, it calls `function(*given)` for whoever unpickles it."""

    def __init__(self, function, *given):
        self.call = function, given

    def __reduce__(self):
        return self.call


def saved(path: Path, value: object) -> Path:
    torch.save(value, path)
    return path


def with_pickle(path: Path, data: bytes) -> Path:
    """A file of torch.save's whose pickle is `data`."""
    torch.save({"a": torch.ones(3)}, path)
    with zipfile.ZipFile(path) as archive:
        entries = {e.filename: archive.read(e) for e in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, data if name.endswith("data.pkl") else content)
    return path


def test_tensors_and_plain_values_come_back(tmp_path):
    value = {"model": collections.OrderedDict(a=torch.arange(6.0).view(2, 3)), "step": 3, "x": None}
    contents = read_torch_file(saved(tmp_path / "a.pth", value))
    assert torch.equal(contents["model"]["a"], torch.arange(6.0).view(2, 3))
    assert (contents["step"], contents["x"]) == (3, None)


def test_an_object_of_a_listed_class_is_its_contents(tmp_path):
    # By hand: an object of a class that is not installed, with a list and another inside.
    new = b"csomewhere.else\nSettings\n)\x81"
    inner = new + b"}(X\x01\x00\x00\x00aK\x01ub"
    data = b"\x80\x02" + new + b"}(X\x06\x00\x00\x00layersK\x1e"
    data += b"X\x05\x00\x00\x00inner]" + inner + b"aub."
    path = with_pickle(tmp_path / "a.pth", data)
    assert read_torch_file(path, [CLASS]) == {"layers": 30, "inner": [{"a": 1}]}
    with pytest.raises(DamagedFileError, match=r"asks for `somewhere\.else\.Settings`"):
        read_torch_file(path)


TRAP = "ran.txt"
CALLS = {
    "a shell": lambda: Calls(os.system, f"echo ran > {TRAP}"),
    "Python's own": lambda: Calls(exec, f"open({TRAP!r}, 'w').close()"),
    "a file": lambda: Calls(open, TRAP, "w"),
    "a folder": lambda: Calls(os.mkdir, TRAP),
    "torch's own": lambda: Calls(torch.save, torch.ones(1), TRAP),
    "a getter": lambda: Calls(getattr, Calls(__import__, "os"), "system"),
    "pickle in pickle": lambda: Calls(pickle.loads, pickle.dumps(Calls(os.mkdir, TRAP))),
}


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("deep", [False, True])
def test_a_file_that_would_run_code_is_refused(kind, deep, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    value = {"model": {"a": torch.ones(2)}, "config": CALLS[kind]()}
    value = {"optimizer": [{"state": {0: value}}]} if deep else value
    path = saved(tmp_path / "model.pth", value)
    with pytest.raises(DamagedFileError, match=r"asks for `.*could run code"):
        read_torch_file(path, [CLASS])
    assert os.listdir(tmp_path) == ["model.pth"], "nothing ran"


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_other_protocols_and_installed_classes_run_nothing_either(protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = pickle.dumps({"config": Calls(os.mkdir, TRAP)}, protocol=protocol)
    with pytest.raises(DamagedFileError):
        read_torch_file(with_pickle(tmp_path / "model.pth", data), ["posix.mkdir"])
    assert os.listdir(tmp_path) == ["model.pth"]


COMPRESSED = io.BytesIO()
with zipfile.ZipFile(COMPRESSED, "w", zipfile.ZIP_DEFLATED) as archive:
    archive.writestr("archive/data.pkl", bytes(10**6))


WRONG = {
    "it is a web page": b"<!DOCTYPE html><html>",
    "Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:c7ea\n",
    "no PyTorch file": b"RIFF\x00\x00\x00\x00WAVE",
    "compressed archive": COMPRESSED.getvalue(),
}


@pytest.mark.parametrize("kind", WRONG)
def test_another_file_is_recognised_by_its_first_bytes(kind, tmp_path):
    (tmp_path / "model.pth").write_bytes(WRONG[kind])
    with pytest.raises(DamagedFileError, match=kind):
        read_torch_file(tmp_path / "model.pth")


@pytest.mark.parametrize("share", [0.001, 0.9])
def test_a_download_cut_short_or_missing_is_reported(share, tmp_path):
    with pytest.raises(DamagedFileError, match=r"There is no file .*model\.pth"):
        read_torch_file(tmp_path / "model.pth")
    path = saved(tmp_path / "model.pth", {"a": torch.randn(5000)})
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(DamagedFileError, match="no PyTorch file"):
        read_torch_file(path)


def test_damage_anywhere_is_a_sentence_or_harmless(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    value = {"model": {f"layer.{i}": torch.randn(4, 4) for i in range(6)}, "config": {"a": [1, 2]}}
    path = saved(tmp_path / "model.pth", value)
    whole = path.read_bytes()
    where = random.Random(0)
    messages = []
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(where.choice((1, 1, 4))):
            damaged[where.randrange(len(damaged))] = where.randrange(256)
        path.write_bytes(damaged)
        try:
            read_torch_file(path)
        except DamagedFileError as error:
            messages.append(str(error))
    assert len(messages) > 30 and os.listdir(tmp_path) == ["model.pth"]
    assert all("model.pth" in message and "\n" not in message for message in messages)


REFUSED = {
    "not a tensor": lambda: "tensor",
    "sparse": lambda: torch.eye(3).to_sparse(),
    "complex": lambda: torch.ones(2, dtype=torch.complex64),
    "float8": lambda: torch.ones(2).to(torch.float8_e4m3fn),
    "meta": lambda: torch.ones(2, device="meta"),
    "its file holds less": lambda: torch.ones(1).expand(10**9),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_tensors_that_are_not_what_they_claim_are_refused(kind):
    with pytest.raises(ValueError, match=rf"weight .*{kind}"):
        require_backed("weight", REFUSED[kind]())
    whole = torch.randn(3, 4).T
    assert require_backed("weight", whole) is whole
