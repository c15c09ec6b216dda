"""Puts this folder on sys.path, so that the models find each other in every pytest import mode."""
import sys
from pathlib import Path

FOLDER = str(Path(__file__).resolve().parent)
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)
