"""Replicas of one model on several devices of one process, in the manner of MXNet's Gluon and Module."""
