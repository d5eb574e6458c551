"""A voice for onnxruntime, without torch."""

COMMANDS = {
    "onnx": {
        "recipe": "extras.onnx.recipe:export_for_onnxruntime",
        "purpose": "the voice for onnxruntime, without torch",
        "writes": "onnx/ in the folder of the exported voice: runs/NAME/export, or what --voice names",
        "takes": "name",
    },
}
