"""The gate of a training: held-out sentences, spoken as it goes on and heard by the recogniser."""

from collections.abc import Callable

from kit.audio.recognizer import load_recognizer
from kit.base.config import build
from kit.inference.evaluate import hearing, recognizer_warning
from kit.inference.settings import EvaluateConfig
from kit.recipes.active_run import ActiveRun
from kit.recipes.prepare_source import sampling_of
from kit.recipes.training_data import TrainingData

GATE_SENTENCES = 24  # held out, spoken at each hearing


def training_gate(run: ActiveRun, data: TrainingData, every: int) -> tuple[Callable | None, str]:
    """What a TrainSession's `gate` asks every `every` steps, None where nothing; told in words."""
    sentences = data.held_out_sentences(GATE_SENTENCES) if every else []
    if not sentences:
        return None, "no gate"
    recognizer = load_recognizer(run.path("recognizer.safetensors"))
    config = sampling_of(run, candidates=1)
    gate = hearing(data.voice(), sentences, recognizer, config)
    return gate, f"gate: {len(sentences)} sentences every {every} steps"


def judge_itself(run: ActiveRun) -> list[str]:
    """How well the recogniser understands recordings, as 01_data_prep found, and what of it."""
    own_cer = run.figure("recognizer", "held_out")
    if own_cer is None:
        lines = ["The recogniser's own errors are not recorded."]
    else:
        lines = [f"The recogniser's own CER on recordings: {own_cer:.1%}."]
    doubt = recognizer_warning(own_cer, build(EvaluateConfig, run.section("evaluate")).worst_cer)
    return [*lines, doubt] if doubt else lines
