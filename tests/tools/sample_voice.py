"""Write the voice of a run to configs/sample, in int8: `python tests/tools/sample_voice.py RUN`."""

import sys

from kit.base.config import CONFIGS
from kit.base.files import write_atomic
from kit.base.run import find_run
from kit.inference.export import export_voice
from kit.inference.voice_files import load_voice
from kit.model.weights import WEIGHTS
from kit.recipes.base_model import SAMPLE
from kit.recipes.exports import chosen_weights
from kit.recipes.open_run import sampling_of

README = """# The sample voice

What `make demo` trains, so that a voice speaks before anything is trained. It learnt Amharic from
espeak-ng's synthetic speech, so no person's voice is in it. It is under the kit's licence (MIT).

    python -m kit speak --voice sample --text "ትናንት እናቴ ከገበያ ትኩስ ዳቦ ገዛች"

{steps:,} steps; character error rate of {sentences} held-out sentences {cer:.1%}, of sentences with
words it never met {unseen:.1%}. Written by `tests/tools/sample_voice.py`.
"""


def main(name: str) -> None:
    run = find_run(name=name)
    figures = run.report()["eval"]
    voice = load_voice(run.folder, WEIGHTS[chosen_weights(run)], run.figure("data", "language"))
    folder = export_voice(voice, CONFIGS / SAMPLE, "int8", sampling_of(run))
    text = README.format(
        steps=run.figure("train", "steps"),
        sentences=figures["sentences"],
        cer=figures["cer"],
        unseen=figures["unseen"]["cer"],
    )
    write_atomic(folder / "README.md", text)


if __name__ == "__main__":
    main(sys.argv[1])
