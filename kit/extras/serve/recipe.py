"""`python -m kit serve`: a voice in a browser and for programs.

The page is Gradio's; `POST /v1/audio/speech` takes what OpenAI's clients send
(https://platform.openai.com/docs/api-reference/audio/createSpeech). Texts that arrive together are
spoken together (kit/extras/serve/speech_queue.py).
"""

import dataclasses
import hmac
import io
import itertools
import json
from collections.abc import Iterator

import numpy as np
import soundfile
import torch
from torch import Tensor

from kit.audio.clip import resampled
from kit.audio.spectrogram import load_reference
from kit.base.errors import KitError, SpeechError
from kit.base.hardware import detect
from kit.extras.serve.speech_queue import Job, SpeechQueue
from kit.inference.export import load_export, read_card
from kit.recipes.exports import export_folder
from kit.settings import GenerateConfig

MAX_CHARACTERS = 4096  # of a text, as at OpenAI
MAX_REQUEST_BYTES = 64 * 1024
MAX_WAITING = 32  # texts that are being spoken or wait
MAX_BEST_OF = 32
PACKAGES = "The server needs Gradio: pip install gradio"
# Media type, and the names that soundfile has for container and coding.
FORMATS = {
    "mp3": ("audio/mpeg", "MP3", "MPEG_LAYER_III"),
    "wav": ("audio/wav", "WAV", "PCM_16"),
    "flac": ("audio/flac", "FLAC", "PCM_16"),
    "opus": ("audio/ogg", "OGG", "OPUS"),
    "pcm": ("audio/pcm", "", ""),  # 16-bit, at the voice's sample rate; sent while it is spoken
}
IGNORED = ("model", "instructions")  # that OpenAI's clients send as well
CONSENT = "The person in the recording has agreed to this use of their voice."


class RequestError(KitError):
    """A request that cannot be answered: the name of the field, and an HTTP status."""

    def __init__(self, message: str, field: str = "", status: int = 400):
        super().__init__(message, field=field)
        self.status = status


def serve(
    run: str = "",
    voice: str = "",  # an exported voice, or hf://OWNER/NAME (the run's export/)
    host: str = "127.0.0.1",  # 0.0.0.0 lets other machines in (127.0.0.1)
    port: int = 7860,  # (7860)
    api_key: str = "",  # that programs and the page must give (none)
) -> tuple:
    """Serve the exported `voice` ("": that of `run`) until Ctrl-C. Raises KitError without Gradio.

    There is no result: ().
    """
    try:
        import uvicorn
    except ImportError as error:
        raise KitError(PACKAGES) from error
    folder = export_folder(voice, run).resolve()
    speech = SpeechQueue(load_export(folder, detect().device))
    name = folder.parent.name if folder.name == "export" else folder.name  # the run's
    app = make_app(speech, read_card(folder).settings, name, api_key)
    if host not in ("127.0.0.1", "localhost", "::1") and not api_key:
        print("Anybody who reaches this machine can use the voice: --api-key asks for a key.")
    try:
        uvicorn.run(app, host=host, port=port, access_log=False)  # prints the address
    finally:
        speech.close()
    return ()


