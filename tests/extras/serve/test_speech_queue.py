"""Texts that arrive together are spoken together, and each sounds as it would alone."""

import asyncio

import pytest
import torch
from helpers import LINES, RATE, opinionated_voice, speech

from kit.base.errors import SpeechError
from kit.extras.serve.recipe import RequestError, read_body
from kit.extras.serve.speech_queue import SpeechQueue
from kit.settings import GenerateConfig

CONFIG = GenerateConfig(temperature=0.7, seed=3, exact_codes=6)
STORY = "። ".join(LINES)


@pytest.fixture(scope="module")
def voice(tmp_path_factory):
    return opinionated_voice(tmp_path_factory.mktemp("voice")).in_format("fp32")


@pytest.fixture
def queue(voice):
    queue = SpeechQueue(voice)
    yield queue
    queue.close()


def chunks_of(job) -> list:
    """All chunks; those of random weights often have no end."""
    chunks = []
    try:
        chunks.extend(job)
    except SpeechError:
        assert job.truncated
    return chunks


def test_together_each_text_sounds_as_it_does_alone(voice, queue):
    asked = [(LINES[0], "alma"), (STORY, "brook"), (LINES[2], "brook")]
    jobs = [queue.submit(*each, CONFIG) for each in asked]
    for (text, name), job in zip(asked, jobs):
        (alone,) = voice.speak([text], name, CONFIG)
        torch.testing.assert_close(torch.cat(chunks_of(job)), alone.wave, rtol=0, atol=1e-4)


def test_a_short_text_does_not_wait_for_the_end_of_a_long_one(voice, queue, monkeypatch):
    spoken = []
    generate_parts = type(voice).generate_parts

    def record(self, parts, speakers, config, batch):
        spoken.append([part.text for part in parts])
        if len(spoken) == 1:  # while the first part of the long text is being spoken
            jobs.append(queue.submit(LINES[0], "alma", CONFIG))
        return generate_parts(self, parts, speakers, config, batch)

    jobs = []
    monkeypatch.setattr(type(voice), "generate_parts", record)
    long = queue.submit(STORY * 3, "brook", CONFIG)
    assert len(long.parts) > 3
    chunks_of(long)
    assert LINES[0] in spoken[1] and len(spoken[1]) == 2, "with the second part, in one batch"
    assert chunks_of(jobs[0])


def test_a_stream_comes_in_chunks_that_join_to_what_stream_yields(voice, queue):
    chunks = chunks_of(queue.submit(STORY, "alma", CONFIG, streamed=True))
    wanted = []
    with pytest.raises(SpeechError):  # random weights find no end
        wanted.extend(voice.stream(STORY, "alma", CONFIG))
    assert len(chunks) == len(wanted) > 1
    assert torch.equal(torch.cat(chunks), torch.cat(wanted))


def test_an_uploaded_voice_speaks_and_is_then_forgotten(voice, queue):
    wave = torch.from_numpy(speech(1.0)).float()
    job = queue.submit(LINES[0], "", CONFIG, reference=(wave, RATE))
    uploaded = torch.cat(chunks_of(job))
    (alone,) = voice.with_speaker("new", wave, RATE).speak([LINES[0]], "new", CONFIG)
    assert (uploaded - alone.wave).abs().max() < 1e-4
    queue.close()
    assert queue.voice.speakers == voice.speakers


@pytest.mark.parametrize(("text", "speaker"), [("", "alma"), ("xyz", "alma"), (LINES[0], "nobody")])
def test_what_cannot_be_spoken_is_refused_at_once(queue, text, speaker):
    with pytest.raises(SpeechError):
        queue.submit(text, speaker, CONFIG)
    assert not queue.jobs


def test_an_error_ends_one_text_and_the_next_is_spoken(voice, queue, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(type(voice), "sound", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(queue.submit(LINES[0], "alma", CONFIG))
    assert chunks_of(queue.submit(LINES[0], "alma", CONFIG))


def test_who_waits_when_the_server_stops_gets_an_error(voice):
    queue = SpeechQueue(voice)
    job = queue.submit(STORY * 20, "alma", CONFIG)
    queue.close()
    with pytest.raises(SpeechError, match="stopped"):
        list(job)
    with pytest.raises(SpeechError, match="stopped"):
        queue.submit(LINES[0], "alma", CONFIG)


class Request:
    def __init__(self, data: bytes):
        self.data = data

    async def stream(self):
        yield self.data


@pytest.mark.parametrize("data", [b"", b"\xff", b"[1]", b"[" * 60_000, b'{"input": "\\ud83d"}'])
def test_what_is_no_request_is_refused_with_a_status_that_clients_do_not_repeat(data):
    with pytest.raises(RequestError) as caught:
        asyncio.run(read_body(Request(data)))
    assert caught.value.status == 400 and str(caught.value).encode()


def test_a_request_is_read():
    text = "\\ud83d\\ude00 ሰላም"  # both halves of a pair make a character
    data = f'{{"input": "{text}"}}'.encode()
    assert asyncio.run(read_body(Request(data))) == {"input": "😀 ሰላም"}
