"""The command line: tables of arguments, and printing."""

from paceline.cli.app import main

__all__ = ["main"]