def make_app(speech: SpeechQueue, settings: GenerateConfig, name: str, api_key: str = ""):
    """Return the ASGI application: the page at /, the API at /v1."""
    try:
        import gradio
        from starlette.applications import Starlette
        from starlette.routing import Route
    except ImportError as error:
        raise KitError(PACKAGES) from error
    api = SpeechAPI(speech=speech, settings=settings, name=name, api_key=api_key)
    app = Starlette(
        routes=[
            Route("/v1/audio/speech", api.create_speech, methods=["POST"]),
            Route("/v1/models", api.list_models),
        ],
        exception_handlers={KitError: error_response, RuntimeError: error_response},
    )
    login = {}
    if api_key:
        login["auth"] = lambda _user, password: api.is_key(password)
        login["auth_message"] = "Any user name; the password is the API key."
    return gradio.mount_gradio_app(app, page(speech, settings, name), path="/", **login)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeechAPI:
    """The routes of OpenAI's API that speak with one voice. Each raises KitError for its client."""

    speech: SpeechQueue
    settings: GenerateConfig
    name: str  # of the voice
    api_key: str  # "": none

    def is_key(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.api_key.encode())

    def require_key(self, request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.api_key and not self.is_key(given):
            raise RequestError("Wrong or missing API key.", status=401)

    async def create_speech(self, request):
        from starlette.concurrency import run_in_threadpool
        from starlette.responses import Response, StreamingResponse

        self.require_key(request)
        speech = self.speech
        body = await read_body(request)
        text, speaker, config, format = parse_request(body, speech.speakers, self.settings)
        streamed = format == "pcm"
        job = await run_in_threadpool(submit, speech, text, speaker, config, streamed=streamed)
        rate = speech.voice.codec.sample_rate
        how = {"media_type": FORMATS[format][0], "headers": {"x-sample-rate": str(rate)}}
        if streamed:
            chunks = stream(job)
            first = await run_in_threadpool(next, chunks, b"")  # an error before it has a status
            return StreamingResponse(itertools.chain([first], chunks), **how)
        return Response(await run_in_threadpool(encode, job, format, rate), **how)

    async def list_models(self, request):
        from starlette.responses import JSONResponse

        self.require_key(request)
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "voicekit"}
        return JSONResponse({"object": "list", "data": [model]})


async def error_response(request, error: Exception):
    """Return `error` as OpenAI's clients understand it; they try again after 429 and all of 5xx."""
    from starlette.responses import JSONResponse

    status = 400 if isinstance(error, KitError) else 500
    if isinstance(error, SpeechError):  # of the text
        status = 422
    status = getattr(error, "status", status)
    kind = "invalid_request_error" if status < 429 else "server_error"
    field = getattr(error, "field", "") or ("input" if status == 422 else None)
    body = {"message": str(error), "type": kind, "param": field, "code": None}
    headers = {"retry-after": "2"} if status == 429 else None
    return JSONResponse({"error": body}, status, headers)


async def read_body(request) -> dict:
    """Return the JSON object that was sent. Raises RequestError for anything else."""
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_REQUEST_BYTES:
            raise RequestError(f"The request exceeds {MAX_REQUEST_BYTES} bytes.", status=413)
    try:
        body = json.loads(data)
        json.dumps(body, ensure_ascii=False).encode()  # raises for half a surrogate pair, "\ud83d"
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The request is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("The request must be a JSON object.")
    return body


def parse_request(
    body: dict, speakers: list[str], settings: GenerateConfig
) -> tuple[str, str, GenerateConfig, str]:
    """Check what OpenAI's clients send, and `temperature`, `best_of` and `seed` beside it.

    Returns text, speaker, sampling settings and format. If the voice has a single speaker, any
    `voice` is taken: many programs send one of OpenAI's names as a default. Raises RequestError.
    """
    defaults = {"input": "", "response_format": "mp3", "voice": speakers[0], "speed": 1.0}
    defaults |= {name: getattr(settings, name) for name in ("temperature", "best_of", "seed")}
    values = defaults | {name: given for name, given in body.items() if name not in IGNORED}
    for name, value in values.items():
        if name not in defaults:
            known = sorted({*defaults, *IGNORED})
            raise RequestError(f"`{name}` is not supported; known are {known}.", name)
        kind = str if isinstance(defaults[name], str) else int | float
        if isinstance(value, bool) or not isinstance(value, kind):
            wanted = "text" if kind is str else "a number"
            raise RequestError(f"`{name}` must be {wanted}, got {json.dumps(value)}.", name)
    text, format, speaker = (values[name] for name in ("input", "response_format", "voice"))
    if len(speakers) == 1:
        speaker = speakers[0]
    if not text.strip():
        raise RequestError("`input` is missing or empty: give the text to speak.", "input")
    if len(text) > MAX_CHARACTERS:
        long = f"`input` has {len(text)} characters, more than {MAX_CHARACTERS}: send it in parts."
        raise RequestError(long, "input")
    for name, value, known in (("response_format", format, FORMATS), ("voice", speaker, speakers)):
        if value not in known:
            raise RequestError(f"`{name}` is {value!r}; supported are {sorted(known)}.", name)
    if values["speed"] != 1:
        raise RequestError("`speed` must be 1: this voice keeps its own pace.", "speed")
    if values["best_of"] > max(MAX_BEST_OF, settings.best_of):
        raise RequestError(f"`best_of` must be at most {MAX_BEST_OF}.", "best_of")
    sampling = {name: values[name] for name in ("temperature", "best_of", "seed")}
    return text, speaker, dataclasses.replace(settings, **sampling), format


