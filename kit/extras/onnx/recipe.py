"""`python -m kit onnx`: an exported voice as files for onnxruntime."""

from kit.extras.onnx.export import export_onnx
from kit.inference.export import load_export, read_card
from kit.notebook.result import Result
from kit.recipes.exports import export_folder
from kit.recipes.speak import megabytes


def export_for_onnxruntime(
    run: str,
    voice: str = "",  # an exported voice, or hf://OWNER/NAME (the run's export/)
) -> Result:
    """Write onnx/ in the folder of the exported `voice` ("": that of `run`), with its settings.

    Raises KitError for a missing package and for a voice that ONNX cannot hold.
    """
    export = export_folder(voice, run)
    folder = export_onnx(load_export(export), export / "onnx", read_card(export).settings)
    how = 'Speak: python speak_onnx.py "..." --out speech.wav'
    return Result(line=f"{folder}: {megabytes(folder)}. {how}")
