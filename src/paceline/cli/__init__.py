"""The command line: tables of options, and printing."""

from paceline.cli.app import main

__all__ = ["main"]
