"""The first line of every notebook: `%run start.py` finds the kit and defines `start`."""

import os
import sys

os.chdir(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.dirname(os.getcwd()))
from kit.recipes.start import set_thread_waiting, start  # noqa: E402, F401

set_thread_waiting()  # before a voice that speaks first loads torch
