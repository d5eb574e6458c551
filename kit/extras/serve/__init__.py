"""Share a voice: a page and a server that speak, and the Hugging Face hub."""

COMMANDS = {
    "serve": {
        "recipe": "extras.serve.recipe:serve",
        "purpose": "the voice in a browser, and OpenAI's speech API",
        "writes": "nothing: it serves runs/NAME/export, or the exported voice that --voice names",
        "takes": "name",
    },
    "push": {
        "recipe": "extras.serve.hub:push",
        "purpose": "the exported voice to the Hugging Face hub",
        "writes": "a repository on the Hugging Face hub: the voice, samples and a model card",
        "example": "--to OWNER/NAME",
    },
}
