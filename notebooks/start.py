"""`%run start.py` in every notebook finds the kit, installs what it lacks and defines `start`."""

import os
import sys

os.chdir(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.dirname(os.getcwd()))
from kit.recipes.start import prepare_machine, start  # noqa: E402, F401

prepare_machine()
