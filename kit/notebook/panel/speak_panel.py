"""The speaking panel: a text box, choices, a Speak button and an audio player.

Core ipywidgets only, the same code for 7.7.1 (Colab's) and 8. Knows nothing of models: `speak`,
from text and choices to sound, is handed in.
"""

from collections.abc import Callable

import ipywidgets as widgets
from IPython.display import Audio, display

from kit.base.words import in_words
from kit.notebook.kernel import front_end
from kit.notebook.panel.widgets import button, message


class SpeakPanel:
    """`panel.run()` shows it. `speak(text, choices)` returns WAV bytes or an IPython Audio.

    Or either with a remark, which is shown beside the player. A ValueError of `speak` is shown as
    the sentence it is, any other exception with its type.
    """

    def __init__(self, speak: Callable, sentence: str, choices: dict[str, list] | None = None):
        self.speak = speak
        wide = {"width": "100%", "margin": "0"}
        self.text = widgets.Textarea(
            value=sentence, rows=3, layout=wide, placeholder="Text to speak"
        )
        self.choices = {name: _dropdown(name, some) for name, some in (choices or {}).items()}
        self.button = button("Speak", "volume-up", "success", "Speak the text above")
        self.player = widgets.Audio(value=b"", format="wav", autoplay=False, loop=False)
        self.player.layout.display = "none"
        self.status = widgets.HTML()
        row = widgets.HBox([*self.choices.values(), self.button], layout={"flex_flow": "row wrap"})
        rows = [self.text, row, self.status, self.player]
        whole = {"max_width": "820px", "padding": "4px", "overflow": "hidden"}
        self.box = widgets.VBox(rows, layout=whole)
        self.button.on_click(lambda _: self._clicked())

    def run(self, mode: str | None = None) -> None:
        """Show the panel; without a front end speak once, and raise what goes wrong."""
        if (mode or front_end()[0]) == "plain":
            wav, remark = self._made()
            if remark:
                print(remark)
            display(Audio(data=wav))
        else:
            display(self.box)

    def _made(self) -> tuple[bytes, str]:
        """WAV bytes and a remark, which is mostly empty."""
        values = {name: choice.value for name, choice in self.choices.items()}
        made = self.speak(self.text.value, values)
        made, remark = made if isinstance(made, tuple) else (made, "")
        return made.data if isinstance(made, Audio) else made, remark

    def _clicked(self) -> None:
        self.button.disabled = True
        self.status.value = message("Speaking...", "info")
        try:
            self.player.value, remark = self._made()
            self.player.layout.display = None
            self.status.value = message(remark, "info") if remark else ""
        except Exception as error:
            self.status.value = message(in_words(error), "bad")
        finally:
            self.button.disabled = False


def _dropdown(name: str, options: list) -> widgets.Dropdown:
    layout = {"width": "240px"}
    style = {"description_width": "initial"}
    return widgets.Dropdown(options=options, description=name, layout=layout, style=style)
