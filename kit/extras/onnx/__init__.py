"""A voice for onnxruntime, without torch."""

COMMANDS = {
    "onnx": {
        "recipe": "extras.onnx.export:export_for_onnxruntime",
        "purpose": "the voice for onnxruntime, without torch",
        "writes": "onnx/ in the exported voice's folder: runs/NAME/export, or what --voice names",
        "takes": "name",
    },
}
