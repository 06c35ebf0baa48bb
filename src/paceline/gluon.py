"""Replicas of one model on several devices: the names of :mod:`paceline.mx.gluon`."""

from paceline.mx.gluon import *  # noqa: F403
from paceline.mx.gluon import __all__ as __all__
