"""Long recordings, with or without a text, become clips and rows: what notebook 06 does."""

SEGMENTERS = {"pauses": "kit.extras.long_recordings.segmentation:Segmenter"}
COMMANDS = {
    "transcribe": {
        "recipe": "extras.long_recordings.recipe:transcribe_with_whisper",
        "purpose": "clips and texts from recordings without text",
        "writes": "clips, metadata.csv, transcripts.csv (with confidences), losses.jsonl to --out",
        "example": "--data talks/ --out clips/",
        "takes": "name",
    },
}