def submit(speech: SpeechQueue, *request, **how) -> Job:
    """Queue a text (see `SpeechQueue.submit`). Raises RequestError if too many wait already."""
    if len(speech.jobs) >= MAX_WAITING:
        raise RequestError(f"{MAX_WAITING} texts wait already: try again soon.", status=429)
    return speech.submit(*request, **how)


def stream(job: Job) -> Iterator[bytes]:
    """Yield 16-bit PCM. Ends early if a part had no end: the status was sent already."""
    try:
        for chunk in job:
            yield pcm(chunk).tobytes()
    except SpeechError:
        if not job.truncated:
            raise
    finally:
        job.cancelled = True


def pcm(wave: Tensor) -> np.ndarray:
    """Return `wave` (L,) as 16-bit integers."""
    return (wave.clamp(-1, 1) * 32767).round().to(torch.int16).numpy()


def encode(job: Job, format: str, rate: int) -> bytes:
    """Return all of `job` as a file in `format`, a key of FORMATS but "pcm"."""
    wave = torch.cat(list(job))
    _, container, coding = FORMATS[format]
    if format == "opus" and rate not in (8000, 12_000, 16_000, 24_000, 48_000):
        wave = resampled(wave, rate, 48_000)
        rate = 48_000
    file = io.BytesIO()
    soundfile.write(file, wave.clamp(-1, 1).numpy(), rate, format=container, subtype=coding)
    return file.getvalue()


def page(speech: SpeechQueue, settings: GenerateConfig, name: str):
    """Return the Gradio page: a text, who speaks it, how, and the sound to play and download."""
    import gradio

    rate = speech.voice.codec.sample_rate

    def speak(text, speaker, reference, consent, temperature, best_of):
        config = dataclasses.replace(settings, temperature=float(temperature), best_of=int(best_of))
        try:
            wave = None
            if reference:
                if not consent:
                    raise SpeechError(f"Please confirm first: {CONSENT}")
                wave = (load_reference(reference, rate), rate)
            if len(text) > MAX_CHARACTERS:
                raise SpeechError(f"The text is longer than {MAX_CHARACTERS} characters.")
            job = submit(speech, text, speaker, config, reference=wave)
            return rate, pcm(torch.cat(list(job)))
        except KitError as error:
            raise gradio.Error(str(error), print_exception=False) from error

    speakers = speech.speakers
    with gradio.Blocks(title=name, analytics_enabled=False) as blocks:
        gradio.Markdown(f"# {name}")
        with gradio.Row():
            with gradio.Column():
                text = gradio.Textbox(label="Text", lines=4, max_length=MAX_CHARACTERS)
                speaker = gradio.Dropdown(speakers, value=speakers[0], label="Speaker")
                with gradio.Accordion("Another person's voice", open=False):
                    reference = gradio.Audio(
                        label="A recording of 6 seconds or more",
                        sources=["upload", "microphone"],
                        type="filepath",
                    )
                    consent = gradio.Checkbox(label=CONSENT)
                with gradio.Accordion("Settings", open=False):
                    temperature = gradio.Slider(
                        0, 1.5, settings.temperature, step=0.05, label="Temperature"
                    )
                    label = "Candidates (more: slower, fewer wrong words)"
                    best_of = gradio.Slider(1, MAX_BEST_OF, settings.best_of, step=1, label=label)
                button = gradio.Button("Speak", variant="primary")
            with gradio.Column():
                sound = gradio.Audio(label="Speech", format="wav", interactive=False)
        inputs = [text, speaker, reference, consent, temperature, best_of]
        how = {"api_name": "speak", "concurrency_limit": None}
        gradio.on([button.click, text.submit], speak, inputs, sound, **how)
    return blocks
