"""`serve`: OpenAI's own client, several at once, and what is refused."""

import contextlib
import io
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import numpy as np
import openai
import pytest
import soundfile
import uvicorn
from helpers import LINES, opinionated_voice

sys.path.append(str(Path(__file__).parents[1] / "browser"))
from lab import browser, missing, screenshot, text_of, wait

from kit.extras.serve import recipe as serve
from kit.extras.serve.speech_queue import SpeechQueue
from kit.settings import GenerateConfig

SETTINGS = GenerateConfig(temperature=0.7, seed=3, exact_codes=8)


@pytest.fixture(scope="module")
def voice(tmp_path_factory):
    """A voice of random weights, whose codes are taken as if they had ended."""
    return opinionated_voice(tmp_path_factory.mktemp("voice")).in_format("fp32")


@pytest.fixture(scope="module", autouse=True)
def every_part_ends():
    """Random weights find no end."""
    finish = SpeechQueue._finish_part
    ended = lambda self, job, part, stopped: finish(self, job, part, True)  # noqa: E731
    with patch.object(SpeechQueue, "_finish_part", ended):
        yield


@pytest.fixture(scope="module")
def address(voice):
    with serving(voice, api_key="secret") as address:
        yield address


@contextlib.contextmanager
def serving(voice, **how):
    queue = SpeechQueue(voice)
    app = serve.make_app(queue, SETTINGS, "a voice", **how)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        thread.join(0.05)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()
    queue.close()


@pytest.fixture
def client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0)


def say(client, text=LINES[0], voice="alma", **how):
    return client.audio.speech.create(model="kit", input=text, voice=voice, **how)


@pytest.mark.parametrize("format", ["mp3", "wav", "flac", "opus", "pcm"])
def test_every_format_holds_what_the_voice_says(client, voice, format):
    data = say(client, response_format=format).content
    (alone,) = voice.speak([LINES[0]], "alma", SETTINGS)
    rate = voice.codec.sample_rate
    if format == "pcm":
        samples = np.frombuffer(data, "<i2") / 32767
    else:
        samples, rate = soundfile.read(io.BytesIO(data))
    seconds = len(alone.wave) / voice.codec.sample_rate
    assert len(samples) / rate == pytest.approx(seconds, abs=0.15)
    if format in ("pcm", "wav", "flac"):
        assert np.abs(samples - alone.wave.clamp(-1, 1).numpy()).max() < 1e-3


def test_eight_clients_at_once_lose_nothing(client, voice):
    texts = [LINES[i % len(LINES)] for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        sounds = list(pool.map(lambda text: say(client, text, response_format="pcm"), texts))
    for text, sound in zip(texts, sounds):
        (alone,) = voice.speak([text], "alma", SETTINGS)
        samples = np.frombuffer(sound.content, "<i2") / 32767
        assert np.abs(samples - alone.wave.clamp(-1, 1).numpy()).max() < 1e-3


def test_the_sound_is_streamed(client):
    text = "። ".join(LINES)
    request = {"model": "kit", "input": text, "voice": "brook", "response_format": "pcm"}
    with client.audio.speech.with_streaming_response.create(**request) as response:
        assert response.headers["x-sample-rate"].isdigit()
        assert sum(len(chunk) for chunk in response.iter_bytes()) > 1000


REFUSED = {
    "no text": ({"text": " "}, "BadRequestError", "input"),
    "too long": ({"text": "a" * 4097}, "BadRequestError", "4096"),
    "unknown letters": ({"text": "xyz"}, "UnprocessableEntityError", "x"),
    "an unknown voice": ({"voice": "alloy"}, "BadRequestError", "alma"),
    "a format": ({"response_format": "aac"}, "BadRequestError", "flac"),
    "faster": ({"speed": 2.0}, "BadRequestError", "speed"),
    "a word for a number": ({"extra_body": {"seed": "x"}}, "BadRequestError", "seed"),
    "too hot": ({"extra_body": {"temperature": 1e9}}, "BadRequestError", "temperature"),
    "half a candidate": ({"extra_body": {"best_of": 1.5}}, "BadRequestError", "best_of"),
    "many candidates": ({"extra_body": {"best_of": 64}}, "BadRequestError", "best_of"),
    "another field": ({"extra_body": {"pitch": 2}}, "BadRequestError", "pitch"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_has_an_error_that_clients_understand(client, case):
    request, error, named = REFUSED[case]
    with pytest.raises(getattr(openai, error)) as caught:
        say(client, **{"response_format": "pcm", **request})
    assert named in caught.value.body["message"]


def test_without_the_key_nothing_is_spoken(address):
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="other", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        say(client)
    with pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["a voice"]


def test_a_full_queue_asks_to_try_again(client, monkeypatch):
    monkeypatch.setattr(serve, "MAX_WAITING", 0)
    with pytest.raises(openai.RateLimitError):
        say(client)


def test_a_part_without_an_end_is_an_error_where_nothing_was_sent(client, monkeypatch):
    finish = SpeechQueue._finish_part

    def cut(self, job, part, stopped):
        finish(self, job, part, True)
        job.truncated.append(part.text)

    monkeypatch.setattr(SpeechQueue, "_finish_part", cut)
    with pytest.raises(openai.UnprocessableEntityError, match="end of"):
        say(client, response_format="flac")


def test_the_page_speaks(voice):
    """In Chromium: the key, a text, a click, a player with sound in it; what is wrong is shown."""
    if missing():
        pytest.skip(missing())
    with serving(voice, api_key="secret") as address, browser() as driver:
        driver.get(address)
        wait(lambda: len(driver.find_elements("css selector", "input")) == 2, "the login")
        for field in driver.find_elements("css selector", "input"):
            field.send_keys("secret")
        driver.find_element("xpath", "//button[contains(., 'Login')]").click()
        text = wait(lambda: driver.find_elements("css selector", "textarea"), "the page")[0]
        button = "//button[normalize-space()='Speak']"
        text.send_keys("xyz")
        driver.find_element("xpath", button).click()
        wait(lambda: "xyz" in text_of(driver, ".toast-body"), "the error")
        screenshot(driver, "serve-error")
        text.clear()
        text.send_keys(LINES[0])
        driver.find_element("xpath", button).click()
        wait(lambda: driver.execute_script(PLAYABLE), "the sound")
        screenshot(driver, "serve")


PLAYABLE = "return document.querySelectorAll('a[download][href*=\"/file=\"]').length > 0"
