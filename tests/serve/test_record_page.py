"""The pages that record and upload, with Gradio's own client in place of the browser."""

import contextlib

import numpy as np
import pytest
import soundfile
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError
from helpers import speech

from kit.extras.recorder.recipe import RecordingFolder, record_page, upload_page

RATE = 48_000
SENTENCES = ["the farmer found a small red house", "my brother lives near the river."]


@contextlib.contextmanager
def client_of(page):
    _, address, _ = page.launch(share=False, prevent_thread_lock=True, quiet=True)
    try:
        yield Client(address, verbose=False)
    finally:
        page.close()


@pytest.fixture
def wav(tmp_path):
    path = tmp_path / "1.wav"
    soundfile.write(path, np.tile(speech(0.4, RATE), 6), RATE)
    return path


def test_a_recording_is_saved_and_the_next_sentence_shown(tmp_path, wav):
    folder = RecordingFolder(tmp_path / "recordings", SENTENCES, "en")
    with client_of(record_page(folder)) as client:
        sentence, _, line = client.predict(SENTENCES[0], handle_file(wav), api_name="/save")
        assert sentence == SENTENCES[1] and str(folder.path) in line
        soundfile.write(wav, np.zeros(RATE), RATE)
        with pytest.raises(AppError, match="silent"):
            client.predict(SENTENCES[1], handle_file(wav), api_name="/save")
        with pytest.raises(AppError, match="Record"):
            client.predict(SENTENCES[1], None, api_name="/save")
        assert client.predict(SENTENCES[1], api_name="/next") == ""
    (row,) = (folder.path / "metadata.csv").read_text("utf-8").splitlines()
    assert row.endswith(f"|{SENTENCES[0]}")


def test_files_are_uploaded_under_their_names(tmp_path, wav):
    folder = tmp_path / "uploads"
    with client_of(upload_page(folder)) as client:
        client.predict([handle_file(wav)], api_name="/add")
        assert (folder / "batch-1" / "1.wav").read_bytes() == wav.read_bytes()
        with pytest.raises(AppError, match=r"test_record_page\.py"):
            client.predict([handle_file(__file__)], api_name="/add")
