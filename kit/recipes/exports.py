"""The exported voice of a run: written from its weights, and again once these have changed."""

import shutil
from pathlib import Path

from kit.base.errors import KitError
from kit.base.files import digest, file_digest, file_digests
from kit.base.run import Run, find_run
from kit.inference.candidates import READER
from kit.inference.export import CARD, export_voice
from kit.inference.voice import Voice
from kit.inference.voice_files import SOUND, load_voice
from kit.model.weights import WEIGHTS
from kit.recipes.base_model import inherited_licence, voice_folder
from kit.recipes.open_run import sampling_of

EXPORT = "export"  # a folder in that of a run
# What a voice consists of beside the model's weights; the last two are optional. The order of the
# files decides the digests of what was made from them.
VOICE_FILES = ("codec.safetensors", "tokenizer.model", "references.safetensors")
BESIDE_WEIGHTS = (*VOICE_FILES, SOUND, READER)
JUDGED_WITH = (*VOICE_FILES, "recognizer.safetensors", SOUND, READER)  # to transcribe it, too


def chosen_weights(run: Run) -> str:
    """The weights that the evaluation chose, if they are still there; else EMA, or raw.

    Raises KitError before training.
    """
    for weights in (run.figure("eval", "weights"), "ema", "raw"):
        if (run.folder / f"model-{weights}.safetensors").is_file():
            return weights
    return run.require_figure("eval", "weights", "03_evaluate_ema")


def made_from(run: Run) -> str:
    """A digest of all that an export of `run` holds: weights, codec, text ids, sampling."""
    names = (WEIGHTS[chosen_weights(run)], *BESIDE_WEIGHTS)
    return digest(file_digests(run.folder / name for name in names), vars(sampling_of(run)))


def write_export(run: Run, voice: Voice, weights: str = "fp16") -> Path:
    """Export `voice` of `run` to its folder, and record what it was made from."""
    folder = run.folder / EXPORT
    export_voice(voice, folder, weights, sampling_of(run), inherited_licence(run))
    new = {"made_from": made_from(run), "weights": weights}
    if run.report().get("export") != new:
        shutil.rmtree(folder / "onnx", ignore_errors=True)  # of the export before
    run.record(export=new)
    return folder


def current_export(run: Run) -> Path:
    """The folder of the exported voice of `run`; written again if the run has changed since.

    Raises KitError where there is neither an export nor a trained voice.
    """
    folder = run.folder / EXPORT
    trained = any((run.folder / name).is_file() for name in WEIGHTS.values())
    if not trained and not (folder / CARD).is_file():
        raise KitError(
            f"There is no exported voice in {folder}, and no trained one beside it: run 02_train "
            "and 04_inference first, or name an exported voice."
        )
    if trained and run.figure("export", "made_from") != made_from(run):
        language = run.require_figure("data", "language", "01_data_prep")
        voice = load_voice(run.folder, WEIGHTS[chosen_weights(run)], language)
        if not voice.codec.decodes:
            raise KitError(f"{run.name}: another package makes its sound; see 07_finetune_xtts.")
        write_export(run, voice, run.figure("export", "weights") or "fp16")
        print(f"Written: {folder}, from the weights and settings that the run has now.", flush=True)
    return folder


def require_evaluated(run: Run) -> None:
    """Raise KitError if `run` was evaluated, and its weights have changed since."""
    judged = run.figure("eval", "weights_sha256")
    path = run.folder / WEIGHTS[run.figure("eval", "weights") or "ema"]
    if judged and path.is_file() and file_digest(path) != judged:
        raise KitError(
            f"The figures of {run.name} are of weights that it no longer has: run 03_evaluate_ema, "
            f"or python -m kit evaluate --run {run.name}, first."
        )


def export_folder(voice: str, run: str = "") -> Path:
    """The folder of the exported `voice`, as `voice_folder` takes it; "": that of `run`."""
    return voice_folder(voice) if voice else current_export(find_run(name=run))
