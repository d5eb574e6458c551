"""What a run's settings make: the model before its first step, what of it trains, a step's size."""

from kit.base.config import build
from kit.base.errors import DamagedFileError, KitError
from kit.base.formatting import shorten
from kit.base.run import Run, read_run_file
from kit.base.tensor_file import tensors_sha256
from kit.model.gpt import SpeechGPT
from kit.model.weights import first_weights, load_model, saved_config, warm_start_model
from kit.recipes.open_run import ActiveRun
from kit.settings import DataConfig, FinetuneConfig, GPTConfig, LoRAConfig, SpeedConfig, TrainConfig
from kit.text.tokenizer import BaseTokenizer, base_spellings, load_tokenizer
from kit.training.config import Base, Finetuning
from kit.tuning.memory_plan import Workload

# Files in a run's folder that start_from_base has copied from a base model.
START_FROM = "start_from"  # the SHA-256 of the base model's weights, and its path
MODEL = "start.safetensors"
TOKENIZER = "start-tokenizer.model"


def base_voice(run: Run) -> str:
    """The path of the model that `run` started from; "" if it trains from scratch."""
    return read_run_file(run.folder / START_FROM).partition(" ")[2]


def load_base_tokenizer(run: ActiveRun, language: str) -> BaseTokenizer | None:
    """The base model's tokenizer, for texts in `language`; None if there is no base model."""
    return load_tokenizer(run.folder / TOKENIZER, language) if base_voice(run) else None


def first_model(run: ActiveRun, config: GPTConfig, *, tokenizer: BaseTokenizer) -> SpeechGPT:
    """The model before its first training step: the base model's weights, or `first_weights`.

    Raises DamagedFileError if `config` is no longer that of the base model.
    """
    base = load_base_tokenizer(run, tokenizer.language)
    if base is None:
        return first_weights(config)
    return warm_start_model(config, load_model(run.folder / MODEL), base_spellings(base, tokenizer))


def describe_base_voice(run: ActiveRun, tokenizer: BaseTokenizer) -> str:
    base = load_base_tokenizer(run, tokenizer.language)
    if base is None:
        return ""
    new = len(base_spellings(base, tokenizer))
    return (
        f"It starts from the voice in {base_voice(run)}: {tokenizer.vocab_size - new} text ids "
        f"stay, {new} new ones are initialised from the ids that spelt them before."
    )


def finetuning_of(run: ActiveRun) -> Finetuning:
    """What of the model `run` trains. Raises KitError if that needs a base model."""
    base = None
    if base_voice(run):
        path = run.folder / MODEL
        try:
            base = Base(config=saved_config(path), sha256=tensors_sha256(path), weights=path)
        except (OSError, KitError) as error:
            raise DamagedFileError(
                f"{path}, the base model that this run started from, cannot be read "
                f"({shorten(error)}): restore a copy of it, or start a new run."
            ) from error
    finetuning = Finetuning(
        config=build(FinetuneConfig, run.section("finetune")),
        lora=build(LoRAConfig, run.section("lora")),
        base=base,
    )
    finetuning.require_voice()
    return finetuning


def workload(run: ActiveRun, **parts) -> Workload:
    """A training step of `run` as its settings say; `parts` are fields that replace them.

    Without lengths in `parts` it has the longest that the model has positions for.
    """
    classes = {"model": GPTConfig, "train": TrainConfig, "speed": SpeedConfig, "data": DataConfig}
    settings = {name: build(cls, run.section(name)) for name, cls in classes.items()}
    settings |= {"hw": run.hw, "precision": run.precision.value}
    return Workload(**settings | run.section("memory") | parts)
