"""A model's files from a hub (on this machine): complete, at the revision requested, or why not."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from hub import COMMIT, Hub, serving

from kit.base.errors import DiskError, KitError
from kit.base.hub import fetch_model

NAME = "someone/a-voice"
FILES = {"model.pth": bytes(range(256)) * 9000, "config.json": b"{}", "README.md": b"read me"}
WANTED = ("model.pth", "config.json")
fetch = partial(fetch_model, NAME, "v2", WANTED)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    folder = tmp_path / "hub"
    folder.mkdir()
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1_000_000)
    with serving(folder, NAME, "v2") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        yield server


@pytest.fixture
def into(tmp_path) -> Path:
    return tmp_path / "here"


def has_all(into: Path) -> bool:
    """Whether the wanted files are there as published, and no incomplete ones."""
    present = {path.name: path.read_bytes() for path in into.iterdir()}
    return present.pop("download.json") and present == {name: FILES[name] for name in WANTED}


def sent(hub: Hub, name: str) -> list[str | None]:
    """The Range of each request for the file `name`."""
    return [wanted for path, wanted in hub.asked if path.endswith(f"/{name}")]


def test_what_is_needed_comes_and_nothing_else(hub, into):
    card = fetch(into)
    assert has_all(into) and sent(hub, "model.pth") == [None] and not sent(hub, "README.md")
    assert (card["revision"], card["commit"]) == ("v2", COMMIT)
    assert card["files"]["model.pth"]["bytes"] == len(FILES["model.pth"])
    assert card == json.loads((into / "download.json").read_text())
    paths = [path for path, _ in hub.asked if "/resolve/" in path]
    assert all(f"/resolve/{COMMIT}/" in path for path in paths), "not a moving revision"


def test_what_is_there_is_not_fetched_again(hub, into):
    first = fetch(into)
    hub.asked.clear()
    assert fetch(into) == first
    assert not hub.asked, "nor is the hub, so it works without a network"
    (into / "config.json").write_bytes(b"")
    fetch(into)
    assert has_all(into) and not sent(hub, "model.pth")


def test_what_is_optional_may_lack_and_nothing_else(hub, into):
    with pytest.raises(KitError, match=r"has no vocab\.json; it has README\.md, config\.json, mod"):
        fetch_model(NAME, "v2", (*WANTED, "vocab.json"), into)
    card = fetch(into, optional=("README.md", "LICENSE.txt"))
    assert (into / "README.md").is_file() and "LICENSE.txt" not in card["files"]


@pytest.mark.parametrize("killed", [False, True])
def test_a_broken_or_killed_download_resumes_where_it_was(hub, into, monkeypatch, killed):
    def kill(_):
        raise KeyboardInterrupt

    hub.cut = 1_700_000
    if killed:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("time.sleep", kill)  # before it tries again
            fetch(into)
        assert (into / "model.pth.part").stat().st_size == 1_000_000
        assert not (into / "model.pth").exists()
    fetch(into)
    assert has_all(into)
    assert sent(hub, "model.pth") == [None, "bytes=1000000-"]


def test_bytes_that_differ_from_the_declared_ones_are_dropped(hub, into):
    hub.spoilt.add("model.pth")
    with pytest.raises(KitError, match=r"model\.pth came damaged: its SHA-256 .*run this again"):
        fetch(into)
    assert not list(into.glob("model*"))
    hub.spoilt.clear()
    fetch(into)
    assert has_all(into)


@pytest.mark.parametrize(("code", "status"), [("GatedRepo", 403), ("gone", 404)])
def test_a_file_that_the_hub_does_not_give_is_named(hub, into, monkeypatch, code, status):
    monkeypatch.setattr("hub.Answer.send", lambda self, path: self.refuse(code, status))
    with pytest.raises(KitError, match=r"does not give model\.pth .*HF_TOKEN"):
        fetch(into)
    assert sent(hub, "model.pth") == [None]
    assert not (into / "download.json").exists()


@pytest.mark.parametrize(
    ("name", "revision"), [("someone/else", "v2"), (NAME, "v3"), ("no name at all", "v2")]
)
def test_a_name_that_is_not_there(hub, into, name, revision):
    with pytest.raises(KitError, match=rf"'{name}' at revision {revision} .*HF_TOKEN"):
        fetch_model(name, revision, WANTED, into)
    assert not into.exists()


def test_without_a_network(into, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(KitError, match=r"127\.0\.0\.1:9 does not give .*name their folder"):
        fetch(into)


def test_disk_space_is_checked_before_the_first_byte(hub, into, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(DiskError, match=r"needs about 2 MB, its disk has 0 MB left\. Free"):
        fetch(into)
    assert not sent(hub, "model.pth")
