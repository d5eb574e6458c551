"""Fine-tune a released model on recordings: what notebook 07 does beside preparing and training."""

COMMANDS = {
    "finetune": {
        "recipe": "extras.finetune.recipe:FineTune",
        "purpose": "prepare and train, from a released XTTS-v2 or IndexTTS2",
        "writes": "what prepare and train do, what was forgotten, export/, coqui/ or indextts2/",
        "example": "--accept-license CPML",
        "begins": True,
    },
}
