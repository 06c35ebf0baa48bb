"""Replicas of one model on several devices: the names of :mod:`paceline.mx.gluon`."""

from typing import TYPE_CHECKING

from paceline.mx.gluon import *  # noqa: F403
from paceline.mx.gluon import __all__ as __all__

if not TYPE_CHECKING:
    from paceline.mx.gluon import __getattr__ as __getattr__
