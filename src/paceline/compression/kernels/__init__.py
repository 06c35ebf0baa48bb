"""The loops of the codecs, compiled by numba. Import a module of this package only when its kernel is needed."""
