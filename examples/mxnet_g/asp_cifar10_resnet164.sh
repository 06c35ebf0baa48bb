#!/bin/sh
exec "${PYTHON:-python}" "$(dirname "$0")/experiments.py" "$0" "$@"
