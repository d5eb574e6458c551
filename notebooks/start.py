"""The first line of every notebook: `%run start.py` finds the kit and defines `start`."""

import os
import sys

os.chdir(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.dirname(os.getcwd()))
from kit.recipes.start import start  # noqa: E402, F401
